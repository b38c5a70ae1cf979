"""docs/support.md, written from what components declare: `make docs`. A test compares the two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stretto.attn.api import AttnCaps, LayerSpec
from stretto.attn.torch_ragged import TorchRagged
from stretto.compat import (
    Component,
    Feature,
    attention_component,
    attention_features,
    check,
    drafter_features,
    engine_component,
    model_taps,
)
from stretto.spec.registry import BUILT_IN, DrafterError

HEAD_DIMS = (8, 64, 80, 96, 128, 256, 512)
PAGE_SIZES = (1, 16, 64, 256)

HEAD = """# What works with what

This page is written from what the components declare (`make docs`); start-up compares the same declarations. Anything
that is "no" here is refused at start-up, with the names of both sides.

Everything that the scheduler does (prompt chunks in steps with running sequences, one step in flight, prefix caching,
retraction, every sampling parameter, grammars, log-probabilities of prompts and answers, n choices) works with every
backend and every drafter: rows differ in their numbers only, so there is nothing to declare.
"""


def support_document() -> str:
    """The whole page, as Markdown."""
    from stretto.attn.triton_ragged import TritonRagged

    backends = {"torch": TorchRagged.caps, "triton": TritonRagged.caps}
    return "\n".join([HEAD, "## Attention backends\n", *_attention(backends), "", "## Drafters\n", *_drafters(), ""])


def _attention(backends: dict[str, AttnCaps]) -> list[str]:
    components = [attention_component(name, caps) for name, caps in backends.items()]
    features: dict[str, Feature] = {}
    plain = LayerSpec(8, 2, 64, 1.0)
    for device in ("cpu", "cuda"):
        for page_size in PAGE_SIZES:
            layers = [LayerSpec(8, 2, dim, 1.0, window=128, softcap=30.0, has_sinks=True) for dim in HEAD_DIMS]
            for feature in attention_features([plain, *layers], page_size, device, graphs=True):
                features.setdefault(_plain_name(feature.name), feature)
    rows = [[name, *_answers(feature, components)] for name, feature in sorted(features.items(), key=_by_words)]
    return _table(["", *(component.name for component in components)], rows)


def _plain_name(name: str) -> str:
    """Without the layer, and without the example's numbers where any number will do."""
    name = name.partition(" of layer")[0]
    return name.rsplit(" ", 1)[0] if name.startswith(("sliding window", "logit soft-cap")) else name


def _by_words(item: tuple[str, Feature]) -> tuple:
    words = item[0].split()
    return [word for word in words if not word.isdigit()], [int(word) for word in words if word.isdigit()]


def _answers(feature: Feature, components: Iterable[Component]) -> list[str]:
    return ["no" if check([feature], [component]) else "yes" for component in components]


def _drafters() -> list[str]:
    engine = engine_component(model_taps(1024) | {"hidden.*"})  # "*": layers that the checkpoint names
    rows = []
    for name, kind in sorted(BUILT_IN.items()):
        try:
            caps = kind.caps("")
        except DrafterError as e:
            rows.append([f"`{name}`", "as its checkpoint says", "", "", "", str(e).partition(": ")[2]])
            continue
        refused = check(drafter_features(name, caps), [engine])
        taps = ", ".join(sorted(caps.taps)) or "the log"
        rows.append([f"`{name}`", f"{caps.shape}, up to {caps.max_width}", taps, caps.kv, caps.where,
                     "; ".join(refusal.why for refusal in refused) or "yes"])
    return _table(["drafter", "proposes", "reads", "own KV", "runs on", "works"], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


if __name__ == "__main__":
    print(support_document(), end="")

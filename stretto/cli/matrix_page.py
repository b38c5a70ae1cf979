"""docs/matrix.md: what tests prove of features together (`stretto.matrix`), and what components declare."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import ascii_uppercase

from stretto.attn.api import AttnCaps, LayerSpec
from stretto.attn.native_ragged import NativeRagged
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
from stretto.matrix import Matrix, Proof, dump, fewest
from stretto.spec.registry import BUILT_IN, FOR_TESTS, DrafterError

HEAD_DIMS = (8, 64, 80, 96, 128, 256, 512)
PAGE_SIZES = (1, 16, 64, 256)

ROOT = Path(__file__).parents[2]  # of a checkout
PAGE, RECORD = "docs/matrix.md", "stretto/matrix.json"
HEAD = """# What works with what

This page is written by `make docs`, from what tests prove and what components declare; a test compares it with both.
`stretto matrix FEATURE FEATURE` prints one cell.

## Features with features

The number in a cell is that of a test below in which both features happened, to the same requests, and every answer
was what a plain forward pass over its text gives. A test that declares a feature counts it while it runs, and fails
where it did not happen. A letter is a refusal. A dash: one of the two at a time. On the diagonal: that it works at all.
Tests in tests/gpu need a CUDA device.
"""

LEGEND = """## Components

Start-up compares what follows; anything that is "no" here is refused at start-up, with the names of both sides.
"""


def matrix_page(matrix: Matrix) -> str:
    """The whole page, as Markdown."""
    from stretto.attn.triton_ragged import TritonRagged

    backends = {"native": NativeRagged.caps, "torch": TorchRagged.caps, "triton": TritonRagged.caps}
    return "\n".join([HEAD, *_features(matrix), "", *_refusals(matrix), "### Proofs\n", *_proofs(matrix), "", LEGEND,
                      "### Attention backends\n", *_attention(backends), "", "### Drafters\n", *_drafters(), ""])


# ------------------------------------------------------------------------------------------------------------ features
def _features(matrix: Matrix) -> list[str]:
    """The lower half of the table: a row names its columns' features by number."""
    names = [feature.name for feature in matrix.features]
    proofs = {proof.test: str(number) for number, proof in enumerate(matrix.proofs, 1)}
    letters = {sentence: letter for sentence, letter in zip(_sentences(matrix), ascii_uppercase)}
    marks = {"one at a time": "–", "untested": "?"}
    rows = []
    for at, name in enumerate(names):
        cells = [matrix.cell(name, other) for other in names[: at + 1]]
        told = [proofs[c.says] if c.state == "yes" else letters[c.says] if c.state == "refused" else marks[c.state]
                for c in cells]
        rows.append([f"{at + 1} {name}", *told, *[""] * (len(names) - at - 1)])
    return [*_table(["", *(str(at + 1) for at in range(len(names)))], rows), "",
            *_table(["feature", "a test has seen"], [[f.name, f.shown] for f in matrix.features])]


def _sentences(matrix: Matrix) -> list[str]:
    return list(dict.fromkeys(refusal.sentence for refusal in matrix.refusals))


def _refusals(matrix: Matrix) -> list[str]:
    return [f"- {letter}: refused, with the words: {sentence}"
            for sentence, letter in zip(_sentences(matrix), ascii_uppercase)] + [""]


def _proofs(matrix: Matrix) -> list[str]:
    return [f"{number}. `{proof.test}`: {', '.join(proof.features)}" for number, proof in enumerate(matrix.proofs, 1)]


# ---------------------------------------------------------------------------------------------------------- components
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
    for name, kind in sorted((n, k) for n, k in BUILT_IN.items() if n not in FOR_TESTS):
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


# ---------------------------------------------------------------------------------------------------------- collection
def collected(root: Path = ROOT) -> Matrix:
    """What the tests of a checkout declare to prove: as few of them as show every pair; of those that run always before
    those that are marked `full`, and before those that need a GPU. Raises ValueError."""
    if not (root / "tests").is_dir():
        raise ValueError(f"{root} is no checkout of the project: it has no folder tests")
    files = sorted(str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py")
                   if "tests.proofs" in path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "proofs.json"
        ran = subprocess.run([sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p",
                              "no:cacheprovider", "--proofs", str(out), *files], cwd=root, capture_output=True,
                             text=True)
        if not out.exists():
            raise ValueError(f"the tests cannot be collected:\n{ran.stdout}{ran.stderr}")
        found = json.loads(out.read_text())
    ranks = [[Proof(one["test"], tuple(one["features"])) for one in found if one["rank"] == rank] for rank in range(3)]
    return Matrix(fewest(*ranks))


def write() -> None:
    """docs/matrix.md and the record, of this checkout."""
    found = collected()
    (ROOT / RECORD).write_text(dump(found))
    (ROOT / PAGE).write_text(matrix_page(found))
    print(f"{PAGE}: {len(found.features)} features, {len(found.proofs)} proofs, {len(found.untested())} cells untested")


if __name__ == "__main__":
    write()

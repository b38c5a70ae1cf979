"""Draft logits of random checkpoints in each public layout against an independent reference, position by position,
while the engine runs: prompts in chunks, pages of several sizes, drafts accepted and refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from stretto.spec.context import DrafterError
from stretto.spec.identify import verifier_of
from stretto.spec.registry import find_drafter
from stretto.testing import Ask, Setup, greedy, make_engine, run
from tests.spec import checkpoints as made
from tests.spec import reference

PROMPTS = [[3, 7, 11], [7, 3, 250, 9, 12] * 7, [17]]
NEW = 11


class Recorder:
    """Stands between a drafter and its choices: remembers (confirmed log, drafts before, logits)."""

    def __init__(self, choose, table):
        self.choose, self.table = choose, table
        self.seen: list[tuple[list[int], list[int], torch.Tensor]] = []

    def _note(self, row: int, drafts: list[int], logits: torch.Tensor) -> None:
        slot = int(self.choose.step.slots[row])
        self.seen.append((self.table.log[slot, : int(self.table.known[slot])].tolist(), list(drafts), logits.clone()))

    def __call__(self, logits, rows, offset, columns=None):
        ids = self.choose(logits, rows, offset, columns)
        logits = self.choose._spread(logits, columns)
        if offset == 0:
            self.chain = [[] for _ in rows]
        for i, row in enumerate(rows.tolist()):
            self._note(row, self.chain[i], logits[i])
            self.chain[i].append(int(ids[i]))
        return ids

    def block(self, logits, rows, columns=None):
        ids = self.choose.block(logits, rows, columns)
        for i, row in enumerate(rows.tolist()):
            for k in range(logits.shape[1]):
                self._note(row, ids[i, :k].tolist(), self.choose._spread(logits[i], columns)[k])
        return ids


def record(tiny: made.TinyTarget, asked: str, setup: Setup) -> list[tuple[list[int], list[int], torch.Tensor]]:
    engine = make_engine(tiny.model, asked, tiny.target, setup)
    runner = engine.device.runner
    recorder = Recorder(runner.drafter.choose, runner.table)
    runner.drafter.choose = recorder
    answers = run(engine, [Ask(f"r{i}", p, greedy(NEW)) for i, p in enumerate(PROMPTS)])
    assert all(a.finish_reason == "length" and len(a.token_ids) == NEW for a in answers.values())
    assert len(recorder.seen) > 3 * NEW
    return recorder.seen


def states_after(tiny: made.TinyTarget, log: list[int], layers: list[int]) -> torch.Tensor:
    """The target's hidden states after these layers, side by side, [T, layers * E]; -1: after the final norm."""
    kept: dict[int, torch.Tensor] = {}

    def keep(i):
        return lambda _, __, out: kept.__setitem__(i, (out[0] if isinstance(out, tuple) else out).view(len(log), -1))

    model = tiny.reference.model
    hooks = [(model.norm if i < 0 else model.layers[i]).register_forward_hook(keep(i)) for i in set(layers)]
    model(torch.tensor([log]))
    for hook in hooks:
        hook.remove()
    return torch.cat([kept[i] for i in layers], -1)


def continued(log: list[int], drafts: list[int], features: torch.Tensor, embed, forward) -> torch.Tensor:
    """The input of the head after log and drafts. `features` are those of log[:-1]; later ones are the head's own."""
    embedded = embed(torch.tensor(log + drafts)[1:])
    for _ in drafts:
        _, own = forward(embedded[: len(features)], features)
        features = torch.cat([features, own[-1:]])
    return forward(embedded, features)[0][-1]


def check(seen, expected) -> None:
    """expected(log, drafts) -> logits [V]. A third of all draws is compared, among them every depth of a proposal."""
    compared = 0
    for n, (log, drafts, logits) in enumerate(seen):
        if n % 3:
            continue
        want = expected(log, drafts)
        finite = want.isfinite()
        assert torch.equal(finite, logits.isfinite()), "other ids can be proposed than the checkpoint's"
        scale = float(want[finite].abs().max())
        assert float((want[finite] - logits[finite]).abs().max()) < 2e-4 * scale, (len(log), drafts)
        compared += 1
    assert compared > NEW


SETUPS = {"chunk7-page8": Setup(chunk=7, page_size=8), "whole": Setup(), "chunk5-page1": Setup(chunk=5, page_size=1)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> made.TinyTarget:
    return made.make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(params=["chunk7-page8", *(pytest.param(s, marks=pytest.mark.full) for s in ("whole", "chunk5-page1"))],
                scope="module")
def setup(request) -> Setup:
    return SETUPS[request.param]


@pytest.fixture(params=SETUPS, scope="module")
def every_setup(request) -> Setup:
    return SETUPS[request.param]


def embedding(tiny: made.TinyTarget):
    return tiny.reference.model.embed_tokens


@pytest.mark.parametrize("prefix", ["", "model."])
def test_eagle(tiny, setup, tmp_path, prefix: str) -> None:
    """Older checkpoints are pickled."""
    path, t = made.eagle(tmp_path / "draft", prefix)
    if not prefix:
        torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
        (path / "model.safetensors").unlink()

    def expected(log, drafts):
        features = states_after(tiny, log, [-1])[:-1]
        h = continued(log, drafts, features, embedding(tiny), lambda e, f: reference.eagle(t, e, f))
        return tiny.reference.lm_head(h)
    check(record(tiny, f"eagle:{path}", setup), expected)


@pytest.mark.parametrize(("vocab", "ids"), [(120, None), (120, [0, 2, 5]), (None, [1, 2, 3])],
                         ids=["reduced-default", "reduced-explicit", "full"])
def test_eagle3(tiny, setup, tmp_path, vocab, ids) -> None:
    path, t = made.eagle3(tmp_path / "draft", vocab=vocab, ids=ids)
    layers = ids or [1, 2, 2]  # before layers 2, 6 / 2 and 6 - 3

    def expected(log, drafts):
        features = states_after(tiny, log, layers)[:-1] @ t["fc.weight"].T
        h = continued(log, drafts, features, embedding(tiny), lambda e, f: reference.eagle3(t, e, f, "midlayer", False))
        return reference.spread(t, t["lm_head.weight"] @ h, made.VOCAB)
    check(record(tiny, f"eagle3:{path}", setup), expected)


def test_eagle3_speculators(tiny, every_setup, tmp_path) -> None:
    """Found out from its config; layer ids 2, 3, 5 mean what comes before those layers."""
    path, t = made.eagle3_speculators(tmp_path / "draft")

    def expected(log, drafts):
        taps = reference.rms(states_after(tiny, log, [1, 2, 4])[:-1], t["input_norm.weight"])
        h = continued(log, drafts, taps @ t["fc.weight"].T, lambda ids: t["embed_tokens.weight"][ids],
                      lambda e, f: reference.eagle3(t, e, f, "layers.0", True))
        return reference.spread(t, t["lm_head.weight"] @ h, made.VOCAB)
    check(record(tiny, str(path), every_setup), expected)


@pytest.mark.parametrize("naming", ["mimo", "deepseek"])
def test_mtp(tmp_path, setup, naming: str) -> None:
    t = made.mtp(naming)
    tiny = made.make_target(tmp_path / "target", mtp=t)
    prefix = next(iter(t)).rsplit(".", 2)[0]

    def expected(log, drafts):
        features = states_after(tiny, log, [-1])[:-1]
        h = continued(log, drafts, features, embedding(tiny), lambda e, f: reference.mtp(t, e, f, naming, prefix))
        return tiny.reference.lm_head(h)
    check(record(tiny, "mtp", setup), expected)


@pytest.mark.parametrize("experts", [False, True], ids=["qwen3.5", "qwen3-next"])
def test_mtp_of_the_targets_own_kind(tmp_path, setup, experts: bool) -> None:
    """Gated heads, norms by 1 + weight, experts; beside layers that keep states."""
    tiny, parts = made.make_hybrid(tmp_path / "target", experts)

    def forward(embedded, features):
        pair = parts["pre_fc_norm_embedding"](embedded), parts["pre_fc_norm_hidden"](features)
        x, at = parts["fc"](torch.cat(pair, -1))[None], torch.arange(len(embedded))[None]
        seen = (at[0, :, None] >= at[0])[None, None]
        x = parts["layers"][0](x, position_embeddings=tiny.reference.model.rotary_emb(x, at),
                               attention_mask=torch.zeros(seen.shape).masked_fill(~seen, float("-inf")))
        out = parts["norm"](x[0] if isinstance(x, tuple) else x)
        out = out.view(len(embedded), -1)
        return out, out

    def expected(log, drafts):
        features = states_after(tiny, log, [-1])[:-1]
        return tiny.reference.lm_head(continued(log, drafts, features, embedding(tiny), forward))
    check(record(tiny, "mtp", setup), expected)


def of_block(tiny, t, log, size: int, mask: int, layers: list[int], windows, embed=None) -> torch.Tensor:
    ids = torch.tensor([log[-1]] + [mask] * (size - 1))
    context = states_after(tiny, log, layers)[:-1]
    return reference.block(t, len(windows), context, (embed or embedding(tiny))(ids), windows)


@pytest.mark.parametrize("sliding", [None, 6])
def test_dflash(tiny, tmp_path, every_setup, sliding) -> None:
    """z-lab: hidden state i of the block speaks of the block's own position i. A sliding layer is causal."""
    path, t = made.dflash(tmp_path / "draft", sliding=sliding)

    def expected(log, drafts):
        h = of_block(tiny, t, log, 8, 299, [1, 3, 4], [sliding, None])
        return tiny.reference.lm_head(h[1 + len(drafts)])
    check(record(tiny, f"dflash:{path}", every_setup), expected)


def test_a_reduced_vocabulary_borrows_rows_of_the_targets_head(tiny, setup, tmp_path) -> None:
    path, t = made.dflash(tmp_path / "draft", vocab=90)

    def expected(log, drafts):
        h = of_block(tiny, t, log, 8, 299, [1, 3, 4], [None, None])
        ids = torch.arange(90) + t["d2t"]
        return reference.spread(t, tiny.reference.lm_head(h[1 + len(drafts)])[ids], made.VOCAB)
    check(record(tiny, f"dflash:{path}", setup), expected)
    whole = made.dflash(tmp_path / "whole")[0]
    counted = [find_drafter(f"dflash:{p}")[0].sizes(str(p), tiny.target).parameters for p in (path, whole)]
    assert counted[0] - counted[1] == 90 * made.HIDDEN


def test_a_head_that_is_no_plain_product_lends_no_rows(tiny, tmp_path, monkeypatch) -> None:
    path, _ = made.dflash(tmp_path / "draft", vocab=90)
    logits = tiny.model.logits
    monkeypatch.setattr(tiny.model, "logits", lambda hidden: 30 * torch.tanh(logits(hidden) / 30), raising=False)
    with pytest.raises(DrafterError, match=r"90 ids by the target's head(.|\n)*target tiny are no plain product"):
        make_engine(tiny.model, f"dflash:{path}", tiny.target)


@pytest.mark.parametrize("start", [None, 0, 1], ids=["own", "open-0", "open-1"])
def test_dflash_speculators(tiny, setup, tmp_path, start: int | None) -> None:
    """Also in the Open Spec Config, which counts layers from where it says."""
    folder = tmp_path / "draft"
    path, t = made.dflash_speculators(folder) if start is None else made.dflash_open_spec(folder, start)
    assert find_drafter(str(path))[0].__class__.__name__ == "DFlash" and verifier_of(str(path)) == "owner/target"

    def expected(log, drafts):
        h = of_block(tiny, t, log, 5, 298, [1, 3], [None])
        return reference.spread(t, t["lm_head.weight"] @ h[1 + len(drafts)], made.VOCAB)
    check(record(tiny, str(path), setup), expected)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_dspark(tiny, setup, tmp_path, head: str) -> None:
    """Hidden state i of the block speaks of the position after its own, biased by the id before."""
    path, t = made.dspark(tmp_path / "draft", head)

    def expected(log, drafts):
        h = of_block(tiny, t, log, 6, 297, [2, 5], [None, None], lambda ids: t["embed_tokens.weight"][ids])
        state = torch.zeros(12)
        for k, before in enumerate([log[-1], *drafts]):
            state, bias = reference.markov_bias(t, head, state, before, h[k])
        return t["lm_head.weight"] @ h[len(drafts)] + bias
    check(record(tiny, f"dspark:{path}", setup), expected)


@pytest.mark.parametrize("said", [{"sample_from_anchor": True}, {}], ids=["anchor", "unsaid"])
def test_dspark_speculators(tiny, setup, tmp_path, said: dict) -> None:
    """The first place of the block speaks of the next id where the config says so; in this layout no is the default."""
    path, t = made.dspark_speculators(tmp_path / "draft", **said)

    def expected(log, drafts):
        h = of_block(tiny, t, log, 4, 296, [2, 5], [None])[0 if said else 1 :]
        _, bias = reference.markov_bias(t, "gated", torch.zeros(10), [log[-1], *drafts][-1], h[len(drafts)])
        return reference.spread(t, t["lm_head.weight"] @ h[len(drafts)] + bias, made.VOCAB)
    check(record(tiny, str(path), setup), expected)


def test_every_kind_is_found_by_its_config(tmp_path) -> None:
    for kind in ("eagle", "eagle3", "dflash", "dspark"):
        make = getattr(made, kind)
        path, _ = make(tmp_path / kind)
        assert type(find_drafter(str(path))[0]).__name__.lower() == kind

"""The scripts that made the heads that ship: what they train is what is served, and nothing that they are judged by."""

from __future__ import annotations

import json
import random
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from stretto.model.dequantize import dequantized, unpack
from stretto.model.load import load_model
from stretto.model.quantization import parse_quantization
from stretto.model.source import SafetensorsSource
from stretto.testing import Ask, Setup, greedy, make_engine, run, target_of
from training import calibrate, compare, export, prompts
from training.answers import Answered, Answers, Dataset
from training.heads import DFlash, DSpark, Eagle3, Seen, Shape, logits_of, shape_of
from training.loop import Options, SparseCrossEntropy, Trainer, inputs_of, walked
from training.optim import Muon
from training.recipes import RECIPES
from training.target import Teacher

SHARED = Path(__file__).resolve().parents[2] / "../shared/data"
STORIES = SHARED / "models/stories260k"
CPU = torch.device("cpu")
TAPS, INNER, MASK, NEW = (0, 2, 4), 48, 3, 24
PROMPTS = [[1, 403, 407, 261, 378], [1, 410, 292, 300, 371, 268, 411], [1, *range(300, 345)]]


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    if not STORIES.is_dir():
        pytest.skip("shared/data/models/stories260k is absent")
    return Teacher(str(STORIES), TAPS, CPU, torch.float32)


def shape_for(kind: str, teacher: Teacher) -> Shape:
    return shape_of(teacher.config, INNER, 1 if kind == "eagle3" else 2, (0, 1, 2))


def make_head(kind: str, teacher: Teacher, ids: torch.Tensor | None = None):
    torch.manual_seed(1)
    shape, mask, norm, head = shape_for(kind, teacher), teacher.embedding[MASK], teacher.norm, teacher.head
    ids = torch.arange(3, len(head), 3) if ids is None else ids
    if kind == "eagle3":
        return Eagle3(shape, ids, norm, head)
    if kind == "dflash":
        return DFlash(shape, 6, mask, ids, norm, head)
    return DSpark(shape, 5, mask, ids, norm, head, rank=8)


def save_head(kind: str, folder: Path, head, teacher: Teacher) -> None:
    export.round_weights(head)
    more = () if kind == "eagle3" else (MASK,)
    getattr(export, kind)(folder, head, teacher, shape_for(kind, teacher), {}, *more)


def short_of_best(head, teacher: Teacher, ids: list[int], known: int) -> torch.Tensor:
    """By how much each of the drafts ids[known:] is less likely than the one that the head, as it is trained, finds
    likeliest there, given those before: of logits, in standard deviations of all. [drafts]"""
    tokens = torch.tensor([ids])
    taps, _ = teacher.states(tokens)
    before = tokens[:, None, known - 1 : len(ids) - 1]
    position = torch.arange(len(ids))[None]
    seen = Seen(taps, teacher.embedding[tokens], torch.zeros_like(position), position, torch.tensor([[known - 1]]),
                teacher.embedding[before], before)
    hidden = head.drafts(seen)[0, 0, : before.shape[-1]]
    logits = logits_of(head.factors(hidden[None], before.flatten(0, 1)))
    chosen = torch.searchsorted(head.ids, tokens[0, known:])
    assert torch.equal(head.ids[chosen], tokens[0, known:])
    return (logits.max(-1).values - logits.gather(1, chosen[:, None])[:, 0]) / logits.std(-1)


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
@torch.no_grad()
def test_the_engine_drafts_what_was_trained(kind: str, teacher: Teacher, tmp_path: Path):
    head = make_head(kind, teacher)
    for weight in head.parameters():  # far from what the start is, so that every part of it matters
        weight.add_(torch.randn_like(weight) * (0.1 if weight.ndim == 1 else 0.15))
    save_head(kind, tmp_path / kind, head, teacher)
    model = load_model(STORIES, dtype=torch.float32, device=CPU)
    asked = str(tmp_path / kind)  # the configuration says what it is
    engine = make_engine(model, asked, target_of(model, STORIES), Setup(width=5, page_size=4, chunk=16))
    answers = run(engine, [Ask(str(i), prompt, greedy(NEW)) for i, prompt in enumerate(PROMPTS)])
    short, ids_seen = [], set()
    for i, prompt in enumerate(PROMPTS):
        answer = answers[str(i)]
        for known, offer in sorted(answer.offers.items()):
            ids = [*prompt, *answer.token_ids][:known] + list(offer)
            short += short_of_best(head, teacher, ids, known).tolist()
            ids_seen.update(offer)
    assert len(short) > 3 * NEW and len(ids_seen) > 8
    # the engine rounds what packed matrices are multiplied by, so two ids that are as good as equal may change places
    assert max(short) < 0.05 and sum(s == 0 for s in short) > 0.95 * len(short), sorted(short)[-8:]


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_training_learns(kind: str, teacher: Teacher, tmp_path: Path):
    """To foresee a few answers, in forty steps."""
    answers = Answers()
    for i in range(24):
        answers.add(Answered([1, 300 + i % 3], [310 + (7 * j + i % 3) % 40 for j in range(40)], greedy=True))
    answers.save(tmp_path / "answers.npz")
    head = make_head(kind, teacher)
    data = Dataset([tmp_path / "answers.npz"], 5, CPU)
    assert len(data.validation) == 3 and not set(data.validation.tolist()) & set(data.train.tolist())
    trainer, memory = Trainer(head, 5, teacher, Options(rate=0.03)), teacher.remember(data)
    batches = data.batches(400, 64, windows=(200,))
    losses = [trainer.step(inputs_of(next(batches), data, teacher, memory), 1.0).item() for _ in range(40)]
    assert min(losses[-5:]) < 0.6 * losses[0]


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_training_goes_on_from_a_checkpoint(kind: str, teacher: Teacher, tmp_path: Path):
    head = make_head(kind, teacher)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    save_head(kind, tmp_path / kind, head, teacher)
    other = make_head(kind, teacher)
    export.load(other, tmp_path / kind)
    for name, weight in head.state_dict().items():
        assert torch.allclose(other.state_dict()[name], weight, atol=1e-6), name
    assert torch.equal(export.vocabulary_of(tmp_path / kind), head.ids)
    more = make_head(kind, teacher, torch.arange(2, len(teacher.head)))
    fresh = {name: weight.clone() for name, weight in more.state_dict().items()}
    export.load(more, tmp_path / kind)
    for name in export.OF_IDS:
        if name in fresh:
            got, old = more.state_dict()[name], head.state_dict()[name]
            assert torch.allclose(got[head.ids - 2], old, atol=1e-6) and torch.equal(got[0], fresh[name][0]), name
    with pytest.raises(ValueError, match="drafts ids that the head does not"):
        export.load(make_head(kind, teacher, head.ids[1:]), tmp_path / kind)
    with pytest.raises(ValueError, match=r"another shape.*norm\.weight"):
        export.load(torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(5)}), tmp_path / kind)


def test_labels_are_the_ids_after_the_anchor(tmp_path: Path):
    answers = Answers()
    for i in range(16):
        answers.add(Answered(list(range(100, 104 + i)), list(range(200, 212)), greedy=i % 2 == 0))
    answers.save(tmp_path / "answers.npz")
    data = Dataset([tmp_path / "answers.npz"], 3, CPU)
    batch = next(data.batches(128, 40, windows=(64,)))
    ids = data.ids[batch.rows]
    assert bool(batch.valid[..., 0].any())
    for b in range(len(ids)):
        for a, anchor in enumerate(batch.anchors[b].tolist()):
            if not batch.valid[b, a, 0]:
                continue
            assert 200 <= ids[b, anchor] <= 210  # an id of the answer, not its last
            n = int(batch.valid[b, a].sum())
            assert n == min(3, 211 - int(ids[b, anchor]))
            assert batch.labels[b, a, :n].tolist() == [int(ids[b, anchor]) + 1 + k for k in range(n)]
            assert data.ids[batch.label_rows[b, a, 0]] == ids[b, anchor]


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
@torch.no_grad()
def test_sequences_of_one_window_do_not_see_each_other(kind: str, teacher: Teacher, tmp_path: Path):
    answers, generator = Answers(), torch.Generator().manual_seed(2)
    for i in range(12):
        ids = torch.randint(3, 500, (2, 18), generator=generator).tolist()
        answers.add(Answered(ids[0][: 4 + i], ids[1], greedy=True))
    answers.save(tmp_path / "answers.npz")
    data, head = Dataset([tmp_path / "answers.npz"], 5, CPU), make_head(kind, teacher)
    memory = teacher.remember(data)
    batch = next(data.batches(128, 48, windows=(128,)))
    packed = head.drafts(inputs_of(batch, data, teacher, memory).seen)[0]
    assert int(batch.owner.unique().numel()) > 3
    checked = 0
    for draft, anchor, valid in zip(packed, batch.anchors[0].tolist(), batch.valid[0], strict=True):
        if not valid[0]:
            continue
        owner = batch.owner[0, anchor]
        alone = data.whole(owner[None])
        at = (alone.anchors[0] == batch.position[0, anchor]).nonzero()[0, 0]
        n = int(valid.sum())
        expected = head.drafts(inputs_of(alone, data, teacher, memory).seen)[0, at]
        assert torch.allclose(draft[:n], expected[:n], atol=1e-4), (kind, anchor)
        checked += 1
    assert checked > 20


def test_muon_is_that_of_torch():
    generator = torch.Generator().manual_seed(4)
    mine = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((6, 9), (6, 9), (12, 5))]
    theirs = [torch.nn.Parameter(weight.detach().clone()) for weight in mine]
    ours = Muon(mine, torch.tensor(0.02), weight_decay=0.1)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        ours.step()
        reference.step()
    for a, b in zip(mine, theirs, strict=True):
        assert torch.allclose(a, b, atol=2e-3), (a - b).abs().max()


def test_cross_entropy_has_the_gradients_of_the_plain_one():
    generator = torch.Generator().manual_seed(3)
    factors = [torch.randn(*shape, generator=generator).requires_grad_() for shape in ((6, 4), (9, 4), (6, 2), (9, 2))]
    ids, weights = torch.randint(9, (6, 3), generator=generator), torch.rand(6, 3, generator=generator)
    x, w, y, u = factors
    plain = -(weights * (x @ w.t() + y @ u.t()).log_softmax(-1).gather(1, ids)).sum()
    wanted = torch.autograd.grad(plain, factors)
    loss, best = SparseCrossEntropy.apply(ids, weights, *factors)
    assert torch.equal(best, (x @ w.t() + y @ u.t()).argmax(-1)) and torch.allclose(loss, plain)
    for got, want in zip(torch.autograd.grad(loss, factors), wanted, strict=True):
        assert torch.allclose(got, want, atol=1e-5)


@torch.no_grad()
def test_four_bits_are_near_and_stay_what_they_are():
    weight = torch.randn(50, 3 * export.GROUP) * torch.logspace(-3, 1, 50)[:, None]
    codes, scale = export.four_bits(weight)
    assert bool((codes.unflatten(1, (3, -1)).amin(2) == export.LEAST).all()) and int(codes.max()) == export.MOST
    once = export.rounded(weight)
    lost = (once - weight).unflatten(1, (3, -1)).abs() / scale.float().abs()[..., None]
    inside = codes.unflatten(1, (3, -1)) < export.MOST  # larger numbers of the other sign are cut
    assert bool((lost <= torch.where(inside, 0.54, 1.04)).all()) and scale.shape == (50, 3)
    assert torch.equal(export.rounded(once), once)
    assert torch.equal(unpack(export.words(codes.int() + 8), 4).float() - 8, codes)


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_heads_are_trained_as_they_will_be_stored(kind: str, teacher: Teacher, tmp_path: Path):
    """What a trainer multiplies by is what the file holds, to the last bit; the file is small; gradients reach all."""
    head = make_head(kind, teacher)
    trainer = Trainer(head, 5, teacher, Options())
    used = {name: part.weight.detach().clone() for name, part in head.named_modules()
            if isinstance(part, torch.nn.Linear | torch.nn.Embedding)}
    assert len(trainer.parameters) == len(list(head.parameters()))
    save_head(kind, tmp_path / kind, head, teacher)
    raw = json.loads((tmp_path / kind / "config.json").read_text())
    stored = dequantized(SafetensorsSource(tmp_path / kind), parse_quantization(raw))
    for name, weight in used.items():
        assert torch.equal(stored.tensor(f"{name}.weight").float(), weight), name
    small = {name for name, weight in used.items() if export.is_rounded(weight)}
    assert small and not small & set(raw["quantization_config"]["ignore"])


@torch.no_grad()
def test_rounding_by_inputs_loses_less_of_what_comes_out() -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(32, 2 * export.GROUP, generator=generator)
    x = torch.randn(400, 20, generator=generator) @ torch.randn(20, 2 * export.GROUP, generator=generator)
    x += 0.1 * torch.randn(x.shape, generator=generator)
    value, scales = calibrate.rounded_by(weight, x.t() @ x)
    assert torch.equal(export.rounded(value, scales), value), "a checkpoint holds something else"
    lost, plain = ((x @ (w - weight).t()).norm() for w in (value, export.rounded(weight)))
    assert lost < 0.7 * plain


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_every_matrix_of_a_head_is_rounded_by_its_inputs(kind: str, teacher: Teacher, tmp_path: Path) -> None:
    answers, generator = Answers(), torch.Generator().manual_seed(5)
    for _ in range(16):
        answers.add(Answered([1, 300], torch.randint(3, 500, (80,), generator=generator).tolist(), greedy=True))
    answers.save(tmp_path / "answers.npz")
    data, head = Dataset([tmp_path / "answers.npz"], 5, CPU), make_head(kind, teacher)
    batches = calibrate.batches_of(data, teacher, teacher.remember(data), 5)
    scales = calibrate.round_head(head, moments := calibrate.moments_of(head, islice(batches, 2)))
    stored = {name for name, part in head.named_modules() if hasattr(part, "weight") and export.is_rounded(part.weight)}
    assert {f"{name}.weight" for name in stored} == set(scales)
    assert stored - set(moments) <= {"markov_head.markov_w1"}, "what is looked up meets no inputs"
    more = () if kind == "eagle3" else (MASK,)
    getattr(export, kind)(tmp_path, head, teacher, shape_for(kind, teacher), scales, *more)
    again = make_head(kind, teacher)
    export.load(again, tmp_path)
    for name, weight in head.state_dict().items():
        assert torch.allclose(again.state_dict()[name], weight, atol=1e-6), name


@torch.no_grad()
def test_rows_that_are_looked_up_are_rounded_by_what_is_made_of_them(teacher: Teacher) -> None:
    shape, mask = shape_for("dspark", teacher), teacher.embedding[MASK]
    head = DSpark(shape, 5, mask, torch.arange(3, 99), teacher.norm, teacher.head, rank=export.GROUP)
    reader = head.markov_head.joint_proj.weight[:, export.GROUP : 2 * export.GROUP]
    reader.copy_(reader[:, :16] @ torch.randn(16, export.GROUP))  # much of a row makes no difference
    rows = head.markov_head.markov_w1.weight
    value, scales = calibrate.rounded_by(rows, calibrate.moments_of_readers(head, "markov_head.markov_w1"))
    lost, plain = (((w - rows) @ reader.t()).norm() for w in (value, export.rounded(rows)))
    assert lost < 0.7 * plain and scales.shape == (len(rows), 1)


def test_heads_are_compared_by_walks_over_the_same_answers(teacher: Teacher, tmp_path: Path) -> None:
    found = walked(torch.tensor([[2, 0, 0, 1, 0, 9], [0, 0, 9, 9, 9, 9]]), torch.tensor([5, 2]))
    assert found == [(5, 2), (2, 2)], "after an anchor its accepted drafts and one id more are known"
    slow, fast = np.array([[30, 15], [10, 10], [20, 15]]), np.array([[30, 12], [10, 10], [20, 10]])
    gain, deviation = compare.compared(slow, fast)
    assert gain == pytest.approx(40 / 32 - 1) and 0 < deviation < 0.3 and compare.compared(fast, fast) == (0, 0)
    answers = Answers()
    for i in range(3):
        answers.add(Answered([1, 300 + i], list(range(310, 330 + i)), greedy=True))
    answers.save(tmp_path / "answers.npz")
    data, head = Dataset([tmp_path / "answers.npz"], 5, CPU), make_head("dflash", teacher)
    recipe = RECIPES["dflash"]
    counts = compare.counts([head, head], recipe, data, teacher, teacher.remember(data))
    assert counts.shape == (2, 3, 2) and counts[0, :, 0].tolist() == [19, 20, 21] and np.array_equal(*counts)
    assert bool((counts[..., 1] <= counts[..., 0]).all())


# ------------------------------------------------------------------------------------------------------------- prompts
@pytest.fixture(scope="module")
def unseen() -> prompts.Unseen:
    if not (SHARED / "eval").is_dir():
        pytest.skip("shared/data/eval is absent")
    return prompts.Unseen(prompts.evaluation_prompts(SHARED))


def test_evaluation_prompts_are_never_trained_on(unseen: prompts.Unseen, monkeypatch: pytest.MonkeyPatch):
    evaluated = list(prompts.evaluation_prompts(SHARED))
    assert len(evaluated) > 1319 + 240 and not any(unseen(prompt) for prompt in evaluated)
    longest = max(evaluated, key=len)
    assert not unseen("Summarize this text.\n\n" + longest[200:500]) and unseen("What is an anchor of a draft?")
    few = tuple(prompts.Recipe(r.templates, ("rust-book",), r.words, 5) for r in prompts.RECIPES)
    planted = prompts.Recipe((evaluated[-1].replace("{", "{{").replace("}", "}}"),), ("rust-book",), (10, 20), 3)
    monkeypatch.setattr(prompts, "RECIPES", (*few, planted))
    monkeypatch.setattr(prompts, "FACTS", ("wikitext-2/valid",))
    built = prompts.build(SHARED)
    assert len(built) > 7000 and evaluated[-1] not in built
    taken = set().union(*(prompts.shingles(prompt) for prompt in evaluated))
    assert all(taken.isdisjoint(prompts.shingles(prompt)) for prompt in built[::20])


def test_word_problems_with_other_numbers():
    chance = random.Random(1)
    asked = "Tom has 12 boxes of 1,200 pens at $3.50, half of 2/3 and 45 more. How many in 3 days?"
    found = [prompts.varied(asked, chance) for _ in range(20)]
    assert len(set(found)) == 20
    for text in found:
        assert re.sub(r"\d+", "#", text) == re.sub(r"\d+", "#", asked)
        numbers = re.findall(r"\d+", text)
        assert numbers[1:7] == ["1", "200", "3", "50", "2", "3"], "parts of numbers and fractions stay"
        assert 6 <= int(numbers[0]) <= 24 and 22 <= int(numbers[7]) <= 90 and 2 <= int(numbers[8]) <= 6


def test_retrieved_pieces_and_questions_about_names():
    chance = random.Random(2)
    text = " ".join(f"Then Anna Karenina met Count Alexei Vronsky for the {i}th time." for i in range(40))
    chunks = prompts.chunked(text, 5, chance)
    size = len(text.split()) // 5
    assert len(chunks) == 5 and all(size <= len(chunk.split()) <= size + 4 for chunk in chunks)
    assert all(" ".join(chunk.split()[-size:]) in text for chunk in chunks), "a piece is a run of the text's words"
    asked = list(prompts.named(text, 30, chance))
    assert len(set(asked)) > 10 and all("karenina" in q.lower() or "vronsky" in q.lower() for q in asked)
    marked = " = Title = \n \n It was 3 @.@ 5 <unk> long , and \" good \" ( so it seems ) . \n"
    assert prompts.plain(marked).split("\n")[-2].strip() == 'It was 3.5 long, and "good" (so it seems).'


def test_prompts_are_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompts, "build", lambda data, seed: ["one\ntwo", "drei \u00fc"])
    prompts.main(SHARED, tmp_path / "prompts.jsonl.xz")
    assert prompts.load(tmp_path / "prompts.jsonl.xz") == ["one\ntwo", "drei \u00fc"]

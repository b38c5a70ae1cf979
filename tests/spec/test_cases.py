"""Bugs that users of other engines reported, for every kind of drafter. The conformance kit carries the cases of texts,
distributions and mixed steps (test_conformance.py); these are the ones of stops, limits, seeds, grammars and pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from stretto.engine.core import EngineCore
from stretto.host.grammar import Grammars
from stretto.model.load import load_model
from stretto.params import Grammar, SamplingParams
from stretto.protocol import Output, Request, TokenLogprob
from stretto.testing import SAMPLED, Ask, Lab, Setup, counters, greedy, make_engine, run, same_text, target_of
from stretto.text.grammar import vocabulary
from stretto.text.stream import IncrementalText
from stretto.wire import HEADER, split_plan
from tests.serve.fakes import EOS, ByteTokenizer
from tests.spec import checkpoints as made
from tests.spec import suffix_trees

HEADS = {"eagle": made.eagle, "eagle3": made.eagle3, "dflash": made.dflash, "dspark": made.dspark}
KINDS = ("ngram", "suffix", "standalone", *HEADS, "mtp")  # standalone: the target's own copy, which is always right
PROMPT = (3, 7, 11, 3, 7, 11, 3, 7)


@pytest.fixture(scope="module")
def labs(tmp_path_factory):
    """kind -> its lab; made when first asked for."""
    folder, kept = tmp_path_factory.mktemp("cases"), dict[str, Lab]()
    tiny = made.make_target(folder / "target")

    def make(kind: str) -> Lab:
        if kind == "mtp":
            model = load_model(made.mimo(folder / "mimo"), dtype=torch.float32, device=torch.device("cpu"))
            return Lab(model, target_of(model, folder / "mimo"), "mtp")
        path = tiny.target.path if kind == "standalone" else HEADS[kind](folder / kind)[0] if kind in HEADS else None
        asked = "suffix:requests=0" if kind == "suffix" else f"{kind}:{path}" if path else kind
        return Lab(tiny.model, tiny.target, asked)

    def get(kind: str) -> Lab:
        if kind not in kept:
            kept[kind] = make(kind)
        return kept[kind]
    return get


class Pieces:
    """Every id is three characters, so that stop strings can begin and end inside of them."""

    def follow(self, prompt: list[int]) -> None:
        pass

    def feed(self, token_id: int) -> str:
        return f"<{token_id:03d}"

    def flush(self) -> str:
        return ""


@dataclass
class Told:
    ids: list[int]
    deltas: list[str]
    last: Output
    scores: int


def told(engine: EngineCore, asks: list[Ask]) -> dict[str, Told]:
    """With text, as clients get it."""
    found: dict[str, Told] = {}
    for ask in asks:
        engine.submit(Request(rid=ask.rid, tokens=list(ask.tokens), sampling=ask.sampling))
    while engine.has_work:
        for output in engine.step():
            one = found.setdefault(output.rid, Told([], [], output, 0))
            one.ids += output.token_ids
            one.deltas.append(output.text)
            one.last, one.scores = output, one.scores + len(output.logprobs or ())
    engine.host.audit()
    return found


def with_text(lab: Lab, drafter: str | None, **setup) -> EngineCore:
    return make_engine(lab.model, drafter, lab.target, Setup(width=7, **setup), text=lambda params: IncrementalText(
        Pieces(), params.stop, include_stop=params.include_stop))


def answer(lab: Lab, n: int = 24) -> list[int]:
    return lab.plain([Ask("whole", PROMPT, greedy(n))])["whole"].token_ids


def first_seen(ids: list[int], least: int) -> int:
    """The place of an id that did not occur before, from `least` on."""
    return next(i for i in range(least, len(ids)) if ids[i] not in ids[:i])


# ------------------------------------------------------------------------------------------------------------ the cases
def case_1_07_seeds_give_different_texts(lab: Lab) -> None:
    asks = [Ask(str(i), PROMPT, SamplingParams(temperature=15.0, seed=i, max_tokens=6)) for i in range(24)]
    got = {tuple(a.token_ids) for a in lab.drafted(asks)[0].values()}
    assert len(got) == len({tuple(a.token_ids) for a in lab.plain(asks).values()}) > 12


def case_1_09_neighbours_with_and_without_seeds_leave_greedy_rows_alone(lab: Lab) -> None:
    hot = {"temperature": 9.0, "max_tokens": 16}
    beside = [Ask(f"seed{i}", PROMPT[: 3 + i], SamplingParams(seed=i, **hot)) for i in range(3)]
    beside += [Ask(f"none{i}", PROMPT[: 3 + i], SamplingParams(**hot)) for i in range(3)]
    got, _ = lab.drafted([Ask("whole", PROMPT, greedy(24)), *beside])
    assert got["whole"].token_ids == answer(lab)
    want = lab.plain(beside[:3])
    assert all(got[rid].token_ids == a.token_ids for rid, a in want.items())


def case_2_01_case_2_03_penalties_and_biases_hold_at_every_place(lab: Lab) -> None:
    plain = answer(lab)
    common = max(plain, key=plain.count)
    asks = [Ask("penalties", PROMPT, greedy(24, frequency_penalty=2.0, repetition_penalty=1.5)),
            Ask("never", PROMPT, greedy(24, logit_bias={common: -100.0})),
            Ask("always", PROMPT, greedy(24, logit_bias={5: 100.0})),
            Ask("all", PROMPT, SamplingParams(seed=1, max_tokens=24, **SAMPLED))]
    got, want = lab.drafted(asks)[0], lab.plain(asks)
    same_text(got, want, "parameters")
    assert common not in got["never"].token_ids and set(got["always"].token_ids) == {5}
    assert got["penalties"].token_ids != plain


def case_2_05_ignore_eos_masks_nothing(lab: Lab) -> None:
    plain = answer(lab)
    eos = plain[first_seen(plain, 4)]
    engine = make_engine(lab.model, lab.drafter, lab.target, lab.setup(), eos=frozenset({eos}))
    got = run(engine, [Ask("stops", PROMPT, greedy(24)), Ask("goes on", PROMPT, greedy(24, ignore_eos=True))])
    assert got["stops"].token_ids == plain[: plain.index(eos) + 1] and got["stops"].finish_reason == "stop"
    assert got["goes on"].token_ids == plain and got["goes on"].finish_reason == "length"


def case_2_07_penalties_and_grammars_in_one_batch(lab: Lab) -> None:
    some = dict(temperature=9.0, max_tokens=14)
    penalties, form = dict(frequency_penalty=1.5, repetition_penalty=1.3), Grammar("regex", "([a-f]{3}-){4}")
    kinds = {"p": penalties, "g": {"grammar": form}, "pg": penalties | {"grammar": form}, "": {}}
    asks = [Ask(f"{i}{name}", PROMPT[: 2 + i], SamplingParams(seed=i, **some, **more))
            for i in range(3) for name, more in kinds.items()]
    grammars = partial(Grammars, partial(vocabulary, ByteTokenizer(), made.VOCAB, [EOS]), made.VOCAB)
    got, want = (run(make_engine(lab.model, drafter, lab.target, lab.setup(slots=13, overlap=True), grammars=grammars(),
                                 eos=frozenset({EOS})), asks) for drafter in (lab.drafter, None))
    same_text(got, want, "penalties and grammars")


def case_3_01_the_earlier_of_stop_and_limit_wins(lab: Lab) -> None:
    plain = answer(lab)
    at = first_seen(plain, 5)
    for stop in ({"stop_token_ids": (plain[at],)}, {"stop": (f"<{plain[at]:03d}",)}):
        asks = [Ask(str(n), PROMPT, greedy(n, **stop)) for n in range(1, at + 4)]
        for rid, one in told(with_text(lab, lab.drafter), asks).items():
            n = int(rid)
            assert one.ids == plain[: min(n, at + 1)]
            assert one.last.finish_reason == ("stop" if n > at else "length"), f"at most {n}"
            assert "".join(one.deltas) == "".join(f"<{i:03d}" for i in plain[: min(n, at)])


def case_3_03_ids_logprobs_text_and_usage_are_of_one_span(lab: Lab) -> None:
    plain = answer(lab)
    stop = f"<{plain[4]:03d}<{plain[5]:03d}"[2:-2]  # from inside one id to inside the next
    asked = [Ask("a", PROMPT, greedy(24, stop=(stop,), logprobs=2))]
    got, want = (told(with_text(lab, drafter), asked)["a"] for drafter in (lab.drafter, None))
    assert got.ids == want.ids and len(got.ids) == got.scores == got.last.usage.completion_tokens <= 6
    assert "".join(got.deltas) == "".join(want.deltas) and stop not in "".join(got.deltas)


def case_3_05_exactly_max_tokens(lab: Lab) -> None:
    plain = answer(lab)
    got, _ = lab.drafted([Ask(str(n), PROMPT, greedy(n)) for n in range(1, 13)], slots=13)
    assert all(a.token_ids == plain[: int(n)] and a.finish_reason == "length" for n, a in got.items())


def case_3_07_no_part_of_a_stop_is_streamed_and_a_near_miss_is(lab: Lab) -> None:
    plain = answer(lab)
    text = "".join(f"<{i:03d}" for i in plain)
    at = text.index(f"<{plain[first_seen(plain, 5)]:03d}")
    stop = text[at + 1 : at + 8]  # over three ids
    asks = [Ask("met", PROMPT, greedy(24, stop=(stop,))), Ask("missed", PROMPT, greedy(24, stop=(stop[:5] + "x",)))]
    got = told(with_text(lab, lab.drafter), asks)
    assert "".join(got["met"].deltas) == text[: text.index(stop)] and got["met"].last.stop_reason == stop
    assert "".join(got["missed"].deltas) == text


def case_4_03_steps_are_mixed_where_mixing_is_on(lab: Lab) -> None:
    first, late = [Ask("a", PROMPT, greedy(40))], [Ask("b", [t % 300 for t in range(90)], greedy(4))]
    for mixed in (True, False):
        _, engine = lab.drafted(first, late, chunk=8, mixed=mixed, overlap=True)
        assert (counters(engine)["tail_rows"] > 0) == (counters(engine)["mixed_steps"] > 0) == mixed


def case_4_07_case_4_09_prompts_at_the_edges_of_chunks_without_a_cache(lab: Lab) -> None:
    asks = [Ask(f"{n}.{i}", [(5 * j + n) % 250 for j in range(n)], greedy(4)) for n in (8, 9, 16, 25) for i in range(4)]
    got, engine = lab.drafted(asks, chunk=8, budget=24, prefix_cache=False, overlap=True)
    same_text(got, lab.plain(asks), "edges of chunks")
    assert counters(engine)["chunk_tokens"] == sum(len(ask.tokens) for ask in asks), "a chunk was computed twice"


def case_4_11_the_budget_holds_in_every_step(lab: Lab) -> None:
    engine, planned = make_engine(lab.model, lab.drafter, lab.target, lab.setup(chunk=32, budget=32)), []
    launch = engine.device.launch

    def spy(packed) -> None:
        planned.append(int(split_plan(packed[:HEADER], packed).rows[:, 2].sum()))
        launch(packed)
    engine.device.launch = spy
    shared = [9, 8, 7] * 12
    asks = [Ask(str(i), [*shared[: 11 * i % 37], i], greedy(6)) for i in range(30)]
    same_text(run(engine, asks), lab.plain(asks), "a small budget")
    assert max(planned) <= 32 and counters(engine)["mixed_steps"] > 0


def case_10_01_no_page_leaks_whatever_the_length(lab: Lab) -> None:
    for page in (16, 64):
        engine = make_engine(lab.model, lab.drafter, lab.target, Setup(width=5, page_size=page))
        for n in (1, 2, 5, 6, 7, 13, 63, 64, 70):
            run(engine, [Ask(str(n), PROMPT, greedy(n))])  # which looks for pages that are still held


def case_10_07_entries_of_page_tables_beyond_a_row_are_never_followed(lab: Lab) -> None:
    engine = make_engine(lab.model, lab.drafter, lab.target, lab.setup(page_size=4, chunk=8))
    runner = engine.device.runner
    step, reach = runner.step, -(-(lab.width + 10) // 4)  # pages that a row's own block may touch

    def watched(packed):
        tables = runner.table.tables[:, 1:]
        beyond = (tables == 0) & (torch.arange(tables.shape[2]) >= reach + int(runner.table.length.max()) // 4)
        tables[beyond] = 1 << 29
        return step(packed)
    runner.step = watched
    asks = lab.asks(20)
    same_text(run(engine, asks), lab.plain(asks), "poisoned tables")


def case_11_01_log_probabilities_of_prompt_and_answer(lab: Lab) -> None:
    """As /v1/completions reports them with `echo`; the second wave finds its prompts cached, beside the first one."""
    asks = lab.asks(8, logprobs=3, prompt_logprobs=2)[:3] + lab.asks(8, "later", logprobs=3)[:3]

    def scores(drafter: str | None) -> dict[str, list[TokenLogprob]]:
        engine, waiting = make_engine(lab.model, drafter, lab.target, lab.setup(chunk=8, page_size=4)), asks[::-1]
        found: dict[str, list[TokenLogprob]] = {ask.rid: [] for ask in asks}
        for step in range(1000):
            if waiting and step % 2 == 0:
                ask = waiting.pop()
                engine.submit(Request(rid=ask.rid, tokens=list(ask.tokens), sampling=ask.sampling, want_text=False))
            for output in engine.step():
                found[output.rid] += [*(output.prompt_logprobs or ()), *(output.logprobs or ())]
            if not engine.has_work and not waiting:
                break
        told = counters(engine)
        assert told["mixed_steps"] > 0 and told["cached_tokens"] > 0 and (told["drafted"] > 0) == (drafter is not None)
        return found

    got, want = scores(lab.drafter), scores(None)
    for ask in asks:
        of_prompt = len(ask.tokens) if ask.sampling.prompt_logprobs else 0
        assert len(got[ask.rid]) == len(want[ask.rid]) == of_prompt + 8
        for one, other in zip(got[ask.rid], want[ask.rid]):
            assert one.token_id == other.token_id and one.top_ids == other.top_ids
            assert one.logprob == pytest.approx(other.logprob, abs=2e-3)  # None: of a prompt's first id
            assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=2e-3)


CASES: tuple[Callable[[Lab], None], ...] = tuple(f for name, f in sorted(globals().items()) if name.startswith("case_"))
ALWAYS = {"case_1_07": "dspark", "case_1_09": "dflash", "case_2_01": "eagle", "case_2_05": "standalone",
          "case_2_07": "eagle3", "case_3_01": "standalone", "case_3_03": "standalone", "case_3_05": "standalone",
          "case_3_07": "standalone", "case_4_03": "dflash", "case_4_07": "dspark", "case_4_11": "ngram",
          "case_10_01": "eagle3", "case_10_07": "eagle3", "case_11_01": "mtp"}  # what the quick suite runs


@pytest.mark.parametrize(("kind", "case"), [
    pytest.param(kind, case, id=f"{case.__name__}-{kind}",
                 marks=() if any(case.__name__.startswith(c) and kind == k for c, k in ALWAYS.items())
                 else pytest.mark.full) for case in CASES for kind in KINDS])
def test_case(labs, monkeypatch, kind: str, case: Callable[[Lab], None]) -> None:
    suffix_trees.install(monkeypatch)
    case(labs(kind))

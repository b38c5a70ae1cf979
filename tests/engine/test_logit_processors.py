"""Custom logit processors: at every position, under every drafter, and when they fail."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest
import torch

from stretto.logit_processors import CustomLogitProcessor, LogitProcessor, ProcessorContext, RowProcessor
from stretto.params import ParameterError, ProcessorUse, SamplingParams
from stretto.protocol import RequestError
from stretto.sample.custom import CustomProcessors, ProcessorError, Registry
from stretto.spec.ngram import NgramDrafter
from stretto.spec.scripted import ScriptedDrafter
from tests.engine.small import VOCAB, Oracle, Run, make_core

PROMPT, NEW = [3, 7, 11, 3, 7], 24
FORCED = [5, 6, 7, 8]


def only(logits: torch.Tensor, token: int) -> torch.Tensor:
    out = torch.full_like(logits, float("-inf"))
    out[..., token] = 0.0
    return out


class ForceRows(RowProcessor):
    def row(self, prompt_ids, output_ids, logits, params):
        assert prompt_ids == PROMPT
        return only(logits, params["ids"][len(output_ids)]) if len(output_ids) < len(params["ids"]) else logits


class ForceOnDevice(LogitProcessor):
    """The same without a look at the device; its state is a table by slot."""

    graph_safe = True

    def __init__(self, context: ProcessorContext):
        super().__init__(context)
        self.ids = torch.full((context.n_slots, 8), -1, dtype=torch.int64, device=context.device)

    @classmethod
    def check(cls, params):
        if not 1 <= len(params["ids"]) <= 8:
            raise ValueError(f"ids has {len(params['ids'])} entries; it must have 1..8")

    def seat(self, slot, params):
        self.ids[slot] = -1
        self.ids[slot, : len(params["ids"])] = torch.tensor(params["ids"])

    def __call__(self, logits, rows):
        at = rows.length - rows.prompt
        wanted = torch.where((at >= 0) & (at < 8), self.ids[rows.slots, at.clamp(0, 7)], -1)
        forced = torch.full_like(logits, float("-inf")).scatter_(1, wanted.clamp(min=0)[:, None], 0.0)
        return torch.where((wanted >= 0)[:, None], forced, logits)


class ForceCode(CustomLogitProcessor):
    """In SGLang's form."""

    def __call__(self, logits, custom_param_list):
        for i, params in enumerate(custom_param_list):
            seen = len(params["__req__"].output_ids)
            if seen < len(params["ids"]):
                logits[i] = only(logits[i], params["ids"][seen])
        return logits


class NoRepeat(RowProcessor):
    """Depends on the newest ids, so that a stale history shows."""

    def row(self, prompt_ids, output_ids, logits, params):
        logits[(prompt_ids + output_ids)[-2:]] = float("-inf")
        return logits


class Breaks(RowProcessor):
    def row(self, prompt_ids, output_ids, logits, params):
        how = params.get("how") if len(output_ids) >= params.get("after", 0) else None
        if how == "raise":
            raise KeyError("nothing here")
        if how == "shape":
            return logits[:-1]
        if how is not None:
            logits.fill_({"nan": float("nan"), "inf": float("inf"), "nothing": float("-inf")}[how])
        return logits


def as_code(kind: type) -> str:
    return json.dumps({"callable": pickle.dumps(kind).hex()})


REGISTRY = Registry({"rows": ForceRows, "device": ForceOnDevice, "no_repeat": NoRepeat, "breaks": Breaks}, True)
USES = {"rows": ProcessorUse("rows", params={"ids": FORCED}), "device": ProcessorUse("device", params={"ids": FORCED}),
        "code": ProcessorUse(source=as_code(ForceCode), params={"ids": FORCED})}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> Oracle:
    return Oracle.make(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def soft(tmp_path_factory) -> Oracle:
    return Oracle.make(tmp_path_factory.mktemp("soft"), "llama", sharpness=0.7)


def engine(model, **more) -> Run:
    core = make_core(model, check_processor=REGISTRY.check, **more)
    table = core.device.runner.table
    table.custom = CustomProcessors(len(table.log), table.device, REGISTRY, model.vocab_size)
    core.info.logit_processors, core.info.custom_logit_processor = sorted(REGISTRY.named), True
    return Run(core)


def greedy(n: int = NEW, *uses: ProcessorUse, **more) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=n, logit_processors=uses, **more)


DRAFTERS = {
    "none": lambda told: None, "ngram": lambda told: NgramDrafter(4),
    "right": lambda told: ScriptedDrafter([told], 4, 1.0, vocab_size=VOCAB),
    "mixed": lambda told: ScriptedDrafter([told], 4, 0.6, vocab_size=VOCAB, variable=True),
}


@pytest.mark.parametrize("drafts", DRAFTERS)
@pytest.mark.parametrize("kind", USES)
@pytest.mark.parametrize("overlap", [False, True])
def test_case_5_01_a_processor_sees_the_newest_ids(oracle, kind: str, drafts: str, overlap: bool) -> None:
    """5, 6, 7, 8, each once, then free text; requests beside it, in mixed steps, get what they get alone."""
    free, after = oracle.answer(PROMPT, NEW), oracle.answer(PROMPT + FORCED, NEW - 4)
    run = engine(oracle.model, overlap=overlap, drafter=DRAFTERS[drafts](PROMPT + FORCED + after), chunk=3)
    run.submit("free", PROMPT, greedy())
    run.submit("forced", PROMPT, greedy(NEW, USES[kind]))
    run.step(6)
    run.submit("late", PROMPT, greedy())
    run.finish()
    assert run.ids("forced") == FORCED + after
    assert run.ids("free") == run.ids("late") == free
    assert run.counters["processor_steps"] > 0 and run.counters["mixed_steps"] > 0
    assert drafts != "right" or run.counters["accepted"] > 0


def test_sampled_text_is_the_same_with_drafts_choices_and_retraction(soft) -> None:
    sampling = SamplingParams(seed=3, n=3, max_tokens=40, top_k=8, logit_processors=(ProcessorUse("no_repeat"),))
    texts = []
    for pool, drafter in ((4096, None), (4096, NgramDrafter(4)), (144, NgramDrafter(4)), (144, None)):
        run = engine(soft.model, drafter=drafter, pool_tokens=pool, chunk=16)
        run.submit("r", PROMPT * 6, sampling)
        run.submit("beside", PROMPT, SamplingParams(seed=1, max_tokens=60))
        run.finish()
        assert (run.counters["retractions"] > 0) == (pool == 144)
        texts.append([run.ids("r", i) for i in range(3)])
        for ids in texts[-1]:
            whole = PROMPT * 6 + ids
            assert all(whole[i] not in whole[i - 2 : i] for i in range(len(PROMPT) * 6, len(whole)))
    assert all(t == texts[0] for t in texts) and len({tuple(t) for t in texts[0]}) == 3


@pytest.mark.parametrize("how", ["raise", "shape", "nan", "inf", "nothing"])
@pytest.mark.parametrize("after", [0, 5])
def test_a_processor_that_fails_ends_its_request_only(oracle, how: str, after: int) -> None:
    free = oracle.answer(PROMPT, NEW)
    run = engine(oracle.model, drafter=NgramDrafter(4))
    run.submit("sound", PROMPT, greedy(NEW, ProcessorUse("breaks")))
    run.submit("broken", PROMPT, greedy(NEW, ProcessorUse("breaks", params={"how": how, "after": after})))
    run.submit("plain", PROMPT, greedy())
    run.finish()
    last = run.outputs["broken", 0][-1]
    assert (last.finish_reason, last.error_code, last.error_param) == ("error", "logit_processor_failed",
                                                                       "logit_processors")
    assert {"raise": "nothing here", "shape": "must match"}.get(how, "left nothing") in last.error
    assert run.ids("broken") == free[: len(run.ids("broken"))] and len(run.ids("broken")) <= after
    assert run.ids("sound") == run.ids("plain") == free
    assert run.counters["processor_errors"] == 1


def test_a_batch_without_processors_pays_nothing(oracle) -> None:
    run = engine(oracle.model)
    run.submit("a", PROMPT, greedy(4, USES["code"]))
    run.finish()
    custom = run.core.device.runner.table.custom
    custom.apply = None  # whoever calls it now fails
    run.submit("b", PROMPT, greedy())
    before = run.counters["processor_steps"]
    run.finish()
    assert run.ids("b") == oracle.answer(PROMPT, NEW) and run.counters["processor_steps"] == before
    assert not custom.active, "the client's code outlives its request"


@pytest.mark.parametrize(("use", "word"), [
    (ProcessorUse("unknown"), "this server has"),
    (ProcessorUse("device", params={"ids": []}), "must have 1..8"),
    (ProcessorUse(source='{"callable": "00"}'), "cannot be loaded"),
    (ProcessorUse(source="not json"), "cannot be loaded"),
])
def test_what_cannot_run_is_refused(oracle, use: ProcessorUse, word: str) -> None:
    run = engine(oracle.model)
    with pytest.raises(RequestError, match=word) as e:
        run.submit("r", PROMPT, greedy(4, use))
    assert e.value.param == use.param
    run.core.close()


def test_code_needs_the_flag(oracle) -> None:
    run = engine(oracle.model)
    run.core.info.custom_logit_processor = False
    with pytest.raises(RequestError, match="--enable-custom-logit-processor"):
        run.submit("r", PROMPT, greedy(4, USES["code"]))
    with pytest.raises(ProcessorError, match="no code"):
        Registry().check(USES["code"])
    run.core.close()


def test_limits_of_what_a_request_may_ask() -> None:
    for uses in ((ProcessorUse("a"),) * 2, (ProcessorUse(),), (ProcessorUse("a", "b"),),
                 tuple(ProcessorUse(str(i)) for i in range(9)), (ProcessorUse("a", params={"x": "y" * 300_000}),)):
        with pytest.raises(ParameterError):
            SamplingParams(logit_processors=uses).check(10)


DOCS = Path(__file__).resolve().parents[2] / "docs" / "sampling.md"


def test_the_example_of_the_page(soft, tmp_path, monkeypatch) -> None:
    """Found by its entry point, as pip leaves it; no id comes again within its window, drafted or not."""
    example = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.S)[1]
    assert len(example.splitlines()) < 40
    (tmp_path / "repeat_guard.py").write_text(example)
    info = tmp_path / "repeat_guard-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: repeat-guard\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[stretto.logit_processors]\nrepeat_guard = repeat_guard:RepeatGuard\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = Registry.installed(False)
    assert registry.named["repeat_guard"].graph_safe
    sampling = SamplingParams(seed=3, max_tokens=40, top_k=8,
                              logit_processors=(ProcessorUse("repeat_guard", params={"window": 6}),))
    texts = []
    for drafter in (None, NgramDrafter(4)):
        core = make_core(soft.model, check_processor=registry.check, drafter=drafter)
        table = core.device.runner.table
        table.custom = CustomProcessors(len(table.log), table.device, registry, soft.model.vocab_size)
        core.info.logit_processors = ["repeat_guard"]
        run = Run(core)
        run.submit("r", PROMPT, sampling)
        run.finish()
        texts.append(run.ids("r"))
    whole = PROMPT + texts[0]
    assert texts[0] == texts[1] and all(whole[i] not in whole[i - 6 : i] for i in range(len(PROMPT) + 1, len(whole)))
    (info / "entry_points.txt").write_text("[stretto.logit_processors]\nrepeat_guard = repeat_guard:Nothing\n")
    with pytest.raises(ProcessorError, match="repeat_guard: its package gives no"):
        Registry.installed(False)


def test_to_str_travels_with_classes_of_a_script() -> None:
    """dill takes along what cannot be imported on the other side."""
    scope: dict = {"CustomLogitProcessor": CustomLogitProcessor, "__name__": "__main__"}
    exec("class Mine(CustomLogitProcessor):\n    def __call__(self, logits, params):\n        return logits + 1", scope)
    use = ProcessorUse(source=scope["Mine"].to_str())
    Registry(allow_code=True).check(use)
    assert Registry(allow_code=True).make(use, ProcessorContext(4, torch.device("cpu"), 2)) is not None

"""One run of the engine in which many features meet on the same requests, and what it proves.

    before      a plain request on the stem that the others share
    f0 f1 f2    with everything that the cell asks of a request; f1 is retracted, f2 is aborted, where the cell says so;
                where there is host memory, all give way first, and their pages leave the device
    f3          the same, with a longer prompt that arrives in chunks while f0 answers
    e0 e1       beside f3: vectors of two prompts, of their last token and the mean of all
    turns       of sessions: f0..f3 are first turns; each is followed by a second one
    after       f0's prompt once more, without a session: finds what f0 computed
    again       f3's, where answers are deterministic: nothing else runs, and nothing may differ

Every answer is checked by `replay_oracle`. Each feature of the cell is shown by a count of what happened.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from stretto.bench.tiny import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, SPREAD, write_tiny
from stretto.device.ranks import RanksDevice
from stretto.device.runner import Runner
from stretto.device.streams import DeviceHalf, LocalDevice
from stretto.engine.adapters import AdapterLoader
from stretto.engine.core import EngineCore
from stretto.host.adapters import Adapters
from stretto.host.cost import CostModel, StepWork
from stretto.host.elastic import Elastic
from stretto.host.grammar import Grammars
from stretto.logit_processors import RowProcessor
from stretto.model.api import CausalModel
from stretto.model.load import load_model
from stretto.model.lora import AdapterBank
from stretto.model.shard import Shard
from stretto.ops.native.library import trouble
from stretto.params import Grammar, ProcessorUse, SamplingParams
from stretto.protocol import CloseSession, GetSession, LoadAdapter, Output, Request, SessionTurn
from stretto.sample.custom import CustomProcessors, Registry
from stretto.spec.context import Target
from stretto.testing import Setup, make_engine, target_of
from stretto.text.grammar import vocabulary
from stretto.text.stream import IncrementalText
from tests.engine.replay_oracle import EIGHT_BITS, TOLERANCE, Replay, with_rounded_cells
from tests.model.lora import ATTENTION, MLP, merged, save_adapter
from tests.serve.fakes import EOS, ByteTokenizer

VOCAB, CONTEXT, NEW, WINDOW, CHUNK = 300, 640, 24, 16, 8
# How far a vector may lie from transformers', relative to its length.
VECTORS = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.1}
VECTORS_OF_ROUNDED = {"float32": 0.03, "float16": 0.1, "bfloat16": 0.2}
LETTERS = range(ord("a"), ord("f") + 1)
WORD = Grammar("regex", f"[a-f]{{{NEW}}}")
SEED = 77
# Seconds of a step: drafts cost little in a step of a few tokens, and much in a larger one.
COSTS = [(StepWork(1, tokens, 0), seconds) for tokens, seconds in ((1, 0.010), (6, 0.0105), (16, 0.04), (64, 0.3))]
Lead = Callable[[LocalDevice], DeviceHalf]
DRAFTERS = ("ngram", "suffix", "standalone", "eagle", "eagle3", "mtp", "dflash", "dspark")


@dataclass(frozen=True)
class Lab:
    """The tiny model in one dtype, the names of its drafters, and transformers' form of it."""

    model: CausalModel
    target: Target
    drafters: dict[str, str]
    reference: transformers.PreTrainedModel
    bank: AdapterBank | None = None  # room for an adapter
    adapter: Path | None = None  # its files
    adapted: transformers.PreTrainedModel | None = None  # transformers' form with the adapter merged


def make_lab(folder: Path, window: bool, dtype: str, device: str = "cpu", lora: bool = False,
             shard: Shard | None = None, states: bool = False, fixed: bool = False) -> Lab:
    """`shard`: the rank whose part of the model it has. `states`: half of the model's layers keep a state. `fixed`:
    every row is summed in one order."""
    tiny = write_tiny(folder, WINDOW if window else None, VOCAB, CONTEXT)
    bank, path = AdapterBank(1, 4) if lora else None, write_hybrid(folder / "hybrid") if states else tiny.path
    model = load_model(path, dtype=getattr(torch, dtype), device=torch.device(device), adapters=bank, shard=shard,
                       fixed=fixed)
    config = json.loads((path / "config.json").read_text())
    made = (transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**config)) if states else
            transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**config | {"model_type": "qwen2"}))).eval()
    loaded = transformers.Qwen3NextForCausalLM.from_pretrained(path).state_dict() if states else load_file(
        path / "model.safetensors")
    kept = {name: t.to(getattr(torch, dtype)).float() for name, t in loaded.items() if "mtp_layers" not in name}
    made.load_state_dict(kept)
    lab = Lab(model, target_of(model, path, "tiny"), tiny.drafters | {
        "suffix": "suffix", "ngram": "ngram:longest=4,shortest=1"}, made)
    if bank is None:
        return lab
    size = 0.2 if states else 0.1  # layers with states have no matrices that an adapter of these names changes
    adapter = save_adapter(folder / "adapter", made, (*ATTENTION, *MLP), size=size)
    return replaced(lab, bank=bank, adapter=adapter, adapted=merged(made, adapter))


def write_hybrid(folder: Path) -> Path:
    """A random model, half of whose layers keep a state; of the sizes of `write_tiny`, so that its drafters fit. It has
    no experts, and an epsilon that counts: which expert is chosen, and the sign of a state's answer that is nearly zero
    and then normed, may hang on a rounding, and then much else."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(11)
        model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, head_dim=HEAD_DIM,
            num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=CONTEXT,
            mlp_only_layers=list(range(LAYERS)), rms_norm_eps=0.05,
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=16,
            layer_types=["linear_attention", "full_attention"] * (LAYERS // 2), tie_word_embeddings=False))
        sizes = {"lm_head": SPREAD, "embed_tokens": HIDDEN**0.5, "out_proj": 0.5, "o_proj": 0.5, "down_proj": 0.5}
        for name, tensor in model.named_parameters():
            if tensor.ndim > 1:
                size = next((size for part, size in sizes.items() if part in name), 1.0)
                tensor.normal_(0, size * tensor.shape[-1] ** -0.5)
        model.lm_head.weight[EOS] = 0  # answers end where the test says so
        attending = {name: t for name, t in model.model.layers[1].state_dict().items() if t.ndim > 1}
        predictor = {f"layers.0.{name}": torch.randn_like(t) * t.shape[-1] ** -0.5 for name, t in attending.items()}
        predictor |= {f"layers.0.{name}": torch.zeros_like(t) for name, t in model.model.layers[1].state_dict().items()
                      if t.ndim == 1}
        predictor |= {name: torch.zeros(HIDDEN) for name in
                      ("norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")}
        predictor["fc.weight"] = torch.randn(HIDDEN, 2 * HIDDEN) * (2 * HIDDEN) ** -0.5
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file(load_file(path) | {f"mtp.{name}": t for name, t in predictor.items()}, path, metadata={"format": "pt"})
    return folder


def lab_keeper(make_folder: Callable[[str], Path], device: str = "cpu",
               shard: Shard | None = None) -> Callable[[frozenset[str]], Lab]:
    """The lab that a cell needs; each is made when first asked for. `shard`: of cells with tensor parallelism."""
    kept: dict[LabKey, Lab] = {}

    def get(features: frozenset[str]) -> Lab:
        key = lab_key(features)
        if key not in kept:
            kept[key] = make_lab(make_folder("tiny"), key.window, key.dtype, device, key.lora,
                                 shard if key.cut else None, key.states, key.fixed)
        return kept[key]
    return get


class LabKey(NamedTuple):
    """`cut`: into ranks."""

    window: bool
    dtype: str
    lora: bool
    cut: bool
    states: bool
    fixed: bool


def lab_key(features: frozenset[str]) -> LabKey:
    return LabKey("window" in features, next(name for name in TOLERANCE if name in features),
                  "LoRA adapter" in features, "tensor parallelism" in features, "recurrent state" in features,
                  "deterministic" in features)


class Shy(RowProcessor):
    """Odd ids are followed by even ones, and the other way round, where both are likely."""

    def row(self, prompt_ids, output_ids, logits, params):
        return shy(prompt_ids + output_ids, logits)


def shy(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    changed = logits.clone()
    changed[ids[-1] % 2 :: 2] -= 3.0
    return changed


REGISTRY = Registry({"shy": Shy})


@dataclass
class Asked:
    """A request, and what came back by choice."""

    prompt: list[int]
    sampling: SamplingParams
    outputs: dict[int, list[Output]] = field(default_factory=dict)
    aborted: bool = False

    def ids(self, choice: int = 0) -> list[int]:
        return [i for output in self.outputs.get(choice, []) for i in output.token_ids]

    @property
    def answering(self) -> bool:
        """It has delivered something, and goes on."""
        return bool(self.ids()) and self.outputs[0][-1].finish_reason is None


def page_size(features: frozenset[str]) -> int:
    return next(int(name.split()[-1]) for name in features if name.startswith("page size"))


def drafter_of(features: frozenset[str]) -> str | None:
    return next((name.split()[-1] for name in features if name.startswith("drafter")), None)


def engine_of(lab: Lab, on: frozenset[str], lead: Lead = lambda half: half) -> EngineCore:
    """`lead` makes of the device half here that of all ranks."""
    tokenizer, page, drafter = ByteTokenizer(), page_size(on), drafter_of(on)
    named = [name.removeprefix("attention ") for name in on if name.startswith("attention ")]
    attention = named[0] if named else "torch"
    if attention == "native" and (reason := trouble("attention")):
        pytest.skip(reason)
    setup = Setup(width=4, page_size=page, pool_tokens=16 * max(page, 256), chunk=CHUNK, budget=64,
                  mixed="mixed chunk" in on, overlap="overlap" in on, slots=13, context=CONTEXT,
                  prefix_cache="prefix cache" in on, attention=attention,
                  kv_dtype="fp8_e4m3" if "FP8 KV cache" in on else None, rejection="rejection sampling" in on,
                  host_tokens=16 * max(page, 256) if "host memory" in on else 0)
    limits: dict = {"adapters": Adapters(1)} if lab.bank is not None else {}
    if "elastic speculation" in on:
        limits["elastic"] = Elastic(CostModel(COSTS, setup.budget), setup.slots, (0, 2, setup.width), exact=True,
                                    on_host=drafter == "suffix")
    core = make_engine(lab.model, lab.drafters[drafter] if drafter else None, lab.target, setup,
                       Grammars(partial(vocabulary, tokenizer, VOCAB, [EOS]), VOCAB), frozenset({EOS}),
                       partial(IncrementalText.for_request, tokenizer), check_processor=REGISTRY.check, **limits)
    runner = core.device.runner  # type: ignore[attr-defined]
    runner.adapters = lab.bank
    if "logit processor" in on:
        runner.table.custom = CustomProcessors(len(runner.table.log), runner.table.device, REGISTRY, VOCAB)
    core.device = lead(core.device)
    return core


class MatrixRun:
    """`features`: names of `stretto.matrix.FEATURES` that are on. `lead`: as `engine_of`."""

    def __init__(self, lab: Lab, features: frozenset[str], lead: Lead = lambda half: half):
        self.lab, self.on, self.page, self.drafter = lab, features, page_size(features), drafter_of(features)
        self.session = next((name.split()[-1] for name in features if name.startswith("session")), None)
        dtype = next(name for name in TOLERANCE if name in features)
        self.lora = "LoRA adapter" if "LoRA adapter" in features else None
        # of the requests that have the features, and of those beside them
        tolerance, cells = TOLERANCE[dtype], "FP8 KV cache" in features
        if cells:
            tolerance = EIGHT_BITS[dtype]
        self.replay, self.beside = (Replay(with_rounded_cells(model) if cells else model, tolerance)
                                    for model in (lab.adapted if self.lora else lab.reference, lab.reference))
        self.core = engine_of(lab, features, lead)
        self.asked: dict[str, Asked] = {}
        self.histories: dict[str, list[int]] = {}
        self.slid, self.most_pages, self.inherited, self.turns, self.repeated = 0, 0, 0, 0, 0
        self._equip()
        self._watch()

    def _equip(self) -> None:
        """What an engine is started with besides."""
        self.core.host._clock._clock = lambda: 0.0  # costs stay what they were said to be
        if "logit processor" in self.on:
            self.core.info.logit_processors = sorted(REGISTRY.named)
        self.core.info.hidden_size = self.lab.model.hidden_size
        if self.lora:
            self.core.adapters = AdapterLoader(self.core.host, self.core.device)
            self.core.manage(LoadAdapter(self.lora, str(self.lab.adapter)))

    @property
    def runner(self) -> Runner:
        """Of rank 0."""
        device = self.core.device
        return (device.own if isinstance(device, RanksDevice) else device).runner  # type: ignore[attr-defined]

    def _watch(self) -> None:
        slide: Callable = self.core.host.ledger.slide

        def watched(lease):
            gone = slide(lease)
            self.slid += len(gone)
            return gone
        self.core.host.ledger.slide = watched  # type: ignore[method-assign]
        self.core.trace(100_000)

    # --------------------------------------------------------------------------------------------------- what is asked
    def sampling(self, **more) -> SamplingParams:
        on, fields = self.on, dict(temperature=0.0, max_tokens=NEW, ignore_eos=True)
        if "seed" in on:
            fields |= dict(temperature=0.9, seed=SEED)
        if "penalties" in on:
            # suffixes find what was said before, so something must be; a grammar sees to that by itself
            mild = 0.1 if self.drafter == "suffix" and "grammar" not in on else 1.0
            fields |= dict(repetition_penalty=1 + 0.3 * mild, presence_penalty=0.7 * mild, frequency_penalty=0.6 * mild)
        if "logprobs" in on:
            fields |= dict(logprobs=3)
        if "prompt logprobs" in on:
            fields |= dict(prompt_logprobs=2)
        if "grammar" in on:
            fields |= dict(grammar=WORD, max_tokens=2 * NEW)
        if "n > 1" in on:
            fields |= dict(n=2)
        if "logit processor" in on:
            fields |= dict(logit_processors=(ProcessorUse("shy"),))
        return SamplingParams(**fields | more)

    def submit(self, rid: str, tokens: list[int], sampling: SamplingParams, sid: str | None = None) -> None:
        """`tokens`: what is new; the history goes before it where there is a session."""
        whole = self.histories.get(sid or "", []) + tokens
        order = None
        if sid is not None:
            order = SessionTurn(sid=sid, mode=self.session)  # type: ignore[arg-type]
        sent = tokens if self.session == "append" and sid else whole
        self.asked[rid] = Asked(whole, sampling)
        self.core.submit(Request(rid=rid, tokens=sent, sampling=sampling, session=order,
                                 want_text="streaming" in self.on, adapter=None if rid == "before" else self.lora))

    def step(self) -> None:
        self.note(self.core.step())
        gauges = self.core.host.stats()[1]
        self.most_pages = max(self.most_pages, int(gauges["pages_used_0"]))

    def note(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.asked[output.rid].outputs.setdefault(output.index, []).append(output)

    def until(self, ready: Callable[[], bool], most: int = 3000) -> None:
        for _ in range(most):
            if ready():
                return
            self.step()
        raise AssertionError("nothing comes of it")

    # ------------------------------------------------------------------------------------------------------- the run
    def run(self) -> None:
        stem = ([7, 3, 250, 9, 12, 40, 41] * (self.page // 7 + 7))[: self.page + 24]
        scored = "prompt logprobs" in self.on  # then nothing of a prompt may be taken from the cache
        self.submit("before", [1, *stem] if scored else stem, SamplingParams(temperature=0.0, max_tokens=4))
        self.until(lambda: not self.core.has_work)
        for i in range(3):
            self.submit(f"f{i}", [*stem, 20 + i, 7, 3, 60 + i], self.sampling(), self.sid(i))
        self.until(lambda: self.asked["f0"].answering)
        self.submit("f3", [*stem, *range(100, 140)], self.sampling(), self.sid(3))
        if "embeddings" in self.on:
            self.embed("e0", [*stem, 77], "last")
            self.embed("e1", [1, *stem[: CHUNK + 3]], "mean")
        if "host memory" in self.on:
            for i in range(3):
                self.retract(f"f{i}")
            self.take_all_pages()
        if "retraction" in self.on:
            self.until(lambda: self.asked["f1"].answering)
            self.retract("f1")
        if "abort" in self.on:
            self.until(lambda: self.asked["f2"].answering)
            self.asked["f2"].aborted = True
            self.note(self.core.abort("f2"))
        self.until(lambda: not self.core.has_work)
        if self.session:
            self.take_all_pages()
            self.second_turns()
        self.submit("after", self.asked["f0"].prompt, replace(self.sampling(), prompt_logprobs=None))
        self.until(lambda: not self.core.has_work)
        if "deterministic" in self.on:
            self.submit("again", self.asked["f3"].prompt, self.asked["f3"].sampling)
            self.until(lambda: not self.core.has_work)
            self.repeated = self.bits("again", self.bits("f3"))
        self.end()

    def embed(self, rid: str, tokens: list[int], pooling: Literal["last", "mean"]) -> None:
        self.asked[rid] = Asked(tokens, SamplingParams(max_tokens=0))
        self.core.submit(Request(rid=rid, tokens=tokens, sampling=self.asked[rid].sampling, pooling=pooling,
                                 want_text=False, adapter=self.lora))

    def sid(self, i: int) -> str | None:
        return f"s{i}" if self.session else None

    def retract(self, rid: str) -> None:
        """As for want of pages, at a moment of the test's choice."""
        host = self.core.host
        for turn in list(host.slots.running):
            if turn.job.request.rid == rid:
                host.planner._retract(turn)

    def take_all_pages(self) -> None:
        """As for others that need them: sessions give up their pages, and what nobody reads leaves the device."""
        host = self.core.host
        if "host memory" in self.on:
            host.sessions.reclaim_all()
            while any([host.ledger._evict(group) for group, _ in enumerate(host.limits.pages)]):
                pass

    def second_turns(self) -> None:
        for i in range(4):
            first = self.asked[f"f{i}"]
            if not first.aborted:  # its session is as if it had not been
                self.histories[f"s{i}"] = first.prompt + first.ids()
            new = first.prompt if first.aborted else [90 + i, 5, 17]
            self.submit(f"g{i}", new, self.sampling(), f"s{i}")
        self.until(lambda: not self.core.has_work)
        for i in range(4):
            history, usage = self.histories.get(f"s{i}", []), self.asked[f"g{i}"].outputs[0][-1].usage
            assert usage is not None and usage.prompt_tokens == len(self.asked[f"g{i}"].prompt)
            if history and not (self.session == "tag" and "prompt logprobs" in self.on):
                # a grammar ends a turn on the host, when a step in flight may have fed its last id
                assert len(history) - 1 <= usage.cached_tokens <= len(history), (usage, len(history))
                self.inherited += usage.cached_tokens
        infos = {info.id: info for info in self.core.manage(GetSession())[0]}
        assert all(infos[f"s{i}"].turns == (1 if self.asked[f"f{i}"].aborted else 2) for i in range(4))
        self.turns = sum(info.turns for info in infos.values())

    def end(self) -> None:
        """Sessions closed, no page may be held; then every answer is checked."""
        for i in range(4 if self.session else 0):
            self.core.manage(CloseSession(f"s{i}"))
        self.core.host.audit()
        gauges = self.core.host.stats()[1]
        assert not any(value for name, value in gauges.items() if name.startswith("pages_used")), gauges
        self.core.close()
        for rid, asked in self.asked.items():
            self.check(rid, asked)
        self.replay.check_spread()
        self.beside.check_spread()

    def bits(self, rid: str, other: Any = None) -> Any:
        """Ids and log-probabilities of each choice; with `other`, which they must be, how many ids that are."""
        found = [(self.asked[rid].ids(choice), [s for o in outputs for s in o.logprobs or []],
                  [s for o in outputs for s in o.prompt_logprobs or []])
                 for choice, outputs in sorted(self.asked[rid].outputs.items())]
        if other is None:
            return found
        assert found == other
        return sum(len(ids) for ids, *_ in found)

    @torch.no_grad()
    def check_vector(self, rid: str, asked: Asked) -> None:
        """Up to rounding: the states of half-precision types, and those of rounded cells, are a little off."""
        (output,) = asked.outputs[0]
        assert output.finish_reason == "length" and output.embedding is not None
        states = self.replay.reference.model(torch.tensor([asked.prompt])).last_hidden_state[0].float().numpy()
        expected = states[-1] if rid == "e0" else states.mean(0)
        off = np.linalg.norm(np.frombuffer(output.embedding, np.float32) - expected) / np.linalg.norm(expected)
        dtype = next(name for name in TOLERANCE if name in self.on)
        assert off <= (VECTORS_OF_ROUNDED if "FP8 KV cache" in self.on else VECTORS)[dtype], (rid, off)

    def check(self, rid: str, asked: Asked) -> None:
        if rid[0] == "e":
            return self.check_vector(rid, asked)
        sampling = asked.sampling
        assert len(asked.outputs) == sampling.n
        for choice, outputs in asked.outputs.items():
            ids, last = asked.ids(choice), outputs[-1]
            if asked.aborted:
                assert last.finish_reason == "abort" and len(ids) < NEW
            else:
                bound = sampling.grammar is not None
                assert last.finish_reason == ("stop" if bound else "length"), (rid, last)
                assert len(ids) == (NEW if bound else sampling.max_tokens)
            scores = None if sampling.logprobs is None else [s for o in outputs for s in o.logprobs or []]
            prompt_scores = [s for o in outputs for s in o.prompt_logprobs or []]
            replay = self.beside if rid == "before" else self.replay
            replay.check(asked.prompt, ids, sampling, choice, scores, prompt_scores or None,
                         None if sampling.grammar is None else lambda place: LETTERS,
                         shy if sampling.logit_processors else None, "rejection sampling" in self.on)
            assert bool(prompt_scores) == (sampling.prompt_logprobs is not None and choice == 0), rid

    # -------------------------------------------------------------------------------------------------- what it proves
    @property
    def focus(self) -> list[Asked]:
        """The requests that have every feature of the cell."""
        return [asked for rid, asked in self.asked.items() if rid[0] in "fg"]

    def counter(self, name: str) -> int:
        return int(self.core.stats().counters[name])

    def narrowed(self) -> int:
        """Rows that were given fewer drafts than they may have."""
        return sum(self.counter(f"elastic_chosen.{n}") for n in range(self.core.host.limits.width))

    def usages(self, column: str) -> int:
        last = [outputs[-1].usage for asked in self.focus for outputs in asked.outputs.values()]
        return sum(getattr(usage, column) for usage in last if usage is not None)

    def pages(self) -> int:
        """Most pages held at a time, where every prompt needs several."""
        several = min(len(asked.prompt) for asked in self.focus) > self.page == self.core.host.limits.page_size
        return self.most_pages if several else 0

    def tells_adapter_from_model(self) -> bool:
        """Whether some answer of the adapter's is not what the model itself would say."""
        try:
            for asked in self.focus:
                self.beside.check(asked.prompt, asked.ids(), asked.sampling)
        except AssertionError:
            return True
        return False

    def pieces(self) -> int:
        """Pieces of text beyond the first of each choice; all of them must be the text of all tokens."""
        pieces, tokenizer = 0, ByteTokenizer()
        for asked in self.focus:
            for choice, outputs in asked.outputs.items():
                if not asked.aborted:
                    assert "".join(output.text for output in outputs) == tokenizer.decode(asked.ids(choice))
                pieces += sum(bool(output.text) for output in outputs) - 1
        return pieces


def overlapped(core: EngineCore) -> int:
    """Steps that were launched before the result of the step before them was collected, of a traced engine."""
    records = core.trace(0)
    return sum(later.launched < earlier.collected for earlier, later in pairwise(records))


# What was seen of each feature in a run; 0 or nothing where it did not happen.
EVIDENCE: dict[str, Callable[[MatrixRun], object]] = {
    "mixed chunk": lambda run: min(run.counter("mixed_steps"), run.counter("tail_rows")),
    "overlap": lambda run: overlapped(run.core),
    "retraction": lambda run: min(run.usages("retractions"), len(run.asked["f1"].ids())),
    "abort": lambda run: len(run.asked["f2"].ids()) if run.asked["f2"].aborted else 0,
    "prefix cache": lambda run: run.asked["after"].outputs[0][-1].usage.cached_tokens,
    "host memory": lambda run: min(run.counter("host_saved_tokens"), run.counter("host_restored_tokens")),
    "FP8 KV cache": lambda run: sum(int((pair.k > 0).sum()) for pair in run.runner.kv.scales if pair),
    "window": lambda run: run.slid if {None, WINDOW} <= set(run.core.host.limits.windows) else 0,
    "recurrent state": lambda run: run.counter("fed_tokens") if run.runner.states is not None else 0,
    # where prompts are scored, a tag turn feeds all of its prompt again
    "session: tag": lambda run: run.turns if "prompt logprobs" in run.on else run.inherited,
    "session: append": lambda run: run.inherited,
    "rejection sampling": lambda run: run.usages("drafted_tokens") if run.runner.table.proposals is not None else 0,
    "deterministic": lambda run: run.repeated if run.runner.fixed else 0,
    "embeddings": lambda run: len([asked for rid, asked in run.asked.items() if rid in ("e0", "e1")]),
    "logprobs": lambda run: run.replay.seen["scores"],
    "prompt logprobs": lambda run: run.replay.seen["prompt scores"],
    "penalties": lambda run: run.replay.seen["penalised"],
    "seed": lambda run: run.replay.seen["drawn"],
    "grammar": lambda run: min(run.counter("masked_positions"), run.counter("grammar_ends")),
    "n > 1": lambda run: min(run.counter("forks"), sum(len(asked.ids(1)) for asked in run.focus)),
    "streaming": MatrixRun.pieces,
    "elastic speculation": lambda run: min(run.counter("elastic_speculating_steps"), run.narrowed()),
    "logit processor": lambda run: run.replay.seen["processed"],
    "tensor parallelism": lambda run: run.counter("steps") if isinstance(run.core.device, RanksDevice) else 0,
    "LoRA adapter": lambda run: run.counter("steps") if run.tells_adapter_from_model() else 0,
    **{f"page size {size}": MatrixRun.pages for size in (1, 16, 64, 256)},
    **{f"drafter {name}": lambda run: run.usages("drafted_tokens") for name in DRAFTERS},
    "attention torch": lambda run: type(run.runner.backend).__name__ in ("TorchRagged", "TorchFixed"),
    "attention native": lambda run: type(run.runner.backend).__name__ == "NativeRagged",
    "attention triton": lambda run: type(run.runner.backend).__name__ == "TritonRagged",
    **{name: lambda run, name=name: run.runner.model.dtype == getattr(torch, name) for name in TOLERANCE},
}

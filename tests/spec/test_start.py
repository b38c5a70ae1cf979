"""Starting with a drafter: what is found of it before anything is loaded, and what is refused, with both names."""

from __future__ import annotations

import json
import shutil
from typing import Literal

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from stretto.compat import ConfigError
from stretto.config import Config, KVSection, ModelSection, SpeculationSection
from stretto.engine.build import make_runner
from stretto.engine.llm import LLM
from stretto.engine.prepare import prepare
from stretto.model.load import load_model
from stretto.params import SamplingParams
from stretto.spec import registry
from stretto.spec.context import DrafterError
from stretto.spec.registry import drafter_sizes
from stretto.spec.repos import open_repo
from stretto.testing import Ask, Lab, Setup, check_mixed_steps, greedy, make_engine, run, target_of
from tests.spec import checkpoints as made


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> made.TinyTarget:
    return made.make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafts(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("drafts")
    makers = {"eagle": made.eagle, "eagle3": made.eagle3, "dflash": made.dflash, "dspark": made.dspark,
              "eagle3_speculators": made.eagle3_speculators}
    return {name: str(make(folder / name)[0]) for name, make in makers.items()}


def config(model, speculation: str, tokens: int | Literal["auto"] = "auto", **kv) -> Config:
    return Config(model=ModelSection(str(model), device="cpu"), kv=KVSection(**({"kv_tokens": 1024} | kv)),
                  speculation=SpeculationSection(speculation, tokens))


def refusal_of(tiny: made.TinyTarget, asked: str) -> str:
    with pytest.raises((ConfigError, DrafterError)) as refused:
        prepare(config(tiny.target.path, asked))
    return str(refused.value)


def test_memory_of_a_drafter_is_planned(tiny, drafts) -> None:
    prepared = prepare(config(tiny.target.path, drafts["eagle3"]))
    resolved, drafter = prepared.resolved, prepared.facts.drafter
    tensors = load_file(f"{drafts['eagle3']}/model.safetensors")
    weights = sum(t.numel() for name, t in tensors.items() if name not in ("d2t", "t2d"))
    assert resolved.memory.draft_weights == 4 * weights
    assert drafter.tap_values == 2 * made.HIDDEN  # of six layers, layer 2 is both L/2 - 1 and L - 4
    assert resolved.lookahead == resolved.speculation_tokens == 4
    runner, _ = make_runner(tiny.model, prepared)
    page = 4 * (sum(g.values for g in prepared.facts.model.kv_groups) * resolved.page_size
                + drafter.kv_groups[0].values * resolved.page_size + drafter.tap_values)
    held = runner.kv.nbytes + runner.drafting.own.nbytes + sum(
        t.numel() * 4 for t in runner.drafting.seams.of_page.values())
    assert held == page * resolved.pages[0]


def test_a_block_is_offered_whole_unless_told_otherwise(tiny, drafts) -> None:
    for name, width in (("dflash", 7), ("dspark", 6)):
        assert prepare(config(tiny.target.path, drafts[name])).resolved.speculation_tokens == width
        resolved = prepare(config(tiny.target.path, drafts[name], 3)).resolved
        assert resolved.speculation_tokens == 3 and resolved.lookahead == {"dflash": 8, "dspark": 6}[name]


def test_a_full_layer_on_a_target_of_windows_gets_a_group(tmp_path, drafts) -> None:
    tiny = made.make_target(tmp_path, window=16)
    prepared = prepare(config(tmp_path, drafts["eagle3"]))
    assert prepared.resolved.windows == (None, 16)
    runner, _ = make_runner(tiny.model, prepared)
    assert [g.layers for g in runner.kv.groups] == [(), tuple(range(made.LAYERS))]
    assert [g.layers for g in runner.drafting.own.groups] == [(0,), ()]


# ---------------------------------------------------------------------------------------------------------- refusals
def test_trees_are_refused_with_the_reason(tiny, drafts) -> None:
    text = refusal_of(tiny, f"eagle3:{drafts['eagle3']},topk=4")
    assert "topk 4" in text and "tree mask" in text and "tiny" not in text.split("does not work")[0]
    assert prepare(config(tiny.target.path, f"eagle3:{drafts['eagle3']},topk=1")).resolved.speculation_tokens == 4


def changed(folder: str, to, edit_config=None, edit_tensors=None) -> str:
    shutil.copytree(folder, to)
    raw = json.loads((to / "config.json").read_text())
    tensors = load_file(to / "model.safetensors")
    if edit_config:
        edit_config(raw)
    if edit_tensors:
        edit_tensors(tensors)
    (to / "config.json").write_text(json.dumps(raw))
    save_file(tensors, to / "model.safetensors")
    return str(to)


@pytest.mark.parametrize(("edit", "named"), [
    (lambda raw: raw.update(vocab_size=308), ("308", "300")),
    (lambda raw: raw.update(hidden_size=32), ("32", "64", "hidden size")),
    (lambda raw: raw.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}), ("[1, 3, 6]", "0..5")),
    (lambda raw: raw.update(num_aux_hidden_states=4), ("4", "3 layers")),
    (lambda raw: raw.update(eagle_config={"use_aux_hidden_state": False}), ("use_aux_hidden_state",)),
])
def test_configs_that_do_not_fit_the_target(tiny, drafts, tmp_path, edit, named) -> None:
    text = refusal_of(tiny, f"eagle3:{changed(drafts['eagle3'], tmp_path / 'draft', edit)}")
    assert all(word in text for word in named) and "draft" in text


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "dflash", "dspark"])
def test_tensors_missing_extra_and_misshapen_are_named(tiny, drafts, tmp_path, kind: str) -> None:
    def edit(t):
        del t["midlayer.mlp.up_proj.weight" if kind == "eagle3" else "layers.0.mlp.up_proj.weight"]
        t["layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)
        t["fc.weight"] = t["fc.weight"][:, :-1].contiguous()
    asked = f"{kind}:{changed(drafts[kind], tmp_path / 'draft', edit_tensors=edit)}"
    prepared = prepare(config(tiny.target.path, asked))
    with pytest.raises(ConfigError) as refused:
        make_runner(tiny.model, prepared)
    text = str(refused.value)
    assert "1 missing: layers.0.mlp.up_proj.weight" in text and "1 misshapen: fc.weight" in text
    assert "layers.7.mlp.up_proj.weight" in text and "does not work with model" in text


@pytest.mark.parametrize("edit", [lambda d2t: d2t.fill_(0)[0:].add_(299), lambda d2t: d2t[0:1].sub_(1000)])
def test_a_map_outside_the_vocabulary_is_refused(tiny, drafts, tmp_path, edit) -> None:
    asked = changed(drafts["eagle3"], tmp_path / "draft", edit_tensors=lambda t: edit(t["d2t"]))
    with pytest.raises(ConfigError, match="d2t"):
        make_runner(tiny.model, prepare(config(tiny.target.path, asked)))


@pytest.mark.parametrize(("key", "value"), [("projector_type", "domino"), ("selector_rank", 8), ("is_causal", False)])
def test_variants_of_blocks_that_are_not_run(tiny, drafts, tmp_path, key: str, value) -> None:
    def edit(raw):
        if key == "is_causal":
            raw.update(is_causal=False, layer_types=["sliding_attention"] * 2, sliding_window=8)
        else:
            raw["dflash_config"][key] = value
    text = refusal_of(tiny, f"dflash:{changed(drafts['dflash'], tmp_path / 'draft', edit)}")
    assert key in text or "sliding layers" in text


@pytest.mark.parametrize(("kind", "path", "value"), [
    ("eagle", "rope_theta", "x"), ("eagle", "rms_norm_eps", "x"), ("eagle", "intermediate_size", 10**12),
    ("eagle", "num_attention_heads", 0), ("eagle3", "num_hidden_layers", "two"), ("eagle3", "draft_vocab_size", 7),
    ("dflash", "block_size", 0), ("dflash", "block_size", 3.5), ("dflash", "dflash_config.target_layer_ids", [1, 99]),
    ("dflash", "dflash_config.mask_token_id", made.VOCAB), ("dspark", "block_size", "x"), ("dspark", "markov_rank", -1),
    ("dspark", "markov_head_type", "other"), ("dspark", "target_layer_ids", [-3]), ("dspark", "num_hidden_layers", 9)])
def test_odd_values_of_a_config_are_named(tiny, drafts, tmp_path, kind: str, path: str, value) -> None:
    def edit(raw):
        *sections, key = path.split(".")
        for section in sections:
            raw = raw[section]
        assert key in raw or key in ("rope_theta", "draft_vocab_size")
        raw[key] = value
    asked = f"{kind}:{changed(drafts[kind], tmp_path / 'draft', edit)}"
    with pytest.raises(ConfigError) as refused:
        make_runner(tiny.model, prepare(config(tiny.target.path, asked)))
    assert f"drafter {kind}" in str(refused.value) and "does not work with model" in str(refused.value)


@pytest.mark.parametrize(("error", "passes"), [
    (torch.OutOfMemoryError("CUDA out of memory"), True), (torch.AcceleratorError("an illegal address"), True),
    (RuntimeError("negative dimension -3"), False)])
def test_a_device_that_fails_is_not_the_configs_fault(monkeypatch, error: RuntimeError, passes: bool) -> None:
    def fail(*given):
        raise error
    monkeypatch.setattr(registry.BUILT_IN["eagle3"], "make", fail)
    with pytest.raises(type(error) if passes else DrafterError, match=str(error)) as raised:
        registry.make_drafter("eagle3:somewhere", None)
    assert isinstance(raised.value, DrafterError) != passes


@pytest.mark.parametrize(("kind", "tokens"), [("dflash", 8), ("dspark", 7), ("eagle3", 17)])
def test_more_drafts_than_a_drafter_has_are_refused(tiny, drafts, kind: str, tokens: int) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)--speculation-tokens {tokens}.*drafter"):
        prepare(config(tiny.target.path, f"{kind}:{drafts[kind]}", tokens))


def test_a_quantised_draft_is_read_as_numbers(drafts, tmp_path) -> None:
    """FP8 in blocks of 32, as the large targets' checkpoints and their drafts come."""
    def quantise(t):
        for name in [n for n in t if n.endswith("_proj.weight")]:
            blocks = t[name].unfold(0, 32, 32).unfold(1, 32, 32)  # [rows / 32, columns / 32, 32, 32]
            scale = blocks.abs().amax((2, 3)) / 448
            spread = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
            t[name] = (t[name] / spread).to(torch.float8_e4m3fn)
            t[f"{name}_scale_inv"] = scale
    folder = changed(drafts["eagle3"], tmp_path / "draft", lambda raw: raw.update(
        quantization_config={"quant_method": "fp8", "weight_block_size": [32, 32]}), quantise)
    plain, read = (open_repo("eagle3", path).source() for path in (drafts["eagle3"], folder))
    assert sorted(plain.names()) == sorted(read.names())
    name = "midlayer.self_attn.q_proj.weight"
    assert torch.allclose(plain.tensor(name), read.tensor(name).float(), atol=0.05)


def test_what_is_no_drafter_is_said(tiny, tmp_path) -> None:
    assert "nosuch" in refusal_of(tiny, "nosuch") and "eagle3" in refusal_of(tiny, "nosuch")
    assert "FOLDER-OR-HUB-ID" in refusal_of(tiny, "eagle3")
    assert "ships no MTP layer" in refusal_of(tiny, "mtp") and "model.mtp_layers.0" in refusal_of(tiny, "mtp")
    assert "is no setting" in refusal_of(tiny, f"eagle:{tmp_path},depth=3")


# ------------------------------------------------------------------------------------------------ token maps, contexts
def tokenizer(folder, words: dict[str, int]) -> None:
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


def words(n: int = made.VOCAB) -> dict[str, int]:
    return {f"w{i}": i for i in range(n)}


def test_case_10_05_standalone_draft_of_another_vocabulary(tmp_path) -> None:
    """Sizes first, then every token; the first differing id is named."""
    tiny = made.make_target(tmp_path / "target")
    shutil.copytree(tmp_path / "target", tmp_path / "draft")
    tokenizer(tmp_path / "target", words())
    tokenizer(tmp_path / "draft", words())
    assert drafter_sizes(f"standalone:{tmp_path / 'draft'}", tiny.target).caps.max_width > 4
    tokenizer(tmp_path / "draft", words() | {"w41": 42, "w42": 41})
    with pytest.raises(DrafterError) as refused:
        drafter_sizes(f"standalone:{tmp_path / 'draft'}", tiny.target)
    assert all(part in str(refused.value) for part in ("id 41", "'w42'", "'w41'", "draft", "tiny"))
    for size in (made.VOCAB - 8, made.VOCAB + 8):
        folder = tmp_path / f"draft{size}"
        config = transformers.LlamaConfig(**made.SHAPE | {"vocab_size": size, "num_hidden_layers": 1})
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        with pytest.raises(DrafterError, match=str(size)):
            drafter_sizes(f"standalone:{folder}", tiny.target)


@pytest.mark.parametrize("kind", ["standalone", "eagle3", "dflash"])
def test_case_10_03_draft_model_with_a_shorter_context(tmp_path, kind: str) -> None:
    """The target serves 256 positions, the drafter 64: a row that outgrows it goes on plain, its neighbour drafts."""
    tiny = made.make_target(tmp_path / "target")
    folder = made.eagle3(tmp_path / "draft", vocab=None)[0] if kind == "eagle3" else \
        made.dflash(tmp_path / "draft")[0] if kind == "dflash" else tmp_path / "draft"
    if kind == "standalone":
        shutil.copytree(tmp_path / "target", folder)
    raw = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(raw))
    lab = Lab(tiny.model, tiny.target, f"{kind}:{folder}")
    asks = [Ask("long", [t % 300 for t in range(40)], greedy(50)), Ask("late", [3, 7, 11], greedy(30)),
            Ask("longest", [t % 300 for t in range(9, 109)], greedy(20))]
    want = lab.plain(asks)
    for chunk in (256, 16):
        got, _ = lab.drafted(asks, page_size=4, chunk=chunk)
        assert {r: a.token_ids for r, a in got.items()} == {r: a.token_ids for r, a in want.items()}
        assert not got["longest"].offers and got["late"].offers
        last = max(got["long"].offers) - 1 + 4  # cells of the draft stream; EAGLE3's begins at cell 1
        assert last <= 64 + (kind == "eagle3")
        if kind == "standalone":
            assert got["late"].accepted == got["late"].drafted > 20


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_case_10_01_short_answers_leak_no_page(tiny, drafts, page: int, limit: int) -> None:
    engine = make_engine(tiny.model, drafts["dflash"], tiny.target, Setup(page_size=page))
    for n in range(3):
        run(engine, [Ask(str(n), [3, 7, 11], greedy(limit))])


# ----------------------------------------------------------------------------------------------------- the whole engine
@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A target with a tokenizer, as LLM wants it."""
    folder = tmp_path_factory.mktemp("served")
    made.make_target(folder)
    tokenizer(folder, words())
    return folder


def texts(model, **options) -> list[tuple[list[int], int]]:
    prompts = [[3, 7, 11], list(range(20, 50))]
    with LLM(str(model), kv_tokens=1024, device="cpu", max_model_len=200, **options) as llm:
        answers = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12))
        assert (llm.info.speculation_tokens > 0) == ("speculation" in options)
        return [(c.token_ids, c.usage.drafted_tokens) for c in answers]


def test_llm_with_every_kind(served, drafts) -> None:
    plain = [ids for ids, _ in texts(served)]
    for asked in ("ngram", f"standalone:{served}", *(drafts[k] for k in ("eagle3", "dflash", "dspark"))):
        got = texts(served, speculation=asked)
        assert [ids for ids, _ in got] == plain
        assert asked == "ngram" or all(drafted for _, drafted in got)


@pytest.mark.parametrize("name", ["mtp", "nextn"])
def test_llm_with_the_predictor_of_its_own_checkpoint(tmp_path, name: str) -> None:
    made.mimo(tmp_path)
    tokenizer(tmp_path, words())
    plain, got = texts(tmp_path), texts(tmp_path, speculation=name)
    assert [ids for ids, _ in got] == [ids for ids, _ in plain]
    assert all(drafted for _, drafted in got)


def test_a_speculator_repo_as_the_model_starts_target_and_draft(served, drafts, tmp_path) -> None:
    repo = changed(drafts["eagle3_speculators"], tmp_path / "speculator",
                   lambda raw: raw["speculators_config"]["verifier"].update(name_or_path=str(served)))
    prepared = prepare(config(repo, "off"))
    assert prepared.path == served and prepared.resolved.drafter == repo
    with LLM(repo, kv_tokens=1024, device="cpu", max_model_len=200) as llm:
        completion = llm.generate([[3, 7, 11]], SamplingParams(temperature=0.0, max_tokens=12))[0]
    assert completion.token_ids == texts(served)[0][0] and completion.usage.drafted_tokens > 0
    with pytest.raises(ConfigError, match="drafter itself"):
        prepare(config(repo, "ngram"))


def test_a_target_that_runs_through_transformers(tmp_path, drafts) -> None:
    """It hands out hidden states, and has no embedding to lend: drafters with their own run, others are refused."""
    torch.manual_seed(2)
    config = transformers.Starcoder2Config(**made.SHAPE, sliding_window=None)
    transformers.Starcoder2ForCausalLM(config).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    target = target_of(model, tmp_path, "starcoder")
    check_mixed_steps(Lab(model, target, drafts["dspark"]))
    with pytest.raises(DrafterError, match=r"target starcoder .* lends no embedding"):
        make_engine(model, drafts["eagle3"], target)


def test_no_tokens_means_no_drafter(tmp_path, drafts) -> None:
    """Nothing of it is loaded, and nothing is planned for it."""
    tiny = made.make_target(tmp_path, window=16)
    prepared = prepare(config(tmp_path, drafts["eagle3"], 0))
    assert prepared.resolved.windows == (16,) and prepared.resolved.memory.draft_weights == 0
    runner, _ = make_runner(tiny.model, prepared)
    assert runner.drafter is None and runner.drafting.own is None

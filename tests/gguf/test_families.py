"""Every architecture that is read from GGUF files, against the transformers model that the file was written from. The
conventions of `convert` have been compared with llama.cpp 0.3.36, whose logits of these files are the same."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from stretto.facts import model_facts, model_name
from stretto.model.config import ConfigError
from stretto.model.digest import digest
from stretto.model.gguf import GGUFSource
from stretto.model.gguf_config import FAMILIES, gguf_config
from stretto.model.hub import ModelNotFound, resolve_model
from stretto.model.load import load_model
from stretto.model.lora import AdapterBank, read_adapter
from stretto.model.source import WeightError
from stretto.text.gguf_file import GGUFFile
from tests.gguf.convert import FAMILIES as CONVERTED
from tests.gguf.convert import convert, llama3_divisors
from tests.model.dense import of, run
from tests.model.lora import ATTENTION, MLP, merged, save_adapter
from tests.model.test_families import (
    GEMMA,
    GRANITE,
    LLAMA3,
    LLAMA4,
    MOE,
    PHI3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
)
from tests.model.tiny import ids_of, oracle_logits, save

Kind = gguf.GGMLQuantizationType
CPU = torch.device("cpu")
SIX = {**GEMMA, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}
TWICE = {"norm_topk_prob": True, "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
PARTLY = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}
SCALED = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0},
          "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 15000.0,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
LONG = {"rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.75, "short_factor": [1.0] * 6,
        "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "original_max_position_embeddings": 16}
CASES = {
    "llama": ("Llama", {}), "mistral": ("Mistral", {"sliding_window": 5, "head_dim": 16}),
    "mixtral": ("Mixtral", MOE), "qwen2": ("Qwen2", {}), "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-moe": ("Qwen3Moe", QWEN3_MOE | {"norm_topk_prob": True, "mlp_only_layers": [1]}),
    "gemma2": ("Gemma2", {**GEMMA, "query_pre_attn_scalar": 16, "num_hidden_layers": 2}), "gemma3": ("Gemma3", SIX),
    "gemma3-scaled": ("Gemma3", SIX | {"rope_parameters": SCALED, "final_logit_softcapping": 10.0}),
    "olmo2": ("Olmo2", {}), "phi3": ("Phi3", PHI3 | {"sliding_window": 5}),
    "phi4-mini": ("Phi3", PHI3 | {"tie_word_embeddings": True, "hidden_size": 64, "rope_parameters": PARTLY}),
    "glm": ("Glm", {"head_dim": 16, "pad_token_id": 0}), "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 0}),
    "glm4-biases": ("Glm4", {"head_dim": 16, "pad_token_id": 0, "attention_bias": True}),
    "granite3": ("Granite", {"logits_scaling": 3.0, "embedding_multiplier": 5.0, "residual_multiplier": 0.4,
                             "attention_multiplier": 0.2, "tie_word_embeddings": True}),
    "granite4": ("GraniteMoeHybrid", GRANITE),
    "granite4-dense": ("GraniteMoeHybrid", GRANITE | {
        "num_local_experts": 0, "mamba_n_groups": 1, "mamba_conv_bias": False, "position_embedding_type": "rope",
        "tie_word_embeddings": True}),
    "gpt-oss": ("GptOss", MOE | {"head_dim": 16, "sliding_window": 6}),
    "gpt-oss-yarn": ("GptOss", MOE | {"head_dim": 16, "sliding_window": 6, "rope_parameters": YARN}),
    "qwen3-next": ("Qwen3Next", QWEN3_NEXT | TWICE), "qwen3.5": ("Qwen3_5", QWEN3_5 | TWICE),
    "qwen3.5-moe": ("Qwen3_5Moe", QWEN3_5_MOE | TWICE),
    "llama4": ("Llama4", LLAMA4 | {"floor_scale": 8192, "attn_scale": 0.1, "no_rope_layer_interval": 4,
                                   "num_hidden_layers": 5, "attention_chunk_size": 8192,
                                   "interleave_moe_layer_step": 2}),
}


# Files of the text part of multimodal models: another name, and keys that matter to images.
TEXT_PARTS = {"mistral3": ("mistral", {"sliding_window": None}, {}),
              "qwen2vl": ("qwen2", {}, {"rope.dimension_sections": [2, 2, 2, 0]}),
              "qwen3vl": ("qwen3", {}, {"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3}),
              "qwen3vlmoe": ("qwen3-moe", {}, {"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3})}


def test_every_architecture_has_a_case(tmp_path):
    import transformers

    from tests.model.tiny import CONFIGS
    types = {getattr(transformers, CONFIGS.get(family, f"{family}Config")).model_type for family, _ in CASES.values()}
    assert {CONVERTED[kind][0] for kind in types} | set(TEXT_PARTS) == set(FAMILIES)


@pytest.mark.parametrize("architecture", TEXT_PARTS)
def test_text_parts_of_multimodal_models(architecture, tmp_path, caplog):
    case, changes, keys = TEXT_PARTS[architecture]
    oracle = save(tmp_path, CASES[case][0], **CASES[case][1] | changes)
    path, ids = convert(tmp_path, tmp_path / "m.gguf", architecture=architecture, metadata={
        f"{architecture}.{key}": value for key, value in keys.items()}), ids_of(23)
    model = load_model(path, dtype=torch.float32, device=CPU)
    torch.testing.assert_close(run(model, ids), oracle_logits(oracle, ids), atol=1e-4, rtol=1e-4)
    assert "has no effect" not in caplog.text
    scaled = convert(tmp_path, tmp_path / "s.gguf", architecture=architecture,
                     metadata={f"{architecture}.attention.temperature_scale": 0.1})
    with pytest.raises(ConfigError, match=r"attention.temperature_scale is 0\.1"):
        gguf_config(scaled)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name, tmp_path):
    family, config = CASES[name]
    oracle = save(tmp_path, family, **config)
    path, ids = convert(tmp_path, tmp_path / "m.gguf"), ids_of(23)
    model = load_model(path, dtype=torch.float32, device=CPU)
    torch.testing.assert_close(run(model, ids), oracle_logits(oracle, ids), atol=1e-4, rtol=1e-4)
    assert model_facts(path).parameters == sum(p.numel() for p in oracle.parameters())


@pytest.mark.parametrize(("context", "factor"), [(16, "short_factor"), (64, "long_factor")])
def test_short_and_long_factors_of_phi(context, factor, tmp_path):
    """By the context that is served; transformers looks at the length of the text, here beyond the original one or
    not."""
    oracle = save(tmp_path, "Phi3", **PHI3, hidden_size=64, original_max_position_embeddings=16,
                  max_position_embeddings=64, rope_parameters=LONG)
    scale = (1 + np.log(4) / np.log(16)) ** 0.5
    path = convert(tmp_path, tmp_path / "m.gguf", metadata={"phi3.rope.scaling.original_context_length": 16,
                                                            "phi3.rope.scaling.attn_factor": float(scale)},
                   extra={f"rope_factors_{part}.weight": np.array(LONG[f"{part}_factor"], np.float32)
                          for part in ("short", "long")})
    ids = ids_of(context if context == 16 else 40)
    model = load_model(path, dtype=torch.float32, device=CPU, context=context)
    torch.testing.assert_close(run(model, ids), oracle_logits(oracle, ids), atol=1e-4, rtol=1e-4)


def test_divisors_of_llama_4(tmp_path):
    scaling = LLAMA3 | {"rope_theta": 500000.0}
    oracle = save(tmp_path, *(CASES["llama4"][:1]), **CASES["llama4"][1] | {"rope_parameters": scaling})
    path = convert(tmp_path, tmp_path / "m.gguf", extra={"rope_freqs.weight": llama3_divisors(500000.0, 16, scaling)})
    ids = ids_of(23)
    model = load_model(path, dtype=torch.float32, device=CPU)
    torch.testing.assert_close(run(model, ids), oracle_logits(oracle, ids), atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------------------ quantised files
WIDE = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 64}


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16")
@pytest.mark.parametrize(("family", "config"), [
    ("Mixtral", MOE), ("Phi3", PHI3), ("GptOss", MOE | {"head_dim": 16, "sliding_window": 6}),
    ("Qwen3_5", QWEN3_5 | TWICE | {"linear_key_head_dim": 16, "linear_value_head_dim": 16})],
    ids=["mixtral", "phi3", "gpt-oss", "qwen3.5"])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q5_1], ids=lambda kind: kind.name)
def test_rows_that_are_moved_stay_packed(family, config, kind, tmp_path, monkeypatch):
    """In bfloat16, no further from what the file stands for than with matrices that are not packed."""
    save(tmp_path, family, **{**config, **WIDE})
    path, ids = convert(tmp_path, tmp_path / "m.gguf", kind), ids_of(23)
    exact = run(load_model(path, dtype=torch.float32, device=CPU), ids)
    packed = []
    monkeypatch.setattr(GGUFSource, "packed", lambda self, name, before=GGUFSource.packed:
                        packed.append(name) or before(self, name))
    found = run(load_model(path, dtype=torch.bfloat16, device=CPU), ids)
    assert any("self_attn" in name for name in packed) and any("mlp" in name or "moe" in name for name in packed)
    monkeypatch.setattr("stretto.model.weights.stays_packed", lambda *_: False)
    usual = run(load_model(path, dtype=torch.bfloat16, device=CPU), ids)
    assert (found - exact).norm() < 2 * (usual - exact).norm() < 0.2 * exact.norm()


@pytest.mark.parametrize("kind", [Kind.MXFP4, Kind.Q4_0], ids=lambda kind: kind.name)
def test_experts_of_gpt_oss_as_their_kernel_reads_them(kind, tmp_path):
    """Rows of gate and up in turn, as in the checkpoint that the kernel was made for."""
    save(tmp_path, "GptOss", **MOE, **WIDE, head_dim=16, sliding_window=6)
    source = GGUFSource(convert(tmp_path, tmp_path / "m.gguf", kind))
    for name in ("gate_up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.{name}"
        rows = source.tensor(name).transpose(1, 2).flatten(0, 1)
        assert source.layout(name).kind == ("fp4" if kind is Kind.MXFP4 else "int4")
        torch.testing.assert_close(source.packed(name).dequantized(torch.float32), rows)


def test_matrices_that_are_joined_may_differ_in_type(tmp_path):
    """Files of mixed types are the rule: here gate and up of Granite's experts, which become one tensor."""
    oracle = save(tmp_path, "GraniteMoeHybrid", **GRANITE | {"hidden_size": 64, "mamba_n_heads": 8})
    path = convert(tmp_path, tmp_path / "m.gguf")
    stored = GGUFFile(path)
    writer = gguf.GGUFWriter(tmp_path / "mixed.gguf", "granitehybrid")
    for key, value in stored.metadata.items():
        if key != "general.architecture":
            kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
            kinds[type(value)](key, value)
    for name, info in stored.tensors.items():
        kind = Kind.Q8_0 if "ffn_up_exps" in name else info.kind
        values = stored.data(name).view(np.float32).reshape(info.shape)
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    model, ids = load_model(tmp_path / "mixed.gguf", dtype=torch.float32, device=CPU), ids_of(23)
    right = oracle_logits(oracle, ids)
    assert 0 < (run(model, ids) - right).norm() < 0.02 * right.norm()


@pytest.mark.parametrize(("family", "config", "targets"), [
    ("Llama", {}, (*ATTENTION, *MLP)), ("Phi3", PHI3, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"))],
    ids=["llama", "phi3"])
@pytest.mark.parametrize("rank", [1, 64])
def test_adapters_over_a_quantised_file(family, config, targets, rank, tmp_path):
    """By the names and in the order of the checkpoint, which rows of the file are put back into."""
    oracle = save(tmp_path, family, **{**config, **WIDE})
    adapter = save_adapter(tmp_path / "adapter", oracle, targets, rank)
    path, ids = convert(tmp_path, tmp_path / "m.gguf", Kind.Q8_0), ids_of(12)
    source = GGUFSource(path)
    oracle.load_state_dict({name: source.tensor(name) for name in source.names()})
    right = oracle_logits(merged(oracle, adapter), ids)
    for dtype, off in ((torch.float32, 1e-4), (torch.bfloat16, 0.2)):
        bank = AdapterBank(2, rank)
        model = load_model(path, dtype=dtype, device=CPU, adapters=bank)
        bank.load(2, read_adapter(adapter))
        bank.select(torch.full((len(ids),), 2))
        assert (run(model, ids) - right).norm() < off * right.norm()


# ---------------------------------------------------------------------------------------------------------- split files
def test_a_split_model_is_one_model(tmp_path):
    oracle = save(tmp_path, "Llama")
    folder = tmp_path / "parts"
    folder.mkdir()
    first, ids = convert(tmp_path, folder / "m.gguf", parts=3), ids_of(23)
    assert first.name == "m-00001-of-00003.gguf" and len(list(folder.iterdir())) == 3
    for path in sorted(folder.iterdir()):  # named by any of its parts
        assert model_name(path) == "m"
        model = load_model(path, dtype=torch.float32, device=CPU)
        torch.testing.assert_close(run(model, ids), oracle_logits(oracle, ids), atol=1e-4, rtol=1e-4)
    assert resolve_model(str(folder)) == first
    before = digest(first)
    last = folder / "m-00003-of-00003.gguf"
    last.write_bytes(last.read_bytes()[:-1] + b"\x55")
    assert digest(first) != before


def test_parts_that_do_not_belong_together(tmp_path):
    save(tmp_path, "Llama")
    first = convert(tmp_path, tmp_path / "m.gguf", parts=3)
    second, third = (tmp_path / f"m-0000{i}-of-00003.gguf" for i in (2, 3))
    content = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(WeightError, match=r"m-00003-of-00003.gguf holds .*, which another part holds as well"):
        GGUFSource(first)
    second.unlink()
    with pytest.raises(WeightError, match=r"one of 3 parts .* m-00002-of-00003.gguf is not beside it: fetch all parts"):
        gguf_config(first)
    second.write_bytes(content[: len(content) // 2])
    with pytest.raises(WeightError, match=r"m-00002-of-00003.gguf is cut off"):
        gguf_config(first)


def test_a_part_under_another_name(tmp_path):
    save(tmp_path, "Llama")
    path = convert(tmp_path, tmp_path / "m.gguf", parts=2).rename(tmp_path / "model.gguf")
    with pytest.raises(WeightError, match="one of 2 parts of a split model, which are not named as such"):
        gguf_config(path)


def test_a_folder_with_files_of_several_kinds(tmp_path):
    for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "mmproj-a.gguf"):
        (tmp_path / name).touch()
    assert resolve_model(str(tmp_path)).name == "a-00001-of-00002.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelNotFound, match=r"holds 2 GGUF models \(a-00001-of-00002.gguf, b.gguf\)"):
        resolve_model(str(tmp_path))


def test_layers_that_predict_are_left_to_drafters(tmp_path):
    oracle = save(tmp_path, "Qwen3_5", **QWEN3_5 | TWICE)
    path = convert(tmp_path, tmp_path / "m.gguf", metadata={"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1},
                   extra={"blk.4.nextn.eh_proj.weight": np.ones((48, 96), np.float32),
                          "blk.4.attn_norm.weight": np.ones(48, np.float32)})
    model, ids = load_model(path, dtype=torch.float32, device=CPU), ids_of(12)
    assert len(of(model).layers) == 2 and len(model.decoder) == 4
    torch.testing.assert_close(run(model, ids), oracle_logits(oracle, ids), atol=1e-4, rtol=1e-4)

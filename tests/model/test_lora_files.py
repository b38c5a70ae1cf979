"""Adapters as they come: what is read of their files, and what is refused before anything of it is used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stretto.model.lora import AdapterError, read_adapter
from tests.model.lora import ATTENTION, save_adapter
from tests.model.tiny import save


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"), "Llama")


@pytest.fixture
def adapter(reference, tmp_path) -> Path:
    return save_adapter(tmp_path / "adapter", reference, ATTENTION)


def edit(folder: Path, change) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


def configure(folder: Path, **changes) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_an_adapter_holds(adapter):
    read = read_adapter(adapter)
    assert read.rank == 4 and len(read.modules) == 3 * len(ATTENTION)
    a, b, scale = read.modules["layers.2.self_attn.v_proj"]
    assert (a.shape, b.shape, scale) == ((4, 48), (24, 4), 2.0)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "layers"])
def test_names_of_multimodal_models_and_of_bare_decoders(adapter, prefix):
    plain = read_adapter(adapter).modules.keys()
    old = "base_model.model.model."
    new = old.removesuffix("model.") + (prefix if prefix != "layers" else "")
    edit(adapter, lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()})
    assert read_adapter(adapter).modules.keys() == plain


def test_changes_of_what_sees_images_are_refused(adapter):
    edit(adapter, lambda tensors: {name.replace("model.layers", "vision_tower.layers"): tensor
                                   for name, tensor in tensors.items()})
    with pytest.raises(AdapterError, match="of what sees images; only text is served"):
        read_adapter(adapter)


@pytest.mark.parametrize(("patterns", "scales"), [
    ({"q_proj": 12}, {"0.self_attn.q_proj": 3, "2.self_attn.q_proj": 3, "0.self_attn.k_proj": 2}),
    ({"layers.0.self_attn.q_proj": 12}, {"0.self_attn.q_proj": 3, "1.self_attn.q_proj": 2}),
    ({r"layers\.[01]\..*": 12, r".*\.q_proj": 4}, {"0.self_attn.q_proj": 3, "2.self_attn.q_proj": 1}),
    ({r"^model\.layers\.1\.self_attn\.(q|k)_proj": 12}, {"1.self_attn.k_proj": 3, "1.self_attn.v_proj": 2}),
    ({"_proj": 12}, {"0.self_attn.q_proj": 2}),
], ids=["end", "module", "first_that_fits", "whole_name", "no_part_of_a_name"])
def test_alpha_patterns_are_expressions(adapter, patterns, scales):
    """As PEFT matches them: the end of a module's name, from a dot on."""
    configure(adapter, alpha_pattern=patterns)
    found = read_adapter(adapter).modules
    assert {name: found[f"layers.{name}"][2] for name in scales} == scales


def test_ranks_may_differ_between_modules(adapter, reference, tmp_path):
    other = save_adapter(tmp_path / "other", reference, ("down_proj",), rank=9)
    edit(adapter, lambda tensors: tensors | load_file(other / "adapter_model.safetensors"))
    read = read_adapter(adapter)
    assert read.rank == 9 and read.modules["layers.0.mlp.down_proj"][2] == 8 / 9
    configure(adapter, use_rslora=True)
    read = read_adapter(adapter)
    assert read.modules["layers.0.mlp.down_proj"][2] == 8 / 3 and read.modules["layers.0.self_attn.q_proj"][2] == 4


@pytest.mark.parametrize(("key", "value", "why"), [
    ("layer_replication", [[0, 2], [1, 3]], "runs layers several times"), ("lora_bias", True, "it has biases"),
    ("alora_invocation_tokens", [1, 2], "acts behind certain tokens alone"), ("use_dora", True, "DoRA"),
    ("target_parameters", ["mlp.experts.gate_up_proj"], "changes experts"),
    ("trainable_token_indices", [5], "changes embeddings"), ("arrow_config", {"k": 2}, "a mixture of adapters")])
def test_what_is_more_than_low_rank_is_refused(adapter, key, value, why):
    configure(adapter, **{key: value})
    with pytest.raises(AdapterError, match=rf"has {key} set: .*{why}"):
        read_adapter(adapter)
    configure(adapter, **{key: None})
    read_adapter(adapter)


def test_keys_that_nobody_knows_are_told(adapter, caplog):
    configure(adapter, use_quantum=True, unused=False)
    read_adapter(adapter)
    assert "has use_quantum set (True), which is not known" in caplog.text and "unused" not in caplog.text


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t | {FIRST: torch.full_like(t[FIRST], float("nan"))}, "holds what is no number, or infinite"),
    (lambda t: t | {FIRST: t[FIRST].int()}, "holds what is no number"),
    (lambda t: t | {FIRST: t[FIRST][:2].clone()}, "their ranks differ"),
    (lambda t: t | {FIRST: t[FIRST][:0].clone(), FIRST.replace("_A", "_B"): torch.zeros(48, 0)}, "their ranks differ"),
    (lambda t: t | {FIRST: t[FIRST][:, :, None].clone()}, "lacks one of its two matrices, or their ranks"),
    (lambda t: {name: x for name, x in t.items() if name != FIRST}, "lacks one of its two matrices"),
    (lambda t: t | {"base_model.model.lm_head.lora_embedding_A": t[FIRST].clone()}, "only lora_A and lora_B of linear"),
    (lambda t: {}, "changes nothing"),
], ids=["nan", "whole_numbers", "ranks", "rank_0", "convolution", "half", "embedding", "empty"])
def test_damaged_adapters_are_named(adapter, change, message):
    edit(adapter, change)
    with pytest.raises(AdapterError, match=message):
        read_adapter(adapter)


@pytest.mark.parametrize("values", [
    {"alpha_pattern": {"(": 8}}, {"alpha_pattern": ["q_proj"]}, {"alpha_pattern": {"q_proj": None}},
    {"alpha_pattern": {"q_proj": "8"}}, {"lora_alpha": "x"}, {"lora_alpha": float("nan")},
    {"alpha_pattern": {"q_proj": float("inf")}}, {"lora_alpha": [8]}], ids=str)
def test_alphas_that_are_none_are_named(adapter, values):
    configure(adapter, **values)
    with pytest.raises(AdapterError, match="lora_alpha or alpha_pattern that cannot be read"):
        read_adapter(adapter)


@pytest.mark.parametrize(("file", "content", "message"), [
    ("adapter_model.safetensors", b"", r"\(0 bytes\) is truncated or damaged"),
    ("adapter_model.safetensors", b"<html>not found</html>", "is truncated or damaged"),
    ("adapter_config.json", b"{", "cannot be read"), ("adapter_config.json", b"[]", "is of type list"),
    ("adapter_config.json", b"{}", "is of type None"), ("adapter_config.json", b"\xff\xfe", "cannot be read")])
def test_files_that_are_no_adapter_are_named(adapter, file, content, message):
    (adapter / file).write_bytes(content)
    with pytest.raises(AdapterError, match=message):
        read_adapter(adapter)

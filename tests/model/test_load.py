"""Loading: what is wrong with a checkpoint is named, all of it, before anything runs; and stray files do no harm."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stretto.facts import model_facts
from stretto.model.config import ConfigError, ModelConfig, read_config
from stretto.model.load import build_model, load_model
from stretto.model.progress import LoadLog
from stretto.model.source import SafetensorsSource, WeightError
from tests.model.dense import run
from tests.model.tiny import ids_of, oracle_logits, save

CPU = torch.device("cpu")
IDS = ids_of(9)


def load(folder, **options):
    return load_model(folder, dtype=torch.float32, device=CPU, **options)


def edit(folder, change) -> None:
    """Rewrites model.safetensors with `change` applied to its tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def folder(tmp_path):
    save(tmp_path, "Llama")
    return tmp_path


# ------------------------------------------------------------------------------------------------------- what is wrong
def test_missing_extra_and_misshapen_are_named_together(folder):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(7, 48)
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(80, 48)

    edit(folder, change)
    with pytest.raises(WeightError) as e:
        load(folder)
    assert str(e.value) == (
        "the checkpoint does not fit its config: 2 missing: model.layers.1.mlp.up_proj.weight, model.norm.weight; "
        "1 misshapen: model.layers.0.self_attn.k_proj.weight is [7, 48], the config wants [24, 48]; "
        "1 not part of this model: model.layers.9.mlp.up_proj.weight")


def test_nothing_is_read_from_a_checkpoint_that_does_not_fit(folder):
    class Counting(SafetensorsSource):
        read = 0

        def tensor(self, name):
            Counting.read += 1
            return super().tensor(name)

    edit(folder, lambda tensors: tensors.pop("model.norm.weight"))
    config = ModelConfig.from_hf(*read_config(folder))
    with pytest.raises(WeightError, match=r"1 missing: model\.norm\.weight"):
        build_model(config, Counting(folder), torch.float32, CPU)
    assert Counting.read == 0


@pytest.mark.parametrize("keep", [0, 7, 1000, -4])
def test_truncated_file_is_named(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightError, match=r"model\.safetensors \(\d+ bytes\) is truncated or damaged"):
        load(folder)


def test_missing_and_truncated_shards_are_named_together(tmp_path):
    save(tmp_path, "Llama", shard="60KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) >= 4
    shards[0].unlink()
    shards[2].write_bytes(shards[2].read_bytes()[:-10])
    with pytest.raises(WeightError) as e:
        load(tmp_path)
    assert f"shard {shards[0].name} is missing" in str(e.value) and f"{shards[2].name} (" in str(e.value)


def test_index_that_lists_a_tensor_its_shard_lacks(tmp_path):
    save(tmp_path, "Llama", shard="60KB")
    index = tmp_path / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    shard = data["weight_map"]["lm_head.weight"]
    tensors = load_file(tmp_path / shard)
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / shard, metadata={"format": "pt"})
    with pytest.raises(WeightError, match=rf"lists tensors that its shards do not hold: lm_head.weight \(in {shard}\)"):
        load(tmp_path)


def test_damaged_index_is_named(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3')
    with pytest.raises(WeightError, match=r"index\.json is no index of safetensors"):
        load(folder)


def test_a_folder_without_weights_says_what_it_found(folder):
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    with pytest.raises(WeightError, match=r"neither .*; it has consolidated\.safetensors, which no index"):
        load(folder)
    (folder / "consolidated.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightError, match=r"it has pytorch_model\.bin: convert them to safetensors"):
        load(folder)


def test_integer_weights_are_refused(folder):
    edit(folder, lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int32)}))
    with pytest.raises(WeightError, match=r"model\.norm\.weight holds torch\.int32"):
        load(folder)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_named(folder, number):
    """One of thousands would make every logit NaN."""
    edit(folder, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"][3].__setitem__(5, number))
    with pytest.raises(WeightError, match=r"layers\.1\.mlp\.up_proj\.weight would be infinite .* it is damaged"):
        load(folder)


def test_weights_beyond_float16_name_the_type_that_holds_them(folder):
    edit(folder, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"][3].__setitem__(5, 1e5))
    with pytest.raises(WeightError, match=r"up_proj\.weight would be infinite .*torch\.float16; take --dtype bfloat16"):
        load_model(folder, dtype=torch.float16, device=CPU)
    load_model(folder, dtype=torch.bfloat16, device=CPU)


def test_large_numbers_whose_sum_is_infinite_are_numbers(folder):
    edit(folder, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].fill_(3e38))
    load(folder)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123456\n"


@pytest.mark.parametrize(("file", "error"), [("model.safetensors", WeightError), ("config.json", ConfigError)])
def test_pointers_of_git_lfs_are_known(folder, file, error):
    (folder / file).write_text(POINTER)
    with pytest.raises(error, match=rf"{file} is the pointer of Git LFS to a file: fetch .* with `git lfs pull`"):
        model_facts(folder)


def test_a_link_to_nothing_is_named(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../blobs/4d7a")
    with pytest.raises(WeightError, match=r"model\.safetensors is a link to \.\./blobs/4d7a, which is not there"):
        load(folder)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "LlamaModel"])
@pytest.mark.parametrize("head", [True, False])
def test_a_decoder_that_was_saved_by_itself(tmp_path, architecture, head, caplog):
    """Models for embeddings: names without "model.", perhaps without a head, whose place the embedding takes."""
    oracle, path = save(tmp_path, "Llama", tie_word_embeddings=not head), tmp_path / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": [architecture]}
    config["tie_word_embeddings"] = architecture == "LlamaForCausalLM" and not head
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(run(load(tmp_path), IDS), oracle_logits(oracle, IDS), atol=1e-4, rtol=1e-4)
    assert ("a decoder without a head" in caplog.text) == (architecture == "LlamaModel")


def test_a_config_with_a_byte_order_mark(folder):
    path = folder / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    load(folder)


def test_buffers_of_old_checkpoints_are_ignored(folder):
    oracle = save(folder, "Llama")
    names = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(3)]
    edit(folder, lambda t: t.update({name: torch.ones(6) for name in names}))
    torch.testing.assert_close(run(load(folder), IDS), oracle_logits(oracle, IDS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("change, says", [
    ({"quantization_config": {"quant_method": "hqq", "bits": 4}}, "quantised by 'hqq'"),
    ({"num_hidden_layers": None}, "num_hidden_layers is None; the config must give a positive whole number"),
    ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ({"hidden_act": "wobble"}, "hidden_act 'wobble' is not supported"),
    ({"rope_parameters": {"rope_type": "spiral"}}, "rope type 'spiral' is not supported"),
    ({"rope_parameters": "linear"}, r"\(rope_parameters or rope_scaling\) is 'linear'; an object with a rope_type"),
    ({"eos_token_id": ["</s>"]}, "eos_token_id is '</s>'; it must be the id of a token"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; a small positive number is needed"),
])
def test_configs_are_refused_with_the_reason(folder, change, says):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=says):
        load(folder)


def test_folders_that_are_no_models(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json cannot be read \(No such file"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="neither architectures nor model_type"):
        load(tmp_path)


def test_a_context_beyond_the_model_is_refused(folder):
    assert load(folder, context=100).max_position == 100
    with pytest.raises(ConfigError, match="a context of 129 positions was asked for; the model has 128"):
        load(folder, context=129)


# ---------------------------------------------------------------------------------------------------------- tied heads
@pytest.mark.parametrize("in_file", [False, True], ids=["head_absent", "head_in_file"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_case_18_07_tied_heads(tmp_path, tied, in_file):
    oracle = save(tmp_path, "Llama", tie_word_embeddings=tied)

    def change(tensors):
        tensors.pop("lm_head.weight", None)
        if in_file:
            tensors["lm_head.weight"] = oracle.lm_head.weight.clone()

    edit(tmp_path, change)
    if not tied and not in_file:
        with pytest.raises(WeightError, match=r"1 missing: lm_head\.weight"):
            load(tmp_path)
    else:
        torch.testing.assert_close(run(load(tmp_path), IDS), oracle_logits(oracle, IDS), atol=1e-4, rtol=1e-4)


def test_case_18_07_a_head_that_contradicts_the_config_is_used_and_said(tmp_path, caplog):
    save(tmp_path, "Llama", tie_word_embeddings=True)
    head = torch.randn(320, 48, generator=torch.Generator().manual_seed(5))
    edit(tmp_path, lambda t: t.update({"lm_head.weight": head}))
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path)
    assert "lm_head.weight differs from model.embed_tokens.weight" in caplog.text
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(run(model, IDS), oracle_logits(oracle, IDS), atol=1e-4, rtol=1e-4)


# ----------------------------------------------------------------------------------------------- shards, stray files
def test_case_18_09_the_index_decides(tmp_path):
    oracle = save(tmp_path, "Qwen2", shard="60KB")
    assert not (tmp_path / "model.safetensors").exists()
    zeros = {name: torch.zeros_like(p) for name, p in oracle.state_dict().items()}
    for stray in ("model.safetensors", "consolidated.safetensors", "model-00001-of-00002.safetensors"):
        save_file(zeros, tmp_path / stray, metadata={"format": "pt"})
    torch.testing.assert_close(run(load(tmp_path), IDS), oracle_logits(oracle, IDS), atol=1e-4, rtol=1e-4)


def test_case_18_09_stray_files_beside_a_single_one(folder):
    oracle = save(folder, "Llama")
    zeros = {name: torch.zeros_like(p) for name, p in oracle.state_dict().items()}
    save_file(zeros, folder / "consolidated.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(run(load(folder), IDS), oracle_logits(oracle, IDS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_any_floating_dtype_is_converted(tmp_path, stored):
    save(tmp_path, "Llama").to(stored).save_pretrained(tmp_path)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(run(load(tmp_path), IDS), oracle_logits(oracle, IDS), atol=1e-4, rtol=1e-4)


def test_progress_counts_every_element(folder):
    seen = []
    load(folder, progress=lambda done, total: seen.append((done, total)))
    elements = sum(t.numel() for t in load_file(folder / "model.safetensors").values())
    assert seen[-1] == (elements, elements)
    assert [d for d, _ in seen] == sorted({d for d, _ in seen})


def test_the_log_says_how_far_loading_is_and_how_fast(caplog):
    now, seen = iter((0.0, 1.0, 3.0, 4.0, 5.0)), []
    log = LoadLog(2, lambda done, total: seen.append(done), lambda: next(now))
    with caplog.at_level(logging.INFO):
        for done in (1, 3, 4, 10):
            log(done * 10**9, 10**10)
    assert caplog.messages == ["weights: 30 % of 20.00 GB, 2.00 GB/s", "weights: 20.00 GB in 5.0 s, 4.00 GB/s"]
    assert seen == [10**9, 3 * 10**9, 4 * 10**9, 10**10]


def test_loading_is_logged(folder, caplog):
    with caplog.at_level(logging.INFO):
        load(folder)
    assert [m for m in caplog.messages if m.startswith("weights: 0.00 GB in ")]


def test_what_does_not_fit_is_found_without_loading(folder, monkeypatch):
    def read(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(SafetensorsSource, "tensor", read)
    assert model_facts(folder).architecture == "LlamaForCausalLM"
    edit(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(WeightError, match=r"1 missing: model\.norm\.weight"):
        model_facts(folder)


# ----------------------------------------------------------------------------------------------- generation_config
def test_several_eos_ids(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9, 2], "bos_token_id": 1}))
    config = ModelConfig.from_hf(*read_config(folder))
    assert config.eos_token_ids == (2, 5, 9) and config.bos_token_ids == (1,)


def test_an_architecture_without_a_builder_is_refused_by_name():
    config = ModelConfig.from_hf({"architectures": ["NovelForCausalLM"], "vocab_size": 10, "hidden_size": 8,
                                  "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
                                  "max_position_embeddings": 16})

    class Nothing:
        def names(self):
            return ()

    with pytest.raises(ConfigError, match="NovelForCausalLM has no native model here"):
        build_model(config, Nothing(), torch.float32, CPU)

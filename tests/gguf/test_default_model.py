"""The default model's own file. Skipped where it is neither cached nor to be had."""

from __future__ import annotations

import lzma
from pathlib import Path

import gguf
import pytest
import torch

from stretto.model.config import ModelConfig
from stretto.model.gguf import GGUFSource
from stretto.model.gguf_config import gguf_config
from stretto.model.hub import DEFAULT_WHEEL, ModelNotFound, resolve_model
from stretto.model.load import load_model
from stretto.text.stream import IncrementalText
from stretto.text.tokenizer import load_tokenizer
from tests.model.dense import greedy, run

BOOKS = Path(__file__).resolve().parents[2] / "../shared/data/corpora"
LANGUAGES = ("Hello world", "삼겹살 맛있다", "ďábelské ódy", "世界 こんにちは", "🙂🙂 👩‍👩‍👧", "नमस्ते", "мир שלום",
             "def f(x):\n\treturn x**2  # ok\n\n", "  two  spaces ", "don't I'll 3.14159",
             "<|im_start|>user\nhi<|im_end|>\n")


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        found = resolve_model(None, progress=False)
    except ModelNotFound as e:
        pytest.skip(f"the default model is not to be had: {e}")
    if found.name != DEFAULT_WHEEL.filename:
        pytest.skip("the default model came from the hub, not as a GGUF file")
    return found


@pytest.fixture(scope="module")
def tokenizer(path):
    return load_tokenizer(path)


def test_configuration(path):
    config = ModelConfig.from_hf(gguf_config(path))
    assert (config.n_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.n_heads, config.n_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position, config.rope.theta) == (49152, 8192, 1e5)
    assert (config.norm_eps, config.tie_embeddings, config.eos_token_ids) == (1e-5, True, (2,))


def test_tensors_are_those_of_the_library(path):
    source = GGUFSource(path)
    tensors = {t.name: t for t in gguf.GGUFReader(path, "c").tensors}
    names = list(source.names())
    assert len(names) == len(tensors) == 272
    assert sum(torch.Size(source.shape(n)).numel() for n in names) == 134_515_008
    for name, stored in (("model.embed_tokens.weight", "token_embd.weight"),
                         ("model.norm.weight", "output_norm.weight"),
                         ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight")):
        t = tensors[stored]
        assert torch.equal(source.tensor(name), torch.from_numpy(gguf.dequantize(t.data, t.tensor_type)))


@pytest.mark.parametrize("text", LANGUAGES)
def test_text_survives(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    stream = IncrementalText(tokenizer.decoder(False))
    assert "".join(stream.push([i]).text for i in ids) + stream.push([], True).text == text


def test_known_encodings(tokenizer):
    assert tokenizer.encode("Hello world 12") == [19556, 905, 216, 33, 34]  # every digit alone
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n") == [1, 4093, 198, 26843, 2, 198]
    assert tokenizer.apply_chat_template([{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]) == [
        1, 9690, 198, 67, 2, 198, 1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198]
    assert tokenizer.render_chat_template([{"role": "user", "content": "Hi"}]).startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n")


def test_ids_equal_transformers(path, tokenizer):
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    texts = list(LANGUAGES)
    if (books := sorted(BOOKS.glob("public-domain-books*.xz"))):
        with lzma.open(books[0], "rt") as f:
            texts.append(f.read(100_000))
    for text in texts:
        assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False)


def test_it_speaks_and_stops(path, tokenizer):
    model = load_model(path, dtype=torch.float32, device=torch.device("cpu"))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is gravity? Answer in one sentence."}])
    with torch.no_grad():
        text = tokenizer.decode(greedy(model, prompt, 12))
    assert "ravity" in text and "force" in text, text


@pytest.mark.slow
@pytest.mark.full
def test_logits_equal_transformers(path, tokenizer):
    pytest.importorskip("accelerate", reason="transformers reads GGUF weights only with accelerate installed")
    transformers = pytest.importorskip("transformers")
    ids = tokenizer.encode("<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
        mine = run(load_model(path, dtype=torch.float32, device=torch.device("cpu")), ids)
    torch.testing.assert_close(mine, expected, atol=1e-3, rtol=1e-4)
    assert torch.equal(mine.argmax(-1), expected.argmax(-1))

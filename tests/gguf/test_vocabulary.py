"""Tokenizers from GGUF metadata equal the `tokenizers` objects that the metadata was written from."""

from __future__ import annotations

import logging

import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from stretto.text.gguf_vocab import PRE_TOKENIZERS, VocabularyError, build_tokenizer, special_ids
from stretto.text.tokenizer import TokenizerError, load_tokenizer
from tests.gguf.files import Writer, vocabulary_metadata
from tests.text.vocabularies import LINES, byte_fallback, byte_level

TEXTS = (*LINES[:4], "12345 1 22", "a\r\n\r\n  b   c\n", "cafe\u0301 I'LL WE'VE", "HTTPServer camelCase /path\n",
         "٣١ ½ x²", "<|im_start|>user\nhi<|im_end|>", "   ", "▁x ▁▁", "")

LLAMA3 = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
          "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+")
QWEN2 = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
         "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+")
TEKKEN = ("[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+|"
          "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*|\\p{N}|"
          " ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+")

QWEN35 = QWEN2.replace("\\p{L}+", "[\\p{L}\\p{M}]+").replace("[^\\s\\p{L}\\p{N}]", "[^\\s\\p{L}\\p{M}\\p{N}]")
ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = TEKKEN.replace("\\p{M}]+|[^", f"\\p{{M}}]+{ENDING}|[^").replace(
    "\\p{M}]*|\\p{N}|", f"\\p{{M}}]*{ENDING}|\\p{{N}}{{1,3}}|")


def byte_level_steps(pattern: str | None = None, digits: bool = False):
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated", invert=False))
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)])


# As the tokenizer.json files of GPT-2, SmolLM2, Llama 3, Qwen2, Mistral NeMo, Qwen3.5 and gpt-oss say it.
CUTS = {"gpt-2": byte_level_steps(), "default": byte_level_steps(), "smollm": byte_level_steps(digits=True),
        "llama-bpe": byte_level_steps(LLAMA3), "qwen2": byte_level_steps(QWEN2), "tekken": byte_level_steps(TEKKEN),
        "qwen35": byte_level_steps(QWEN35), "gpt-4o": byte_level_steps(O200K)}


def reference(pre: str, size: int = 1500) -> Tokenizer:
    """A vocabulary trained without any cuts, so that every way of cutting shows in the ids."""
    tokenizer = byte_level(size)
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.pre_tokenizer = CUTS[pre]
    if pre.startswith("qwen"):
        copy.normalizer = normalizers.NFC()
    return copy


@pytest.mark.parametrize("pre", CUTS)
def test_byte_level_equals_the_library(pre):
    theirs = reference(pre)
    mine = build_tokenizer(vocabulary_metadata(theirs, pre))
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert mine.encode(text, add_special_tokens=False).ids == ids
        assert mine.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


def test_ways_of_cutting_differ():
    """Else the test above could not tell them apart."""
    pieces = {name: tuple(tuple(p for p, _ in cut.pre_tokenize_str(text)) for text in TEXTS)
              for name, cut in CUTS.items() if name != "default"}
    assert len(set(pieces.values())) == len(pieces)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_equals_the_library(prefix):
    theirs = byte_fallback(prefix=prefix)
    metadata = vocabulary_metadata(theirs, None) | {"tokenizer.ggml.add_space_prefix": prefix}
    mine = build_tokenizer(metadata)
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert mine.encode(text, add_special_tokens=False).ids == ids
        assert mine.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    assert mine.encode("삼", add_special_tokens=False).tokens[-3:] == ["<0xEC>", "<0x82>", "<0xBC>"]


def test_user_defined_tokens_are_text():
    metadata = vocabulary_metadata(byte_level(), "gpt-2")
    kinds = list(metadata["tokenizer.ggml.token_type"])
    kinds[3] = 4  # <|im_start|>
    mine = build_tokenizer(metadata | {"tokenizer.ggml.token_type": kinds})
    assert mine.encode("a<|im_start|>b").ids[1] == 3
    assert mine.decode(mine.encode("a<|im_start|>b<|im_end|>").ids, skip_special_tokens=True) == "a<|im_start|>b"


@pytest.mark.parametrize(("pre", "keys", "expected"), [
    ("gpt-2", {}, "b"), ("gpt-2", {"add_bos_token": True}, "1b"), ("llama-bpe", {}, "1b"),
    ("llama-bpe", {"add_bos_token": False}, "b"), ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, "1b2"),
    ("gpt-2", {"add_eos_token": True}, "b2"), (None, {}, "1b"), (None, {"add_bos_token": False}, "b"),
])
def test_tokens_around_a_text(pre, keys, expected):
    source = byte_fallback(prefix=False) if pre is None else byte_level()
    metadata = vocabulary_metadata(source, pre) | {f"tokenizer.ggml.{k}": v for k, v in keys.items()}
    mine = build_tokenizer(metadata | {"tokenizer.ggml.add_space_prefix": False})
    ids = {1: "1", 2: "2", source.token_to_id("b"): "b"}
    assert "".join(ids[i] for i in mine.encode("b").ids) == expected
    assert mine.encode("b", add_special_tokens=False).ids == [source.token_to_id("b")]


@pytest.mark.parametrize(("keys", "expected"), [
    ({"eos": 2}, [2, 4]), ({"eos": 2, "eot": 3}, [2, 3]), ({"eos": 2, "eot": 2, "eom": 1}, [2, 1]), ({"eos": 4}, [4]),
], ids=["turn_end_by_text", "eot", "eom", "already_there"])
def test_ids_that_end_an_answer(keys, expected):
    """Token 4 is the control token <|im_end|>, which counts where the file names no end of turn."""
    metadata = vocabulary_metadata(byte_level(), "gpt-2") | {f"tokenizer.ggml.{k}_token_id": v for k, v in keys.items()}
    assert special_ids(metadata)["eos_token_id"] == expected


@pytest.mark.parametrize(("tokens", "keys", "expected"), [
    (("<|return|>", "<|end|>", "<|call|>"), {"eos": 0}, [0, 2]),
    (("<|return|>", "<|end|>", "<|call|>"), {"eos": 0, "eot": 1}, [0, 2]),
    (("<|endoftext|>", "<|user|>", "<|observation|>"), {"eos": 0, "eot": 1}, [0, 1, 2]),
    (("<eos>", "<end_of_turn>", "<start_of_turn>"), {"eos": 0}, [0, 1]),
    (("<|end_of_text|>", "<|eot|>", "<|end|>"), {"eos": 1, "eot": 1}, [1]),
], ids=["gpt-oss", "gpt-oss-eot", "glm4", "gemma", "llama4"])
def test_ids_that_end_an_answer_by_family(tokens, keys, expected):
    """In gpt-oss <|end|> is the end of a message, behind which the same answer goes on."""
    metadata = {"tokenizer.ggml.tokens": list(tokens), "tokenizer.ggml.token_type": [3] * len(tokens)}
    assert special_ids(metadata | {f"tokenizer.ggml.{k}_token_id": v for k, v in keys.items()})[
        "eos_token_id"] == expected


@pytest.mark.parametrize(("changes", "message"), [
    ({"tokenizer.ggml.pre": "klingon"}, "pre-tokenizer 'klingon' is not known; known: default, gpt-2"),
    ({"tokenizer.ggml.model": "t5"}, "tokenizer model 't5' is not supported; supported: gpt2"),
    ({"tokenizer.ggml.tokens": []}, "holds no vocabulary"),
    ({"tokenizer.ggml.merges": ["a b", "zz qq"]}, "1 merges make no token of the vocabulary, the first is"),
    ({"tokenizer.ggml.model": "llama"}, "needs a score and a type for every token"),
])
def test_what_cannot_be_built_is_refused(tmp_path, changes, message):
    metadata = vocabulary_metadata(byte_level(), "gpt-2")
    if "merges" in next(iter(changes)):
        metadata["tokenizer.ggml.tokens"][-1] = "ab"
    with pytest.raises(VocabularyError, match=message):
        build_tokenizer(metadata | changes)


def test_missing_name_of_the_cut_is_logged(caplog):
    metadata = vocabulary_metadata(byte_level(), "gpt-2")
    del metadata["tokenizer.ggml.pre"]
    with caplog.at_level(logging.WARNING):
        assert build_tokenizer(metadata).encode("the end").ids == byte_level().encode("the end").ids
    assert "does not say how its tokenizer cuts text" in caplog.text


def test_file_with_templates(tmp_path):
    metadata = vocabulary_metadata(byte_level(), "gpt-2") | {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        "tokenizer.chat_template.tool_use": "tools", "tokenizer.ggml.padding_token_id": 2}
    mine = load_tokenizer(Writer(tmp_path / "v.gguf", "llama", metadata).close())
    chat = [{"role": "user", "content": "hi"}]
    assert mine.render_chat_template(chat) == "<s>hi</s>"
    assert mine.render_chat_template(chat, [{"name": "f"}]) == "tools"
    assert (mine.bos_token_id, mine.eos_token_id, mine.pad_token_id, mine.eos_token_ids) == (1, 2, 2, (2, 4))
    with pytest.raises(TokenizerError, match=r"v2\.gguf: GGUF pre-tokenizer 'x' is not known"):
        load_tokenizer(Writer(tmp_path / "v2.gguf", "llama", metadata | {"tokenizer.ggml.pre": "x"}).close())


def test_every_listed_name_can_be_built():
    for pre in PRE_TOKENIZERS:
        assert build_tokenizer(vocabulary_metadata(byte_level(), pre)).encode("a 1").ids


def test_whole_piece_before_merges():
    """Llama 3's way: a piece that is a token is that token, even where no merges lead to it."""
    metadata = vocabulary_metadata(byte_level(), "gpt-2")
    tokens = [*metadata["tokenizer.ggml.tokens"], "Ġzyzzyva"]
    kinds = [*metadata["tokenizer.ggml.token_type"], 1]
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    ids = {pre: build_tokenizer(metadata | changes | {"tokenizer.ggml.pre": pre}).encode(
        "a zyzzyva", add_special_tokens=False).ids for pre in ("llama-bpe", "tekken", "qwen2", "gpt-2")}
    assert ids["llama-bpe"][1:] == ids["tekken"][1:] == [len(tokens) - 1]
    assert len(ids["qwen2"]) == len(ids["gpt-2"]) > 3

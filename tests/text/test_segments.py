"""Texts that are tokenised in parts have the ids that they have as a whole, and what was there before is not tokenised
again."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from stretto.text import segments
from stretto.text.segments import Segments, cutting_tokens
from stretto.text.tokenizer import load_tokenizer
from tests.text.vocabularies import ALL, LINES, byte_level, metaspace, with_bos

# Tokens that get in each other's way: parts of others, overlapping others, with a will of their own about neighbours.
AWKWARD = [AddedToken("<|im", normalized=False), AddedToken("<|im_start|>user", normalized=False),
           AddedToken("|><|", normalized=False), AddedToken("<b>", lstrip=True, normalized=False),
           AddedToken("<c>", rstrip=True, normalized=False), AddedToken("<w>", single_word=True, normalized=False),
           AddedToken("end", normalized=True), AddedToken("<n>", normalized=True), AddedToken("xx", normalized=False),
           AddedToken("_</", rstrip=True, normalized=False)]
PIECES = [*AWKWARD, "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<unk>", "<|x|>", " ", "  ", "\n", "\n\n", "x", "|>",
          "<|", "the end", *"aé世🙂<>|_", *LINES[:4]]


def awkward(tokenizer: Tokenizer) -> Tokenizer:
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.add_tokens(AWKWARD)
    copy.add_special_tokens([AddedToken("<|x|>", special=True, normalized=False)])
    return copy


def first_only() -> Tokenizer:
    """Only the very beginning of a text gets a space in front."""
    copy = Tokenizer.from_str(metaspace().to_str())
    copy.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return copy


def spaced() -> Tokenizer:
    copy = Tokenizer.from_str(byte_level().to_str())
    copy.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return copy


KINDS = {**ALL, "metaspace, first": first_only, "byte_level, space": spaced}


@cache
def backend(kind: str, hard: bool) -> Tokenizer:
    tokenizer = with_bos(KINDS[kind]())
    return awkward(tokenizer) if hard else tokenizer


@pytest.mark.parametrize("hard", [False, True], ids=["plain", "awkward tokens"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@example(parts=["a", "_</s>", " ", "_</", "s>"], around=False)  # a token that is hidden by one that cuts nothing
@given(parts=st.lists(st.sampled_from([p if isinstance(p, str) else p.content for p in PIECES]), max_size=40),
       around=st.booleans())
def test_ids_of_the_parts_are_those_of_the_whole(kind: str, hard: bool, parts: list[str], around: bool) -> None:
    tokenizer, text = backend(kind, hard), "".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "LEAST", 0)
        made = Segments(tokenizer)
        for _ in range(2):
            assert made.encode(text, around) == tokenizer.encode(text, add_special_tokens=around).ids


def test_where_a_text_may_be_cut() -> None:
    assert set(cutting_tokens(byte_level())) == {"<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"}
    # "<|im_start|>" is part of a longer token; "|><|" may hide the beginning of all that begin with "<|", and begins
    # itself as they end; "_</" may hide the beginning of "</s>"
    assert set(cutting_tokens(backend("byte_level", True))) == {"<unk>", "<s>"}


def test_special_tokens_that_are_ordinary_text_cut_nothing() -> None:
    copy = Tokenizer.from_str(byte_level().to_str())
    copy.encode_special_tokens = True
    assert cutting_tokens(copy) == []
    text = "<|im_start|>user\nHi<|im_end|>\n" * 300
    assert Segments(copy).encode(text, False) == copy.encode(text, add_special_tokens=False).ids


def conversation(turns: int) -> str:
    rng = random.Random(3)
    return "".join(f"<|im_start|>{'user' if i % 2 else 'assistant'}\n{rng.choice(LINES)} {i} {rng.random()}<|im_end|>\n"
                   for i in range(turns))


@pytest.fixture
def tokenizer(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path)


class Counting:
    """A tokenizer that counts the characters that it is asked to encode."""

    def __init__(self, backend):
        self._backend, self.characters = backend, 0

    def __getattr__(self, name: str):
        return getattr(self._backend, name)

    def encode(self, text: str, *args, **kwargs):
        self.characters += len(text)
        return self._backend.encode(text, *args, **kwargs)


def test_a_turn_tokenises_what_is_new_alone(tokenizer) -> None:
    """Counted: of a conversation sent whole each time, and of another one that begins alike."""
    counting, new, whole = Counting(tokenizer.backend), list[int](), ""
    tokenizer.segments = Segments(counting)
    for turns in range(100, 130):
        before, whole = counting.characters, conversation(turns)
        assert tokenizer.encode(whole, False) == tokenizer.backend.encode(whole, add_special_tokens=False).ids
        new.append(counting.characters - before)
    assert new[0] > 9_000 and max(new[1:]) < 200
    before = counting.characters
    tokenizer.encode(whole[: len(whole) // 2] + "<|im_end|>\n<|im_start|>system\nAnother one", False)
    assert counting.characters - before < 300


def test_what_is_remembered_is_bounded() -> None:
    made = Segments(byte_level(), kept=20_000)
    for i in range(40):
        made.encode(conversation(60)[i:] + str(i), False)
        assert made._size <= 20_000 and made._size == sum(len(text) + segments.ENTRY for text in made._ids)
    longest = "word " * 10_000
    assert made.encode(longest, False) == byte_level().encode(longest, add_special_tokens=False).ids
    assert not made._ids


def test_threads_share_what_is_remembered() -> None:
    made, texts = Segments(byte_level(), kept=30_000), [conversation(n) for n in range(40, 80)]
    expected = [byte_level().encode(text, add_special_tokens=False).ids for text in texts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(lambda text: made.encode(text, False), texts)) == expected
    assert made._size == sum(len(text) + segments.ENTRY for text in made._ids)

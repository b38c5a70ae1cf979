"""Bad words of a request as ids, with tokenizers of every kind: those that the word has within an answer."""

from __future__ import annotations

import pytest

from stretto.serve.prompts import PromptReader
from stretto.text.tokenizer import Tokenizer, TokenizerParts
from tests.text.vocabularies import ALL

WORDS = ["end", " dog", "end of", "Lily.", "don't", "###"]


@pytest.mark.parametrize("kind", ALL)
def test_bad_words_are_what_an_answer_would_write(kind: str):
    """Of each word two runs of ids, or one where the tokenizer cannot write it without a space in front: the bytes are
    the word's, alone and behind one space. What the tokenizer puts in front of a whole text is in neither."""
    tokenizer = Tokenizer(TokenizerParts(ALL[kind]()))
    reader = PromptReader(tokenizer, 500, 100)
    for word in WORDS:
        runs = reader.bad_words([word])
        written = {b"".join(map(tokenizer.token_bytes, run)) for run in runs}
        assert f" {word.lstrip()}".encode() in written, (word, written)
        assert written <= {word.encode(), f" {word.lstrip()}".encode()}, (word, written)
        assert word.encode() in written or kind == "metaspace", (word, written)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_a_word_in_the_midst_of_a_text_is_found(kind: str):
    """As the tokenizer itself cuts a text with the word in it, one of the runs is there. (Those of the other kinds have
    tokens that go across the spaces of what they were trained on.)"""
    tokenizer = Tokenizer(TokenizerParts(ALL[kind]()))
    reader = PromptReader(tokenizer, 500, 100)
    for text, word in (("the lazy dog and the end of the story", "end"), ("the lazy dog and", "dog"),
                       ("there was a little girl named Lily. She", "Lily.")):
        ids = tokenizer.encode(text, add_special_tokens=False)
        runs = reader.bad_words([word])
        assert any(ids[at : at + len(run)] == list(run) for run in runs for at in range(len(ids))), (word, ids, runs)

"""Streamed text equals decoding everything at once, however the ids are cut; stop strings never leak."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.params import SamplingParams
from stretto.text.detokenize import WindowDecoder, decoder_factory, is_token_by_token
from stretto.text.stream import IncrementalText, StopStrings, TextDelta
from stretto.text.tokenizer import Tokenizer, TokenizerParts
from tests.text.vocabularies import ALL, byte_fallback

# The vocabularies have tokens for the first ones, whole; of the characters of UNSEEN they have bytes alone.
UNSEEN = ("🚀𝄞🚀", "뷁a궭", "žř þ", "龘")
TEXTS = ("🙂🙂", "삼겹살", "ďábelské", "世a世b", "👩‍👩‍👧", " the end  of\n\nthe story", "don't 3.14 #\t\tx ", *UNSEEN)


@pytest.fixture(scope="module", params=ALL)
def tokenizer(request) -> Tokenizer:
    return Tokenizer(TokenizerParts(ALL[request.param]()))


def groups(ids: list[int], size: int) -> list[list[int]]:
    return [ids[i : i + size] for i in range(0, len(ids), size)]


def stream(tokenizer, pushes, final=True, **params) -> list[TextDelta]:
    """Pushes until a stop. The last push is final, or an empty final one follows."""
    text = IncrementalText.for_request(tokenizer, SamplingParams(**params))
    deltas = []
    for i, ids in enumerate(pushes):
        deltas.append(text.push(ids, final and i == len(pushes) - 1))
        if deltas[-1].stop is not None:
            return deltas
    return deltas if pushes or not final else [text.push([], True)]


def joined(deltas) -> str:
    return "".join(d.text for d in deltas)


# ---------------------------------------------------------------------------------------------------- whole characters
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_there_are_characters_of_several_tokens(name):
    tokenizer = Tokenizer(TokenizerParts(ALL[name]()))
    for text in UNSEEN:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert sum("\ufffd" in tokenizer.decode([i]) for i in ids) > 1


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("text", TEXTS)
def test_case_14_01_characters_split_over_tokens(tokenizer, text, size):
    ids = tokenizer.encode(text)
    if tokenizer.decode(ids) != text and tokenizer.backend.token_to_id("<0x00>") is None:
        pytest.skip("this vocabulary has no tokens for the text")
    deltas = stream(tokenizer, groups(ids, size))
    assert joined(deltas) == tokenizer.decode(ids)
    assert not any("\ufffd" in d.text for d in deltas)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("final_push", [True, False], ids=["with_ids", "empty"])
def test_case_14_03_unfinished_character_is_flushed_once(name, final_push):
    tokenizer = Tokenizer(TokenizerParts(ALL[name]()))
    lead = tokenizer.encode("世")[-3] if name == "byte_fallback" else tokenizer.backend.token_to_id("ä")  # byte E4
    ids = [*tokenizer.encode("the end"), lead]
    pushes = [[i] for i in ids] if final_push else [*([i] for i in ids), []]
    deltas = stream(tokenizer, pushes)
    assert joined(deltas) == tokenizer.decode(ids) == "the end\ufffd"
    assert sum(d.kept for d in deltas) == len(ids)
    assert "\ufffd" in deltas[-1].text


def test_case_14_03_real_replacement_character_is_not_held():
    tokenizer = Tokenizer(TokenizerParts(ALL["byte_level"]()))
    ids = tokenizer.encode("a\ufffdb")
    deltas = stream(tokenizer, [[i] for i in ids], final=False)
    assert joined(deltas[:-1]) == "a\ufffd"


def test_case_14_05_leading_space_same_streamed_and_whole(tokenizer):
    ids = tokenizer.encode(" the end of the story")
    for skip in (True, False):
        for text_ids in (ids, [tokenizer.backend.token_to_id("<|im_start|>"), *ids],
                         [*ids[:2], tokenizer.backend.token_to_id("<|im_end|>"), *ids[2:]]):
            for size in (1, 2, 5):
                deltas = stream(tokenizer, groups(text_ids, size), skip_special_tokens=skip)
                assert joined(deltas) == tokenizer.decode(text_ids, skip_special_tokens=skip)


def test_case_14_07_ten_thousand_random_sequences(tokenizer):
    """Degenerate output: any ids in any order, unknown ones included."""
    rng = random.Random(14)
    size = tokenizer.vocab_size + 3
    for _ in range(10_000 // len(ALL)):
        ids = [rng.randrange(size) for _ in range(rng.randrange(1, 12))]
        if rng.random() < 0.5:  # many byte tokens in a row
            low = tokenizer.backend.token_to_id("<0x80>") or 5
            ids = [rng.randrange(low, low + 128) if rng.random() < 0.8 else i for i in ids]
        skip = rng.random() < 0.5
        deltas = stream(tokenizer, groups(ids, rng.randrange(1, 5)), skip_special_tokens=skip)
        assert joined(deltas) == tokenizer.decode(ids, skip_special_tokens=skip), ids


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_partition_gives_the_same_text(tokenizer, data):
    """Joined text, the stop and the id that completes it do not depend on how ids arrive."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=24))
    whole = tokenizer.decode(ids)
    inside = [whole[i : i + n] for i in range(len(whole)) for n in (1, 2, 4)] or ["x"]
    stops = data.draw(st.lists(st.one_of(st.sampled_from(inside), st.text(max_size=3)), max_size=3))
    params = {"stop": tuple(s for s in stops if s), "include_stop": data.draw(st.booleans()),
              "min_tokens": data.draw(st.integers(0, 6))}
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids)))) | {len(ids)})
    pushes = [ids[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]
    parts, single = stream(tokenizer, pushes, **params), stream(tokenizer, [ids], **params)
    assert joined(parts) == joined(single)
    assert parts[-1].stop == single[-1].stop
    assert sum(d.kept for d in parts) == single[0].kept
    if not params["stop"]:
        assert joined(single) == whole


# -------------------------------------------------------------------------------------------------------- stop strings
class Characters:
    """A tokenizer whose ids are code points."""

    def decoder(self, skip_special_tokens):
        return self

    def feed(self, token_id):
        return chr(token_id)

    def flush(self):
        return ""


def run(text: str, stop, cut: int = 1, **params) -> tuple[str, str | None, int]:
    deltas = stream(Characters(), groups([ord(c) for c in text], cut), stop=tuple(stop), **params)
    return joined(deltas), deltas[-1].stop, sum(d.kept for d in deltas)


def first_stop(text: str, stops, earliest: int = 0) -> tuple[int, str] | None:
    """The plain definition: the first end of a match that lies at or after `earliest`; there the longest string."""
    ends = [(i + len(s), -len(s), s) for s in stops for i in range(len(text)) if text.startswith(s, i)]
    ends = [e for e in ends if e[0] >= earliest]
    return (min(ends)[0], min(ends)[2]) if ends else None


@settings(max_examples=400, deadline=None)
@given(text=st.text("ab\n", max_size=24),
       stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
       cut=st.integers(1, 6), include=st.booleans(), minimum=st.integers(0, 8))
def test_stop_strings_against_their_definition(text, stops, cut, include, minimum):
    out, stop, kept = run(text, stops, cut, include_stop=include, min_tokens=minimum)
    expected = first_stop(text, stops, minimum)
    if expected is None:
        assert (out, stop, kept) == (text, None, len(text))
    else:
        end, string = expected
        assert (stop, kept) == (string, end)
        assert out == (text[:end] if include else text[: end - len(string)])


@pytest.mark.parametrize("stop", ["END", "##", "\n###", "story"])
def test_case_3_07_no_part_of_a_stop_string_is_sent(stop):
    text = f"once upon a ti{stop[:-1]}me{stop} never"
    deltas = stream(Characters(), [[ord(c)] for c in text], stop=(stop,))
    assert joined(deltas) == f"once upon a ti{stop[:-1]}me"
    assert deltas[-1] == TextDelta("", stop, 1)


def test_case_3_07_near_miss_arrives_in_full():
    deltas = stream(Characters(), [[ord(c)] for c in "a##b###"], stop=("###!",))
    assert [d.text for d in deltas] == ["a", "", "", "##b", "", "", "###"]


def test_case_3_07_stop_over_three_tokens(tokenizer):
    ids = tokenizer.encode("the quick brown fox jumps over the lazy dog")
    whole = tokenizer.decode(ids)
    for start in range(4, len(whole) - 6):
        stop = whole[start : start + 6]
        for size in (1, 3, 8):
            deltas = stream(tokenizer, groups(ids, size), stop=(stop,))
            assert deltas[-1].stop == stop and joined(deltas) == whole[: whole.index(stop)]


def test_case_3_03_kept_ids_are_those_up_to_the_stop(tokenizer):
    ids = tokenizer.encode("the quick brown fox jumps over the lazy dog")
    whole = tokenizer.decode(ids)
    ends = [len(tokenizer.decode(ids[: i + 1])) for i in range(len(ids))]
    for start in range(2, len(whole) - 4):
        stop = whole[start : start + 4]
        end = whole.index(stop) + 4
        for size in (1, 2, 8):
            deltas = stream(tokenizer, groups(ids, size), stop=(stop,))
            assert sum(d.kept for d in deltas) == next(i for i, e in enumerate(ends) if e >= end) + 1


def test_longest_of_two_that_end_together():
    assert run("say goodbye now", ["bye", "goodbye"]) == ("say ", "goodbye", 11)


def test_stop_in_the_flushed_text():
    tokenizer = Tokenizer(TokenizerParts(ALL["byte_level"]()))
    ids = [*tokenizer.encode("end"), tokenizer.backend.token_to_id("ä")]
    deltas = stream(tokenizer, [ids], stop=("\ufffd",))
    assert deltas == [TextDelta("end", "\ufffd", len(ids))]


def test_min_tokens_lets_early_stops_pass():
    assert run("a.b.c.d", ["."], min_tokens=4) == ("a.b", ".", 4)
    assert run("a.b.c.d", ["."], min_tokens=5) == ("a.b.c", ".", 6)


def test_long_stop_string_is_linear():
    """A text that matches a long stop string almost, again and again."""
    stops = StopStrings(["a" * 5000 + "b"])
    out = "".join(stops.feed("a" * 100)[0] for _ in range(200)) + stops.flush()
    assert out == "a" * 20_000


def test_push_after_the_end_is_an_error(tokenizer):
    text = IncrementalText(tokenizer.decoder(), ["."])
    text.push([], True)
    with pytest.raises(RuntimeError, match="after the end"):
        text.push([1], True)


def test_unicode_replacement_follows_the_library():
    """Invalid UTF-8 of every shape becomes as many U+FFFD as in the whole."""
    tokenizer = Tokenizer(TokenizerParts(ALL["byte_level"]()))
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}
    assert len(by_byte) == 256
    rng = random.Random(7)
    shapes = [b"\xf0\x9f\x99", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf", b"\xe0\x80\x80", b"\xff",
              b"\x80", b"a", "世".encode(), "🙂".encode()]
    for _ in range(500):
        raw = b"".join(rng.choice(shapes) for _ in range(rng.randrange(1, 6)))[rng.randrange(2) :]
        ids = [by_byte[bytes([b])] for b in raw]
        assert joined(stream(tokenizer, [[i] for i in ids])) == tokenizer.decode(ids), raw


@pytest.mark.parametrize(("text", "stop"), [("aaab", "aab"), ("ababac", "abac"),
                                            ("aabaabaaab", "aabaaab"), ("#a##b", "##b")])
def test_stop_that_begins_inside_a_near_miss(text, stop):
    assert run(text, [stop]) == (text[: -len(stop)], stop, len(text))


# ------------------------------------------------------------------------------------------------ behind a prompt
@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("text", ["Once upon a time there was", "the  end\n of the story", "don't we'll", "世 世 a"])
def test_prompt_and_answer_are_the_text_of_both(tokenizer, text, cut):
    ids = tokenizer.encode(text)
    if tokenizer.decode(ids) != text:
        pytest.skip("this vocabulary has no tokens for the text")
    for at in range(1, len(ids)):
        answer = IncrementalText.for_request(tokenizer, SamplingParams())
        answer.follow(ids[:at])
        said = "".join(answer.push(each).text for each in groups(ids[at:], cut)) + answer.push([], True).text
        if "\ufffd" not in tokenizer.decode(ids[:at]):  # else the prompt ends inside a character
            assert tokenizer.decode(ids[:at]) + said == text


def test_stop_strings_with_a_space_stop_behind_a_prompt(tokenizer):
    ids = tokenizer.encode("the end")
    answer = IncrementalText.for_request(tokenizer, SamplingParams(stop=(" end",)))
    answer.follow(ids)
    deltas = [answer.push([i]) for i in tokenizer.encode_inside(" end")]
    assert joined(deltas) == "" and deltas[-1].stop == " end"


@pytest.mark.parametrize("skip", [True, False])
def test_answers_behind_a_header_of_a_template_begin_a_text(tokenizer, skip):
    ids = tokenizer.encode("<|im_start|>the end")
    answer = IncrementalText.for_request(tokenizer, SamplingParams(skip_special_tokens=skip))
    answer.follow(ids[:1])
    assert answer.push(ids[1:], True).text == "the end"


REPLACE, STRIP = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "Strip", "content": " "}
FUSE, BYTES = {"type": "Fuse"}, {"type": "ByteFallback"}


@pytest.mark.parametrize("steps, expected", [
    ([REPLACE, BYTES, FUSE, STRIP | {"start": 1, "stop": 0}], True),
    ([REPLACE, BYTES, FUSE], True),
    ([{"type": "Metaspace"}], True),
    ([], False),
    ([{"type": "ByteLevel"}], False),
    ([{"type": "WordPiece"}], False),
    ([FUSE, REPLACE], False),  # the whole text is replaced in
    ([REPLACE | {"pattern": {"Regex": "^a"}}, FUSE], False),
    ([REPLACE, FUSE, STRIP | {"start": 0, "stop": 1}], False),
    ([REPLACE, FUSE, STRIP | {"start": 2, "stop": 0}], False),
    ([REPLACE, STRIP | {"start": 1, "stop": 0}], False),  # of every token
])
def test_which_decoders_need_no_window(steps: list[dict], expected: bool):
    assert is_token_by_token(steps) is expected


def test_most_tokens_are_looked_up(monkeypatch: pytest.MonkeyPatch):
    """Behind a first token the library is asked of each id once, not of every token."""
    backend, asked = byte_fallback(), 0
    decoder = decoder_factory(backend, frozenset())(True)
    ids = backend.encode("the quick brown fox and the lazy dog and the end").ids

    def counted(self, *args, **kwargs):
        nonlocal asked
        asked += 1
        return decode(self, *args, **kwargs)

    decode = WindowDecoder._decode
    monkeypatch.setattr(WindowDecoder, "_decode", counted)
    assert "".join(map(decoder.feed, ids)) + decoder.flush() == backend.decode(ids) and asked == 1

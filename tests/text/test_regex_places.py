"""Places in regular expressions: masks at equal ones are equal, whatever led there; and what is kept is bounded."""

from __future__ import annotations

import gc
import random
from functools import cache

import numpy as np
import pytest
from llguidance import LLTokenizer

from stretto.params import Grammar
from stretto.text import regex_places as module
from stretto.text.grammar import GrammarError, compiled, places_in, texts_of, vocabulary
from stretto.text.mask_cache import KEY_BYTES, MaskCache
from stretto.text.regex_places import NoPlaces, Numbers, Place, RegexPlaces, State, TokenTexts, parsed

FOLLOWED = [
    r"([\w.+-]{1,64}@[\w-]{1,63}(\.[\w-]{1,63})+ )*!{2000}", r"([a-z]{1,9}[ .,])*!{2000}", r"(\w{1,200} ){5}",
    r"[a-z ]{40,300}", r"(a|ab){3,9}(c|bc)*", r"(.|\n){1,500}", r'[^"]{2,100}', r"\d{4}-\d{2}", r"(a*){3}b",
    r"(a?){20,30} *", r"[]a]+[^]a]{2,}", r"[\w&&[^a]]+x", r"[[:alpha:]]{3,}( {1,90}a)*", r"\p{L}+ \PL+",
    r"\x41*\u{e9}+.{3}", r"(?:ab|a)(?:bc|c)[ ]{0,70}", r"(( {3}){4,30}a)+", r"(a{2,3}){2,40}", r"a{100}",
    r"(import|from) [a-c]{2,9}", r"(the quick brown fox|the quiet){3}", r"a{20}b{30}[ab]a{20}", r" {40,90}x",
    r"(|a)b{2}{3}", r"日+[^日]"]
NOT_FOLLOWED = [r"^a", r"a$", r"a\b", r"(?i)a", r"(?P<n>a)", r"a*?", r"a{2,3}?", r"a{3,2}", r"a{", r"*a", r"(a", r"a)",
                r"[a", r"\1", "a" * 1001, "(" * 50 + "a" + ")" * 50, "|".join("ab"[i % 2] * i for i in range(20))]


class Mixed:
    """All bytes, and pieces of a few characters, some of them cut within one; runs of spaces up to a hundred."""

    bos_token_id, end = None, 1500
    special_ids = frozenset({end})

    def __init__(self) -> None:
        rng, found = random.Random(5), {bytes([i]) for i in range(256)} | {b" " * n for n in range(2, 101, 3)}
        found |= {word.encode() for word in ("the", " the", " quick", "import", "imp", "quiet", "from ", "fox")}
        while len(found) < self.end:
            letters = rng.choice(["a", "ab", "abc ", "abc ,.-é日x1_A🎉"])
            word = "".join(rng.choices(letters, k=rng.choice([2, 3, 4, 5, 8, 17, 20, 30]))).encode()
            found.add(word[rng.randrange(2) : len(word) - rng.randrange(2)])
        self.texts = sorted(found)
        self._ids = {text: i for i, text in enumerate(self.texts)}

    def token_bytes(self, token_id: int) -> bytes:
        return b"</s>" if token_id == self.end else self.texts[token_id]

    def encode_inside(self, text: str) -> list[int]:
        """The longest piece first."""
        raw, ids = text.encode(), []
        while raw:
            size = next(n for n in range(min(len(raw), 100), 0, -1) if raw[:n] in self._ids)
            ids.append(self._ids[raw[:size]])
            raw = raw[size:]
        return ids


@cache
def vocabulary_of() -> tuple[LLTokenizer, TokenTexts]:
    tokens = vocabulary(Mixed(), Mixed.end + 1, [Mixed.end])
    return tokens, texts_of(tokens)


NUMBERS = Numbers()


def followed(source: str) -> RegexPlaces | None:
    return places_in(Grammar("regex", source), vocabulary_of()[1], NUMBERS)


def allowed(mask: bytes) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))


def check(source: str, walks: int = 4, steps: int = 40, known: MaskCache | None = None) -> tuple[int, int]:
    """Along random answers, half of their ids long ones: the mask at a place is the one that was made there first, for
    this expression or, where `known` has its masks, for another. Returns how many masks were made, and how many were of
    a place that came again."""
    tokens, texts = vocabulary_of()
    matcher, places = compiled(Grammar("regex", source), tokens), followed(source)
    assert places is not None
    known = MaskCache() if known is None else known
    made = again = 0
    for walk in range(walks):
        rng, here, place = random.Random(walk), matcher.deep_copy(), places.start
        for _ in range(steps):
            mask = here.compute_bitmask()
            made += 1
            ids = [int(i) for i in allowed(mask) if i != Mixed.end]
            if here.is_error() or here.is_stopped() or not ids or place is None:
                break
            before = known.get(places.key(place))
            assert before is None or before.tobytes() == mask, (source, place)
            again += before is not None
            places.reused(1)
            known.put(places.key(place), np.frombuffer(mask, np.int32))
            if rng.random() < 0.5:
                ids = sorted(ids, key=lambda i: -len(texts.texts[i]))[:5]
            token = rng.choice(ids)
            if not here.try_consume_tokens([token]):  # a bound of the library: such answers end there
                assert "too many expressions" in here.get_error(), (source, token, here.get_error())
                break
            place = places.after(place, token)
    return made, again


@pytest.mark.parametrize("source", FOLLOWED)
def test_masks_of_equal_places_are_equal(source: str):
    check(source)


def drawn(rng: random.Random, depth: int = 0) -> str:
    kind = rng.randrange(9 if depth < 3 else 3)
    if kind == 0:
        return rng.choice(["the", "im", "a", "b", "c", " ", " ", "é", "日", "x", ",", r"\."])
    if kind < 3:
        return rng.choice(["a", "b", "[a-c]", r"\w", r"\s", ".", "[^a]", "[ ,]", r"[^\x00-\x7f]", r"\d"])
    if kind < 5:
        return drawn(rng, depth + 1) + drawn(rng, depth + 1)
    if kind == 5:
        return f"({drawn(rng, depth + 1)}|{drawn(rng, depth + 1)})"
    if kind == 6:
        return f"({drawn(rng, depth + 1)})" + rng.choice("*+?")
    least = rng.choice([0, 1, 2, 3, 10, 30])
    most = rng.choice(["", str(least + rng.choice([1, 3, 20, 60]))])
    return f"({drawn(rng, depth + 1)}){{{least},{most}}}"


def check_drawn(seeds: range) -> None:
    made, again, known = 0, 0, MaskCache()
    for seed in seeds:
        try:
            found = check(drawn(random.Random(seed)), 3, 25, known)
        except GrammarError:
            continue  # past the limits
        made, again = made + found[0], again + found[1]
    assert again > made / 3 > len(seeds)


def test_masks_of_equal_places_are_equal_for_expressions_of_all_sorts():
    check_drawn(range(60))


@pytest.mark.full
@pytest.mark.parametrize("part", range(8))
def test_masks_of_equal_places_are_equal_for_many_expressions(part: int):
    check_drawn(range(1000 * (part + 1), 1000 * (part + 1) + 400))


@pytest.mark.parametrize("source", NOT_FOLLOWED, ids=lambda source: source[:12])
def test_what_is_not_followed(source: str):
    assert followed(source) is None


def test_only_regular_expressions_by_themselves_are_followed():
    texts = vocabulary_of()[1]
    assert places_in(Grammar("regex", "b", around='start: "a" @answer'), texts, NUMBERS) is None
    assert places_in(Grammar("ebnf", 'root ::= "a"'), texts, NUMBERS) is None
    with pytest.raises(NoPlaces):
        parsed("a|(b")


def byte_id(byte: bytes) -> int:
    return vocabulary_of()[1].texts.index(byte)


def along(places: RegexPlaces, text: str, place: Place | None = None) -> Place | None:
    """Where the text leads, from the start or from a place."""
    place = place or places.start
    for byte in text.encode():
        place = place and places.after(place, byte_id(bytes([byte])))
    return place


def test_counts_that_no_token_reaches_are_alike():
    """The longest token of letters a to c has 30; of spaces, 98."""
    places, spaces = followed("[a-c]{500}"), followed(" {500}")
    assert places is not None and spaces is not None
    keys = [places.key(along(places, "a" * n)) for n in range(0, 500, 10)]
    assert len(set(keys)) == 1 + sum(500 - n <= 30 for n in range(0, 500, 10))
    numbers = [spaces.key(along(spaces, " " * n)) for n in (0, 300, 399, 410)]
    assert numbers[0] == numbers[1] == numbers[2] != numbers[3] and numbers[0][0] != keys[0][0]


def test_expressions_after_which_the_same_may_follow_share_their_masks():
    """Whatever came before, and however much more there is than any token reaches."""
    first, second = followed("[a-c]{1,500}x"), followed("yes: [a-c]{1,900}x")
    assert first is not None and second is not None
    assert first.key(along(first, "")) == second.key(along(second, "yes: "))
    assert first.key(along(first, "a" * 9)) == second.key(along(second, "yes: " + "b" * 99))
    assert first.key(along(first, "a")) != second.key(along(second, "yes: "))  # x may follow at once


def test_numbers_are_never_given_twice():
    numbers, given = Numbers(most=20), list[int]()
    for source in [*"abcdefgh" * 3, "abc", "(ab|cd)*"] * 2:
        given.append(numbers.of(parsed(source)))
        assert len(numbers._known) <= 21 and numbers.of(parsed(source)) == given[-1]
    assert len(set(given)) == max(given) + 1


def test_a_token_that_cuts_a_character():
    places = followed("(é|日)+x")
    assert places is not None
    start, cut = places.start, places.after(places.start, byte_id("é".encode()[:1]))
    assert cut is not None and cut.state is start.state and places.key(cut) != places.key(start)
    assert places.after(cut, byte_id(b"x")) is None
    assert places.after(start, Mixed.end) is None  # its text is no part of the answer


def test_tables_are_begun_anew_and_places_stay_good(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_ENTRIES", 60)
    for source in FOLLOWED[:3]:
        check(source)
    places = followed("[a-c]{1,90}[a-z]{5}")
    assert places is not None
    kept, key = along(places, "abc"), places.key(along(places, "abc"))
    for n in range(80):
        along(places, "a" * n)
        assert len(places._known) < 60
    assert places.key(kept) == key and places.after(kept, byte_id(b"a")) is not None


def alive() -> int:
    return sum(type(each) is State for each in gc.get_objects())


def test_what_was_forgotten_goes(monkeypatch: pytest.MonkeyPatch):
    """Neither the start nor a place that a turn holds keeps what was found from it."""
    monkeypatch.setattr(module, "MAX_ENTRIES", 300)
    gc.collect()
    before = alive()
    places = followed("([a-z]{1,9}[ .,]){1,5000}")
    assert places is not None
    held, rng, most = [], random.Random(0), 0
    for _ in range(40):
        text = "".join(rng.choice("abc") * rng.randint(1, 9) + rng.choice(" .,") for _ in range(20))
        held.append(along(places, text[: rng.randint(5, 15)]))
        assert along(places, text) is not None
        for place in held[::7]:
            along(places, text[:5], place)
        places.reused(1000)
        most = max(most, alive() - before)
    assert len(held) < most < 300 + len(held) and places.size <= (300 + 9) * module.ENTRY_BYTES


@pytest.mark.parametrize("source", ["[a-z]*", "((id|[a-z]{1,30}),)*"])
def test_places_are_no_cycles(source: str):
    """Of cycles that grow old nothing is freed where the engine runs."""
    gc.collect()
    before = alive()
    places = followed(source)
    assert places is not None and along(places, "a" * 20) is not None
    gc.disable()
    try:
        del places
        assert alive() == before
    finally:
        gc.enable()


def test_work_that_brings_no_mask_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CREDIT", 20)
    places = followed("[a-z]{200}")
    assert places is not None
    assert along(places, "a" * 20) is not None and along(places, "a" * 21) is None
    places.reused(1)
    assert along(places, "a" * 28) is not None and along(places, "a" * 29) is None
    places.reused(1000)
    assert along(places, "a" * 48) is not None and along(places, "a" * 49) is None


def test_a_place_that_grows_too_large_is_left():
    places = followed("(a{2,3}){2,60}")
    assert places is not None
    assert along(places, "a" * 4) is not None and along(places, "a" * 100) is None


# -------------------------------------------------------------------------------------------------------------- masks
def mask(*ids: int) -> np.ndarray:
    bits = np.zeros(128, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def test_masks_are_kept_once_and_those_used_least_recently_go():
    cache = MaskCache(3 * 16 + 4 * KEY_BYTES)
    for key, ids in enumerate([(1, 2), (1, 2), (3, 4), (5, 6)]):
        cache.put(key, mask(*ids))
    assert len(cache) == 4 and cache.size == 3 * 16 + 4 * KEY_BYTES
    cache.put(3, mask(8, 9))
    assert cache.get(3) is not None and cache.get(3).tolist() == mask(5, 6).tolist()
    assert cache.get(0) is not None
    cache.put("more", mask(7, 8))  # one too many: 1 goes, whose mask 0 still needs; then 2
    assert cache.get(1) is None and cache.get(2) is None
    assert cache.get(0).tolist() == mask(1, 2).tolist() and cache.get("more").tolist() == mask(7, 8).tolist()
    assert cache.size == 3 * 16 + 3 * KEY_BYTES


def test_masks_that_are_not_kept():
    cache = MaskCache()
    for key, bits in (("none", mask()), ("one", mask(7)), ("nobody's", np.full(4, -1, np.int32))):
        cache.put(key, bits)
        assert cache.get(key) is None
    assert cache.size == 0

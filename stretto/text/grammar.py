"""Grammars of answers: what a request may ask for, in llguidance's terms, and what is wrong with it.

    kind              source
    json_schema       a JSON schema
    regex             a regular expression (Rust's syntax; the whole answer matches)
    choice            a JSON list of strings
    lark              Lark, with llguidance's additions: %json {...}, lazy rules, <special tokens>
    ebnf              GBNF as llama.cpp and SGLang read it, or Lark
    structural_tag    {"structures": [{"begin", "schema", "end"}], "triggers": [...]}: free text with constrained parts
    llguidance        {"grammars": [...]}, llguidance's own form

What is compiled, and each mask that is made, is bounded by llguidance's fuel, a count of work, so the same grammar is
refused everywhere and always; what its fuel does not count is bounded by `grammar_cost`.
No torch in this module.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, TokenizerWrapper, grammar_from

from stretto.params import Grammar
from stretto.text.grammar_cost import MAX_REMAINDERS, remainders, schemas_of
from stretto.text.json_schema import children, in_other_words
from stretto.text.regex_places import NoPlaces, Numbers, RegexPlaces, TokenTexts

MAX_SOURCE = 512 * 1024  # characters of one grammar
MAX_CHOICES = 10_000
MAX_PLACES = 500  # parts of a broken schema that are tried one by one to name the broken one
LIMITS = LLParserLimits(initial_lexer_fuel=200_000, step_lexer_fuel=200_000, verbose_errors=False)  # a mask: 30 ms
QUICK = LLParserLimits(initial_lexer_fuel=40_000, step_lexer_fuel=40_000, step_max_items=5_000, verbose_errors=False)
QUICK_SOURCE = 16 * 1024  # characters
QUICK_REMAINDERS = 2_000
# Tokens that are allowed together wherever a grammar allows all such texts, besides those of JSON strings: words of \w
# and the like, whose masks take half as long so.
SLICES = ("[a-zA-Z0-9]{1,4}", "[a-zA-Z0-9]{1,10}", *LLTokenizer.general_slices())
PROBED = 2  # tokens that a new grammar is led along: the first one may be forced, which needs no lexer
NO_TEXT = b"\xff"  # no part of any UTF-8
_TOO_COMPLEX = {"ParserTooComplex": "its parser", "LexerTooComplex": "its lexer"}
_TEXTUAL = {"regex": "regex", "lark": "lark", "ebnf": "ebnf"}


class GrammarError(ValueError):
    """A grammar that cannot be used. The message names the place and the cause."""


class GrammarTokenizer(Protocol):
    """The part of a tokenizer that grammars need."""

    bos_token_id: int | None

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode_inside(self, text: str) -> list[int]: ...


class _Source:
    """A tokenizer as llguidance reads it. An id without a token has no bytes and is never allowed."""

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int, eos: int):
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = sorted(i for i in tokenizer.special_ids if i < vocab_size)
        self.eos_token_id, self.bos_token_id = eos, tokenizer.bos_token_id
        self._encode = tokenizer.encode_inside

    def __call__(self, text: str | bytes) -> list[int]:
        raw = text if isinstance(text, bytes) else text.encode()
        ids = self._encode(raw.decode("utf-8", "replace"))
        # Of a text that the tokenizer spells otherwise (normalised, or with an unknown token) nothing is forced.
        return ids if b"".join(self.tokens[i] for i in ids if i < len(self.tokens)) == raw else []


def vocabulary(tokenizer: GrammarTokenizer, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """llguidance's index of a vocabulary; about a second for 150,000 tokens. `vocab_size`: of the model's logits.
    Raises GrammarError where no id ends an answer."""
    if not eos_ids:
        raise GrammarError("this model names no end-of-sequence id, with which an answer that follows a grammar ends")
    wrapped = TokenizerWrapper(_Source(tokenizer, vocab_size, eos_ids[0]))
    return LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=list(eos_ids), slices=list(SLICES))


def texts_of(tokens: LLTokenizer) -> TokenTexts:
    """Of a vocabulary that was indexed."""
    return TokenTexts([NO_TEXT if tokens.is_special_token(i) else tokens.decode_bytes([i]) or NO_TEXT
                       for i in range(tokens.vocab_size)])


def places_in(grammar: Grammar, texts: TokenTexts, numbers: Numbers) -> RegexPlaces | None:
    """The places of a grammar where they can be followed: of most regular expressions, and of nothing else."""
    if grammar.kind != "regex" or grammar.around:
        return None
    matchers: dict[str, LLMatcher] = {}

    def is_in(written: str, character: str) -> bool:
        if written not in matchers:
            one = grammar_from("regex", written)
            matchers[written] = matcher = LLMatcher(_bytes(), one, log_level=0, limits=LIMITS)
            if matcher.is_error():
                raise ValueError(matcher.get_error())
        encoded = list(character.encode())
        return matchers[written].validate_tokens(encoded) == len(encoded)
    try:
        return RegexPlaces(grammar.source, is_in, texts, numbers)
    except NoPlaces:
        return None


def definition(grammar: Grammar) -> str:
    """The grammar in llguidance's form, not compiled. Raises GrammarError where its outer form is wrong."""
    if len(grammar.source) > MAX_SOURCE:
        raise GrammarError(f"the grammar has {len(grammar.source)} characters; the limit is {MAX_SOURCE}")
    try:
        main = _definition(grammar)
    except ValueError as e:
        raise GrammarError(str(e)) from e
    return _surrounded(main, grammar.around) if grammar.around else main


def _definition(grammar: Grammar) -> str:
    kind, source = grammar.kind, grammar.source
    if kind == "json_schema":
        options: Any = {} if grammar.whitespace else {"whitespace_flexible": False}
        schema = _parsed(source, (dict, bool))
        if schema is False:
            raise GrammarError("the schema false allows nothing")
        return LLMatcher.grammar_from_json_schema(_schema_text(schema), overrides=options)
    if kind == "choice":
        choices = _parsed(source, (list,))
        if not choices or len(choices) > MAX_CHOICES or not all(isinstance(c, str) and c for c in choices):
            raise GrammarError(f"a choice is a list of 1 to {MAX_CHOICES} strings that are not empty")
        listed = " | ".join(json.dumps(c).replace("\x7f", r"\u007f") for c in choices)
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {listed}")  # one token of its lexer, one automaton
    if kind in _TEXTUAL and not source:
        raise GrammarError("it is empty; say what the answer must look like, or leave it out")
    if kind in _TEXTUAL:
        return grammar_from(_TEXTUAL[kind], source)  # type: ignore[arg-type]
    if kind == "structural_tag":
        return LLMatcher.grammar_from_lark(StructTag.to_grammar(_tags(_parsed(source, (dict,))), assume_special=False))
    if kind == "llguidance":
        _parsed(source, (dict,))
        return source
    raise GrammarError(f"grammars of the kind {kind!r} are not known; known: json_schema, choice, structural_tag, "
                       "llguidance, " + ", ".join(_TEXTUAL))


def _schema_text(schema: Any) -> str:
    try:
        return "{}" if schema is True else json.dumps(in_other_words(schema), ensure_ascii=False)
    except RecursionError:
        raise GrammarError("its schema is nested too deep") from None


def _parsed(source: str, types: tuple[type, ...]) -> Any:
    try:
        value = json.loads(source)
    except (ValueError, RecursionError) as e:
        raise GrammarError(f"this is not JSON: {e}") from e
    if not isinstance(value, types):
        names = {dict: "an object", list: "a list", bool: "true or false"}
        found = names.get(type(value), "a plain value")
        raise GrammarError(f"this must be {' or '.join(names[t] for t in types)}, not {found}")
    return value


def _tags(tag: dict[str, Any]) -> list[StructTag]:
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list):
        raise GrammarError("a structural tag has a list `structures` of begin, schema and end, and a list `triggers`")
    tags = []
    for i, structure in enumerate(structures):
        begin, end = (structure.get(k) if isinstance(structure, dict) else None for k in ("begin", "end"))
        if not isinstance(begin, str) or not isinstance(end, str):
            raise GrammarError(f"structures[{i}] needs the texts begin and end")
        trigger = next((t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None)
        if trigger is None:
            raise GrammarError(f"structures[{i}].begin is {begin!r}; no trigger begins it")
        schema = structure.get("schema", {})
        schema = schema if isinstance(schema, dict) else _parsed(str(schema), (dict,))
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    return tags


def _surrounded(main: str, rules: str) -> str:
    """`rules` with the grammar in the place of `@answer`."""
    parts = json.loads(main)["grammars"] if main.lstrip().startswith("{") else [{"lark_grammar": main}]
    parts[0] = {**parts[0], "name": "answer"}
    return json.dumps({"grammars": [{"name": "around", "lark_grammar": rules}, *parts]})


def compiled(grammar: Grammar, tokens: LLTokenizer) -> LLMatcher:
    """A matcher at the grammar's beginning, its first mask made, which is most of what a grammar costs. For a thread:
    it may take as long as the limits let it, most of it without the interpreter's lock. Raises GrammarError."""
    text = definition(grammar)
    _check_cost(text)
    matcher = LLMatcher(tokens, text, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise _told(grammar, matcher.get_error())
    _probe(matcher)
    return matcher


def _probe(matcher: LLMatcher) -> None:
    """Makes the first mask of a matcher, and leads a copy along. Raises GrammarError where that is past the limits."""
    first = matcher.compute_bitmask()
    matcher.compute_ff_tokens()
    probe, mask = matcher.deep_copy(), first
    for _ in range(PROBED):
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little"))
        if not allowed.size or probe.is_stopped():
            break
        probe.try_consume_tokens([int(allowed[0])])
        mask = probe.compute_bitmask()
    for each in (matcher, probe):
        if (broken := fault_of(each)) is not None and not is_dead(each):
            raise GrammarError(broken)


def is_dead(matcher: LLMatcher) -> bool:
    """Nothing may follow, which is no fault of its limits."""
    return matcher.get_error().startswith("NoExtension")


def check_grammar(grammar: Grammar, tokens: LLTokenizer | None = None) -> None:
    """Compiles it, over bytes where there are no `tokens`; special tokens that the grammar names then go unchecked.
    Raises GrammarError."""
    try:
        compiled(grammar, tokens or _bytes())
    except GrammarError:
        if tokens is None and _names_special(grammar):
            return
        raise


@functools.cache
def _bytes() -> LLTokenizer:
    """A vocabulary of single bytes."""
    return LLTokenizer("byte")


def _names_special(grammar: Grammar) -> bool:
    """All that is wrong with it is that it names special tokens, which only a vocabulary can tell."""
    text = definition(grammar)
    _check_cost(text)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(text, limits=LIMITS)
    return not is_error and any("special_token" in message for message in messages)


def fault_of(matcher: LLMatcher) -> str | None:
    """Why a matcher is past its limits, or broken."""
    fault = matcher.get_error().partition("\n")[0]
    part = _TOO_COMPLEX.get(matcher.stop_reason()) or ("its lexer" if "too many expressions" in fault else None)
    if part is not None:
        return f"the grammar exceeds the limits of {part} at this point of the answer: simplify it"
    return f"the grammar fails here: {fault}" if fault else None


def is_quick(grammar: Grammar) -> bool:
    """It holds, and takes milliseconds to find out and to compile. Those that take longer, or do not hold, should be
    looked at where these need not wait for them. For a thread."""
    if len(grammar.source) + len(grammar.around) > QUICK_SOURCE:
        return False
    try:
        text = definition(grammar)
        if _remainders(text) > QUICK_REMAINDERS:
            return False
        matcher = LLMatcher(_bytes(), text, log_level=0, limits=QUICK)
        if matcher.is_error():
            return False
        _probe(matcher)
    except GrammarError:
        return False
    return True


def _remainders(text: str) -> int:
    try:
        return sum(remainders(schema) for schema in schemas_of(text))
    except RecursionError:
        raise GrammarError("its schema is nested too deep") from None
    except ValueError as e:
        raise GrammarError(f"this is not JSON: {e}") from e


def _check_cost(text: str) -> None:
    states = _remainders(text)
    if states > MAX_REMAINDERS:
        told = str(states) if states < 10**12 else "more than 10^12"
        raise GrammarError(f"its multipleOf together cost {told} states, one for each remainder; the limit is"
                           f" {MAX_REMAINDERS}: choose a smaller multipleOf, or check it afterwards")


def _told(grammar: Grammar, fault: str) -> GrammarError:
    """The fault of a grammar, with its place in a schema."""
    if grammar.kind != "json_schema":
        return GrammarError(fault.strip())
    return GrammarError(f"at {_place(json.loads(grammar.source), fault)}: {fault.strip()}")


def _fault(text: str) -> str | None:
    is_error, messages = LLMatcher.validate_grammar_with_warnings(text, limits=LIMITS)
    return messages[0] if is_error else None


def _place(schema: Any, fault: str) -> str:
    """A JSON pointer to the innermost part of the schema that is at fault by itself, looked for from outside in."""
    root = {k: schema[k] for k in ("$defs", "definitions", "$schema") if isinstance(schema, dict) and k in schema}
    place, part, tries = "#", schema, 0
    while True:
        for path, child in children(part):
            tries += 1
            if tries > MAX_PLACES:
                return place
            alone = child if isinstance(child, bool) else {**child, **(root if "defs" not in path else {})}
            if _fault(LLMatcher.grammar_from_json_schema(_schema_text(alone))) == fault:
                place, part = place + path, child
                break
        else:
            return place

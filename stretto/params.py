"""What a request asks of the sampler. No torch in this module.

Order in which the processors act, at every position of a verify window: logit bias, bad words, min_tokens (stop ids
masked), penalties (repetition over prompt and output; presence and frequency over output, ids accepted earlier in the
same window included), logit processors of the server's or the client's, allowed ids, grammar; then temperature, top-k,
top-p and min-p, which see only what is left.
Greedy is temperature 0: the lowest id among equal maxima.
"""

from __future__ import annotations

import hashlib
import json
import math
from numbers import Integral, Real
from typing import Any

import msgspec

from stretto.wire import MAX_STOP_IDS

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 256
MAX_BAD_WORD = 32  # ids of one
MAX_PROCESSORS = 8
MAX_PROCESSOR_BYTES = 1 << 18  # of the parameters of one, and of its code
_RANGES = (("temperature", 0.0, 1e6), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0), ("repetition_penalty", 0.0, 1e6),
           ("presence_penalty", -2.0, 2.0), ("frequency_penalty", -2.0, 2.0), ("top_k", -1, 2**31 - 1),
           ("min_tokens", 0, 2**31 - 1))


# types of fields: those that there may be, as they are kept, and in words
_NUMBER = (Real, float, "a number")
_INTEGER = (Integral, int, "an integer")
_MAYBE = (Integral, int, "an integer or None")
_SWITCH = (bool, bool, "True or False")
_TYPES = {**dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
                           "frequency_penalty"), _NUMBER),
          **dict.fromkeys(("top_k", "min_tokens", "n"), _INTEGER),
          **dict.fromkeys(("max_tokens", "seed", "logprobs", "prompt_logprobs", "speculation"), _MAYBE),
          **dict.fromkeys(("ignore_eos", "include_stop", "skip_special_tokens"), _SWITCH)}
_JSON_KINDS = ("json_schema", "choice", "structural_tag", "llguidance")  # of grammars
_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logit_processors")


class ParameterError(ValueError):
    """A sampling parameter that cannot be honoured. `param` is the field's name in the request."""

    def __init__(self, param: str, message: str):
        super().__init__(message)
        self.param = param


def _wrong_type(name: str, value: object, word: str, verb: str = "is") -> ParameterError:
    must = "it must be" if verb == "is" else "each must be"
    return ParameterError(name, f"{name} {verb} {str(value)[:64]!r} ({type(value).__name__}); {must} {word}")


class Grammar(msgspec.Struct, frozen=True):
    """A language that the answer must belong to; `stretto.text.grammar` says what the kinds are and checks them."""

    kind: str  # json_schema | regex | choice | lark | ebnf | structural_tag | llguidance
    source: str  # JSON text of json_schema, choice, structural_tag and llguidance; else the grammar's own text
    whitespace: bool = True  # json_schema: white space between the parts of the JSON text is free
    around: str = ""  # Lark rules; their `start` says where the grammar itself, `@answer`, stands in the answer

    def __post_init__(self) -> None:
        """A source that is JSON may be given as what the text says. Raises ParameterError."""
        if type(self.source) is not str and self.kind in _JSON_KINDS and isinstance(self.source, (dict, list, tuple)):
            try:
                msgspec.structs.force_setattr(self, "source", json.dumps(self.source, ensure_ascii=False))
            except (TypeError, ValueError, RecursionError) as e:
                raise ParameterError("grammar", f"the source of grammar {self.kind} is no JSON: {e}") from None
        for name in ("kind", "source", "around"):
            if not isinstance(value := getattr(self, name), str):
                error = _wrong_type("grammar", value, "text")
                raise ParameterError("grammar", f"{name} of {error}")


class ProcessorUse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A logit processor at work on one request: one of the server's, by `name`, or the client's own code, `source`, in
    the form of `stretto.logit_processors.CustomLogitProcessor.to_str`."""

    name: str = ""
    source: str = ""
    params: dict[str, Any] = {}

    @property
    def key(self) -> str:
        """Uses of equal keys are of one processor."""
        return self.name or "code:" + hashlib.sha256(self.source.encode()).hexdigest()

    @property
    def param(self) -> str:
        """The request's field by which it was asked for."""
        return "logit_processors" if self.name else "custom_logit_processor"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Defaults are those of the OpenAI API, except temperature and top_p, which a model's generation_config may set.

    What no engine could honour raises ParameterError when it is made; what depends on a model or a server, its
    vocabulary and its limit of log-probabilities, is refused by `check` of the engine that a request goes to."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()  # the only ids that may be sampled; (): all. Name the stop ids as well
    bad_words: tuple[tuple[int, ...], ...] = ()  # runs of ids that the text, its prompt included, does not come to hold
    min_tokens: int = 0
    max_tokens: int | None = None  # None: as many as the context has room for; 0: score the prompt only
    seed: int | None = None  # None: a random seed for each request
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False  # keep the matched stop string in the text
    skip_special_tokens: bool = True
    logprobs: int | None = None  # alternatives to report for each generated token; 0: only the token itself; -1: all
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    grammar: Grammar | None = None  # the answer ends with it, finish_reason "stop", whatever min_tokens says
    logit_processors: tuple[ProcessorUse, ...] = ()  # in the order of their names, code last
    speculation: int | None = None  # most drafts a step for this request; None: the server's setting; 0: off

    def __post_init__(self) -> None:
        """Raises ParameterError, naming the field, the value and the limit. Lists become tuples, a stop string a tuple
        of one, None in place of a list an empty one, numbers of other libraries Python's own."""
        self._check_types()
        self._check_ranges()
        for name, most in (("n", MAX_CHOICES), ("logprobs", None), ("prompt_logprobs", None), ("max_tokens", None)):
            self._check_count(name, most)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        self._check_lengths()
        self._check_restrictions()
        self._check_processors()
        for value in self.logit_bias.values():
            if not (math.isfinite(value) and -100 <= value <= 100):
                raise ParameterError("logit_bias", f"a bias is {value}; it must lie in -100..100")

    def check(self, vocab_size: int, max_logprobs: int = MAX_LOGPROBS) -> None:
        """Raises ParameterError, naming the field, the value and the limit. max_logprobs: the server's limit; -1: the
        vocabulary."""
        self._check_logprobs(vocab_size, max_logprobs)
        self._check_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        self._check_ids("logit_bias", self.logit_bias, vocab_size)
        self._check_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        for run in self.bad_words:
            self._check_ids("bad_words", run, vocab_size)

    def _check_types(self) -> None:
        for name, (kind, kept, word) in _TYPES.items():
            value = getattr(self, name)
            if type(value) is kept or (value is None and word is _MAYBE[2]):
                continue
            if not isinstance(value, kind) or (isinstance(value, bool) and kept is not bool):
                raise _wrong_type(name, value, word)
            if type(value) is not int:  # 1 stays 1 where 1.0 would do
                msgspec.structs.force_setattr(self, name, kept(value))
        for name in _LISTS:
            value = getattr(self, name)
            if type(value) is tuple:
                continue
            if value == [] and name == "allowed_token_ids":  # () is the default, and who says [] means something
                raise ParameterError(name, "allowed_token_ids is empty, which leaves nothing to generate; leave it out"
                                           " to allow all tokens")
            if not isinstance(value, (tuple, list, type(None), str if name == "stop" else tuple)):
                raise _wrong_type(name, value, "a tuple")
            msgspec.structs.force_setattr(self, name, (value,) if isinstance(value, str) else tuple(value or ()))
        if not isinstance(self.logit_bias, dict):
            raise _wrong_type("logit_bias", self.logit_bias, "a dict of token ids and biases")
        if not isinstance(self.grammar, (Grammar, type(None))):
            raise _wrong_type("grammar", self.grammar, "a Grammar, such as Grammar('regex', '[0-9]+')")
        self._check_items()

    def _check_items(self) -> None:
        for use in self.logit_processors:
            if not isinstance(use, ProcessorUse):
                raise _wrong_type("logit_processors", use, "a ProcessorUse", "holds")
        for text in self.stop:
            if not isinstance(text, str):
                raise _wrong_type("stop", text, "text", "holds")
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("allowed_token_ids", self.allowed_token_ids),
                          ("logit_bias", self.logit_bias)):
            for token in ids:
                if not isinstance(token, Integral):
                    raise _wrong_type(name, token, "a token id", "holds")
        for value in self.logit_bias.values():
            if not isinstance(value, Real):
                raise _wrong_type("logit_bias", value, "a number", "holds")
        for run in self.bad_words:
            if not isinstance(run, (tuple, list)) or not all(isinstance(token, Integral) for token in run):
                raise _wrong_type("bad_words", run, "the token ids of a word, which encode_inside of the tokenizer"
                                                    " gives", "holds")
        if any(type(run) is list for run in self.bad_words):
            msgspec.structs.force_setattr(self, "bad_words", tuple(map(tuple, self.bad_words)))

    def _check_count(self, name: str, most: int | None) -> None:
        value = getattr(self, name)
        least = {"n": 1, "max_tokens": 0}.get(name, -1)
        if value is not None and not (value >= least and (most is None or value <= most)):
            room = f"lie in {least}..{most}" if most is not None else f"be {least} or more"
            free = "; without it an answer may fill the context" if name == "max_tokens" else ""
            raise ParameterError(name, f"{name} is {value}; it must {room}{free}")

    def _check_lengths(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ParameterError("stop", f"{len(self.stop)} stop strings; the limit is {MAX_STOP_STRINGS}")
        if not all(self.stop):
            raise ParameterError("stop", "a stop string is empty")
        if len(self.stop_token_ids) > MAX_STOP_IDS // 2:
            raise ParameterError("stop_token_ids", f"{len(self.stop_token_ids)} ids; the limit is {MAX_STOP_IDS // 2}")
        if len(self.logit_bias) > MAX_BIASES:
            raise ParameterError("logit_bias", f"{len(self.logit_bias)} entries; the limit is {MAX_BIASES}")

    def _check_restrictions(self) -> None:
        if self.allowed_token_ids and self.grammar is not None:
            raise ParameterError("allowed_token_ids", "allowed_token_ids and a grammar exclude each other: the ids may"
                                 " leave nothing of what the grammar demands; say it in the grammar")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise ParameterError("bad_words", f"bad_words has {len(self.bad_words)} words; the limit is"
                                              f" {MAX_BAD_WORDS}")
        for run in self.bad_words:
            if not 1 <= len(run) <= MAX_BAD_WORD:
                raise ParameterError("bad_words", f"bad_words has one of {len(run)} tokens; it must have"
                                                  f" 1..{MAX_BAD_WORD}")

    def _check_logprobs(self, vocab_size: int, limit: int) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value, most = getattr(self, name), vocab_size if limit < 0 else limit
            if value == -1 and most < vocab_size:
                raise ParameterError(name, f"{name} is -1, all {vocab_size} tokens; this server's limit is {most}"
                                           " (--max-logprobs)")
            if value is not None and not -1 <= value <= most:
                raise ParameterError(name, f"{name} is {value}; it must lie in 0..{most}")

    def alternatives(self, vocab_size: int) -> tuple[int | None, int | None]:
        """`logprobs` and `prompt_logprobs` as numbers of tokens: -1 is the vocabulary's size."""
        wanted = (self.logprobs, self.prompt_logprobs)
        first, second = (vocab_size if n == -1 else n for n in wanted)
        return first, second

    def _check_processors(self) -> None:
        if len(self.logit_processors) > MAX_PROCESSORS:
            raise ParameterError("logit_processors", f"{len(self.logit_processors)} logit_processors; the limit is"
                                                     f" {MAX_PROCESSORS}")
        keys = [use.key for use in self.logit_processors]
        for use in self.logit_processors:
            if bool(use.name) == bool(use.source):
                raise ParameterError("logit_processors", "each of logit_processors has either a name or a source")
            if keys.count(use.key) > 1:
                raise ParameterError(use.param, f"{use.param} names {use.name or 'the same code'} twice")
            size = len(msgspec.json.encode(use))
            if size > MAX_PROCESSOR_BYTES:
                raise ParameterError(use.param, f"{use.param} takes {size} bytes, code and parameters; the limit is"
                                                f" {MAX_PROCESSOR_BYTES}")

    def _check_ranges(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise ParameterError(name, f"{name} is {value}; it must lie in {low:g}..{high:g}")
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0:
                raise ParameterError(name, f"{name} is 0; it must be above 0")
        if self.speculation is not None and self.speculation < 0:
            raise ParameterError("speculation", f"speculation is {self.speculation}; it must be 0 or more")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ParameterError("seed", f"seed is {self.seed}; it must fit 64 bits")

    @staticmethod
    def _check_ids(param: str, ids, vocab_size: int) -> None:
        for i in ids:
            if not 0 <= i < vocab_size:
                raise ParameterError(param, f"{param} names token id {i}; the vocabulary has ids 0..{vocab_size - 1}")

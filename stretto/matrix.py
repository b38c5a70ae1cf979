"""Which features work together, and what shows it. No torch in this module.

    FEATURES     the rows, and columns, of the matrix; one declaration each
    REFUSALS     pairs that cannot work, with the sentence by which they are refused
    matrix.json  for every other pair a test in which both happened: written by `make docs`, which collects
                 what the tests declare (`tests/proofs.py`: a declared feature that did not happen fails its test)

A new feature is one line in FEATURES; its cells are "untested", and a test fails, until a test proves them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

RECORD = Path(__file__).with_name("matrix.json")


class Feature(NamedTuple):
    """`option`: features of one option exclude each other, like two page sizes; "": an option of its own. `shown`: what
    a test must have seen to call the feature proved."""

    name: str
    shown: str
    option: str = ""


FEATURES: tuple[Feature, ...] = (
    Feature("mixed chunk", "steps with both a prompt's chunk and a decoding row"),
    Feature("overlap", "steps launched before the result of the step before was there"),
    Feature("retraction", "a request lost its pages while it answered, and came back"),
    Feature("abort", "a request was ended after its first tokens, beside others"),
    Feature("prefix cache", "cells that another request had computed"),
    Feature("host memory", "KV that was copied to host memory when its pages went, and back when it was needed"),
    Feature("FP8 KV cache", "heads of keys that were written in 8 bits"),
    Feature("window", "pages behind the window that were given back while their request ran", "layers"),
    Feature("recurrent state", "tokens fed to a model half of whose layers keep a state in place of cells", "layers"),
    *(Feature(f"page size {size}", "sequences of several pages", "page size") for size in (1, 16, 64, 256)),
    Feature("session: tag", "a second turn that sent its history again, and computed only what was new", "session"),
    Feature("session: append", "a second turn that sent only what was new, and computed only that", "session"),
    *(Feature(f"drafter {name}", "drafts that were verified", "drafter")
      for name in ("ngram", "suffix", "standalone", "eagle", "eagle3", "mtp", "dflash", "dspark")),
    Feature("elastic speculation", "rows that were given fewer drafts than they may have, by gain and cost"),
    Feature("rejection sampling", "drafts that were accepted by chance, from what they were drawn from"),
    Feature("deterministic", "an answer that came again bit for bit, without anybody beside it"),
    Feature("embeddings", "vectors of requests beside the others, equal to the model's own"),
    Feature("logprobs", "a log-probability for every token, equal to the model's own"),
    Feature("prompt logprobs", "a log-probability for every token of the prompt, equal to the model's own"),
    Feature("penalties", "tokens that would have been others without repetition, presence and frequency penalties"),
    Feature("seed", "tokens drawn by the request's seed that are not the likeliest"),
    Feature("grammar", "answers that a regular expression bound, and ended"),
    Feature("n > 1", "choices that were forked from one prompt"),
    Feature("streaming", "text that came in pieces and equals the text of all tokens"),
    Feature("logit processor", "places where a processor of the server's changed which token is the likeliest"),
    Feature("tensor parallelism", "steps that two ranks ran, each with its part of the model, to the same result"),
    Feature("LoRA adapter", "answers of the adapter that the model itself would not give"),
    *(Feature(f"attention {name}", "the backend of the run", "attention") for name in ("torch", "native", "triton")),
    *(Feature(name, "the type of weights, activations and KV cells", "dtype")
      for name in ("float32", "bfloat16", "float16")),
)


class Refusal(NamedTuple):
    """The sentence is a part of what the user is told."""

    first: str
    second: str
    sentence: str


_ONE_ANSWER = ("a session's turn has n 1, since its answer becomes the history: branch the session for other answers")
_POINT = "it does not draw its ids, so there is no probability to divide by"
REFUSALS: tuple[Refusal, ...] = (Refusal("n > 1", "session: tag", _ONE_ANSWER),
                                 Refusal("n > 1", "session: append", _ONE_ANSWER),
                                 Refusal("rejection sampling", "drafter ngram", _POINT),
                                 Refusal("rejection sampling", "drafter suffix", _POINT),
                                 Refusal("deterministic", "rejection sampling",
                                         "a seed's text depends on which positions were drafted"),
                                 Refusal("deterministic", "LoRA adapter",
                                         "how an adapter's products round depends on the batch"),
                                 Refusal("attention native", "float16",
                                         "float16 has no native kernels of attention"))


class Proof(NamedTuple):
    """A test in which all of these features happened, to the same requests."""

    test: str
    features: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """`says`: the test's id, or the sentence of the refusal."""

    state: Literal["yes", "refused", "untested", "one at a time"]
    says: str = ""


@dataclass(frozen=True)
class Matrix:
    proofs: tuple[Proof, ...]
    features: tuple[Feature, ...] = FEATURES
    refusals: tuple[Refusal, ...] = REFUSALS

    @cached_property
    def by_name(self) -> dict[str, Feature]:
        return {feature.name: feature for feature in self.features}

    @cached_property
    def _proved(self) -> dict[frozenset[str], Proof]:
        """Each pair's first proof."""
        found: dict[frozenset[str], Proof] = {}
        for proof in self.proofs:
            for pair in pairs(proof.features):
                found.setdefault(pair, proof)
        return found

    def cell(self, first: str, second: str) -> Cell:
        """Of two features by name, in any order; of one with itself: that it works at all. Raises KeyError."""
        a, b = self.by_name[first], self.by_name[second]
        if first != second and a.option and a.option == b.option:
            return Cell("one at a time")
        for refusal in self.refusals:
            if {refusal.first, refusal.second} == {first, second}:
                return Cell("refused", refusal.sentence)
        proof = self._proved.get(frozenset((first, second)))
        return Cell("yes", proof.test) if proof else Cell("untested")

    def untested(self) -> list[tuple[str, str]]:
        names = [feature.name for feature in self.features]
        return [(a, b) for a, b in itertools.combinations_with_replacement(names, 2)
                if self.cell(a, b).state == "untested"]


def pairs(features: Iterable[str]) -> set[frozenset[str]]:
    """Of each feature with each, itself included."""
    return {frozenset(pair) for pair in itertools.combinations_with_replacement(sorted(features), 2)}


def fewest(*ranks: Sequence[Proof]) -> tuple[Proof, ...]:
    """Proofs that show every pair that any of them shows, those of earlier ranks before those of later ones: in each
    round the one that adds most, the earliest of equals."""
    chosen: list[Proof] = []
    shown: set[frozenset[str]] = set()
    for proofs in ranks:
        left = set().union(*(pairs(proof.features) for proof in proofs)) - shown
        shown |= left
        while left:
            best = max(proofs, key=lambda proof: len(pairs(proof.features) & left))
            left -= pairs(best.features)
            chosen.append(best)
    return tuple(chosen)


def load(path: Path = RECORD) -> Matrix:
    return Matrix(tuple(Proof(one["test"], tuple(one["features"])) for one in json.loads(path.read_text())))


def dump(matrix: Matrix) -> str:
    """As `load` reads it; one proof a line."""
    lines = [json.dumps({"test": proof.test, "features": sorted(proof.features)}) for proof in matrix.proofs]
    return "[\n" + ",\n".join(lines) + "\n]\n"

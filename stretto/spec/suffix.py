"""SUFFIX: proposals from suffix trees of a request's own ids and of other requests' answers, on the host.

Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975) by the package arctic-inference, an optional extra. Under overlap
a proposal of the host is late, and longer to make up for it (`wire.HostDraft`). Answers are remembered across requests,
whatever their cache_salt: `suffix:requests=0` remembers none.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stretto.spec.api import Drafter, DrafterCaps
from stretto.spec.context import DrafterContext, DrafterError, DrafterMissing

PACKAGE, INSTALL = "arctic_inference.suffix_decoding", "pip install 'stretto[suffix]'"
WIDEST = 32
DEPTH = 64  # ids of a suffix, at most
REQUESTS = 1000  # whose answers are remembered
ACTIVE = 512  # sequences followed at one time
TAIL = 8  # ids by which a sequence is recognised


class Suffix:
    """`spec.context.DrafterKind`. Settings: requests=N."""

    def caps(self, settings: str) -> DrafterCaps:
        return DrafterCaps(shape="chain", max_width=WIDEST, variable=True, where="host")

    def make(self, settings: str, context: DrafterContext) -> Drafter:
        raise DrafterError("drafter suffix proposes on the host: there is nothing of it on the device")

    def host(self, settings: str) -> SuffixProposals:
        """Raises DrafterError where the package is missing or a setting is none."""
        key, _, value = settings.partition("=")
        if settings and (key != "requests" or not value.isdigit()):
            raise DrafterError(f"drafter suffix: {settings!r} is no setting; it takes requests=N")
        try:
            trees = importlib.import_module(PACKAGE)
        except ImportError as e:
            raise DrafterMissing(f"drafter suffix needs the package arctic-inference ({e}): {INSTALL}") from e
        return SuffixProposals(trees.SuffixDecodingCache(DEPTH, int(value) if settings else REQUESTS))


@dataclass
class _Followed:
    """A sequence that is in the trees up to `length`."""

    serial: int
    length: int
    tail: list[int]  # its last ids up to `length`


class SuffixProposals:
    """`host.limits.HostDrafter`. A sequence is a list that grows at its end; another list at the same place, or one
    that was cut, is a new sequence."""

    def __init__(self, cache: Any):
        self._cache = cache
        self._followed: OrderedDict[int, _Followed] = OrderedDict()  # by the list's identity, last used last
        self._serial = 0

    def __call__(self, tokens: Sequence[int], width: int) -> list[int]:
        sequence = self._follow(tokens)
        return list(self._cache.speculate(sequence.serial, list(tokens[-DEPTH:]), max_spec_tokens=width).token_ids)

    def _follow(self, tokens: Sequence[int]) -> _Followed:
        key, known = id(tokens), self._followed.pop(id(tokens), None)
        if known is not None and not self._continues(tokens, known):
            self._cache.stop_request(known.serial)
            known = None
        if known is None:
            self._serial += 1
            known = _Followed(self._serial, len(tokens), [])
            self._cache.start_request(known.serial, list(tokens))
        elif len(tokens) > known.length:
            self._cache.add_active_response(known.serial, list(tokens[known.length :]))
        known.length, known.tail = len(tokens), list(tokens[-TAIL:])
        self._followed[key] = known
        if len(self._followed) > ACTIVE:
            self._cache.stop_request(self._followed.popitem(last=False)[1].serial)
        return known

    @staticmethod
    def _continues(tokens: Sequence[int], known: _Followed) -> bool:
        start = known.length - len(known.tail)
        return len(tokens) >= known.length and list(tokens[start : known.length]) == known.tail

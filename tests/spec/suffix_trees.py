"""Stands in for the trees of arctic-inference where that optional package is not installed: the same calls, answered by
searching lists. Everything around the trees is the product's."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any


class SuffixDecodingCache:
    def __init__(self, max_tree_depth: int, max_cached_requests: int):
        self._depth, self._most = max_tree_depth, max_cached_requests
        self._sequences: dict[int, list[int]] = {}
        self._stopped: list[int] = []  # whose answers others may still be told

    def start_request(self, serial: int, prompt: list[int]) -> None:
        self._sequences[serial] = list(prompt)
        while len(self._stopped) > self._most:
            del self._sequences[self._stopped.pop(0)]

    def add_active_response(self, serial: int, ids: list[int]) -> None:
        self._sequences[serial] += ids

    def stop_request(self, serial: int) -> None:
        self._stopped.append(serial)

    def speculate(self, serial: int, context: list[int], max_spec_tokens: int) -> Any:
        for length in range(min(4, len(context)), 0, -1):
            wanted = context[-length:]
            for ids in reversed(self._sequences.values()) if self._most else [self._sequences[serial]]:
                for at in range(len(ids) - length - 1, -1, -1):
                    if ids[at : at + length] == wanted:
                        return SimpleNamespace(token_ids=ids[at + length : at + length + max_spec_tokens])
        return SimpleNamespace(token_ids=[])


def install(monkeypatch: Any) -> None:
    """Where the package is missing, this takes its place."""
    try:
        import arctic_inference.suffix_decoding  # noqa: F401
    except ImportError:
        package, module = ModuleType("arctic_inference"), ModuleType("arctic_inference.suffix_decoding")
        module.SuffixDecodingCache = SuffixDecodingCache  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "arctic_inference", package)
        monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", module)

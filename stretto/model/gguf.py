"""GGUF files as a source of weights.

Tensors come by their Hugging Face names (`gguf_tensors`), of the architectures in `gguf_config`. Quantised ones stay
packed (`ops.packed`) where the device multiplies by them; others are dequantised to float32 by the `gguf` package when
they are read, and the model casts them to its dtype. Whatever in the file would change the model's output and is not
supported here is refused by name.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from stretto.model import gguf_blocks as blocks
from stretto.model.config import ConfigError
from stretto.model.gguf_config import config_of, family_of, open_file
from stretto.model.gguf_tensors import Stored, names_of
from stretto.model.source import WeightError
from stretto.ops.packed import Layout, Packed

log = logging.getLogger(__name__)


class GGUFSource:
    """A WeightSource over a GGUF file. Tensors come in float32 if they were quantised."""

    def __init__(self, path: str | Path):
        """Raises WeightError for a file that is damaged or holds tensors that cannot be served, ConfigError for an
        architecture that is not supported."""
        self._file = open_file(path)
        self._unpacked: Counter[str] = Counter()  # numbers that were quantised and have been dequantised, by kind
        try:
            config = config_of(self._file)
        except ConfigError as e:
            raise ConfigError(f"{self._file.path}: {e}") from None
        self._stored, unknown = names_of(family_of(self._file).tensors, self._file.tensors, config,
                                         config["num_hidden_layers"])
        if unknown:
            raise WeightError(f"{self._file.path} holds tensors that {family_of(self._file).architecture} does not "
                              f"have: {_some(unknown)}")
        unreadable = [f"{info.name} ({info.kind.name})" for info in self._file.tensors.values()
                      if info.kind not in blocks.QUANTISED and info.kind not in blocks.PLAIN]
        if unreadable:
            kinds = ", ".join(sorted(kind.name for kind in (*blocks.PLAIN, *blocks.QUANTISED)))
            raise WeightError(f"{self._file.path}: quantisation not supported: {_some(unreadable)}; supported: {kinds}")

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def tensor(self, name: str) -> torch.Tensor:
        stored = self._stored[name]
        parts = [blocks.numbers(kind, rows) for kind, rows in self._rows(stored)]
        for kind, part in zip(self._kinds(stored), parts, strict=True):
            if kind in blocks.QUANTISED:
                self._unpacked[kind.name] += part.numel()
        same = len({part.dtype for part in parts}) == 1
        found = parts[0] if len(parts) == 1 else torch.cat(parts if same else [part.float() for part in parts])
        if stored.order is not None:
            found = found[stored.order]
        if stored.change is not None:
            found = stored.change(found)
        if stored.transposed:
            experts, inputs, rows = stored.shape
            return found.reshape(experts, rows, inputs).transpose(1, 2)
        return found.reshape(stored.shape)

    def layout(self, name: str) -> Layout | None:
        """See `source.PackedSource`."""
        kinds = set(self._kinds(self._stored[name]))
        if len(kinds) > 1 or self._stored[name].change is not None:
            return None
        return blocks.layout(kinds.pop())

    def packed(self, name: str) -> Packed:
        """See `source.PackedSource`."""
        stored = self._stored[name]
        (kind, *_), parts = self._kinds(stored), [rows for _, rows in self._rows(stored)]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return blocks.packed(kind, rows if stored.order is None else rows[stored.order.numpy()])

    def told(self, dtype: torch.dtype) -> None:
        """See `source.PackedSource`. Exact types cost only what they cost, which is told by whoever plans memory."""
        if self._unpacked and dtype.itemsize == 2:
            log.warning("weights stored as %s were dequantised at load: %.2f GB of %s",
                        ", ".join(sorted(self._unpacked)), self._unpacked.total() * 2 / 1e9,
                        str(dtype).removeprefix("torch."))

    def _kinds(self, stored: Stored) -> list[Kind]:
        return [self._file.tensors[part.tensor].kind for part in stored.rows]

    def _rows(self, stored: Stored) -> Iterable[tuple[Kind, np.ndarray]]:
        """The bytes of each part, uint8 [rows, bytes of a row], mapped."""
        for part in stored.rows:
            info = self._file.tensors[part.tensor]
            count = info.shape[0] if len(info.shape) == 1 else int(np.prod(info.shape[:-1]))
            data = self._file.data(info.name).reshape(count, -1)
            yield info.kind, data[part.start : None if part.count is None else part.start + part.count]


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

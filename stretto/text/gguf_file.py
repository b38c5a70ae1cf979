"""The GGUF container: metadata, tensor table, and the mapped bytes of each tensor.

    magic | version | tensor count | key count | key-values | tensor infos | padding | data, each tensor aligned

The `gguf` package knows the types and how to dequantise them, and is used for both. Its reader makes an array object
for every string of the file, which takes seconds for a vocabulary; this one reads a header in a tenth of a second, and
says where a damaged file ends. Only little-endian files of version 2 and 3. No torch in this module.

Of a split model (`gguf_names`) the first part holds the metadata, and all hold tensors.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from stretto.text.gguf_names import parts_of

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32


class GGUFError(ValueError):
    """A GGUF file that cannot be used: damaged, of an unknown version, or holding what is not supported."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor. `shape` in row-major order (the file stores it reversed); `offset` from the start of the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    nbytes: int


class GGUFFile:
    """An opened GGUF file, or all parts of a split one. Files stay mapped as long as the object, or an array from it,
    lives."""

    def __init__(self, path: str | Path):
        """`path`: the file, or any part. Raises GGUFError for a file that is damaged or not GGUF, and for a part that
        is missing, OSError for one that cannot be opened."""
        self.path = Path(path)
        first, *others = self._find_parts()
        self._parts = [_Part(first), *map(_Part, others)]
        self.metadata: dict[str, Any] = self._parts[0].header.metadata
        if (count := self.metadata.get("split.count", 1)) > max(1, len(self._parts)):
            raise GGUFError(f"{self.path} is one of {count} parts of a split model, which are not named as such; name "
                            "them NAME-00001-of-00002.gguf and so on, or merge them (llama-gguf-split --merge)")
        self.tensors: dict[str, TensorInfo] = {}
        self._where: dict[str, _Part] = {}
        for part in self._parts:
            if twice := sorted(part.header.tensors.keys() & self.tensors.keys()):
                raise GGUFError(f"{part.path} holds {twice[0]}, which another part holds as well")
            self.tensors |= part.header.tensors
            self._where |= dict.fromkeys(part.header.tensors, part)
        wanted = self.metadata.get("split.tensors.count", len(self.tensors))
        if wanted != len(self.tensors):
            raise GGUFError(f"{self.path} and its other parts hold {len(self.tensors)} tensors instead of {wanted}; "
                            "fetch all parts again, from one place")

    def _find_parts(self) -> list[Path]:
        parts = parts_of(self.path)
        missing = [part.name for part in parts if not part.is_file()]
        if len(parts) > 1 and missing:
            raise GGUFError(f"{self.path} is one of {len(parts)} parts of a split model, and {', '.join(missing[:5])}"
                            f"{' and others are' if len(missing) > 5 else ' is'} not beside it: fetch all parts")
        return parts

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def data(self, name: str) -> np.ndarray:
        """The tensor's bytes, mapped: uint8, one row of the file's layout per row of the tensor."""
        info = self.tensors[name]
        raw = np.frombuffer(self._where[name].map, dtype=np.uint8, count=info.nbytes, offset=info.offset)
        return raw.reshape(*info.shape[:-1], -1)


class _Part:
    """One mapped file and its header."""

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as f:
            if not path.stat().st_size:
                raise GGUFError(f"{path} is empty")
            self.map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)  # arrays are writable, the file is not
        try:
            self.header = _Header(self.map)
        except (struct.error, UnicodeDecodeError, OverflowError) as e:
            raise GGUFError(f"{path}: the header is damaged or cut off ({e}); fetch the file again") from e
        except GGUFError as e:
            raise GGUFError(f"{path}: {e}") from e
        end = max((t.offset + t.nbytes for t in self.header.tensors.values()), default=0)
        if end > len(self.map):
            raise GGUFError(f"{path} is cut off: it has {len(self.map)} bytes, its tensors need {end};"
                            " fetch the file again")


class _Header:
    """A cursor over the header; reads it all at construction."""

    def __init__(self, data: mmap.mmap):
        self._data, self._at = data, 4
        if data[:4] != _MAGIC:
            raise GGUFError("not a GGUF file")
        version = self._scalar("<I")
        if version not in _VERSIONS:
            big = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            raise GGUFError("a big-endian GGUF file; only little-endian ones are supported" if big else
                            f"GGUF version {version}; supported are {', '.join(map(str, _VERSIONS))}")
        n_tensors, n_keys = self._scalar("<Q"), self._scalar("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("<I"))
        infos = [self._tensor_info() for _ in range(n_tensors)]
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise GGUFError(f"general.alignment is {alignment!r}, not a power of two")
        start = -(-self._at // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in infos:
            if name in self.tensors:
                raise GGUFError(f"two tensors are called {name}")
            self.tensors[name] = TensorInfo(name, shape, kind, start + offset, _nbytes(name, shape, kind))

    def _scalar(self, code: str) -> Any:
        value = struct.unpack_from(code, self._data, self._at)[0]
        self._at += struct.calcsize(code)
        return value

    def _string(self) -> str:
        length = struct.unpack_from("<Q", self._data, self._at)[0]
        start, self._at = self._at + 8, self._at + 8 + length
        if self._at > len(self._data):
            raise GGUFError("the header is cut off inside a string; fetch the file again")
        return self._data[start : self._at].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise GGUFError(f"metadata of unknown type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> list:
        kind, count = self._scalar("<I"), self._scalar("<Q")
        if count > len(self._data):  # every element takes a byte at least
            raise GGUFError("the header is cut off inside an array; fetch the file again")
        if kind in _SCALARS:
            code = _SCALARS[kind]
            values = struct.unpack_from(f"<{count}{code[1]}", self._data, self._at)
            self._at += count * struct.calcsize(code)
            return list(values)
        read: Callable[[], Any] = self._string if kind == _STRING else lambda: self._value(kind)
        return [read() for _ in range(count)]

    def _tensor_info(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name, n_dims = self._string(), self._scalar("<I")
        dims = [self._scalar("<Q") for _ in range(n_dims)]
        kind, offset = self._scalar("<I"), self._scalar("<Q")
        try:
            return name, tuple(reversed(dims)), GGMLQuantizationType(kind), offset
        except ValueError:
            raise GGUFError(f"tensor {name} has the unknown type {kind}; a newer gguf package may know it") from None


def _nbytes(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block, size = GGML_QUANT_SIZES[kind]
    if not shape or shape[-1] % block:
        raise GGUFError(f"tensor {name} of shape {list(shape)} does not divide into blocks of {block} ({kind.name})")
    return math.prod(shape) // block * size

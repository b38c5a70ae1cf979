"""Which adapters are loaded, and under which number. Requests name an adapter; the device knows numbers.

A number is given again only when no live turn has it. KV cells depend on the adapter, so its name and serial go into
the salt of the prefix tree: two loads of one name share nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stretto.protocol import RequestError


@dataclass(frozen=True)
class Adapter:
    name: str
    path: str
    number: int  # 1..count
    serial: int


class Adapters:
    """`count`: how many may be loaded at once."""

    def __init__(self, count: int):
        self.count = count
        self._loaded: dict[str, Adapter] = {}
        self._serials = 0

    @property
    def names(self) -> dict[str, str]:
        """Name -> path."""
        return {adapter.name: adapter.path for adapter in self._loaded.values()}

    def of(self, name: str) -> Adapter:
        """Raises RequestError where it is not loaded."""
        adapter = self._loaded.get(name)
        if adapter is None:
            raise RequestError(f"the adapter {name!r} is not loaded", param="model", code="model_not_found")
        return adapter

    def vacancy(self, name: str, in_use: Iterable[int]) -> int:
        """The number that a new adapter would get; `in_use`: numbers of live turns. Raises RequestError."""
        if name in self._loaded:
            raise RequestError(f"the adapter {name!r} is loaded already: unload it first", param="lora_name")
        taken = {adapter.number for adapter in self._loaded.values()} | set(in_use)
        free = [number for number in range(1, self.count + 1) if number not in taken]
        if not free:
            raise RequestError(f"{len(self._loaded)} adapters are loaded, and this server has room for {self.count}"
                               " (requests of unloaded ones count until they end): unload one, or start it with a"
                               " larger --max-loras", param="lora_name")
        return free[0]

    def add(self, name: str, path: str, number: int) -> None:
        self._serials += 1
        self._loaded[name] = Adapter(name, path, number, self._serials)

    def remove(self, name: str) -> None:
        """Its live turns go on; no new one may name it. Raises RequestError where it is not loaded."""
        del self._loaded[self.of(name).name]


def salted(salt: str, adapter: Adapter) -> str:
    """The salt of prefixes that were computed under an adapter."""
    return f"{salt}\0{adapter.name}\0{adapter.serial}"

"""Loads and unloads LoRA adapters while the engine runs: file -> number -> device, between two steps."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from pathlib import Path

from stretto.device.runner import Runner
from stretto.device.streams import DeviceHalf
from stretto.host.half import HostHalf
from stretto.model.digest import digest
from stretto.model.lora import AdapterError, read_adapter
from stretto.protocol import LoadAdapter, RequestError, UnloadAdapter

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PutAdapter:
    """Reads an adapter's files and puts it in place `number`, which no row in flight has. Raises AdapterError, also
    where the files are not those of rank 0's `digest`. Plain data, so that it can go to every rank, each of which takes
    its own part."""

    number: int
    path: Path
    digest: str

    def __call__(self, runner: Runner) -> None:
        assert runner.adapters is not None, "there is no room for adapters"
        adapter = read_adapter(self.path)
        if digest(self.path) != self.digest:
            raise AdapterError(f"the adapter {self.path} on {socket.gethostname()} has other files than at rank 0: give"
                               " every host the same files")
        runner.adapters.check(adapter)
        runner.adapters.load(self.number, adapter)
        logger.info("adapter %d is %s: rank %d, %d modules", self.number, self.path, adapter.rank, len(adapter.modules))


class AdapterLoader:
    def __init__(self, host: HostHalf, device: DeviceHalf):
        self._host, self._device = host, device

    @property
    def names(self) -> dict[str, str]:
        """Name -> path of those that requests may name."""
        registry = self._host.limits.adapters
        return registry.names if registry is not None else {}

    def carry_out(self, action: LoadAdapter | UnloadAdapter) -> None:
        """Raises RequestError for an adapter that cannot be used, or is not there."""
        registry = self._host.limits.adapters
        assert registry is not None
        if isinstance(action, UnloadAdapter):
            registry.remove(action.name)
            logger.info("adapter %s unloaded", action.name)
            return
        number = registry.vacancy(action.name, self._host.adapters_in_use)
        path = Path(action.path).expanduser()
        try:
            self._device.between(PutAdapter(number, path, digest(path)))
        except (AdapterError, OSError) as e:
            raise RequestError(str(e), param="lora_path") from e
        registry.add(action.name, action.path, number)
        logger.info("adapter %s loaded", action.name)

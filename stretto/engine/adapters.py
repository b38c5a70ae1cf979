"""Loads and unloads LoRA adapters while the engine runs: file -> number -> device, between two steps."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from stretto.device.streams import DeviceHalf
from stretto.host.half import HostHalf
from stretto.model.lora import AdapterBank, AdapterError, read_adapter
from stretto.protocol import LoadAdapter, RequestError, UnloadAdapter

logger = logging.getLogger(__name__)


class AdapterLoader:
    def __init__(self, bank: AdapterBank, host: HostHalf, device: DeviceHalf):
        self._bank, self._host, self._device = bank, host, device

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
        try:
            adapter = read_adapter(Path(action.path).expanduser())
            self._bank.check(adapter)
        except AdapterError as e:
            raise RequestError(str(e), param="lora_path") from e
        self._device.between(partial(self._bank.load, number, adapter))
        registry.add(action.name, action.path, number)
        logger.info("adapter %s loaded from %s: rank %d, %d modules", action.name, action.path, adapter.rank,
                    len(adapter.modules))

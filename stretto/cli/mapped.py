"""Settings that a program hands over as a mapping, read as a configuration file is. No torch in this module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cyclopts import App, CycloptsError
from cyclopts.config import Dict

from stretto.cli.options import SERVER, ServerOptions
from stretto.cli.sources import read_units
from stretto.config import Config, UsageError
from stretto.foreign.translate import Told, read_mapping


def read_settings(values: Mapping[str, Any], source: str) -> Config:
    """Flags without their dashes, such as {"model": "Qwen/Qwen3-8B", "kv_memory": "4GiB"}. `source`: for errors.
    Raises UsageError."""
    told = Told([], [])
    settings = read_mapping(values, source, told)
    if told.void:
        raise UsageError("\n".join(told.void))
    app = App(name="settings", result_action="return_value")
    app.config = [Dict(settings, source=source, use_commands_as_keys=False), read_units]

    @app.default
    def made(server: ServerOptions = SERVER) -> Config:
        return server.config()

    try:
        return app([], exit_on_error=False, print_error=False)
    except CycloptsError as e:
        raise UsageError(f"{source}: {e}") from e

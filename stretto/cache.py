"""Where this project keeps what it fetched or made itself, between runs. No torch."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$STRETTO_CACHE, else $XDG_CACHE_HOME/stretto, else ~/.cache/stretto."""
    if own := os.environ.get("STRETTO_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "stretto"

"""What is raised for a model that cannot be served. No torch in this module."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration that cannot be served. Names the key, its value and what would do."""

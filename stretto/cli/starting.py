"""What commands that need a model share: from the settings to facts and the resolved configuration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stretto.cli.failures import CommandFailed
from stretto.config import Config, Facts, Resolved, resolve
from stretto.facts import gather_facts
from stretto.model.config import ConfigError
from stretto.model.hub import ModelNotFound, resolve_model
from stretto.model.source import WeightError
from stretto.protocol import EngineDead


@contextmanager
def expected_failures() -> Iterator[None]:
    """Turns the errors by which a model or an engine refuses to start into CommandFailed; compat.ConfigError passes,
    since it has a form of its own."""
    try:
        yield
    except (ModelNotFound, ConfigError, WeightError, EngineDead) as e:
        raise CommandFailed(str(e)) from e


def resolve_all(config: Config) -> tuple[Resolved, Facts]:
    """Finds the model (fetching it if need be), reads its headers and resolves. Raises CommandFailed and
    compat.ConfigError."""
    with expected_failures():
        facts = gather_facts(resolve_model(config.model.model))
    return resolve(config, facts), facts

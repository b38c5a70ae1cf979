"""What commands that need a model share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stretto.cli.failures import CommandFailed
from stretto.config import Config
from stretto.engine.prepare import START_FAILURES, Prepared, prepare
from stretto.protocol import EngineDead


@contextmanager
def expected_failures() -> Iterator[None]:
    """Turns the errors by which a model or an engine refuses to start into CommandFailed; compat.ConfigError passes,
    since it has a form of its own."""
    try:
        yield
    except (*START_FAILURES, EngineDead) as e:
        raise CommandFailed(str(e)) from e


def prepare_or_fail(config: Config) -> Prepared:
    """Finds the model (fetching it if need be), reads its headers and resolves. Raises CommandFailed and
    compat.ConfigError."""
    with expected_failures():
        return prepare(config)

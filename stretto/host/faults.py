"""The one exception of the host half's books: a check that cannot fail unless there is a defect."""

from __future__ import annotations


class HostFault(AssertionError):
    """A law of the host half was broken. Tests let it end the run; a server counts it and ends that request alone."""


def need(ok: object, message: str) -> None:
    """Raises HostFault(message) unless `ok`."""
    if not ok:
        raise HostFault(message)

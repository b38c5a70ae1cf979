"""SUFFIX: proposals from suffix trees of a request's own ids and of earlier answers, on the host.

Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975) by the package arctic-inference, an optional extra. Proposals are
late under overlap, and longer to make up for it; see `wire.HostDraft`.
"""

from __future__ import annotations

from stretto.spec.api import Drafter, DrafterCaps
from stretto.spec.context import DrafterContext, DrafterError

WIDEST = 32


class Suffix:
    """`spec.context.DrafterKind`. No settings."""

    def caps(self, settings: str) -> DrafterCaps:
        return DrafterCaps(shape="chain", max_width=WIDEST, variable=True, where="host")

    def make(self, settings: str, context: DrafterContext) -> Drafter:
        raise DrafterError("drafter suffix proposes on the host: the engine asks for `host_drafter`")

"""`stretto explain`: the configuration that `serve` would run, without loading weights."""

from __future__ import annotations

import json
from importlib.metadata import version

from stretto.cli.failures import EXIT_REFUSED
from stretto.cli.options import SERVER, Json, ServerOptions
from stretto.cli.report import render
from stretto.cli.screen import show
from stretto.cli.starting import prepare_or_fail
from stretto.compat import ConfigError
from stretto.report import start_report


def explain(server: ServerOptions = SERVER, *, as_json: Json = False) -> int:
    """Show the configuration that `serve` would run, with the reason for every value. Nothing is loaded.

    Exits with 3 if something that was asked for cannot run, and says what and why.

    Parameters
    ----------
    as_json
        Print one JSON object.
    """
    try:
        prepared = prepare_or_fail(server.config())
        report = start_report(prepared.resolved, prepared.facts, version("stretto"))
    except ConfigError as e:
        if not as_json:
            raise
        refused = [{"feature": r.feature, "component": r.component, "why": r.why, "remedy": r.remedy}
                   for r in e.refusals]
        print(json.dumps({"refused": refused}, indent=2))
        return EXIT_REFUSED
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        show(render(report))
    return 0

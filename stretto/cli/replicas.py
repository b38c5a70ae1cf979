"""`stretto serve --replicas N`: what `cli/serve.py` does with a fleet, and the program of one replica.

    python -m stretto.cli.replicas CONFIG      a replica, CONFIG pickled and in base64; its parent is the fleet
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from stretto.cli.failures import told
from stretto.cli.screen import error_screen
from stretto.cli.server import serve_here
from stretto.config import Config
from stretto.replicas.fleet import Fleet, Job
from stretto.replicas.gateway import Gateway, make_gateway
from stretto.replicas.placement import LOOPBACK, Place, place, ports_after, reserved, usable_cores, visible_gpus


def serve_replicas(config: Config) -> int:
    """Until SIGTERM or Ctrl-C. Returns the exit code. Raises ConfigError and OSError before anything is started."""
    gpus = () if config.model.device == "cpu" else visible_gpus()
    serve = config.serve
    with (reserved(serve.host, serve.port, "choose another --host or --port") as sock,
          ports_after(sock, serve.port, serve.replicas) as ports):
        places = place(config, gpus, usable_cores(), ports.replicas)
        address = replace(serve, host=sock.getsockname()[0])  # gateways take no names
        return _serve(config, places, make_gateway(address, ports.gateway, ports.metrics))


def _serve(config: Config, places: Sequence[Place], gateway: Gateway) -> int:
    console = error_screen()
    logging.getLogger("httpx").setLevel(logging.WARNING)  # of the fleet's own questions

    def on_ready() -> None:
        print_fleet(fleet_report(places, gateway), console)
        logging.getLogger(__name__).info("ready on %s", gateway.url)

    async def run() -> int:
        fleet = Fleet(places, lambda one: replica_job(config, one), gateway, gateway_job(gateway),
                      config.serve.engine_restarts, config.serve.drain_timeout)
        return await fleet.run(on_ready)

    return asyncio.run(run())


def gateway_job(gateway: Gateway) -> Job:
    return Job("gateway", gateway.module, gateway.argv, gateway.python)


def replica_job(config: Config, one: Place) -> Job:
    packed = base64.b64encode(pickle.dumps((replica_config(config, one), one.index))).decode()
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(one.gpus)} if one.gpus else {}
    return Job(f"replica-{one.index}", "stretto.cli.replicas", [packed], sys.executable, one.cores, environment)


def replica_config(config: Config, one: Place) -> Config:
    """The fleet's configuration as one replica has it: alone, at its own address. TLS ends at the gateway."""
    return replace(config, serve=replace(config.serve, replicas=1, gateway=None, host=LOOPBACK, port=one.port,
                                         ssl_certfile=None, ssl_keyfile=None))


# -------------------------------------------------------------------------------------------------------------- report
def fleet_report(places: Sequence[Place], gateway: Gateway) -> dict[str, Any]:
    """What runs where. JSON-ready; holds no keys."""
    in_front = {"program": gateway.program, "url": gateway.url, "probes": ["/liveness", "/readiness"],
                "own_metrics": gateway.metrics_url}
    return {"event": "replicas", "gateway": in_front, "replicas": [
        {"replica": one.index, "runs_on": one.hardware, "url": one.url, "metrics": f"{one.url}/metrics"}
        for one in places]}


def print_fleet(report: dict[str, Any], console: Console) -> None:
    """A table where `console` is a terminal, else one JSON line."""
    if console.is_terminal:
        console.print(_render(report))
    else:
        console.file.write(json.dumps(report) + "\n")
        console.file.flush()


def _render(report: dict[str, Any]) -> RenderableType:
    table = Table(box=None, padding=(0, 2), pad_edge=False, show_edge=False)
    for title in ("", "runs on", "address", "metrics"):
        table.add_column(title, overflow="fold")
    gateway = report["gateway"]
    table.add_row(f"gateway ({gateway['program']})", "", gateway["url"], gateway["own_metrics"])
    for one in report["replicas"]:
        table.add_row(f"replica {one['replica']}", one["runs_on"], one["url"], one["metrics"])
    return Group(table, Text(f"probes: {', '.join(gateway['probes'])}   one restart after the other: SIGHUP"))


def main() -> None:
    """One replica."""
    config, index = pickle.loads(base64.b64decode(sys.argv[1]))
    sys.exit(told(lambda: serve_here(config, index), error_screen()))


if __name__ == "__main__":
    main()

"""A fleet whose replicas run the scripted core, as a program: gateway's Python, number of replicas, then JSON for
CoreOptions and for the settings that replicas share, with those that only the gateway has as "gateway" among them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path

from stretto.cli.replicas import fleet_report, gateway_job
from stretto.config import Config, ServeSection
from stretto.logs import set_up_logging
from stretto.replicas.fleet import Fleet, Job
from stretto.replicas.gateway import PROGRAMS
from stretto.replicas.offers import DEFAULT_GATEWAY
from stretto.replicas.placement import LOOPBACK, Place, place, ports_after, reserved

if __name__ == "__main__":
    python, count = sys.argv[1], int(sys.argv[2])
    options, settings = (json.loads(text) for text in sys.argv[3:5])
    set_up_logging("info", "text")
    keys = {name: tuple(settings.get(known, ())) for name, known in (("api_key", "api_keys"),
                                                                     ("admin_api_key", "admin_keys"))}
    own = settings.pop("gateway", {})
    own |= {name: Path(own[name]) for name in ("ssl_certfile", "ssl_keyfile") if name in own}
    held = contextlib.ExitStack()  # until this program ends
    serve = ServeSection(port=0, replicas=count, **keys, **own)
    ports = held.enter_context(ports_after(held.enter_context(reserved(LOOPBACK, 0, "")), 0, count))
    places = place(Config(serve=serve), (), (), ports.replicas)
    gateway = PROGRAMS[serve.gateway or DEFAULT_GATEWAY](python, ports.gateway, ports.metrics, serve)

    def job(one: Place) -> Job:
        own = json.dumps(settings | {"replica": one.index})
        return Job(f"replica-{one.index}", "tests.serve.serve_fake", [str(one.port), json.dumps(options), own],
                   sys.executable)

    async def run() -> int:
        fleet = Fleet(places, job, gateway, gateway_job(gateway), settings.get("engine_restarts", 3),
                      settings.get("drain_timeout", 30.0))
        return await fleet.run(lambda: print(json.dumps(fleet_report(places, gateway)), flush=True))

    sys.exit(asyncio.run(run()))

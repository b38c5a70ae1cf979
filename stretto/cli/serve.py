"""`stretto serve`: the HTTP server in this process, the engine in a process of its own."""

from __future__ import annotations

import logging
import time
from functools import partial

import psutil
from rich.console import Console

from stretto.cli.failures import CommandFailed
from stretto.cli.options import (
    KV,
    MODEL,
    PARALLEL,
    SCHEDULE,
    SERVE,
    SPECULATION,
    KVOptions,
    ModelOptions,
    ParallelOptions,
    ScheduleOptions,
    ServeOptions,
    SpeculationOptions,
    engine_config,
)
from stretto.cli.report import print_report
from stretto.cli.starting import prepare_or_fail
from stretto.engine.build import Prepared, build_core
from stretto.model.hub import DEFAULT_NAME
from stretto.protocol import EngineInfo
from stretto.serve.server import run_server
from stretto.serve.settings import ServeSettings
from stretto.text.tokenizer import load_tokenizer


def serve(model: ModelOptions = MODEL, *, kv: KVOptions = KV, schedule: ScheduleOptions = SCHEDULE,
          speculation: SpeculationOptions = SPECULATION, parallel: ParallelOptions = PARALLEL,
          serve: ServeOptions = SERVE) -> int:
    """Serve a model over HTTP, with OpenAI's API, until SIGTERM or Ctrl-C."""
    logging.basicConfig(level=serve.log_level.upper(), format="%(levelname)s:     %(message)s")
    prepared = prepare_or_fail(engine_config(model, kv, schedule, speculation, parallel, serve))
    console = Console(stderr=True)

    def on_ready(info: EngineInfo, url: str) -> None:
        phases = {**info.server_info["start"], "in all": time.time() - psutil.Process().create_time()}
        print_report({**info.server_info, "start": phases}, console)
        name = (serve_settings(prepared).served_model_names or (info.model_name,))[0]
        logging.getLogger(__name__).info("clients call the model %s at %s/v1; see also /docs and /metrics", name, url)

    try:
        return run_server(partial(build_core, prepared), lambda: load_tokenizer(prepared.tokenizer_path),
                          serve_settings(prepared), on_ready)
    except OSError as e:
        raise CommandFailed(str(e)) from e


def serve_settings(prepared: Prepared) -> ServeSettings:
    """What the HTTP server needs of the configuration. The default model goes by its plain name, wherever it came
    from."""
    config = prepared.resolved.config
    names = config.serve.served_model_name or ((DEFAULT_NAME,) if config.model.model is None else ())
    return ServeSettings(
        host=config.serve.host, port=config.serve.port, served_model_names=names, api_keys=config.serve.api_key,
        default_sampling=dict(prepared.resolved.sampling_defaults), strict_requests=config.serve.strict_requests,
        drain_timeout=config.serve.drain_timeout, log_level=config.serve.log_level)

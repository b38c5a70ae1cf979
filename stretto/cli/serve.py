"""`stretto serve`: the HTTP server in this process, the engine in a process of its own."""

from __future__ import annotations

import logging
import time
from functools import partial

import psutil
from rich.console import Console

from stretto.cli.failures import CommandFailed
from stretto.cli.options import SERVER, ServerOptions
from stretto.cli.report import print_report
from stretto.cli.starting import prepare_or_fail
from stretto.engine.build import Prepared, build_core
from stretto.logs import set_up_logging
from stretto.model.hub import DEFAULT_NAME
from stretto.protocol import EngineInfo
from stretto.serve.server import run_server
from stretto.serve.settings import ServeSettings
from stretto.text.tokenizer import load_tokenizer

SAME_NAME = ("host", "port", "uds", "ssl_certfile", "ssl_keyfile", "root_path", "strict_requests", "drain_timeout",
             "stall_timeout", "max_live_requests", "max_body_bytes", "log_level", "log_format", "access_log")


def serve(server: ServerOptions = SERVER) -> int:
    """Serve a model over HTTP, with OpenAI's API, until SIGTERM or Ctrl-C."""
    set_up_logging(server.serve.log_level, server.serve.log_format)
    prepared = prepare_or_fail(server.config())
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
        served_model_names=names, default_sampling=dict(prepared.resolved.sampling_defaults),
        api_keys=config.serve.api_key, admin_keys=config.serve.admin_api_key,
        **{name: getattr(config.serve, name) for name in SAME_NAME})

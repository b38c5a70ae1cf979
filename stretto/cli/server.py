"""One server: the HTTP server in this process, the engine in a process of its own.

This process never loads torch: its address answers at once, and says what the start is doing.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace

import psutil

from stretto.cli.failures import CommandFailed
from stretto.cli.report import print_report
from stretto.cli.screen import error_screen
from stretto.compat import ConfigError, Refusal
from stretto.config import Config
from stretto.engine.locate import Deferred, locate
from stretto.logs import set_up_logging
from stretto.model.hub import DEFAULT_NAME, ModelNotFound
from stretto.protocol import EngineInfo
from stretto.serve import tracing
from stretto.serve.server import Model, run_server
from stretto.serve.settings import ServeSettings
from stretto.text.gguf_file import GGUFError
from stretto.text.tokenizer import TokenizerError

START_CORE = "stretto.engine.build:start_core"  # by name: it needs torch

SAME_NAME = ("host", "port", "uds", "ssl_certfile", "ssl_keyfile", "root_path", "allowed_origins", "strict_requests",
             "request_timeout", "drain_timeout", "stall_timeout", "engine_restarts", "max_live_requests",
             "max_body_bytes", "log_level", "log_format", "access_log", "otlp_traces_endpoint")


def serve_here(config: Config, replica: int | None = None) -> int:
    """Until SIGTERM or Ctrl-C. `replica`: its number where there are several of this configuration; the first of them
    prints the start-up report, which is that of all. Returns the exit code. Raises CommandFailed and ConfigError."""
    set_up_logging(config.serve.log_level, config.serve.log_format, "" if replica is None else f"replica {replica}")
    settings, console = replace(serve_settings(config), replica=replica or 0), error_screen()

    def find_model() -> Model:
        located = locate(config)
        return Model(Deferred(START_CORE, located), located.tokenizer)

    def on_ready(info: EngineInfo, url: str) -> None:
        if replica:
            return
        phases = {**info.server_info["start"], "in all": time.time() - psutil.Process().create_time()}
        print_report({**info.server_info, "start": phases}, console)
        if replica is not None:  # its address is for the gateway
            return
        name = (settings.served_model_names or (info.model_name,))[0]
        logging.getLogger(__name__).info("clients call the model %s at %s/v1; see also /docs and /metrics", name, url)

    try:
        return run_server(find_model, settings, on_ready)
    except (OSError, ModelNotFound, TokenizerError, GGUFError) as e:
        raise CommandFailed(str(e)) from e


def check_traces(config: Config) -> None:
    """Raises ConfigError where traces are asked for and cannot be sent."""
    endpoint = config.serve.otlp_traces_endpoint
    if endpoint is None:
        return
    if not tracing.available():
        raise ConfigError([Refusal(f"--otlp-traces-endpoint {endpoint}", "this installation",
                                   "it has no OpenTelemetry exporter", tracing.PACKAGES)])
    for name in tracing.PROTOCOL_VARIABLES:
        if (protocol := os.environ.get(name, tracing.PROTOCOL)) != tracing.PROTOCOL:
            raise ConfigError([Refusal(f"--otlp-traces-endpoint {endpoint}", f"{name}={protocol}",
                                       f"traces are sent by {tracing.PROTOCOL}", "unset the variable")])


def serve_settings(config: Config) -> ServeSettings:
    """What the HTTP server needs of the configuration. The default model goes by its plain name, wherever it came
    from."""
    names = config.serve.served_model_name or ((DEFAULT_NAME,) if config.model.model is None else ())
    return ServeSettings(
        served_model_names=names, api_keys=config.serve.api_key, admin_keys=config.serve.admin_api_key,
        **{name: getattr(config.serve, name) for name in SAME_NAME})

"""`stretto serve`: one server, or several behind a gateway. Neither this process nor what it imports loads torch."""

from __future__ import annotations

from stretto.cli.failures import CommandFailed
from stretto.cli.options import SERVER, ServerOptions
from stretto.cli.replicas import serve_replicas
from stretto.cli.server import check_traces, serve_here
from stretto.engine.follow import follow
from stretto.engine.launch import Launch, check_launch
from stretto.logs import set_up_logging
from stretto.resolve import check_values


def serve(server: ServerOptions = SERVER) -> int:
    """Serve a model over HTTP, with OpenAI's API, until SIGTERM or Ctrl-C. Started by torchrun, rank 0 serves and the
    others follow it."""
    set_up_logging(server.serve.log_level, server.serve.log_format)
    config = server.config()
    check_values(config)  # before anybody can call
    check_traces(config)
    launch = Launch.of_environment()
    if launch is not None:
        check_launch(config, launch)
        if launch.rank > 0:
            return follow(config, launch)
    if config.serve.replicas == 1:
        return serve_here(config)
    try:
        return serve_replicas(config)
    except OSError as e:
        raise CommandFailed(str(e)) from e

"""What the HTTP server is told at start-up: one frozen record, passed as an argument."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class ServeSettings:
    """Times in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None  # a Unix socket to listen on, instead of host and port
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    replica: int = 0  # its number among several of one model: the label "engine" of its metrics
    served_model_names: tuple[str, ...] = ()  # the first is reported; empty: the engine's own model name
    api_keys: tuple[str, ...] = ()  # any of them opens the API; empty: open to all
    admin_keys: tuple[str, ...] = ()  # open the operators' routes as well; empty: any API key does
    strict_requests: bool = False  # True: an unknown request field is an error; False: named in X-Stretto-Ignored
    max_body_bytes: int = 32 * 2**20
    body_timeout: float = 30.0  # most that a body may take from one piece of it to the next
    max_prompts: int = 1024  # prompts of one completions call
    max_choices: int = 1024  # prompts x n of one call
    max_live_requests: int = 4096  # running and waiting; above it 429
    max_stored_responses: int = 1000  # of /v1/responses, for previous_response_id
    max_stored_bytes: int = 256 * 2**20
    ping_interval: float = 15.0  # of the comments that keep a silent stream open
    request_timeout: float | None = None  # most that a call may take, from arrival to end
    drain_timeout: float = 30.0  # how long a shutdown waits for requests in flight
    stall_timeout: float = 25.0  # an engine loop that neither speaks nor computes for so long counts as wedged
    start_timeout: float = 1800.0  # loading and warm-up
    engine_restarts: int = 3  # of an engine that dies, in ten minutes; one more ends the server
    generation_probe_timeout: float = 20.0  # of /health_generate
    trace_steps: int = 20_000  # most steps of one trace
    tokenizer_threads: int = 4
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"  # of the engine process; this one's logging is set up by its owner
    access_log: bool = False
    otlp_traces_endpoint: str | None = None  # where spans are sent, by OTLP over HTTP
    root_path: str = ""
    allowed_origins: tuple[str, ...] = ()  # of web pages elsewhere that may call; "*": any

    def __post_init__(self) -> None:
        if any(not key for key in (*self.api_keys, *self.admin_keys)):
            raise ValueError("an API key is empty")

"""`stretto.ray:app`, an application for Ray Serve: one deployment a model, replicas on as many machines as there are.

    applications:
      - name: default
        import_path: stretto.ray:app
        args: {model: Qwen/Qwen3-8B, device: cuda, tensor_parallel_size: 2, min_replicas: 1, max_replicas: 8}

A replica is a server's app (serve/app.py) and an engine's process in one actor of Ray. Ray starts and restarts replicas
and places them: the GPUs of a replica are one bundle of its placement group, on one machine, all or none. Requests of a
session go to one replica (`ConsistentHashRouter`, by the header X-Session-Id); their number follows from what engines
tell (replicas/scaling.py). Needs the extra `ray`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig

from stretto.cli.mapped import read_settings
from stretto.cli.server import START_CORE, serve_settings
from stretto.compat import ConfigError, Refusal
from stretto.config import Config, ServeSection
from stretto.engine.client import EngineClient
from stretto.engine.locate import Deferred, locate
from stretto.engine.supervisor import Supervisor
from stretto.logs import set_up_logging
from stretto.replicas.scaling import SCALING_NAMES, TARGET, Load, Scaling, replicas_for
from stretto.resolve import check_values
from stretto.serve.app import build_app
from stretto.serve.tracing import otlp_provider

SESSION_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
HEALTH_SECONDS, HEALTH_TIMEOUT = 5.0, 30.0
LAST_WORDS_SECONDS = 15.0  # of a replica beyond --drain-timeout

log = logging.getLogger(__name__)


class Server:
    """One replica. Ray makes it on the event loop on which every call runs."""

    async def __init__(self, config: Config) -> None:  # type: ignore[misc]  # as Ray has it
        set_up_logging(config.serve.log_level, config.serve.log_format)
        rank = serve.get_replica_context().rank
        settings = replace(serve_settings(config), replica=getattr(rank, "rank", rank) or 0)
        located = await asyncio.to_thread(locate, config)
        start = partial(EngineClient.start, Deferred(START_CORE, located), stall_timeout=settings.stall_timeout,
                        start_timeout=settings.start_timeout, log_format=settings.log_format)
        self._engine, tokenizer = await asyncio.gather(
            Supervisor.start(start, settings.engine_restarts), asyncio.to_thread(located.tokenizer))
        endpoint = settings.otlp_traces_endpoint
        self._app = build_app(self._engine, tokenizer, settings, otlp_provider(endpoint) if endpoint else None)
        self._service = self._app.state.service
        self._engine.on_change = self._service.note_interruption

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def check_health(self) -> None:
        """Ray starts another replica where this raises: when the engine is wedged, or has died too often."""
        if not await self._engine.healthy():
            raise RuntimeError("the engine makes no progress")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `ScaleByLoad` is told."""
        await self._service.refresh_stats()
        gauges = self._service.metrics.snapshot.gauges
        return Load(gauges.get("running", 0.0), gauges.get("waiting", 0.0), float(self._service.info.max_num_seqs),
                    gauges.get("kv_usage", 0.0))._asdict()

    async def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            await engine.close()


class ScaleByLoad:
    """Ray's autoscaling policy: as many replicas as the engines' queues and KV need. Its delays, factors and bounds are
    Ray's own settings (`upscale_delay_s`, ...)."""

    def __init__(self, target_load: float = TARGET):
        self._target = target_load

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        told: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        heard = set.intersection(*(set(told.get(name, {})) for name in Load._fields))
        loads = [Load(**{name: told[name][one] for name in Load._fields}) for one in heard]
        wanted = max(replicas_for(loads, self._target), 1)
        if len(loads) < context.current_num_replicas:  # some have just started, and cannot tell yet
            wanted = max(wanted, context.target_num_replicas)
        return wanted, {}


def app(args: Mapping[str, Any]) -> serve.Application:
    """The application. `args`: settings of `stretto serve` (docs/configuration.md) without their dashes, and
    `min_replicas`, `max_replicas`, `target_load` (share of a replica that the load may take) and `num_cpus` (of a
    replica; without GPUs the ranks of a model share them). Raises ConfigError and UsageError."""
    own = Scaling.read(args)
    config = read_settings({name: value for name, value in args.items() if name not in SCALING_NAMES},
                           "the application's args")
    check_values(config)
    _refuse_what_ray_does(config)
    return serve.deployment(serve.ingress()(Server), **_options(config, own)).bind(config)


def _refuse_what_ray_does(config: Config) -> None:
    plain, here = ServeSection(), "Ray Serve"
    lacks = [Refusal(f"{name} {getattr(config.serve, name)}", here, "it listens itself", "set it in Ray's http_options")
             for name in ("host", "port", "uds", "ssl_certfile", "ssl_keyfile", "root_path")
             if getattr(config.serve, name) != getattr(plain, name)]
    if config.serve.replicas != 1:
        lacks.append(Refusal(f"replicas {config.serve.replicas}", here, "it starts the replicas",
                             "set min_replicas and max_replicas"))
    if config.schedule.session_file is not None:
        lacks.append(Refusal(f"session_file {config.schedule.session_file}", here,
                             "replicas come and go, on other machines", "leave it out: sessions are computed again"))
    if lacks:
        raise ConfigError(lacks)


def _options(config: Config, own: Scaling) -> dict[str, Any]:
    bundle = {"CPU": own.num_cpus} | _gpus_of_replica(config, machines())
    autoscaling = AutoscalingConfig(
        min_replicas=own.min_replicas, max_replicas=own.max_replicas,
        policy=AutoscalingPolicy(policy_function=ScaleByLoad, policy_kwargs={"target_load": own.target_load}))
    return {
        "name": "stretto", "autoscaling_config": autoscaling,
        "placement_group_bundles": [bundle], "placement_group_strategy": "STRICT_PACK",
        "ray_actor_options": {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0.0)},
        "request_router_config": RequestRouterConfig(request_router_class=SESSION_ROUTER),
        "max_ongoing_requests": config.serve.max_live_requests,  # the engine has the queue
        "health_check_period_s": HEALTH_SECONDS, "health_check_timeout_s": HEALTH_TIMEOUT,
        "graceful_shutdown_timeout_s": config.serve.drain_timeout + LAST_WORDS_SECONDS}


def machines() -> list[Mapping[str, float]]:
    """What each machine of the cluster has now; none, outside of a cluster."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []


def _gpus_of_replica(config: Config, there: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """A replica's ranks are processes of one machine. `auto` is decided by what the cluster has now: say `cuda` where
    machines with GPUs come when they are needed. Raises ConfigError where no machine has enough and none may come."""
    ranks, most = config.parallel.tensor_parallel_size, max((one.get("GPU", 0.0) for one in there), default=0.0)
    if config.model.device == "auto":
        log.info("device auto: %s", "the cluster has GPUs" if most else "the cluster has no GPU; replicas run on CPUs")
        if 0 < most < ranks:
            raise ConfigError([Refusal(
                f"tensor_parallel_size {ranks}", f"a cluster whose largest machine has {most:g} GPUs",
                "the ranks of a replica run on one machine",
                f"set {most:g} or less, or device cuda where larger machines come when they are needed")])
        return {"GPU": float(ranks)} if most else {}
    if config.model.device != "cuda":
        return {}
    if there and most < ranks:
        log.warning("no machine of the cluster has %d GPUs now, which one replica needs: it waits for one", ranks)
    return {"GPU": float(ranks)}

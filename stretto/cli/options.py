"""The settings of config.py as parameters of commands: each section becomes a group of flags in the help."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Group, Parameter

from stretto.config import (
    Config,
    KVSection,
    ModelSection,
    ParallelSection,
    ScheduleSection,
    ServeSection,
    SpeculationSection,
)

ModelOptions = Annotated[ModelSection, Parameter(name="*", group=Group("Model", sort_key=1))]
KVOptions = Annotated[KVSection, Parameter(name="*", group=Group("KV cache", sort_key=2))]
ScheduleOptions = Annotated[ScheduleSection, Parameter(name="*", group=Group("Schedule", sort_key=3))]
SpeculationOptions = Annotated[SpeculationSection, Parameter(name="*", group=Group("Speculation", sort_key=4))]
ParallelOptions = Annotated[ParallelSection, Parameter(name="*", group=Group("Devices", sort_key=5))]
ServeOptions = Annotated[ServeSection, Parameter(name="*", group=Group("Server", sort_key=6), negative_iterable=())]

MODEL, KV, SCHEDULE, SPECULATION, PARALLEL, SERVE = (
    ModelSection(), KVSection(), ScheduleSection(), SpeculationSection(), ParallelSection(), ServeSection())


def engine_config(model: ModelSection, kv: KVSection, schedule: ScheduleSection, speculation: SpeculationSection,
                  parallel: ParallelSection, serve: ServeSection = SERVE) -> Config:
    """The sections that a command received, as one configuration."""
    return Config(model=model, kv=kv, schedule=schedule, speculation=speculation, parallel=parallel, serve=serve)

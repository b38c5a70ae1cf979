"""The settings of config.py as parameters of commands: each section becomes a group of flags in the help."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from typing import Annotated

from cyclopts import Group, Parameter

from stretto.config import (
    Config,
    KVSection,
    LoraSection,
    ModelSection,
    ParallelSection,
    SamplingSection,
    ScheduleSection,
    ServeSection,
    SpeculationSection,
)

ModelOptions = Annotated[ModelSection, Parameter(name="*", group=Group("Model", sort_key=1))]
DEFAULTS = Config()
MODEL = DEFAULTS.model


@dataclass(frozen=True)
class EngineSections:
    """What every command with an engine takes. The model may stand first, without a flag."""

    model: ModelOptions = MODEL
    _: KW_ONLY
    kv: Annotated[KVSection, Parameter(name="*", group=Group("KV cache", sort_key=2))] = DEFAULTS.kv
    schedule: Annotated[ScheduleSection, Parameter(name="*", group=Group("Schedule", sort_key=3))] = DEFAULTS.schedule
    speculation: Annotated[SpeculationSection, Parameter(
        name="*", group=Group("Speculation", sort_key=4))] = DEFAULTS.speculation
    sampling: Annotated[SamplingSection, Parameter(
        name="*", group=Group("Sampling", sort_key=5))] = DEFAULTS.sampling
    lora: Annotated[LoraSection, Parameter(
        name="*", group=Group("LoRA", sort_key=6), negative_iterable=())] = DEFAULTS.lora
    parallel: Annotated[ParallelSection, Parameter(name="*", group=Group("Devices", sort_key=7))] = DEFAULTS.parallel

    def config(self) -> Config:
        """The sections as one configuration; those that the command does not take have their defaults."""
        return Config(**{section.name: getattr(self, section.name) for section in fields(self)})


@dataclass(frozen=True)
class ServerSections(EngineSections):
    """What commands about a server take."""

    serve: Annotated[ServeSection, Parameter(
        name="*", group=Group("Server", sort_key=8), negative_iterable=())] = DEFAULTS.serve


EngineOptions = Annotated[EngineSections, Parameter(name="*")]
ServerOptions = Annotated[ServerSections, Parameter(name="*")]
ENGINE, SERVER = EngineSections(), ServerSections()

Json = Annotated[bool, Parameter(name="--json", negative=())]

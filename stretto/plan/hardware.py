"""Devices that a plan can be made for: `hardware.json`, and what a user says of his own.

Rates are what a program reaches, not what the datasheet says: of the H200 they are measured, of the others the
datasheet's figures times the share that an H200 reaches (0.906 of its bandwidth, 0.768 of its dense bf16 rate, 0.44 of
its link in sums of thousands of rows).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("hardware.json")
FLAGS = {"memory": ("--memory", 1.0), "read": ("--read-tb-s", 1e12), "multiply": ("--tflops", 1e12),
         "link": ("--link-gb-s", 1e9), "node": ("--gpus-per-host", 1.0)}  # of `stretto plan`, and their units


@dataclass(frozen=True)
class Hardware:
    """One device. Bytes, bytes a second, operations a second in 16 bits. `link`: bytes a second to a neighbour, one
    way. `node`: devices of one machine, which a model can be spread over."""

    name: str
    memory: float
    read: float
    multiply: float
    link: float
    node: int
    origin: str


@dataclass(frozen=True)
class Engine:
    """What this engine makes of a device's rates; shares of them, or seconds.

    `blend`: how sharply a product goes from being bound by its weights' bytes to being bound by its operations (the
    exponent of a power mean; at infinity the larger alone counts). `passes`: times that a token's hidden state is read
    or written in a layer. `host_*`: seconds of the host for a step and for a row of it, while the device computes."""

    read: float
    multiply: float
    blend: float
    attention_read: float
    attention_multiply: float
    layer_s: float
    step_s: float
    passes: float
    host_step_s: float
    host_row_s: float


@lru_cache(maxsize=1)
def _file() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def engine() -> Engine:
    return Engine(**{key: value for key, value in _file()["engine"].items() if key != "from"})


def engine_origin() -> str:
    return _file()["engine"]["from"]


def known_hardware() -> tuple[str, ...]:
    return tuple(_file()["devices"])


def find_hardware(name: str, *, memory: float | None = None, read: float | None = None, multiply: float | None = None,
                  link: float | None = None, node: int | None = None) -> Hardware:
    """A device of the catalogue, with whatever is given instead of its own figures; or, under any other name, one of
    which memory and both rates are given. Raises ValueError that names what is known."""
    asked = {"memory": memory, "read": read, "multiply": multiply, "link": link, "node": node}
    given: dict[str, Any] = {key: value for key, value in asked.items() if value is not None}
    for key, value in given.items():
        flag, unit = FLAGS[key]
        if not 0 < value < math.inf:
            raise ValueError(f"{flag} {value / unit:g}: it must be above 0 and finite")
    entry = _file()["devices"].get(name.lower())
    if entry is not None:
        found = Hardware(**{key: value for key, value in entry.items() if key != "from"}, origin=entry["from"])
        return replace(found, **given, origin="as given") if given else found
    if lacking := [key for key in ("memory", "read", "multiply") if key not in given]:
        raise ValueError(f"{name} is not in the catalogue ({', '.join(known_hardware())}); of another device give"
                         f" {', '.join(FLAGS[key][0] for key in lacking)} too")
    return Hardware(name=name, memory=given["memory"], read=given["read"], multiply=given["multiply"],
                    link=given.get("link", 11e9), node=int(given.get("node", 1)), origin="as given")

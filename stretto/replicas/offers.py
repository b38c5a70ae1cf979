"""What the gateways can do, for the check before the start. No names are asked for anywhere else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Offer:
    """`every_name`: a call's model name is passed on, whatever it is, so LoRA adapters can be asked for.
    `guarded`: its control interface needs a key, so that it may be reached from other machines. `tls`, `origins`: it
    can serve HTTPS, and answer browsers that ask for another origin."""

    package: str
    every_name: bool
    guarded: bool
    tls: bool
    origins: bool


DEFAULT_GATEWAY = "smg"
OFFERS = {"smg": Offer("smg", every_name=False, guarded=True, tls=True, origins=True),
          "vllm-router": Offer("vllm-router", every_name=True, guarded=False, tls=False, origins=True)}

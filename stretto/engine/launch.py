"""What torchrun tells each process that it starts, read from the environment. No torch in this module.

    torchrun --nnodes 2 --nproc-per-node 4 ... -m stretto serve MODEL --tensor-parallel-size 8

Rank 0 serves; the others follow its engine (`engine/follow.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from stretto.compat import ConfigError, Refusal
from stretto.config import Config

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """One process of several. `local`: among those of this host, which share its GPUs."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    address: str  # of rank 0's host
    port: int  # of the store there
    agents_store: bool  # torchrun's agent keeps the store; otherwise rank 0 does

    @property
    def one_host(self) -> bool:
        return self.local_ranks == self.ranks

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Launch | None:
        """None where this process was started alone. Raises compat.ConfigError for variables that are no numbers."""
        if not all(environment.get(name) for name in NAMES):
            return None

        def number(name: str, default: str = "") -> int:
            value = environment.get(name, default)
            try:
                return int(value)
            except ValueError:
                raise ConfigError([Refusal(f"{name}={value}", "torchrun's variables", "it is no number",
                                           "unset it, or let torchrun set it")]) from None

        ranks = number("WORLD_SIZE")
        if ranks == 1:
            return None
        return cls(number("RANK"), ranks, number("LOCAL_RANK", "0"), number("LOCAL_WORLD_SIZE", "1"),
                   environment["MASTER_ADDR"], number("MASTER_PORT"),
                   environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def check_launch(config: Config, launch: Launch) -> None:
    """Raises compat.ConfigError where so many processes are not what the configuration asks for."""
    asked, refusals = config.parallel.tensor_parallel_size, []
    if asked != launch.ranks:
        refusals.append(Refusal(f"--tensor-parallel-size {asked}", f"WORLD_SIZE={launch.ranks}",
                                "torchrun starts one process for each rank",
                                f"set --tensor-parallel-size {launch.ranks}, or unset torchrun's variables"))
    if config.serve.replicas > 1:
        refusals.append(Refusal(f"--replicas {config.serve.replicas}", f"WORLD_SIZE={launch.ranks}",
                                "all processes of torchrun share one model", "start torchrun once for each replica"))
    if refusals:
        raise ConfigError(refusals)

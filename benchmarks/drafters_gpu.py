"""What a step with a drafter of the default model is made of on one GPU, and what that makes of the speed.

    python -m benchmarks.drafters_gpu ../shared/data --output drafters_gpu.json

First the speeds of `benchmarks.drafters`, which say how many steps ran without a graph. Then, of each drafter and
number of rows, graphs of steps that are replayed alone:

    decode     one token a row, no drafter
    verify     1 + K tokens a row, no drafter
    read       the same, and the drafter reads what was fed
    propose    the same, and the drafter proposes K ids

The differences are what verifying, reading and proposing cost. Ids are random, so no draft is right.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cyclopts
import torch

from benchmarks.drafters import LONGEST, prompts_of, questions, speeds_of
from benchmarks.engine_gpu import print_kernels
from benchmarks.step_gpu import Lab, decode, verify
from stretto.engine.llm import LLM

DRAFTERS = ("off", "eagle3@5", "dflash@7", "dspark@7")
CONTEXT = 512  # cells of each row


def lab_of(llm: LLM) -> Lab:
    """The engine's device half, whose slot table is written over: it serves no request any more."""
    device = llm.core.device
    return Lab(device.runner, device.graphs, device.runner.model)


def parts_of(labs: dict[str, tuple[Lab, int]], rows: int) -> dict[str, dict[str, float]]:
    """Milliseconds by drafter: each kind of step of the module's table."""
    plain, found = labs["off"][0], {}
    for name, (lab, width) in labs.items():
        if width:
            window = [verify(rows, CONTEXT, width)]
            found[name] = {"decode": plain.time([decode(rows, CONTEXT)]), "verify": plain.time(window),
                           "read": lab.time(window), "propose": lab.time(window, drafts=width)}
            found[name] = {kind: round(1e3 * seconds, 4) for kind, seconds in found[name].items()}
            print(f"{rows} rows, {name}, ms a step alone: {found[name]}", flush=True)
    return found


def kernels_of(labs: dict[str, tuple[Lab, int]]) -> None:
    """Prints the kernels of one row's step, by time."""
    print_kernels(labs["off"][0].record([decode(1, CONTEXT)]), "off, 1 row", 1)
    for name, (lab, width) in labs.items():
        if width:
            print_kernels(lab.record([verify(1, CONTEXT, width)], width), f"{name}, 1 row", 1)


def main(data: Path, *, model: str | None = None, drafters: tuple[str, ...] = DRAFTERS,
         rows: tuple[int, ...] = (1, 8, 32), speed_prompts: int = 32, tokens: int = 128, rounds: int = 2,
         kernels: bool = True, output: Path | None = None) -> None:
    """data: the folder with eval/.  drafters: as for `benchmarks.drafters`; "off" is needed, and first.  speed_prompts,
    tokens, rounds: of the speed.  kernels: whether to print those of a step of one row."""
    engines = {name: LLM(model, device="cuda", max_num_seqs=max(rows), max_model_len=LONGEST, kv_tokens=131_072,
                         speculation=name.partition("@")[0],
                         **({"speculation_tokens": int(name.partition("@")[2])} if "@" in name else {}))
               for name in drafters}
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    prompts = prompts_of(engines["off"], questions(data, None, 1319), speed_prompts, tokens)
    figures["speeds"] = speeds_of(engines, prompts, rows, tokens, rounds, parts=False)
    torch.cuda.set_stream(torch.cuda.Stream())  # graphs are not captured on the default stream
    labs = {name: (lab_of(llm), llm.info.speculation_tokens) for name, llm in engines.items()}
    figures["parts"] = {n: parts_of(labs, n) for n in rows}
    if kernels:
        kernels_of(labs)
    if output is not None:
        output.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    cyclopts.run(main)

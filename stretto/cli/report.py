"""The start-up report for people: a table on a terminal, one line of JSON elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from stretto.config import gib


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """A table where `console` is a terminal, else one JSON line, which log collectors can read."""
    if console.is_terminal:
        console.print(render(report))
    else:
        console.file.write(json.dumps({"event": "start", **report}) + "\n")
        console.file.flush()


def render(report: Mapping[str, Any]) -> RenderableType:
    """The report of stretto.report.start_report as a rich renderable."""
    parts: list[RenderableType] = [_facts(report), _features(report["features"])]
    if report["start"]:
        phases = "   ".join(f"{phase} {seconds:.1f} s" for phase, seconds in report["start"].items())
        parts.append(Text.assemble(("start     ", "bold"), phases))
    return Group(*parts)


def _facts(report: Mapping[str, Any]) -> Table:
    model, device, memory, limits, kv = (report[part] for part in ("model", "device", "memory", "limits", "kv"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("stretto", report["version"])
    grid.add_row("model", f"{model['name']} ({model['architecture']}, {model['parameters'] / 1e6:,.0f}M parameters, "
                          f"{model['layers']} layers, {model['dtype']})")
    cores = f", {device['cores']} cores" if device["kind"] == "cpu" else ""
    grid.add_row("device", f"{device['kind']}: {device['name']}{cores}, {gib(memory['free_at_start'])} free of "
                           f"{gib(device['memory'])}")
    if "attention" in report:
        grid.add_row("attention", report["attention"])
    parts = [("weights", memory["weights"]), ("drafter", memory["draft_weights"]),
             ("adapters", memory["adapters"]), ("buffers", memory["step_buffers"] + memory["slot_table"]),
             ("graphs", memory["graphs"]), ("KV", memory["kv"])]
    shown = " + ".join(f"{name} {gib(size)}" for name, size in parts if size)
    grid.add_row("memory", f"{gib(memory['budget'])} = {shown} ({kv['tokens']:,} tokens, page {kv['page_size']})")
    times = limits["full_length_requests_at_once"]
    grid.add_row("limits", f"{limits['max_model_len']:,} tokens a request ({times} of that length fit at once), "
                           f"{limits['max_num_seqs']} sequences, {limits['max_num_batched_tokens']:,} tokens a step")
    return grid


def _features(features: list[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False, show_edge=False)
    table.add_column("feature", no_wrap=True)
    for title in ("asked", "now", "why"):
        table.add_column(title, overflow="fold")
    for decision in features:
        style = "yellow" if decision["changed"] else ""
        table.add_row(decision["feature"], decision["asked"], decision["now"], decision["why"], style=style)
    return table

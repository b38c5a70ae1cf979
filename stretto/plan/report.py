"""A plan as plain data, and as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stretto.plan.hardware import engine_origin
from stretto.plan.load import Load
from stretto.plan.options import Option, Question

UNITS = {"requests/s": "req/s"}  # narrow, so that the table fits 80 columns
KV_DTYPES = {8: "fp8_e4m3"}  # bits of a number in the KV cache -> --kv-cache-dtype, where it is not the model's own
AUTO_DRAFTS = 4  # of `--speculation-tokens auto`, which like a plan verifies them where that pays


def as_data(question: Question, options: Sequence[Option]) -> dict[str, Any]:
    """JSON-ready: seconds, tokens, bytes."""
    shape, hardware, load = question.shape, question.hardware, question.load
    return {
        "model": {"name": shape.name, "weight_bytes": shape.weight_bytes, "kv_token_bytes": shape.kv_token_bytes},
        "hardware": {"name": hardware.name, "memory": hardware.memory, "read": hardware.read,
                     "multiply": hardware.multiply, "from": hardware.origin},
        "engine": engine_origin(), "load": describe(load),
        "goals": {"first_token_p99": question.goals.first, "between_tokens_p99": question.goals.between},
        "headroom": question.headroom,
        "options": [_entry(question, option) for option in options]}


def describe(load: Load | Sequence[object]) -> str:
    return str(load) if isinstance(load, Load) else f"a trace of {len(load)} conversations"


def command(question: Question, option: Option) -> str:
    """That runs one of the option's replicas as it was simulated."""
    parallel = f" --tensor-parallel-size {option.ranks}" if option.ranks > 1 else ""
    cells = f" --kv-cache-dtype {KV_DTYPES[question.shape.kv_bits]}" if question.shape.kv_bits in KV_DTYPES else ""
    drafter = " --speculation DRAFTER" if question.drafts else ""
    if question.drafts not in (0, AUTO_DRAFTS):
        drafter += f" --speculation-tokens {question.drafts}"
    return f"stretto serve MODEL{parallel} {option.schedule.flags} --max-num-seqs {question.seats}{cells}{drafter}"


def _entry(question: Question, option: Option) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "fits": option.fits, "devices": option.devices, "replicas": option.replicas,
        "tensor_parallel_size": option.ranks, "chunk_size": option.schedule.chunk,
        "max_num_batched_tokens": option.schedule.budget, "max_num_seqs": question.seats,
        "kv_bits": question.shape.kv_bits, "command": command(question, option), "kv_tokens": option.kv_tokens,
        "per_replica": option.per_replica, "limit": option.limit}
    if (outcome := option.outcome) is not None:
        entry |= {"first_token": {f"p{int(100 * q)}": outcome.first_token(q) for q in (0.5, 0.99)},
                  "between_tokens": {f"p{int(100 * q)}": outcome.between(q) for q in (0.5, 0.99)},
                  "output_tokens_per_second": option.output_rate,
                  "cached_share": outcome.cached_tokens / max(outcome.prompt_tokens, 1), "busy": outcome.load}
    return entry


def render(question: Question, options: Sequence[Option]) -> RenderableType:
    shape, hardware, load = question.shape, question.hardware, question.load
    unit = load.unit if isinstance(load, Load) else "conversations"
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("model", f"{shape.name}: {shape.weight_bytes / 1e9:.1f} GB of weights,"
                           f" {shape.kv_token_bytes / 1e3:.0f} kB of KV a token")
    facts.add_row("GPU", f"{hardware.name}: {hardware.memory / 1e9:.0f} GB, {hardware.read / 1e12:.2f} TB/s,"
                         f" {hardware.multiply / 1e12:.0f} TFLOP/s ({hardware.origin})")
    facts.add_row("load", describe(load))
    facts.add_row("goals", f"99 of 100: first token within {1e3 * question.goals.first:.0f} ms, the next within"
                           f" {1e3 * question.goals.between:.0f} ms; {question.headroom:.0%} of what a replica bears")
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_edge=False)
    for title in ("GPUs", "of", "chunk", "KV", f"bears\n{UNITS.get(unit, unit)}", "first, ms\np50  p99",
                  "next, ms\np50  p99", "tokens/s"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("breaks first", overflow="fold")
    for option in best_of_each(options):
        table.add_row(*_cells(option), style="" if option.fits else "dim")
    return Group(facts, table, Text(_advice(question, options)))


def best_of_each(options: Sequence[Option]) -> list[Option]:
    """The best schedule of every grouping, in the order that they have."""
    found: dict[int, Option] = {}
    for option in options:
        found.setdefault(option.ranks, option)
    return list(found.values())


def _cells(option: Option) -> list[str]:
    outcome = option.outcome
    kv = f"{option.kv_tokens / 1e3:,.0f}k"
    if outcome is None:
        return ["-", str(option.ranks), "", kv, "-", "-", "-", "-", option.limit]
    first, between = ([1e3 * of(q) for q in (0.5, 0.99)] for of in (outcome.first_token, outcome.between))
    return [f"{option.devices:,}", f"{option.replicas:,} x {option.ranks}", str(option.schedule.chunk), kv,
            _three_digits(option.per_replica), f"{first[0]:,.0f}  {first[1]:,.0f}",
            f"{between[0]:.1f}  {between[1]:.1f}", f"{option.output_rate:,.0f}", option.limit.partition(":")[0]]


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _advice(question: Question, options: Sequence[Option]) -> str:
    best, bits = options[0], question.shape.weight_bits
    if not best.fits:
        return "nothing fits"
    packed = f"\nMODEL: a checkpoint with weights of {bits} bits" if bits < 16 else ""
    return f"{best.replicas:,} x {command(question, best)}{_on_hosts(question, best)}{packed}"


def _on_hosts(question: Question, best: Option) -> str:
    """Where a host has room for several replicas."""
    each = question.hardware.node // best.ranks
    if min(each, best.replicas) < 2:
        return ""
    if best.replicas <= each:
        return f"\nor on one host: once, with --replicas {best.replicas}"
    return (f"\nor on hosts of {question.hardware.node} GPUs: {-(-best.replicas // each):,} x the same with --replicas"
            f" {each}")

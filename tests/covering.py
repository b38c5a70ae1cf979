"""Covering subsets of a product of options: every pair of values of two options occurs in some cell."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Cell = dict[str, Any]


def full_product(options: Mapping[str, Sequence[Any]]) -> list[Cell]:
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]


def pairwise(options: Mapping[str, Sequence[Any]], seed: int = 0,
             allowed: Callable[[Cell], bool] = lambda cell: True) -> list[Cell]:
    """Greedy: each cell is the best of a few random ones at covering pairs that no earlier cell has. `allowed`: which
    cells there are, also asked of cells that hold two options only; every pair it allows can be made whole."""
    rng, names = random.Random(seed), list(options)
    left = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in options[a] for y in options[b]
            if allowed({a: x, b: y})}
    cells: list[Cell] = []
    while left:
        a, x, b, y = min(left, key=repr)
        candidates: list[Cell] = []
        while len(candidates) < 40:
            cell = {n: rng.choice(list(options[n])) for n in names} | {a: x, b: y}
            candidates += [cell] * allowed(cell)
        best = max(candidates, key=lambda cell: len(_pairs(cell, names) & left))
        left -= _pairs(best, names)
        cells.append(best)
    return cells


def each_value(options: Mapping[str, Sequence[Any]], seed: int = 0,
               allowed: Callable[[Cell], bool] = lambda cell: True) -> list[Cell]:
    """As few cells in which every value of every option occurs, each the best of a few random ones."""
    rng = random.Random(seed)
    left = {(name, value) for name, values in options.items() for value in values}
    cells: list[Cell] = []
    while left:
        candidates: list[Cell] = []
        while len(candidates) < 400:
            cell = {name: rng.choice(values) for name, values in options.items()}
            candidates += [cell] * allowed(cell)
        best = max(candidates, key=lambda cell: len(cell.items() & left))
        left -= best.items()
        cells.append(best)
    return cells


def _pairs(cell: Cell, names: list[str]) -> set[tuple[str, Any, str, Any]]:
    return {(a, cell[a], b, cell[b]) for a, b in itertools.combinations(names, 2)}


def cell_id(cell: Cell) -> str:
    return "-".join(f"{name}={value}" for name, value in cell.items())

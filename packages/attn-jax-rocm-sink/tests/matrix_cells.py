"""The matrix of attention features as cells, one value an axis, and a small sample in which every pair of values meets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

import numpy as np

__all__ = ["AXES", "Axes", "Cell", "missing_pairs", "sample", "whole"]

AXES: Mapping[str, tuple[str, ...]] = {
    "softmax": ("vanilla", "off_by_one", "learnable"),
    "bias": ("none", "1HSS", "B1SS", "BHSS", "11SS", "pre_scale", "alibi"),
    "mask": ("none", "padding", "causal", "padding_causal", "bottom_right", "padding_bottom_right"),
    "window": ("none", "window"),
    "dropout": ("none", "dropout"),
    "layout": ("attention", "bshd", "qkv_packed", "kv_packed", "thd_padded", "thd_packed"),
    "heads": ("mha", "gqa", "mqa"),
    "dtype": ("float32", "bfloat16", "float16"),
    "repeated": ("once", "twice"),
    "engine": ("host", "xla", "ck"),
}


@dataclass(frozen=True)
class Cell:
    """One value of every axis. Layout "attention" is the plain call, with its log-sum-exp; the others are ``fused_attn``."""

    softmax: str
    bias: str
    mask: str
    window: str
    dropout: str
    layout: str
    heads: str
    dtype: str
    repeated: str
    engine: str

    def __str__(self) -> str:
        return "-".join(getattr(self, field.name) for field in fields(self))

    def exists(self) -> bool:
        """Packed qkv has as many kv heads as query heads; segments need a padding mask."""
        return not (self.layout == "qkv_packed" and self.heads != "mha") and (not self.layout.startswith("thd") or "padding" in self.mask)


Axes = Mapping[str, tuple[str, ...]]
Pair = tuple[str, str, str, str]
Wanted = Callable[[Cell], object]


def whole(axes: Axes = AXES) -> Iterator[Cell]:
    """Every cell that exists."""
    return (cell for values in itertools.product(*axes.values()) if (cell := Cell(*values)).exists())


def pairs_of(cell: Cell) -> set[Pair]:
    values = [(field.name, getattr(cell, field.name)) for field in fields(cell)]
    return {(*first, *second) for first, second in itertools.combinations(values, 2)}


def sample(axes: Axes = AXES, wanted: Wanted = Cell.exists, *, seed: int = 1, tries: int = 200) -> list[Cell]:
    """A small list of cells in which every pair of values of two axes that can meet does: greedy, and the same on every machine.

    Cells that exist but are not ``wanted`` are left out, and the pairs that meet in those alone.
    """
    rng = np.random.default_rng(seed)
    missing = _possible_pairs(axes, wanted)
    chosen: list[Cell] = []
    while missing:
        pair = min(missing)
        best = max((_random_cell(rng, pair, axes, wanted) for _ in range(tries)), key=lambda cell: len(pairs_of(cell) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


def missing_pairs(cells: Iterable[Cell], axes: Axes = AXES, wanted: Wanted = Cell.exists) -> set[Pair]:
    """Pairs that can meet and do not in ``cells``."""
    return _possible_pairs(axes, wanted) - set().union(*(pairs_of(cell) for cell in cells))


def _possible_pairs(axes: Axes, wanted: Wanted) -> set[Pair]:
    found = set()
    for (a, a_values), (b, b_values) in itertools.combinations(axes.items(), 2):
        for first, second in itertools.product(a_values, b_values):
            fixed = {a: (first,), b: (second,)}
            if any(map(wanted, whole({name: fixed.get(name, values) for name, values in axes.items()}))):
                found.add((a, first, b, second))
    return found


def _random_cell(rng: np.random.Generator, pair: Pair, axes: Axes, wanted: Wanted) -> Cell:
    fixed = {pair[0]: pair[1], pair[2]: pair[3]}
    while True:
        cell = Cell(**{name: fixed.get(name, values[rng.integers(len(values))]) for name, values in axes.items()})
        if cell.exists() and wanted(cell):
            return cell

"""One cell of the matrix: its arrays, the call, and what it must give, from the reference (bytes) and from float64 (close).

Both expectations work on items, a whole sequence or one segment each, with the rows that count and no others, and put the results back:
nothing of padding, packing or batching is in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import matrix_ck
import matrix_oracle
import numpy as np
from attn_jax_rocm_sink import attention
from attn_jax_rocm_sink._arrays import from_numpy
from attn_spec import Call
from attn_spec._arrays import from_float32, to_float32
from attn_spec._registry import get_backend
from jax_calls import bits
from matrix_cells import Cell
from matrix_fused import call_fused
from matrix_oracle import Problem, solve

__all__ = ["Case"]

B, SEED, DROPOUT = 2, 2**40 + 17, 0.3
SCALE = float(np.float32(0.4))
WINDOW = (2, 1)
_QUICK = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": "True"}  # half the time to compile
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
Rows = list[list[tuple[int, int]]]
LENGTHS: dict[str, tuple[Rows, Rows]] = {
    "padding": ([[(0, 3)], [(0, 5)]], [[(0, 7)], [(0, 4)]]),
    "thd_padded": ([[(0, 2), (3, 2)], [(1, 3)]], [[(0, 3), (4, 2)], [(0, 6)]]),
    "thd_packed": ([[(0, 2), (2, 3)], [(0, 5)]], [[(0, 3), (3, 4)], [(0, 7)]]),
}


@dataclass(frozen=True)
class Item:
    """Rows of one sequence that attend to each other; ``place`` is its number among the batch items that dropout counts."""

    sequence: int
    queries: slice
    keys: slice
    place: int


class Case:
    """The arrays and expectations of a cell. ``compiled``: one program a call; else operation by operation, which cells share compiled."""

    def __init__(self, cell: Cell, seed: int = 0, *, compiled: bool = True) -> None:
        self.cell, self.compiled = cell, compiled
        self._programs: dict[tuple[Any, ...], Any] = {}
        rng = np.random.default_rng(seed)
        heads, kv_heads = HEADS[cell.heads]
        self.queries, self.keys = (7, 7) if cell.layout == "qkv_packed" else (5, 7)
        head_dim = 8 if cell.engine == "ck" else 4  # CK has multiples of 8 alone
        value_dim = head_dim if cell.engine == "ck" or cell.layout in ("qkv_packed", "kv_packed") else 3

        def normal(*shape: int, dtype: str = cell.dtype) -> np.ndarray:
            return from_float32(rng.standard_normal(shape).astype(np.float32), dtype)

        self.arrays = {
            "q": normal(B, heads, self.queries, head_dim),
            "k": normal(B, kv_heads, self.keys, head_dim),
            "v": normal(B, kv_heads, self.keys, value_dim),
        }
        if cell.softmax == "learnable":
            self.arrays["sinks"] = np.linspace(-1.5, 2.5, heads, dtype=np.float32)
        if cell.bias not in ("none", "alibi"):
            shape = {"B1SS": (B, 1), "BHSS": (B, heads), "11SS": (1, 1)}.get(cell.bias, (1, heads))
            self.arrays["bias"] = normal(*shape, self.queries, self.keys)
        self.dout = normal(B, heads, self.queries, value_dim)
        # CK has no gradient through the log-sum-exp.
        self.dlse = normal(B, heads, self.queries, dtype="float32") if cell.layout == "attention" and cell.engine != "ck" else None

    @property
    def causal(self) -> bool:
        return self.cell.mask not in ("none", "padding")

    @property
    def bottom_right(self) -> bool:
        return self.cell.mask.endswith("bottom_right")

    @property
    def rows(self) -> tuple[Rows, Rows]:
        """(first row, length) of each segment of the queries and keys of each sequence. The plain call has no padded queries."""
        whole: tuple[Rows, Rows] = ([[(0, self.queries)]] * B, [[(0, self.keys)]] * B)
        if self.cell.layout.startswith("thd"):
            return LENGTHS[self.cell.layout]
        if "padding" not in self.cell.mask:
            return whole
        queries, keys = LENGTHS["padding"]
        return (whole[0] if self.cell.layout == "attention" else queries), keys

    @cached_property
    def items(self) -> list[Item]:
        queries, keys = self.rows
        found = []
        for sequence, (q_rows, k_rows) in enumerate(zip(queries, keys, strict=True)):
            for segment, ((q, q_size), (k, k_size)) in enumerate(zip(q_rows, k_rows, strict=True)):
                place = sequence * max(map(len, queries)) + segment
                found.append(Item(sequence, slice(q, q + q_size), slice(k, k + k_size), place))
        return found

    def shift(self, item: Item) -> int:
        """Key beside query 0 of an item."""
        return (item.keys.stop - item.keys.start) - (item.queries.stop - item.queries.start) if self.bottom_right else 0

    def part(self, name: str, item: Item) -> np.ndarray:
        """An array's rows of one item, as a batch of one."""
        rows = {"q": item.queries, "dout": item.queries, "dlse": item.queries, "k": item.keys, "v": item.keys}[name]
        array = getattr(self, name) if name in ("dout", "dlse") else self.arrays[name]
        return array[item.sequence : item.sequence + 1, :, rows]

    def item_bias(self, item: Item) -> np.ndarray | None:
        """float32 [1, H, S, T] that is added to the scaled scores of one item."""
        heads, queries, keys = self.arrays["q"].shape[1], item.queries.stop - item.queries.start, item.keys.stop - item.keys.start
        if self.cell.bias == "alibi":
            slopes = np.float32(2.0) ** -np.arange(2, 2 * heads + 1, 2, dtype=np.float32)
            distance = np.abs(np.arange(queries)[:, None] + self.shift(item) - np.arange(keys)).astype(np.float32)
            return (-slopes[:, None, None] * distance)[None]
        if "bias" not in self.arrays:
            return None
        bias = to_float32(self.arrays["bias"])
        if self.cell.bias == "pre_scale":
            bias = bias * np.float32(SCALE)
        row = bias[item.sequence if bias.shape[0] > 1 else 0][:, item.queries, item.keys]
        return np.broadcast_to(row, (1, heads, queries, keys)).copy()

    def sinks(self) -> np.ndarray | None:
        return np.zeros(self.arrays["q"].shape[1], np.float32) if self.cell.softmax == "off_by_one" else self.arrays.get("sinks")

    # Expectations

    def close(self) -> dict[str, np.ndarray]:
        """float64 results."""
        return self._assembled(np.float64, self._solve_item)

    def exact(self) -> dict[str, np.ndarray]:
        """The reference's results, in the dtypes of the call."""
        return self._assembled(np.float32, self._reference_item)

    def _solve_item(self, item: Item) -> dict[str, np.ndarray]:
        q, k, v, dout = (to_float32(self.part(name, item)).astype(np.float64) for name in ("q", "k", "v", "dout"))
        i, j = np.arange(q.shape[2])[:, None] + self.shift(item), np.arange(k.shape[2])
        visible = np.ones((q.shape[2], k.shape[2]), bool)
        if self.causal:
            visible &= j <= i
        if self.cell.window == "window":
            visible &= (i - WINDOW[0] <= j) & (j <= i + WINDOW[1])
        keep = None
        if self.cell.dropout == "dropout":
            kept_pairs = (matrix_ck if self.cell.engine == "ck" else matrix_oracle).kept_pairs
            keep = kept_pairs(SEED, DROPOUT, (item.place + 1, q.shape[1], q.shape[2], k.shape[2]))[-1:]
        bias, sinks = self.item_bias(item), self.sinks()
        dlse = np.zeros(q.shape[:3]) if self.dlse is None else self.part("dlse", item).astype(np.float64)
        return solve(
            Problem(
                q,
                k,
                v,
                visible[None],
                SCALE,
                None if sinks is None else sinks.astype(np.float64),
                None if bias is None else bias.astype(np.float64),
                keep,
                DROPOUT if keep is not None else 0.0,
                dout,
                dlse,
            )
        )

    def _reference_item(self, item: Item) -> dict[str, np.ndarray]:
        """The item as the last of a batch of ``place + 1``: its number reaches dropout, and the others move no bit of it."""
        copies = item.place + 1 if self.cell.dropout == "dropout" else 1

        def last(array: np.ndarray) -> np.ndarray:
            return np.concatenate([array] * copies)

        arrays = {name: last(self.part(name, item)) for name in ("q", "k", "v")}
        arrays["q_start"] = np.full(copies, self.shift(item), np.int32)
        cotangents = {"out": last(self.part("dout", item))}
        cotangents["lse"] = np.zeros(cotangents["out"].shape[:3], np.float32) if self.dlse is None else last(self.part("dlse", item))
        bias, sinks = self.item_bias(item), self.sinks()
        if bias is not None:
            arrays["bias"] = last(bias)
        wrt: tuple[str, ...] = ("q", "k", "v", *(["bias"] if bias is not None else []))
        options: dict[str, object] = {"causal": self.causal, "scale": SCALE, "return_lse": True}
        if self.cell.window == "window":
            options["window"] = WINDOW
        if self.cell.dropout == "dropout":
            options |= {"dropout_p": DROPOUT, "dropout_seed": SEED}
        if sinks is not None:
            arrays["sinks"], wrt = sinks, (*wrt, "sinks")
        host = get_backend("attn_reference")
        found = host.evaluate(Call("attention", arrays, options, cotangents, wrt), engine="host")
        results = {name: array[-1:] for name, array in found.items() if name not in ("dsinks", "dbias")}
        if "dbias" in found:
            results["ds"] = found["dbias"][-1:]
        if sinks is not None:  # of this item alone: one call without the copies, or with their terms taken away by zero cotangents
            for name in ("out", "lse"):
                cotangents[name] = cotangents[name].copy()
                cotangents[name][:-1] = from_float32(
                    np.zeros(cotangents[name][:-1].shape, np.float32), self.cell.dtype if name == "out" else "float32"
                )
            results["dsinks"] = host.evaluate(Call("attention", arrays, options, cotangents, ("sinks",)), engine="host")["dsinks"][None]
        return results

    def _assembled(self, kind: Any, solved: Any) -> dict[str, np.ndarray]:
        """Results of the items in their places; zeros, or an LSE of -inf, elsewhere. Sums over items are one addition after another."""
        exact = kind == np.float32
        shapes = {"out": (*self.dout.shape,), "lse": self.dout.shape[:3]} | {
            f"d{name}": self.arrays[name].shape for name in ("q", "k", "v")
        }
        full = {name: np.zeros(shape, kind) for name, shape in shapes.items()}
        full["lse"] -= np.inf
        ds = np.zeros((B, self.dout.shape[1], self.queries, self.keys), kind)
        dsinks = np.zeros(self.dout.shape[1], kind)
        for item in self.items:
            found = solved(item)
            for name in full:
                rows = item.keys if name in ("dk", "dv") else item.queries
                full[name][item.sequence, :, rows] = to_float32(found[name][0]) if exact else found[name][0]
            if "ds" in found:
                ds[item.sequence, :, item.queries, item.keys] = found["ds"][0]
            if "dsinks" in found:
                dsinks = dsinks + found["dsinks"][0]
        if self.cell.layout != "attention":
            del full["lse"]
        if self.cell.softmax == "learnable":
            full["dsinks"] = dsinks
        if "bias" in self.arrays:
            full["dbias"] = _summed(ds, self.arrays["bias"].shape) * (kind(np.float32(SCALE)) if self.cell.bias == "pre_scale" else kind(1))
        if not exact:
            return full
        return {name: array if name in ("lse", "dsinks") else from_float32(array, self.cell.dtype) for name, array in full.items()}

    # The call

    def run(self, **changes: Any) -> dict[str, np.ndarray]:
        """What the package gives; ``changes`` replaces parts of the cell (``cell``), arrays, or the seed: the broken calls of the tests."""
        cell: Cell = changes.pop("cell", self.cell)
        seed = changes.pop("seed", SEED)
        given = {name: jnp.asarray(from_numpy(array)) for name, array in (self.arrays | changes).items()}
        cotangents = tuple(jnp.asarray(from_numpy(array)) for array in (self.dout, self.dlse) if array is not None)

        def both(given: dict[str, jax.Array], cotangents: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
            def split(moving: dict[str, jax.Array]) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
                outputs = self.call(cell, moving, seed)
                return outputs[: len(cotangents)], jax.lax.stop_gradient(outputs[len(cotangents) :])

            outputs, pullback, more = jax.vjp(split, given, has_aux=True)
            return (*outputs, *more), pullback(cotangents)[0]

        if self.compiled:
            key = (cell, seed, tuple((name, array.shape) for name, array in given.items()))
            if key not in self._programs:
                self._programs[key] = jax.jit(both).lower(given, cotangents).compile(compiler_options=_QUICK)
            outputs, gradients = self._programs[key](given, cotangents)
        else:
            with jax.disable_jit():
                outputs, gradients = both(given, cotangents)
        found = dict(zip(("out", "lse"), outputs, strict=False)) | {f"d{name}": array for name, array in gradients.items()}
        return {name: bits(array) for name, array in found.items()}

    def call(self, cell: Cell, arrays: Mapping[str, jax.Array], seed: int) -> tuple[jax.Array, ...]:
        if cell.layout == "attention":
            return self._attention(cell, arrays, seed)
        return (call_fused(cell, arrays, self.rows, SCALE, WINDOW, DROPOUT, seed),)

    def _attention(self, cell: Cell, arrays: Mapping[str, jax.Array], seed: int) -> tuple[jax.Array, ...]:
        heads = self.arrays["q"].shape[1]
        bias = arrays.get("bias")
        if cell.bias == "alibi":
            bias = jnp.concatenate(
                [jnp.pad(part, [(0, 0)] * 3 + [(0, self.keys - part.shape[3])]) for part in map(self.item_bias, self.items)]
            )
        elif bias is not None and cell.bias == "pre_scale":
            bias = bias.astype(jnp.float32) * jnp.float32(SCALE)
        bottom_right = cell.mask.endswith("bottom_right")
        return attention(
            *(arrays[name] for name in ("q", "k", "v")),
            causal=cell.mask not in ("none", "padding"),
            scale=SCALE,
            kv_lengths=jnp.asarray([rows[0][1] for rows in LENGTHS["padding"][1]]) if "padding" in cell.mask else None,
            q_start=None if bottom_right else 0,
            window=WINDOW if cell.window == "window" else None,
            sinks=jnp.zeros(heads) if cell.softmax == "off_by_one" else arrays.get("sinks") if cell.softmax == "learnable" else None,
            bias=bias,
            dropout_p=DROPOUT if cell.dropout == "dropout" else 0.0,
            dropout_seed=seed if cell.dropout == "dropout" else None,
            return_lse=True,
            engine=cell.engine,
        )


def _summed(ds: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """dS [B, H, S, T] over the axes on which ``shape`` has size 1, lexicographically, one addition after another."""
    total = np.zeros(shape, ds.dtype)
    for index in np.ndindex(ds.shape[:2]):
        place = tuple(0 if size == 1 else i for i, size in zip(index, shape[:2], strict=True))
        total[place] = total[place] + ds[index]
    return total

"""Rows of packed sequences: each segment becomes a batch item of its own, so that its bits are those of the segment alone."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

__all__ = ["Packing", "fitted", "keep_rows", "packing_of_ids", "packing_of_lengths", "route", "spoil"]


def fitted(lengths: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """``lengths`` [B] clamped to [0, size], int32, and bool [B]: which ones were outside."""
    return jnp.clip(lengths, 0, size).astype(jnp.int32), (lengths < 0) | (lengths > size)


def keep_rows(rows: jax.Array, lengths: jax.Array, unused: float = 0.0) -> jax.Array:
    """``rows`` [B, S, ...] with those from ``lengths`` [B] on ``unused``; nothing of them, NaN included, passes in either direction."""
    kept = jnp.arange(rows.shape[1], dtype=jnp.int32) < lengths[:, None]
    return jnp.where(kept.reshape(kept.shape + (1,) * (rows.ndim - 2)), rows, jnp.full((), unused, rows.dtype))


def spoil(rows: jax.Array, lost: jax.Array) -> jax.Array:
    """``rows`` [B, ...] with the batch items of ``lost`` bool [B] set to NaN."""
    return jnp.where(lost.reshape(-1, *(1,) * (rows.ndim - 1)), jnp.nan, rows)


@jax.custom_vjp
def route(rows: jax.Array, index: jax.Array, back: jax.Array) -> jax.Array:
    """[B, N, ...] to [B, M, ...]: place m takes row ``index[b, m]``, and zeros where the index is past the end.

    ``back`` [B, N] is the inverse map, and the gradient: both directions only move rows, so they keep every bit.
    """
    return jax.vmap(lambda item, places: item.at[places].get(mode="fill", fill_value=0))(rows, index)


def _route_fwd(rows: jax.Array, index: jax.Array, back: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return route(rows, index, back), (index, back)


def _route_bwd(maps: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    index, back = maps
    return route(cotangent, back, index), None, None


route.defvjp(_route_fwd, _route_bwd)


@dataclass(frozen=True)
class Packing:
    """Where the rows of ``segments`` segments lie in sequences of ``size`` rows.

    ``lengths`` int32 [B, segments]; ``index`` [B, segments * size]: the row of each place of each segment; ``back`` [B, size]: the place
    of each row; ``lost`` bool [B]: the sequence does not fit: it has more than ``segments``, or a row of a segment has no place of its own.
    """

    lengths: jax.Array
    index: jax.Array
    back: jax.Array
    lost: jax.Array

    def split(self, rows: jax.Array) -> jax.Array:
        """[B, size, ...] to [B * segments, size, ...], each segment at the front of its item, zeros behind it."""
        batch, size = rows.shape[:2]
        return route(rows, self.index, self.back).reshape(batch * self.lengths.shape[1], size, *rows.shape[2:])

    def join(self, rows: jax.Array) -> jax.Array:
        """The inverse of ``split``; rows of no segment are zero."""
        batch, segments = self.lengths.shape
        return route(rows.reshape(batch, segments * rows.shape[1], *rows.shape[2:]), self.back, self.index)

    def pick(self, rows: jax.Array) -> jax.Array:
        """[B * segments, size, ...], the whole sequence for each segment, to the segment's own rows at the front, zeros behind them."""
        size, segments = rows.shape[1], self.lengths.shape[1]
        place = self.back[:, None] - size * jnp.arange(segments, dtype=jnp.int32)[:, None]
        back = jnp.where((place >= 0) & (place < size), place, size)
        return route(rows, self.index.reshape(rows.shape[:2]), back.reshape(rows.shape[:2]))


def packing_of_lengths(lengths: jax.Array, starts: jax.Array, segments: int, size: int) -> Packing:
    """From lengths and first rows [B, any]; a length of -1 is an unused entry.

    A sequence is lost, too, when segments overlap or leave it, or when a length is below -1.
    """
    used = jnp.clip(lengths, 0, size + 1).astype(jnp.int32)  # a longer one, of 64 bits too, leaves the sequence as well
    outside = (lengths < -1) | ((used > 0) & ((starts < 0) | (starts > size - used)))
    lost = outside.any(1) | (used[:, segments:] > 0).any(1)
    missing = max(segments - used.shape[1], 0)
    used = jnp.pad(used[:, :segments], ((0, 0), (0, missing)))
    starts = jnp.pad(starts[:, :segments].astype(jnp.int32), ((0, 0), (0, missing)))
    row = jnp.arange(size, dtype=jnp.int32)
    index = jnp.where(row < used[..., None], starts[..., None] + row, size).reshape(used.shape[0], segments * size)
    inside = (row >= starts[..., None]) & (row < (starts + used)[..., None])
    lost |= (inside.sum(1) > 1).any(1)
    segment = jnp.argmax(inside, axis=1).astype(jnp.int32)
    place = segment * size + row - jnp.take_along_axis(starts, segment, axis=1)
    return Packing(used, index, jnp.where(inside.any(1), place, segments * size), lost)


def packing_of_ids(ids: jax.Array, positions: jax.Array | None, segments: int) -> Packing:
    """From segment ids [B, size], 1 and up, 0 for padding; ``positions`` [B, size] within the segment, None: in the order of the rows.

    A sequence is lost, too, when the positions of a segment are not 0, 1, ... in some order.
    """
    size = ids.shape[1]
    of_segment = ids[..., None] == jnp.arange(1, segments + 1)
    lengths = of_segment.sum(1, dtype=jnp.int32)
    if positions is None:
        positions = jnp.where(of_segment, jnp.cumsum(of_segment, axis=1, dtype=jnp.int32) - 1, 0).sum(-1)
    length = jnp.where(of_segment, lengths[:, None], 0).sum(-1)
    belongs = (positions >= 0) & (positions < length)
    back = jnp.where(belongs, (ids.astype(jnp.int32) - 1) * size + positions.astype(jnp.int32), segments * size)
    row = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), ids.shape)
    empty = jnp.full((ids.shape[0], segments * size), size, jnp.int32)
    index = jax.vmap(lambda places, item, rows: item.at[places].set(rows, mode="drop"))(back, empty, row)
    return Packing(lengths, index, back, (index < size).sum(1) != (ids != 0).sum(1))

"""``SequenceDescriptor``: which rows of a batch are used, and which segments they belong to, in Transformer Engine's three forms."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax_rocm_sink._arrays import integer_array
from attn_jax_rocm_sink._segments import Packing, packing_of_ids, packing_of_lengths

__all__ = ["SequenceDescriptor"]

Pair = tuple[jax.Array, jax.Array]
_MOST_ROWS = 2**31 - 1
_FIELDS = ("seqlens", "seq_offsets", "segment_ids", "segment_pos")


@partial(jax.tree_util.register_dataclass, data_fields=list(_FIELDS), meta_fields=[])
@dataclass(frozen=True, kw_only=True)
class SequenceDescriptor:
    """Used rows of queries and of keys, each field a pair (queries, keys). Build it with a ``from_`` method; its arrays may be traced.

    Known values that int32 does not hold are a ValueError in those methods, whatever the dtype of the array that has them.

    Source: Transformer Engine's ``transformer_engine.jax.attention.SequenceDescriptor``.
    """

    seqlens: Pair | None = None
    seq_offsets: Pair | None = None
    segment_ids: Pair | None = None
    segment_pos: Pair | None = None

    @classmethod
    def from_seqlens(cls, seqlens: jax.Array | Pair) -> SequenceDescriptor:
        """``seqlens`` int [B]: the first rows of each sequence are used. One array serves queries and keys, a pair each."""
        return cls(seqlens=_pair("seqlens", seqlens, 1))

    @classmethod
    def from_seqlens_and_offsets(cls, seqlens: jax.Array | Pair, seq_offsets: jax.Array | Pair) -> SequenceDescriptor:
        """``seqlens`` int [B, segments] and first rows ``seq_offsets`` int [B, segments or more]; unused entries are -1, after the used."""
        found = cls(seqlens=_pair("seqlens", seqlens, 2), seq_offsets=_pair("seq_offsets", seq_offsets, 2))
        assert found.seqlens is not None and found.seq_offsets is not None
        for lengths, offsets in zip(found.seqlens, found.seq_offsets, strict=True):
            if offsets.shape[0] != lengths.shape[0] or offsets.shape[1] < lengths.shape[1]:
                raise ValueError(
                    f"SequenceDescriptor: seq_offsets need an entry for each of seqlens {list(lengths.shape)}; "
                    f"got shape {list(offsets.shape)}"
                )
        return found

    @classmethod
    def from_segment_ids_and_pos(cls, segment_ids: jax.Array | Pair, segment_pos: jax.Array | Pair | None = None) -> SequenceDescriptor:
        """``segment_ids`` int [B, S]: 1 and up, 0 for padding. ``segment_pos`` int [B, S]: 0 and up in each segment, in any order.

        Without positions a segment's rows count in their order.
        """
        ids = _pair("segment_ids", segment_ids, 2)
        positions = None if segment_pos is None else _pair("segment_pos", segment_pos, 2)
        if positions is not None and any(a.shape != b.shape for a, b in zip(ids, positions, strict=True)):
            raise ValueError(
                f"SequenceDescriptor: segment_pos must have the shape of segment_ids; got {[list(p.shape) for p in positions]}"
            )
        return cls(segment_ids=ids, segment_pos=positions)

    def checked(self) -> SequenceDescriptor:
        """The same, its fields checked as the ``from_`` methods check them, which a descriptor need not come from."""
        ids, lengths, offsets = self.segment_ids, self.seqlens, self.seq_offsets
        if ids is not None and lengths is None and offsets is None:
            return self.from_segment_ids_and_pos(ids, self.segment_pos)
        if lengths is not None and ids is None and self.segment_pos is None:
            return self.from_seqlens(lengths) if offsets is None else self.from_seqlens_and_offsets(lengths, offsets)
        given = [name for name in _FIELDS if getattr(self, name) is not None]
        if not given:
            raise ValueError("the SequenceDescriptor is empty: build it with from_seqlens or another from_ method")
        raise ValueError(f"a SequenceDescriptor holds what one of its from_ methods gives it; got {', '.join(given)}")

    def lengths(self, batch: int, sizes: tuple[int, int]) -> Pair | None:
        """Used lengths [B] of queries and keys where these are the first rows of each sequence; None where segments are named.

        ValueError for shapes, and for values that are known and do not fit.
        """
        if self.seqlens is None or self.seq_offsets is not None:
            return None
        for lengths, size in zip(self.seqlens, sizes, strict=True):
            if lengths.shape != (batch,):
                raise ValueError(f"SequenceDescriptor: seqlens must have shape [B] = [{batch}]; got {list(lengths.shape)}")
            _check_range("seqlens", lengths, size)
        return self.seqlens

    def packing(self, batch: int, sizes: tuple[int, int], segments: int) -> tuple[Packing, Packing]:
        """Segments of the queries and of the keys. ValueError for shapes, and for values that are known and do not fit."""
        if segments * max(sizes) > _MOST_ROWS:
            raise ValueError(
                f"SequenceDescriptor: max_segments_per_seq={segments} sequences of {max(sizes)} rows are too many; "
                f"supported: {_MOST_ROWS} rows"
            )
        packings = tuple(self._packing(side, batch, size, segments) for side, size in enumerate(sizes))
        for packing in packings:
            if not isinstance(packing.lost, jax.core.Tracer) and np.asarray(packing.lost).any():
                raise ValueError(
                    f"SequenceDescriptor: a sequence has segments beyond max_segments_per_seq={segments}, segments that overlap or leave it"
                    ", or positions that are not 0, 1, ... in each segment"
                )
        return packings[0], packings[1]

    def _packing(self, side: int, batch: int, size: int, segments: int) -> Packing:
        if self.segment_ids is not None:
            ids = self.segment_ids[side]
            if ids.shape != (batch, size):
                raise ValueError(f"SequenceDescriptor: segment_ids must have shape [B, S] = {[batch, size]}; got {list(ids.shape)}")
            return packing_of_ids(ids, None if self.segment_pos is None else self.segment_pos[side], segments)
        assert self.seqlens is not None and self.seq_offsets is not None
        lengths = self.seqlens[side]
        if lengths.shape[0] != batch:
            raise ValueError(f"SequenceDescriptor: seqlens must have {batch} rows, one a sequence; got shape {list(lengths.shape)}")
        offsets = self.seq_offsets[side][:, : lengths.shape[1]]
        _check_range("seqlens + seq_offsets", jnp.where(lengths > 0, offsets + lengths, 0), size)
        return packing_of_lengths(lengths, offsets, segments, size)


def _pair(name: str, value: jax.Array | Pair, rank: int) -> Pair:
    pair = value if isinstance(value, tuple) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"SequenceDescriptor: {name} must be one array or a pair (queries, keys); got {len(pair)} arrays")
    queries, keys = (integer_array("SequenceDescriptor", name, array) for array in pair)
    for array in (queries, keys):
        if array.ndim != rank:
            raise ValueError(f"SequenceDescriptor: {name} must have {rank} axes; got shape {list(array.shape)}")
    return queries, keys


def _check_range(name: str, values: jax.Array, high: int) -> None:
    """Values that are known must lie in [0, high]."""
    if isinstance(values, jax.core.Tracer):
        return
    known = np.asarray(values)
    if known.size and (known.min() < 0 or known.max() > high):
        raise ValueError(f"SequenceDescriptor: {name} must lie in [0, {high}]; got {known.tolist()}")

"""What the launches of contract sm90-v1 know on the device alone: the blocks of packed segments, and the gap between text and image."""

# mypy: ignore-errors
# (the bodies are Triton's language, which Python's types do not describe)

import triton
import triton.language as tl

from attn_triton._visibility_kernel import _segment

__all__ = ["attention_plan", "key_gap"]


@triton.jit(do_not_specialize=["total", "key_total", "batch", "repeats", "size", "segment"])
def attention_plan(
    offsets, used, total, key_offsets, key_used, key_total, plan, batch, repeats, size, segment, KEYS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """int64 plan [batch + 1]: how many blocks of ``size`` rows lie before each packed segment, whose rows are repeated ``repeats`` times.

    KEYS: each block counts once for every ``segment`` keys of its packed segment, at least once. One program.
    """
    before = tl.full([], 0, tl.int64)
    tl.store(plan, before)
    for first in range(0, batch, BLOCK):
        number = first + tl.arange(0, BLOCK)
        item = tl.minimum(number, batch - 1)
        _, length = _segment(offsets, used, item, total)
        blocks = (length.to(tl.int64) * repeats + (size - 1)) // size
        if KEYS:
            _, keys = _segment(key_offsets, key_used, item, key_total)
            blocks *= tl.maximum((keys.to(tl.int64) + (segment - 1)) // segment, 1)
        blocks = tl.where(number < batch, blocks, 0)
        tl.store(plan + 1 + number, before + tl.cumsum(blocks, axis=0), mask=number < batch)
        before += tl.sum(blocks, axis=0)


@triton.jit(do_not_specialize=["item_stride", "key_stride", "keys"])
def key_gap(mask, item_stride, key_stride, keys, gap, BLOCK: tl.constexpr):
    """int64 gap [B, 2]: the first key that ``mask`` [B, keys] (uint8) drops and the one after the last; ``keys`` twice where it drops none.

    A program for each item.
    """
    item = tl.program_id(0).to(tl.int64)
    begin, end = tl.full([], 0, tl.int64) + keys, tl.full([], 0, tl.int64)
    for first in range(0, keys, BLOCK):
        key = (first + tl.arange(0, BLOCK)).to(tl.int64)
        dropped = tl.load(mask + item * item_stride + key * key_stride, mask=key < keys, other=1) == 0
        begin = tl.minimum(begin, tl.min(tl.where(dropped, key, keys), axis=0))
        end = tl.maximum(end, tl.max(tl.where(dropped, key + 1, 0), axis=0))
    tl.store(gap + item * 2, begin)
    tl.store(gap + item * 2 + 1, tl.maximum(begin, end))

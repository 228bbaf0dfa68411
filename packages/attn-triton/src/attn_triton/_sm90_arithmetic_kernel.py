"""Arithmetic of contract sm90-v1 that its kernels share: exp2 of the hardware, ordered sums, row states and their merge.

Source: docs/contracts/sm90-v1.md, sections 1 and 3.
"""

# mypy: ignore-errors
# (the bodies are Triton's language, which Python's types do not describe)

import triton.language as tl

from attn_triton._attention_forward_kernel import _ln
from attn_triton._device_function import device_function

__all__ = ["LN2", "LOG2E", "add_rn", "class_sums", "empty_state", "ex2", "finish", "halved", "merge", "row_sum", "tree_sum", "zero_if_dead"]

NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
LOG2E = tl.constexpr(float.fromhex("0x1.715476p+0"))
LN2 = tl.constexpr(float.fromhex("0x1.62e430p-1"))
CLASSES = tl.constexpr(8)


@device_function
def ex2(x):
    """``ex2.approx.ftz.f32``, the only instruction of its kind here."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@device_function
def add_rn(a, b):
    """``RN(a + b)`` in assembly, since Triton makes a product's accumulator of an addition to a product."""
    return tl.inline_asm_elementwise("add.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@device_function
def halved(x, M: tl.constexpr, N: tl.constexpr):
    """[M, N] to [M, N / 2]: column i plus column i + N / 2."""
    return tl.sum(tl.reshape(x, (M, 2, N // 2)), axis=1)


@device_function
def class_sums(x, M: tl.constexpr, N: tl.constexpr):
    """[M, N] to [M, 8], N = 256, 128 or 64: halves of the columns down to eight, all of them in a thread's registers."""
    if N == 256:
        x = halved(x, M, 256)
    if N >= 128:
        x = halved(x, M, 128)
    x = halved(x, M, 64)
    x = halved(x, M, 32)
    return halved(x, M, 16)


@device_function
def row_sum(classes, M: tl.constexpr):
    """[M, 8] to [M]: halves of the classes."""
    x = halved(classes, M, 8)
    x = halved(x, M, 4)
    return tl.sum(x, axis=1)


@device_function
def tree_sum(x, M: tl.constexpr, N: tl.constexpr):
    """[M, N] to [M], N = 256, 128 or 64: halves of the columns down to one."""
    return row_sum(class_sums(x, M, N), M)


@device_function
def zero_if_dead(n):
    """The reference of exponents: n, or +0 where no score was seen."""
    return tl.where(n == NEGATIVE_INFINITY, 0.0, n)


@device_function
def empty_state(M: tl.constexpr, D: tl.constexpr):
    """A state without a key: n [M], class sums [M, 8], O [M, D]."""
    return tl.full((M,), NEGATIVE_INFINITY, tl.float32), tl.zeros((M, CLASSES), tl.float32), tl.zeros((M, D), tl.float32)


@device_function
def merge(n, total, o, n_s, total_s, o_s):
    """The merged state and one segment's: n, l and O [M, D]. A state is dead iff its sum is 0; a NaN is live.

    A factor of -0 makes the formula copy: ``fma(x, 1, +0 * -0)`` is x, and ``fma(+0, -0, x)`` is x, with the sign of a zero.
    """
    top = tl.maximum(n, n_s)
    reference = zero_if_dead(top)
    a = tl.where(total == 0.0, -0.0, ex2(n - reference))
    b = tl.where(total_s == 0.0, -0.0, ex2(n_s - reference))
    return top, tl.fma(total_s, b, total * a), tl.fma(o_s, b[:, None], o * a[:, None])


@device_function
def finish(n, total, o, sink):
    """float32 out [M, D] and LSE [M] of a merged state; ``sink`` [M] is None without sinks, and -inf for a row without one."""
    dead = (n == NEGATIVE_INFINITY) & (total == 0.0)
    if sink is None:
        a = tl.where(dead, 0.0, 1.0)
        empty = tl.full(n.shape, NEGATIVE_INFINITY, tl.float32)
    else:
        n_g = sink * LOG2E
        top = tl.maximum(n, n_g)
        reference = zero_if_dead(top)
        a = ex2(n - reference)
        total = tl.fma(total, a, ex2(n_g - reference))
        n = top
        empty = sink
    total = tl.where(dead, 1.0, total)
    out = tl.where(dead[:, None], 0.0, o * tl.div_rn(a, total)[:, None])
    return out, tl.where(dead, empty, tl.fma(n, LN2, _ln(total)))

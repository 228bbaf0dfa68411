"""Dropout decisions of ``ordered-v1`` in 32-bit arithmetic: Philox4x32-10 (Salmon, Moraes, Dror and Shaw, SC 2011)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

__all__ = ["kept_pairs"]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def kept_pairs(probability: float, seed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """bool ``shape`` = [B, H, S, T], True where a pair survives. ``seed`` is uint32 [2], low word first; it may be traced."""
    if probability == 1.0:
        return jnp.zeros(shape, bool)
    counter = [jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(4)]
    return _word(seed, counter) >= jnp.uint32(math.floor(probability * 2**32))


def _word(seed: jax.Array, counter: list[jax.Array]) -> jax.Array:
    """Word 0 for the key ``seed`` and four counter words."""
    c0, c1, c2, c3 = counter
    key0, key1 = seed[0], seed[1]
    for _ in range(_ROUNDS):
        high0, low0 = _wide_product(c0, _MULTIPLIERS[0])
        high1, low1 = _wide_product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = key0 + jnp.uint32(_WEYL[0]), key1 + jnp.uint32(_WEYL[1])
    return c0


def _wide_product(value: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """The 64 bits of ``value * factor`` as two uint32 words, high and low, from halves: no 64-bit mode is needed."""
    low, high = value & jnp.uint32(0xFFFF), value >> 16
    factor_low, factor_high = jnp.uint32(factor & 0xFFFF), jnp.uint32(factor >> 16)
    middle = high * factor_low + ((low * factor_low) >> 16)
    cross = low * factor_high + (middle & jnp.uint32(0xFFFF))
    return high * factor_high + (middle >> 16) + (cross >> 16), value * jnp.uint32(factor)

"""``ordered-v1`` once more, one number at a time: numpy float32 scalars and the C library's fmaf, written from the contract's text.

It shares no line with the package, so agreement of bytes says that the vectorised code, its masks and its orders are what the text says.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import math
from dataclasses import dataclass, field

import numpy as np

F = np.float32
_FMAF = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6").fmaf
_FMAF.restype, _FMAF.argtypes = ctypes.c_float, [ctypes.c_float] * 3
_HEX = {
    bits: np.array(bits, dtype=np.uint32).view(F)[()] for bits in (0x3FB8AA3B, 0x3F317200, 0x35BFBE8E, 0x3FB504F3, 0xB95E8083, 0x3F318000)
}
_LN = [
    np.array(bits, dtype=np.uint32).view(F)[()]
    for bits in (0x3D9021BB, 0xBDEBD1B8, 0x3DEF251A, 0xBDFE5D4F, 0x3E11E9BF, 0xBE2AAE50, 0x3E4CCEAC, 0xBE7FFFFC, 0x3EAAAAAA)
]
MINUS_INF, ZERO = F(-np.inf), F(0)


def fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    return F(_FMAF(float(a), float(b), float(c)))


def chain(terms: list[tuple[np.float32, np.float32]]) -> np.float32:
    acc = F(0)
    for a, b in terms:
        acc = fma(a, b, acc)
    return acc


def exp(x: np.float32) -> np.float32:
    if np.isnan(x):
        return x
    if x < F(-104):
        return F(0)
    n = F(math.floor(F(F(x * _HEX[0x3FB8AA3B]) + F(0.5))))
    r = F(F(x - F(n * _HEX[0x3F317200])) - F(n * _HEX[0x35BFBE8E]))
    p = F(1 / 5040)
    for divisor in (720, 120, 24, 6, 2, 1, 1):
        p = F(F(p * r) + F(1 / divisor))
    if n >= -126:
        return F(p * F(2.0 ** int(n)))
    return F(F(p * F(2.0 ** int(n + 64))) * F(2.0**-64))


def ln(z: np.float32) -> np.float32:
    if np.isnan(z) or np.isinf(z):
        return z
    mantissa, k = math.frexp(float(z))
    f, k = F(mantissa * 2), k - 1
    if f >= _HEX[0x3FB504F3]:
        f, k = F(f * F(0.5)), k + 1
    t = F(f - F(1))
    w = F(t * t)
    p = _LN[0]
    for c in _LN[1:]:
        p = F(F(p * t) + c)
    y = F(F(t * w) * p)
    y = F(y + F(F(k) * _HEX[0xB95E8083]))
    y = F(y - F(F(0.5) * w))
    y = F(t + y)
    return F(y + F(F(k) * _HEX[0x3F318000]))


def larger(a: np.float32, b: np.float32) -> np.float32:
    if np.isnan(a) or np.isnan(b):
        return F(np.nan)
    return a if a > b else b


def tree(combine, slots: list[np.float32]) -> np.float32:
    slots = list(slots)
    half = 128
    while half:
        for i in range(half):
            slots[i] = combine(slots[i], slots[i + half])
        half //= 2
    return slots[0]


def plus(a: np.float32, b: np.float32) -> np.float32:
    return F(a + b)


@dataclass
class Row:
    """One softmax row: final scores by stored key, and the slot of each kept key (masked ones have none of the sums)."""

    scores: dict[int, np.float32]
    slot: dict[int, int]
    sink: np.float32 = MINUS_INF
    m: np.float32 = MINUS_INF
    s: np.float32 = ZERO
    probs: dict[int, np.float32] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tile in self._tiles():
            filled = [self.scores[key] if key is not None else MINUS_INF for key in tile]
            top = tree(larger, filled)
            weights = [exp(F(x - top)) if key is not None else F(0) for x, key in zip(filled, tile, strict=True)]
            self._merge(top, tree(plus, weights))
        if self.sink != MINUS_INF:
            self._merge(self.sink, F(1))
        self.probs = {key: F(exp(F(x - self.m)) / self.s) for key, x in self.scores.items()}

    def _tiles(self) -> list[list[int | None]]:
        """Live tiles in order: 256 slots of unmasked keys, None elsewhere."""
        tiles: dict[int, list[int | None]] = {}
        for key in self.scores:
            tiles.setdefault(self.slot[key] // 256, [None] * 256)[self.slot[key] % 256] = key
        return [tiles[index] for index in sorted(tiles)]

    def _merge(self, m: np.float32, s: np.float32) -> None:
        if self.m == MINUS_INF:
            self.m, self.s = m, s
            return
        top = larger(self.m, m)
        self.s = F(F(self.s * exp(F(self.m - top))) + F(s * exp(F(m - top))))
        self.m = top

    @property
    def lse(self) -> np.float32:
        return MINUS_INF if self.m == MINUS_INF else F(F(self.m + ln(self.s)) + F(0))

    def backward(self, dprobs: dict[int, np.float32], dlse: np.float32 | None) -> tuple[dict[int, np.float32], np.float32]:
        """dX by stored key, and dsink."""
        delta = None
        for tile in self._tiles():
            total = tree(plus, [F(self.probs[key] * dprobs[key]) if key is not None else F(0) for key in tile])
            delta = total if delta is None else F(delta + total)
        delta = F(0) if delta is None else delta
        if dlse is not None:
            delta = F(delta - dlse)
        gradient = {key: F(F(p * F(dprobs[key] - delta)) + F(0)) for key, p in self.probs.items()}
        if self.sink == MINUS_INF:
            return gradient, F(0)
        return gradient, F(-F(exp(F(self.sink - self.m)) / self.s) * delta)

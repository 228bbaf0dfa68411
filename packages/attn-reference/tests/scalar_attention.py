"""``attention`` of ``ordered-v1`` by ``scalar_law``: every pair in a Python loop, forward and backward."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scalar_law import MINUS_INF, F, Row, chain


@dataclass(kw_only=True)
class ScalarAttention:
    """One call on float32 numpy arrays; absent options are None. ``kept`` tells dropout's decision of (b, h, i, j)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    causal: bool = True
    scale: float | None = None
    key_padding_mask: np.ndarray | None = None
    kv_lengths: np.ndarray | None = None
    q_start: np.ndarray | None = None
    k_start: np.ndarray | None = None
    window: tuple[int | None, int | None] = (None, None)
    sinks: np.ndarray | None = None
    bias: np.ndarray | None = None
    keep: np.ndarray | None = None
    keep_scale: float = 1.0

    def __post_init__(self) -> None:
        self.batch, self.heads, self.queries, self.head_dim = self.q.shape
        self.kv_heads, self.keys = self.k.shape[1:3]
        self.group = self.heads // self.kv_heads
        self.factor = F(1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale)
        self.rows = {place: self._row(*place) for place in np.ndindex(self.batch, self.heads, self.queries)}

    def _at(self, array: np.ndarray | None, b: int, default: int) -> int:
        return default if array is None else int(array[b])

    def _row(self, b: int, h: int, i: int) -> Row:
        used = self._at(self.kv_lengths, b, self.keys)
        k_start = self._at(self.k_start, b, 0)
        position = self._at(self.q_start, b, k_start + used - self.queries) + i
        left, right = self.window
        scores, slot, logical = {}, {}, 0
        for j in range(self.keys):
            if self.key_padding_mask is not None and not self.key_padding_mask[b, j]:
                continue
            slot[j], logical = k_start + logical, logical + 1
            key = k_start + j
            if j >= used or (self.causal and key > position):
                continue
            if (left is not None and key < position - left) or (right is not None and key > position + right):
                continue
            x = F(chain(list(zip(self.q[b, h, i], self.k[b, h // self.group, j], strict=True))) * self.factor)
            if self.bias is not None:
                x = F(x + np.broadcast_to(self.bias, (self.batch, self.heads, self.queries, self.keys))[b, h, i, j])
            if x != MINUS_INF:
                scores[j] = x
        return Row(scores, slot, MINUS_INF if self.sinks is None else self.sinks[h])

    def _kept(self, b: int, h: int, i: int, j: int) -> bool:
        return self.keep is None or bool(self.keep[b, h, i, j])

    def _weight(self, p: np.float32) -> np.float32:
        return p if self.keep is None else F(p * F(self.keep_scale))

    def forward(self) -> tuple[np.ndarray, np.ndarray]:
        out = np.zeros((*self.q.shape[:3], self.v.shape[3]), dtype=F)
        lse = np.zeros(self.q.shape[:3], dtype=F)
        for (b, h, i), row in self.rows.items():
            lse[b, h, i] = row.lse
            for d in range(out.shape[3]):
                terms = [(self._weight(p), self.v[b, h // self.group, j, d]) for j, p in row.probs.items() if self._kept(b, h, i, j)]
                out[b, h, i, d] = F(chain(terms) + F(0))
        return out, lse

    def backward(self, dout: np.ndarray, dlse: np.ndarray | None) -> dict[str, np.ndarray]:
        dscores, dsinks = {}, np.zeros((self.batch, self.heads, self.queries), dtype=F)
        for (b, h, i), row in self.rows.items():
            dprobs = {}
            for j in row.probs:
                dp = chain(list(zip(dout[b, h, i], self.v[b, h // self.group, j], strict=True)))
                dprobs[j] = self._weight(dp) if self._kept(b, h, i, j) else F(0)
            dscores[b, h, i], dsinks[b, h, i] = row.backward(dprobs, None if dlse is None else dlse[b, h, i])
        found = {"q": np.zeros_like(self.q), "k": np.zeros_like(self.k), "v": np.zeros_like(self.v)}
        for (b, h, i), gradient in dscores.items():
            for d in range(self.head_dim):
                found["q"][b, h, i, d] = F(
                    F(chain([(ds, self.k[b, h // self.group, j, d]) for j, ds in gradient.items()]) * self.factor) + F(0)
                )
        for b, kv, j in np.ndindex(self.batch, self.kv_heads, self.keys):
            places = [(b, h, i) for h in range(kv * self.group, (kv + 1) * self.group) for i in range(self.queries)]
            places = [place for place in places if j in dscores[place]]
            for d in range(self.head_dim):
                found["k"][b, kv, j, d] = F(F(chain([(dscores[place][j], self.q[*place, d]) for place in places]) * self.factor) + F(0))
            for d in range(self.v.shape[3]):
                terms = [(self._weight(self.rows[place].probs[j]), dout[*place, d]) for place in places if self._kept(*place, j)]
                found["v"][b, kv, j, d] = F(chain(terms) + F(0))
        if self.sinks is not None:
            found["sinks"] = self._sinks(dsinks)
        if self.bias is not None:
            found["bias"] = self._bias(dscores)
        return found

    def _sinks(self, rows: np.ndarray) -> np.ndarray:
        total = np.zeros(self.heads, dtype=F)
        for h in range(self.heads):
            for b in range(self.batch):
                item = F(0)
                for i in range(self.queries):
                    item = F(item + rows[b, h, i])
                total[h] = F(total[h] + item)
        return total

    def _bias(self, dscores: dict[tuple[int, ...], dict[int, np.float32]]) -> np.ndarray:
        assert self.bias is not None
        total = np.zeros_like(self.bias)
        for place in np.ndindex(self.batch, self.heads, self.queries, self.keys):
            into = tuple(0 if size == 1 else at for size, at in zip(self.bias.shape, place, strict=True))
            total[into] = F(total[into] + dscores[place[:3]].get(place[3], F(0)))
        return total

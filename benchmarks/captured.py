"""Attention on activations that were captured once from a real model (benchmarks/captures/)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from attn_spec import Call
from attn_spec._arrays import from_float32, to_float32
from attn_spec._trace import Recording
from attn_spec.testing.cases import Evaluate, Sample, draw

FILE = Path(__file__).parent / "captures" / "minilm-l6-v2.safetensors"
HEADS = [0, 11]


class Captured:
    """Layer 0 of all-MiniLM-L6-v2: 12 heads of 32, two sequences of 320 and 194 tokens, padded, not causal. The sample is two heads."""

    name = "minilm-captured"
    source = "captured q, k, v of all-MiniLM-L6-v2, layer 0"
    dtypes = ("bfloat16", "float32")
    operator = "attention"
    pairs = 2 * 12 * 320 * 320

    def layer_call(self, dtype: str, *, gradients: bool = True) -> Call:
        arrays = Recording.load(FILE).arrays
        q, k, v = (from_float32(to_float32(arrays[f"layer0.{name}"]), dtype) for name in ("q", "k", "v"))
        cotangent = np.stack([draw((41, item, head), *q.shape[2:]) for item in range(q.shape[0]) for head in range(q.shape[1])])
        cotangents = {"out": from_float32(cotangent.reshape(q.shape), dtype)} if gradients else None
        inputs = {"q": q, "k": k, "v": v, "key_padding_mask": arrays["key_padding_mask"]}
        return Call("attention", inputs, {"causal": False, "return_lse": True}, cotangents, ("q", "k", "v") if gradients else ())

    def sample_calls(self, dtype: str, reference: Evaluate) -> Iterator[Sample]:
        layer = self.layer_call(dtype)
        arrays = {name: array if name == "key_padding_mask" else array[:, HEADS] for name, array in layer.arrays.items()}
        cotangents = {"out": (layer.cotangents or {})["out"][:, HEADS]}
        yield Sample(Call("attention", arrays, layer.options, cotangents, layer.wrt), dtype, len(HEADS) / layer.arrays["q"].shape[1])

    def sampled_part(self, results: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: results[name][:, HEADS] for name in ("out", "lse", "dq") if name in results}

"""Named cases of real models, used by tests, the cross-backend job and benchmarks alike.

A case keeps the model's true lengths, heads and head dim. ``layer_call`` is one whole layer; ``sample_calls`` are ordinary calls over the
case's named heads and query rows (first, last, tile and prompt edges) with all keys, small enough for the PyTorch definition and Triton's
interpreter.
Data is drawn from integer arithmetic alone, so that every machine and numpy version sees the same bits; it has outlier channels and rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attn_spec._arrays import from_float32
from attn_spec._backend import Call

__all__ = ["CASES", "Case", "Sample", "draw"]

_EVEN_WORDS = np.uint64(0x0000FFFF0000FFFF)
_CROPPED_IMAGE = 40
Evaluate = Callable[[Call], Mapping[str, np.ndarray]]


def draw(seed: tuple[int, ...], rows: int, columns: int) -> np.ndarray:
    """float32 [rows, columns], near normal with unit scale, three outlier channels (x6) and row scales of 0.5 to 2.

    The sum of four 16-bit integers of PCG64's raw stream, scaled in binary64: exact and the same everywhere.
    """
    raw = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(rows * columns + columns + rows)
    body = raw[: rows * columns]
    pairs = (body & _EVEN_WORDS) + ((body >> np.uint64(16)) & _EVEN_WORDS)
    total = (pairs & np.uint64(0xFFFFFFFF)) + (pairs >> np.uint64(32))
    values = ((total.view(np.int64) - 131070) / 37837.0).reshape(rows, columns)
    gain = np.ones(columns)
    gain[np.argsort(raw[rows * columns : rows * columns + columns], kind="stable")[: min(3, columns - 1)]] = 6.0
    spread = np.array([0.5, 1.0, 1.0, 2.0])[(raw[rows * columns + columns :] >> np.uint64(7)).astype(np.int64) & 3]
    values *= gain
    values *= spread[:, None]
    return values.astype(np.float32)


_STREAM = {"q": 1, "k": 2, "v": 3, "out": 4, "lse": 5, "sinks": 6, "scores": 7, "probs": 8}


@dataclass(frozen=True)
class Sample:
    """One small call of a case: its dtype and the fraction of the layer's (head, query) rows that it covers."""

    call: Call
    dtype: str
    fraction: float


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layer of a real model.

    ``text`` and ``prompt``: text slots and valid prompt tokens of a joint layer (0: not joint). ``lengths``: packed segment lengths, or
    used keys of each batch item in decode. ``sample_kv_heads`` and ``sample_rows`` (batch item, first row) name the sample;
    ``sample_width`` rows are taken at each.
    """

    name: str
    source: str
    batch: int = 1
    heads: int
    kv_heads: int
    head_dim: int
    queries: int
    keys: int
    text: int = 0
    prompt: int = 0
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    sinks: bool = False
    lengths: tuple[int, ...] = ()
    packed: bool = False
    dtypes: tuple[str, ...] = ("bfloat16",)
    sample_kv_heads: tuple[int, ...] = (0,)
    sample_rows: tuple[tuple[int, int], ...] = ((0, 0),)
    sample_width: int = 1
    seed: int = 0

    @property
    def joint(self) -> bool:
        return self.text > 0

    @property
    def pairs(self) -> int:
        """(query, key) pairs of the whole layer, masked ones included: what its time grows with."""
        return self.batch * self.heads * self.queries * self.keys

    @property
    def operator(self) -> str:
        """The operator that runs the whole layer."""
        return "joint_attention" if self.joint else "attention_varlen" if self.packed else "attention"

    def tensor(self, name: str, batch_item: int, head: int, rows: int | None = None) -> np.ndarray:
        """float32 [rows, D] of one head; every row of the layer when ``rows`` is None."""
        full = rows if rows is not None else (self.queries if name in ("q", "out") else self.keys)
        return draw((self.seed, _STREAM[name], batch_item, head), full, self.head_dim)

    def sink_logits(self, heads: list[int]) -> np.ndarray:
        """float32 [len(heads)], between -2 and 4."""
        return (np.array(heads, dtype=np.float64) * (6.0 / max(self.heads - 1, 1)) - 2.0).astype(np.float32)

    def layer_call(self, dtype: str, *, gradients: bool = True) -> Call:
        """The whole layer, forward, or forward and backward with a cotangent for every output row."""
        data = {name: self._stack(name, range(self.batch), range(self._heads(name)), dtype) for name in ("q", "k", "v", "out")}
        return self._joint_layer(data, gradients) if self.joint else self._plain_layer(data, gradients)

    def sample_calls(self, dtype: str, reference: Evaluate) -> Iterator[Sample]:
        """Small calls of every operator that the layer consists of; ``reference`` supplies the stages between the joint operators."""
        yield from self._joint_samples(dtype, reference) if self.joint else self._attention_samples(dtype)

    def sampled_part(self, results: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The rows of a layer's out, lse and dq that the case's attention sample computes too, in the sample's shape."""
        heads, width = self.sampled_heads(), self.sample_width
        if self.joint:
            whole = {name: np.concatenate([results[f"{name}_txt"], results[f"{name}_img"]], axis=2) for name in ("out", "dq")}
            index = [row + offset for _, row in self.sample_rows for offset in range(width)]
            return {name: array[:, heads][:, :, index] for name, array in whole.items()}
        names = [name for name in ("out", "lse", "dq") if name in results]
        if self.packed:
            return {name: results[name][heads] if name == "lse" else results[name][:, heads] for name in names}
        return {name: np.stack([results[name][item][heads][:, row : row + width] for item, row in self.sample_rows]) for name in names}

    def sampled_heads(self) -> list[int]:
        """Query heads of the sample: first and last of each sampled kv head's group."""
        group = self.heads // self.kv_heads
        return [head for kv in self.sample_kv_heads for head in sorted({kv * group, kv * group + group - 1})]

    def _heads(self, name: str) -> int:
        return self.heads if name in ("q", "out") else self.kv_heads

    def _stack(self, name: str, batch_items: Any, heads: Any, dtype: str) -> np.ndarray:
        return from_float32(np.stack([np.stack([self.tensor(name, item, head) for head in heads]) for item in batch_items]), dtype)

    def _mask(self) -> np.ndarray:
        return (np.arange(self.text) < self.prompt)[None].repeat(self.batch, axis=0)

    def _joint_layer(self, data: dict[str, np.ndarray], gradients: bool) -> Call:
        split = {name: (array[:, :, : self.text], array[:, :, self.text :]) for name, array in data.items()}
        arrays = {f"{name}_{side}": split[name][index] for index, side in enumerate(("txt", "img")) for name in ("q", "k", "v")}
        cotangents = {"out_txt": split["out"][0], "out_img": split["out"][1]} if gradients else None
        return Call("joint_attention", {**arrays, "prompt_mask": self._mask()}, {}, cotangents, tuple(arrays) if gradients else ())

    def _plain_layer(self, data: dict[str, np.ndarray], gradients: bool) -> Call:
        arrays = {name: data[name] for name in ("q", "k", "v")}
        if self.packed:
            arrays = {name: np.ascontiguousarray(np.swapaxes(array[0], 0, 1)) for name, array in arrays.items()}
            offsets = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)
            arrays.update(cu_seqlens_q=offsets, cu_seqlens_k=offsets)
        elif self.lengths:
            arrays["kv_lengths"] = np.array(self.lengths, dtype=np.int32)
        wrt: tuple[str, ...] = ("q", "k", "v")
        if self.sinks:
            arrays["sinks"] = self.sink_logits(list(range(self.heads)))
            wrt = (*wrt, "sinks")
        cotangent = np.ascontiguousarray(np.swapaxes(data["out"][0], 0, 1)) if self.packed else data["out"]
        cotangents = {"out": cotangent, "lse": self._lse_cotangent()}
        options = {**self._options(), "return_lse": True}
        return Call(self.operator, arrays, options, cotangents if gradients else None, wrt if gradients else ())

    def _lse_cotangent(self) -> np.ndarray:
        """float32, the shape of the layer's lse."""
        rows = (self.heads, self.queries) if self.packed else (self.batch, self.heads, self.queries)
        return draw((self.seed, _STREAM["lse"]), rows[0], int(np.prod(rows[1:]))).reshape(rows)

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"causal": self.causal}
        if self.window is not None:
            options["window"] = self.window
        return options

    def _attention_samples(self, dtype: str) -> Iterator[Sample]:
        """Rows of the layer as batch items of one call, each at its own position."""
        heads, width = self.sampled_heads(), self.sample_width
        if self.packed:
            yield Sample(self._packed_sample(self.layer_call(dtype), heads), dtype, len(heads) / self.heads)
            return
        rows = {name: self._sampled_rows(name, heads) for name in ("q", "out")}
        keys = {
            name: np.stack([np.stack([self.tensor(name, item, head) for head in self.sample_kv_heads]) for item, _ in self.sample_rows])
            for name in ("k", "v")
        }
        arrays = {"q": from_float32(rows["q"], dtype), **{name: from_float32(array, dtype) for name, array in keys.items()}}
        used = [self.lengths[item] if self.lengths else self.keys for item, _ in self.sample_rows]
        arrays["kv_lengths"] = np.array(used, dtype=np.int32)
        arrays["q_start"] = np.array(
            [length - self.queries + row for length, (_, row) in zip(used, self.sample_rows, strict=True)], dtype=np.int32
        )
        wrt: tuple[str, ...] = ("q", "k", "v")
        if self.sinks:
            arrays["sinks"] = self.sink_logits(heads)
            wrt = (*wrt, "sinks")
        lse = np.stack([self._lse_cotangent()[item][heads][:, row : row + width] for item, row in self.sample_rows])
        cotangents = {"out": from_float32(rows["out"], dtype), "lse": lse}
        fraction = len(self.sample_rows) * width * len(heads) / (self.batch * self.queries * self.heads)
        yield Sample(Call("attention", arrays, {**self._options(), "return_lse": True}, cotangents, wrt), dtype, fraction)

    def _packed_sample(self, layer: Call, heads: list[int]) -> Call:
        arrays = dict(layer.arrays)
        for name, kept in (("q", heads), ("k", list(self.sample_kv_heads)), ("v", list(self.sample_kv_heads))):
            arrays[name] = layer.arrays[name][:, kept]
        cotangents = layer.cotangents or {}
        return replace(layer, arrays=arrays, cotangents={"out": cotangents["out"][:, heads], "lse": cotangents["lse"][heads]})

    def _sampled_rows(self, name: str, heads: list[int]) -> np.ndarray:
        return np.stack(
            [np.stack([self.tensor(name, item, head)[row : row + self.sample_width] for head in heads]) for item, row in self.sample_rows]
        )

    def _joint_samples(self, dtype: str, reference: Evaluate) -> Iterator[Sample]:
        heads = self.sampled_heads()
        index = [row + offset for _, row in self.sample_rows for offset in range(self.sample_width)]
        fraction = len(index) * len(heads) / (self.queries * self.heads)
        q, cotangent = (from_float32(np.stack([self.tensor(name, 0, head)[index] for head in heads])[None], dtype) for name in ("q", "out"))
        k, v = (from_float32(np.stack([self.tensor(name, 0, head) for head in self.sample_kv_heads])[None], dtype) for name in ("k", "v"))
        mask = np.concatenate([self._mask(), np.ones((self.batch, self.keys - self.text), dtype=bool)], axis=1)
        shape = (1, len(heads), len(index), self.keys)
        dscores, dprobs = (
            np.stack([draw((self.seed, _STREAM[name], 0, head), len(index), self.keys) for head in heads])[None]
            for name in ("scores", "probs")
        )
        product = Call("joint_attn_qk_gemm", {"q": q, "k": k}, {}, {"scores": dscores}, ("q", "k"))
        yield Sample(product, dtype, fraction)
        scores = reference(replace(product, cotangents=None, wrt=()))["scores"].reshape(shape)
        softmax = Call("joint_attn_softmax", {"scores": scores, "key_padding_mask": mask}, {}, {"probs": dprobs}, ("scores",))
        yield Sample(softmax, "float32", fraction)
        half = {"scores": from_float32(scores, dtype), "key_padding_mask": mask}
        if dtype != "float32":
            yield Sample(replace(softmax, arrays=half, cotangents={"probs": from_float32(dprobs, dtype)}), dtype, fraction)
        probs = reference(replace(softmax, cotangents=None, wrt=()))["probs"].reshape(shape)
        yield Sample(Call("joint_attn_av_gemm", {"probs": probs, "v": v}, {}, {"out": cotangent}, ("probs", "v")), dtype, fraction)
        fused = {"q": q, "k": k, "v": v, "key_padding_mask": mask}
        options = {"causal": False, "return_lse": True}
        yield Sample(Call("attention", fused, options, {"out": cotangent}, ("q", "k", "v")), dtype, fraction)
        if dtype == "bfloat16":
            yield self._joint_crop(dtype)

    def _joint_crop(self, dtype: str) -> Sample:
        """The last sampled head of the text and of the first image tokens, which attend to one another alone."""
        head, rows = self.sampled_heads()[-1], self.text + _CROPPED_IMAGE
        data = {name: from_float32(self.tensor(name, 0, head)[None, None, :rows], dtype) for name in ("q", "k", "v", "out")}
        return Sample(self._joint_layer(data, gradients=True), dtype, rows**2 / (self.queries * self.keys * self.heads))


def _qwen_image(keys: int, prompt: int, dtypes: tuple[str, ...], seed: int) -> Case:
    rows = sorted({0, prompt - 1, 512, 767, 768, keys - 1})
    return Case(
        name=f"qwen-image-{keys}",
        source=f"Qwen-Image joint layer: 512 text slots ({prompt} tokens) and {keys - 512} image tokens, 24 heads of 128",
        heads=24,
        kv_heads=24,
        head_dim=128,
        queries=keys,
        keys=keys,
        text=512,
        prompt=prompt,
        causal=False,
        dtypes=dtypes,
        sample_kv_heads=(23,),
        sample_rows=tuple((0, row) for row in rows),
        seed=seed,
    )


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _qwen_image(4608, 73, ("bfloat16", "float32"), 11),
        _qwen_image(6544, 512, ("bfloat16",), 12),
        _qwen_image(7401, 8, ("bfloat16", "float16"), 13),
        Case(
            name="qwen3-8b-load",
            source="Qwen3-8B training load: batch 8, 4096 tokens, 32 query and 8 kv heads of 128, causal",
            batch=8,
            heads=32,
            kv_heads=8,
            head_dim=128,
            queries=4096,
            keys=4096,
            sample_kv_heads=(7,),
            sample_rows=((0, 0), (0, 255), (3, 2047), (7, 4094)),
            sample_width=2,
            seed=21,
        ),
        Case(
            name="qwen3-8b-decode",
            source="Qwen3-8B decode: one token for each of 8 sequences with caches of 1 to 4096 keys",
            batch=8,
            heads=32,
            kv_heads=8,
            head_dim=128,
            queries=1,
            keys=4096,
            lengths=(1, 97, 255, 256, 257, 1500, 4095, 4096),
            sample_kv_heads=(0,),
            sample_rows=tuple((item, 0) for item in range(8)),
            seed=22,
        ),
        Case(
            name="qwen3-8b-packed",
            source="Qwen3-8B packed training batch: segments of 1 to 300 tokens, one empty",
            heads=32,
            kv_heads=8,
            head_dim=128,
            queries=705,
            keys=705,
            lengths=(17, 300, 1, 0, 257, 130),
            packed=True,
            sample_kv_heads=(0,),
            seed=23,
        ),
        Case(
            name="gpt-oss-window",
            source="gpt-oss sliding-window layer: 4096 tokens, 64 query and 8 kv heads of 64, window of 128 tokens, softmax sinks",
            heads=64,
            kv_heads=8,
            head_dim=64,
            queries=4096,
            keys=4096,
            window=(127, 0),
            sinks=True,
            sample_kv_heads=(7,),
            sample_rows=((0, 0), (0, 126), (0, 255), (0, 2047), (0, 4094)),
            sample_width=2,
            seed=31,
        ),
        Case(
            name="gpt-oss-full",
            source="gpt-oss full-attention layer: 4096 tokens, 64 query and 8 kv heads of 64, softmax sinks",
            heads=64,
            kv_heads=8,
            head_dim=64,
            queries=4096,
            keys=4096,
            sinks=True,
            dtypes=("bfloat16", "float16"),
            sample_kv_heads=(7,),
            sample_rows=((0, 0), (0, 255), (0, 4094)),
            sample_width=2,
            seed=32,
        ),
    )
}

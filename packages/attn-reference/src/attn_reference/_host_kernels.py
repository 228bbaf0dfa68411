"""The kernels of the host engine: ``attn_spec.torch.Kernels`` over the compiled module ``attn_reference._host``.

Tensors go as addresses and strides, so any layout runs without a copy. Masks become contiguous bytes, integer arrays contiguous int64.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from attn_spec._sm90 import ex2_table, score_factor
from attn_spec.torch import AttentionInputs
from torch import Tensor

__all__ = ["KERNELS", "HostKernels", "fingerprint", "unavailable"]

_MISSING = Path(__file__).with_name("host_missing.txt")


def _load() -> tuple[ModuleType | None, str | None]:
    try:
        return importlib.import_module("attn_reference._host"), None
    except ImportError as error:
        reason = _MISSING.read_text(encoding="utf-8").strip() if _MISSING.exists() else str(error)
        return None, f"compiled host kernels are not installed: {reason}"


_HOST, _REASON = _load()


def unavailable() -> str | None:
    """Why the host kernels cannot run, or None."""
    return _REASON


def _module() -> Any:
    if _HOST is None:
        raise RuntimeError(_REASON)
    return _HOST


def fingerprint() -> str:
    """Hash of sources, flags, compiler and the variant that this CPU runs."""
    return hashlib.sha256(f"{_module().fingerprint()} {_module().best_variant()}".encode()).hexdigest()


class HostKernels:
    """Host kernels on one variant and thread count; by default those of the CPU and ``torch.get_num_threads()``. No bit depends on them."""

    def __init__(self, variant: str = "automatic", threads: int | None = None) -> None:
        self._variant, self._threads = variant, threads

    @staticmethod
    def variants() -> list[str]:
        """Compiled variants that this CPU runs."""
        found: list[str] = _module().variants()
        return found

    def softmax_forward(self, scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        return self._softmax("softmax_forward", scores, mask, out_dtype)

    def softmax_backward(self, dprobs: Tensor, scores: Tensor, mask: Tensor | None, row_max: Tensor, row_sum: Tensor) -> Tensor:
        return self._softmax_gradient("softmax_backward", dprobs, scores, mask, row_max, row_sum)

    def softmax_v2_forward(self, scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        return self._softmax("softmax_v2_forward", scores, mask, out_dtype)

    def softmax_v2_backward(self, dprobs: Tensor, scores: Tensor, mask: Tensor | None, row_max: Tensor, row_sum: Tensor) -> Tensor:
        return self._softmax_gradient("softmax_v2_backward", dprobs, scores, mask, row_max, row_sum)

    def _softmax(self, name: str, scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        probs = torch.empty(scores.shape, dtype=out_dtype)
        row_max, row_sum = (torch.empty(scores.shape[:-1], dtype=torch.float32) for _ in range(2))
        rows, bytes_of_mask = _four_axes(scores), _bytes(mask)
        self._run(
            name,
            list(rows.shape),
            _array(rows),
            _address(bytes_of_mask),
            _array(_four_axes(probs)),
            row_max.data_ptr(),
            row_sum.data_ptr(),
        )
        return probs, row_max, row_sum

    def _softmax_gradient(self, name: str, dprobs: Tensor, scores: Tensor, mask: Tensor | None, row_max: Tensor, row_sum: Tensor) -> Tensor:
        dscores = torch.empty(scores.shape, dtype=scores.dtype)
        rows, cotangent, bytes_of_mask = _four_axes(scores), _four_axes(dprobs), _bytes(mask)
        row_max, row_sum = row_max.contiguous(), row_sum.contiguous()
        self._run(
            name,
            list(rows.shape),
            _array(rows),
            _address(bytes_of_mask),
            _array(cotangent),
            row_max.data_ptr(),
            row_sum.data_ptr(),
            _array(_four_axes(dscores)),
        )
        return dscores

    def qk_gemm_forward(self, q: Tensor, k: Tensor, scale: float, out_dtype: torch.dtype) -> Tensor:
        scores = torch.empty((*q.shape[:3], k.shape[2]), dtype=out_dtype)
        self._product("product_over_width", q, k, scores, scale, q.shape, k.shape)
        return scores

    def qk_gemm_backward(
        self, dscores: Tensor, q: Tensor, k: Tensor, scale: float, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        dq, dk = (_empty_if(need, tensor) for need, tensor in zip(needs, (q, k), strict=True))
        if dq is not None:
            self._product("product_over_keys", dscores, k, dq, scale, q.shape, k.shape)
        if dk is not None:
            self._product("product_over_queries", dscores, q, dk, scale, q.shape, k.shape)
        return dq, dk

    def av_gemm_forward(self, probs: Tensor, v: Tensor, out_dtype: torch.dtype) -> Tensor:
        out = torch.empty((*probs.shape[:3], v.shape[3]), dtype=out_dtype)
        self._product("product_over_keys", probs, v, out, 1.0, probs.shape, v.shape)
        return out

    def av_gemm_backward(self, dout: Tensor, probs: Tensor, v: Tensor, needs: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
        dprobs, dv = (_empty_if(need, tensor) for need, tensor in zip(needs, (probs, v), strict=True))
        if dprobs is not None:
            self._product("product_over_width", dout, v, dprobs, 1.0, probs.shape, v.shape)
        if dv is not None:
            self._product("product_over_queries", probs, dout, dv, 1.0, probs.shape, v.shape)
        return dprobs, dv

    def attention_forward(self, inputs: AttentionInputs, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out = torch.empty(inputs.out_shape, dtype=out_dtype)
        lse, row_max, row_sum = (torch.empty(inputs.row_shape, dtype=torch.float32) for _ in range(3))
        problem = _Problem(inputs)
        self._run("attention_forward", problem.native, _array(out), lse.data_ptr(), row_max.data_ptr(), row_sum.data_ptr())
        return out, lse, row_max, row_sum

    def attention_backward(
        self, inputs: AttentionInputs, dout: Tensor, dlse: Tensor | None, row_max: Tensor, row_sum: Tensor, needs: frozenset[str]
    ) -> dict[str, Tensor]:
        gradients = inputs.gradients(needs)
        rows = [None if tensor is None else tensor.float().contiguous() for tensor in (dlse, row_max, row_sum)]
        addresses = [_address(gradients.get(name)) for name in ("q", "k", "v", "sinks", "bias")]
        shape = [0] * 4 if "bias" not in needs else list(gradients["bias"].shape)
        problem = _Problem(inputs)
        self._run("attention_backward", problem.native, _array(dout), *map(_address, rows), *addresses, shape)
        return gradients

    def attention_sm90_forward(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        out, lse = torch.zeros(inputs.q.shape, dtype=inputs.q.dtype), torch.full(inputs.row_shape, -torch.inf)
        problem = _Problem(inputs)
        self._run("sm90_forward", problem.native, score_factor(inputs.scale), _table(), _array(out), lse.data_ptr(), 0, 0, 0)
        return out, lse

    def attention_sm90_backward(
        self, inputs: AttentionInputs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: frozenset[str]
    ) -> dict[str, Tensor]:
        gradients = inputs.gradients(needs, torch.zeros)
        rows = [None if tensor is None else tensor.float().contiguous() for tensor in (lse, dlse)]
        addresses = [_address(gradients.get(name)) for name in ("q", "k", "v", "sinks")]
        problem = _Problem(inputs)
        arrays = _array(dout), _array(out)
        self._run("sm90_backward", problem.native, score_factor(inputs.scale), _table(), *arrays, *map(_address, rows), *addresses)
        return gradients

    def sm90_chain(self, a: Tensor, b: Tensor, start: Tensor) -> Tensor:
        """Tensor-core steps over a [R, N] and b [N, C], halves, from start [R, C]; float32 [R, C]."""
        a, b, found = a.contiguous(), b.contiguous(), start.contiguous().clone()
        sizes, dtype = [*a.shape, b.shape[1]], _dtype(a)
        self._run("sm90_chain", sizes, dtype, a.data_ptr(), b.data_ptr(), found.data_ptr())
        return found

    def attention_sm90_states(self, inputs: AttentionInputs, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """n and l [count, *row_shape] and o [count, *row_shape, D] of the segments, before their merge."""
        shape = (count, *inputs.row_shape)
        n, l, o = torch.full(shape, -torch.inf), torch.zeros(shape), torch.zeros(*shape, inputs.q.shape[-1])
        problem, out = _Problem(inputs), _array(inputs.q)
        addresses = [tensor.data_ptr() for tensor in (n, l, o)]
        self._run("sm90_forward", problem.native, score_factor(inputs.scale), _table(), out, 0, *addresses)
        return n, l, o

    def _product(self, name: str, left: Tensor, right: Tensor, out: Tensor, scale: float, queries: torch.Size, keys: torch.Size) -> None:
        width = right.shape[3]
        sizes = [queries[0], queries[1], keys[1], queries[2], keys[2], width]
        self._run(name, sizes, scale, _array(left), _array(right), _array(out))

    def _run(self, name: str, *arguments: Any) -> None:
        function: Callable[..., None] = getattr(_module(), name)
        function(*arguments, torch.get_num_threads() if self._threads is None else self._threads, self._variant)


class _Problem:
    """``native`` is the AttentionProblem; it holds addresses, so this object must outlive the call."""

    def __init__(self, inputs: AttentionInputs) -> None:
        q, k, v = inputs.q, inputs.k, inputs.v
        packed = inputs.packed
        if inputs.cu_seqlens_q is not None:
            batch, queries, keys = inputs.cu_seqlens_q.numel() - 1, q.shape[0], k.shape[0]
        else:
            batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
        heads, kv_heads = q.shape[1], k.shape[1]
        self._kept: dict[str, Tensor | None] = {name: _bytes(getattr(inputs, name)) for name in ("query_mask", "key_mask")}
        integers = ("kv_lengths", "q_start", "k_start", "cu_seqlens_q", "cu_seqlens_k", "seqlens_q", "seqlens_k")
        self._kept.update({name: _integers(getattr(inputs, name)) for name in integers})
        self._kept["sinks"] = None if inputs.sinks is None else inputs.sinks.float().contiguous()
        bias = None if inputs.bias is None or packed else inputs.bias.float().expand(batch, heads, queries, keys)
        self._kept["bias"] = inputs.bias if packed else bias
        seed = 0 if inputs.dropout_seed is None else int(inputs.dropout_seed.item()) % 2**64
        self.native = _module().AttentionProblem(
            sizes=[batch, heads, kv_heads, queries, keys, q.shape[-1], v.shape[-1]],
            q=_array(q),
            k=_array(k),
            v=_array(v),
            **{name: _address(tensor) for name, tensor in self._kept.items()},
            bias_strides=[0] * 4 if bias is None else list(bias.stride()),
            causal=inputs.causal,
            window_left=min(inputs.window_left, 2**32),
            window_right=min(inputs.window_right, 2**32),
            scale=inputs.scale,
            dropout_p=inputs.dropout_p,
            dropout_seed=seed,
        )


def _table() -> int:
    address: int = ex2_table().ctypes.data
    return address


def _array(tensor: Tensor) -> Any:
    """Address, strides over [B, H, S, D] (packed [S, H, D]: batch 0) and dtype."""
    strides = list(tensor.stride()) if tensor.dim() == 4 else [0, tensor.stride(1), tensor.stride(0), tensor.stride(2)]
    return _module().Array(tensor.data_ptr(), strides, _dtype(tensor))


def _dtype(tensor: Tensor) -> Any:
    return getattr(_module().DType, str(tensor.dtype).removeprefix("torch."))


def _empty_if(need: bool, like: Tensor) -> Tensor | None:
    return torch.empty(like.shape, dtype=like.dtype) if need else None


def _four_axes(scores: Tensor) -> Tensor:
    """[..., T] as [B, H, S, T]; axis 0 stays the batch. More than four axes may be copied."""
    if scores.dim() > 4:
        return scores.reshape(scores.shape[0], -1, *scores.shape[-2:])
    while scores.dim() < 4:
        scores = scores.unsqueeze(-2) if scores.dim() > 1 else scores.unsqueeze(0)
    return scores


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


def _integers(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.int64).contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


KERNELS = HostKernels()

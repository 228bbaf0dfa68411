"""The kernels that a torch backend supplies; registration, checks and autograd are built over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attn_spec._qat import QATConfig

__all__ = ["AttentionInputs", "JointKernels", "Kernels", "QatKernels", "TensorCoreKernels"]

_DIFFERENTIABLE = ("q", "k", "v", "sinks", "bias")


@dataclass(slots=True)
class AttentionInputs:
    """Checked inputs of one attention call, dense or packed, in the order of the registered operator.

    Dense: q [B, H, S, D], k [B, K, T, D], v [B, K, T, V]. Packed (``cu_seqlens_q`` given): q [total, H, D], k [total, K, D], v [total, K,
    V]. ``query_mask`` [B, S] and ``key_mask`` [B, T] are bool, True keeps; a dropped query sees no key. Integer arrays are int64.
    ``sinks`` [H] and ``bias`` [B|1, H|1, S|1, T|1] are float32. ``window_left`` and ``window_right`` are -1 without a bound.
    ``dropout_seed`` is an int64 scalar tensor that holds the bits of the unsigned seed; present iff ``dropout_p > 0``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    query_mask: Tensor | None = None
    key_mask: Tensor | None = None
    kv_lengths: Tensor | None = None
    q_start: Tensor | None = None
    k_start: Tensor | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqlens_q: Tensor | None = None
    seqlens_k: Tensor | None = None
    dropout_seed: Tensor | None = None
    causal: bool = False
    scale: float = 1.0
    window_left: int = -1
    window_right: int = -1
    dropout_p: float = 0.0

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of LSE and of the row state: [B, H, S], packed [H, total]."""
        return (self.q.shape[1], self.q.shape[0]) if self.packed else tuple(self.q.shape[:3])

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of out: that of q with V columns."""
        return (*self.q.shape[:-1], self.v.shape[-1])

    def gradients(self, needs: frozenset[str], make: Callable[..., Tensor] = torch.empty) -> dict[str, Tensor]:
        """Fresh contiguous memory for the gradients of the names in ``needs``, by ``make``: shape, dtype and device of each input."""
        found = {name: getattr(self, name) for name in _DIFFERENTIABLE if name in needs}
        return {name: make(x.shape, dtype=x.dtype, device=x.device) for name, x in found.items() if x is not None}

    def check_shapes(self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor | None]) -> None:
        """ValueError unless ``outputs`` are shaped like out and ``rows`` like LSE: what a backward is given, by name."""
        for name, tensor in outputs.items():
            if tensor.shape != self.out_shape:
                raise ValueError(f"attention_backward: {name} must have shape {list(self.out_shape)}; got {list(tensor.shape)}")
        for name, row in rows.items():
            if row is not None and row.shape != self.row_shape:
                raise ValueError(f"attention_backward: {name} must have shape {list(self.row_shape)}; got {list(row.shape)}")


class Kernels(Protocol):
    """Kernels of one engine, in contract order. Tensors may have any strides; results are fresh and contiguous. Gradients have the dtype
    of their input.

    An engine that lacks an operator or a contract omits its methods and does not list the operator or contract in its capabilities.

    An engine of GPU kernels may have ``prepare(operation, arguments, wanted)`` too: for an accepted call of a registered operator without
    gradients, a function from the addresses of the tensors among ``arguments``, in order, to the results of the public function (one, or
    the first ``wanted``), or None. It is called again for other tensors of the same shapes, strides, dtypes, devices and alignment to 16
    bytes, so it may read nothing else of them. With ``describer()`` the engine says which calls are of one kind faster than Python does.
    """

    def softmax_forward(self, scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """scores [..., T], mask [B, T] or None -> probs of ``out_dtype``, row max and row sum (float32, scores.shape[:-1])."""

    def softmax_backward(self, dprobs: Tensor, scores: Tensor, mask: Tensor | None, row_max: Tensor, row_sum: Tensor) -> Tensor:
        """dprobs (any float dtype) -> dscores in the dtype of scores."""

    def softmax_v2_forward(self, scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """``softmax_forward`` of contract ordered-v2."""

    def softmax_v2_backward(self, dprobs: Tensor, scores: Tensor, mask: Tensor | None, row_max: Tensor, row_sum: Tensor) -> Tensor:
        """``softmax_backward`` of contract ordered-v2."""

    def qk_gemm_forward(self, q: Tensor, k: Tensor, scale: float, out_dtype: torch.dtype) -> Tensor: ...

    def qk_gemm_backward(
        self, dscores: Tensor, q: Tensor, k: Tensor, scale: float, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]: ...

    def av_gemm_forward(self, probs: Tensor, v: Tensor, out_dtype: torch.dtype) -> Tensor: ...

    def av_gemm_backward(self, dout: Tensor, probs: Tensor, v: Tensor, needs: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]: ...

    def attention_forward(self, inputs: AttentionInputs, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """out (layout of q with V columns), LSE, row max, row sum (float32, ``inputs.row_shape``)."""

    def attention_backward(
        self, inputs: AttentionInputs, dout: Tensor, dlse: Tensor | None, row_max: Tensor, row_sum: Tensor, needs: frozenset[str]
    ) -> dict[str, Tensor]:
        """Gradients of the names in ``needs`` (q, k, v, sinks, bias), each with the shape and dtype of its input."""


class TensorCoreKernels(Kernels, Protocol):
    """Kernels of an engine that has contract sm90-v1 too."""

    def attention_sm90_forward(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        """out (layout and dtype of q) and LSE (float32, ``inputs.row_shape``) of contract sm90-v1.

        ``key_mask`` masks keys in place: those between text and image, side by side and up to a multiple of a segment; they are zeros.
        """

    def attention_sm90_backward(
        self, inputs: AttentionInputs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: frozenset[str]
    ) -> dict[str, Tensor]:
        """``attention_backward`` of contract sm90-v1, from out and LSE; no bias."""


class JointKernels(Protocol):
    """Kernels that an engine of ``TensorCoreKernels`` may have for the rows of joint attention (``JointLayout``); they move them alone, so
    bits do not depend on them. Tensors may have any strides."""

    def joint_places(self, prompt_mask: Tensor, first: int, image: int) -> tuple[Tensor, Tensor]:
        """bool mask [B, text] -> where rows go, for the other two, and ``key_mask``: bool [B, first + image], contiguous."""

    def join_rows(self, text: Tensor, image: Tensor, places: Tensor, first: int) -> Tensor:
        """[B, H, text, D] and [B, H, image, D] -> [B, H, first + image, D]: kept text in order, zeros, image from ``first`` on."""

    def part_rows(self, joined: Tensor, places: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """The way back; +0 in text rows that the mask drops."""


class QatKernels(Kernels, Protocol):
    """Kernels of an engine that has 4-bit attention; ``config.enabled`` is True. ``bias``, windows, starts and dropout are absent."""

    def qat_forward(self, inputs: AttentionInputs, config: QATConfig, contract: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """out (layout and dtype of q), LSE, and the row maximum and sum (float32, ``inputs.row_shape``)."""

    def qat_backward(
        self,
        inputs: AttentionInputs,
        config: QATConfig,
        contract: str,
        dout: Tensor,
        dlse: Tensor | None,
        saved: tuple[Tensor, Tensor, Tensor, Tensor],
        needs: frozenset[str],
    ) -> dict[str, Tensor]:
        """Gradients of the names in ``needs`` (q, k, v, sinks) from the results of ``qat_forward``, each with the dtype of its input."""

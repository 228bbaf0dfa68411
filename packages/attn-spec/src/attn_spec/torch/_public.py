"""The public operators of a torch backend: one set of checked functions with the same names, keywords and docstrings in every package."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from attn_spec import _sm90 as sm90
from attn_spec._errors import UnsupportedProblem
from attn_spec._operators import PRODUCTION, QAT
from attn_spec._registry import get_backend
from attn_spec.torch._acceptance import Acceptance
from attn_spec.torch._arguments import (
    autocast,
    float32,
    lengths,
    offsets_of,
    scale_of,
    seed_of,
    starts,
)
from attn_spec.torch._arrays import dtype_name
from attn_spec.torch._joint import JointLayout
from attn_spec.torch._operation import unseen
from attn_spec.torch._qat import QatOperators
from attn_spec.torch._registration import register
from attn_spec.torch._remembered import Remembered, python_describer, remembered

if TYPE_CHECKING:
    from attn_spec.torch._backend import TorchBackend
    from attn_spec.torch._kernels import Kernels

__all__ = ["Operators"]

Outputs = Tensor | tuple[Tensor, Tensor]


@torch.compiler.assume_constant_result
def _check_scale(scale: float, contract: str, operator: str) -> float:
    """``score_factor``, whose numpy a compiler cannot trace."""
    return sm90.score_factor(scale, contract, operator)


class Operators(QatOperators):
    """Public functions over the kernels of one engine, registered under ``torch.ops.<namespace>``.

    Every function checks its arguments first (ValueError, TypeError), then asks the backend's capabilities (UnsupportedProblem), and only
    then runs. Under autocast, q, k, v and the operands of the products are cast to its dtype; gradients come back in each input's own
    dtype.
    """

    def __init__(self, backend: TorchBackend, engine: str, namespace: str, kernels: Kernels) -> None:
        self._backend, self._engine, self._kernels = backend, engine, kernels
        self._out_dtype: torch.dtype | None = None
        self._check = Acceptance(backend, engine)
        prepare = getattr(kernels, "prepare", None)
        self._remembered = None if prepare is None else Remembered(prepare, getattr(kernels, "describer", python_describer))
        self._operations = register(namespace, kernels, backend.capabilities(engine))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Copies and pickles of an operator are the operator of the installed backend."""
        return _installed, (self._backend.name, self._engine, self._out_dtype)

    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions that this engine supports, by operator name; "NAME.forward_fp32" gives a float32 result."""
        found: dict[str, Callable[..., Any]] = {}
        upcast = object.__new__(type(self))
        vars(upcast).update(vars(self), _out_dtype=torch.float32)
        for name in self._backend.capabilities(self._engine).operators:
            found[name] = getattr(self, name)
            if name not in ("joint_attn_qk_gemm", PRODUCTION, *QAT):
                found[f"{name}.forward_fp32"] = getattr(upcast, name)
        return found

    @remembered
    def joint_attn_qk_gemm(
        self, q: Tensor, k: Tensor, *, scale: float | None = None, out_dtype: torch.dtype = torch.float32, contract: str | None = None
    ) -> Tensor:
        """Scores of joint attention: ``scale * q k^T``, one FMA chain over D for each output, scaled after the sum.

        Args:
            q: [B, H, S, D], float32, bfloat16 or float16, any strides.
            k: [B, K, T, D], same dtype; H is a multiple of K.
            scale: None is 1/sqrt(D); 0.0 and negative values are used as they are.
            out_dtype: dtype of the result, one of the same three.

        Returns:
            [B, H, S, T].

        Raises:
            TypeError, ValueError: bad dtype, shape, device or scale. UnsupportedProblem: this backend does not run it.

        Source: docs/contracts/ordered-v1.md, section 3.
        """
        q, k = autocast(q, k)
        options = {"scale": scale, "out_dtype": dtype_name(out_dtype) if isinstance(out_dtype, torch.dtype) else repr(out_dtype)}
        self._check("joint_attn_qk_gemm", {"q": q, "k": k}, options, contract, q, k)
        return self._operations["joint_attn_qk_gemm"](q, k, scale_of(scale, q), out_dtype)

    @remembered
    def joint_attn_softmax(self, scores: Tensor, *, key_padding_mask: Tensor | None = None, contract: str | None = None) -> Tensor:
        """Softmax over the last axis in tiles, combined left to right.

        Args:
            scores: [..., T], float32, bfloat16 or float16, T >= 1, any strides. -inf masks a key in place.
            key_padding_mask: bool [B, T], True keeps the key (the opposite of torch.nn.MultiheadAttention), B = scores.shape[0]. Dropped
                keys are compacted away, so padding moves no bit of the kept ones.
            contract: None is ordered-v1; ordered-v2 has other bits, one exponential an element, and is quicker.

        Returns:
            Probabilities, shape and dtype of ``scores``. Dropped and masked keys, and rows without a key, are +0.

        Raises:
            TypeError, ValueError: bad dtype, shape or device. UnsupportedProblem: this backend does not run it.

        Source: docs/contracts/ordered-v1.md, section 2; docs/contracts/ordered-v2.md.
        """
        arrays = {"scores": scores, "key_padding_mask": key_padding_mask}
        self._check("joint_attn_softmax", arrays, {}, contract, scores)
        operation = "joint_attn_softmax_v2" if contract == "ordered-v2" else "joint_attn_softmax"
        return self._operations[operation](scores, key_padding_mask, self._out_dtype or scores.dtype, wanted=1)[0]

    @remembered
    def joint_attn_av_gemm(self, probs: Tensor, v: Tensor, *, contract: str | None = None) -> Tensor:
        """Output of joint attention: ``probs v``, one FMA chain over T for each output.

        Args:
            probs: [B, H, S, T], float32 or the dtype of v.
            v: [B, K, T, V]; H is a multiple of K.

        Returns:
            [B, H, S, V] in the dtype of v.

        Raises:
            TypeError, ValueError: bad dtype, shape or device. UnsupportedProblem: this backend does not run it.

        Source: docs/contracts/ordered-v1.md, section 3.
        """
        probs, v = autocast(probs, v)
        self._check("joint_attn_av_gemm", {"probs": probs, "v": v}, {}, contract, probs, v)
        return self._operations["joint_attn_av_gemm"](probs, v, self._out_dtype or v.dtype)

    def joint_attention(
        self,
        q_txt: Tensor,
        k_txt: Tensor,
        v_txt: Tensor,
        q_img: Tensor,
        k_img: Tensor,
        v_img: Tensor,
        *,
        prompt_mask: Tensor | None = None,
        scale: float | None = None,
        contract: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Joint text and image attention: every token attends to all text tokens and all image tokens, text first.

        Args:
            q_txt, k_txt, v_txt: [B, H|K, T_txt, D|V]; q_img, k_img, v_img: [B, H|K, T_img, D|V]; one dtype.
            prompt_mask: bool [B, T_txt], True for a token. Padding moves no bit, and padded text rows are +0.
            scale: None is 1/sqrt(D); 0.0 and negative values are used as they are (sm90-v1: positive ones alone).
            contract: None is ordered-v1; sm90-v1 is tensor-core attention of halves with other bits.

        Returns:
            ``(out_txt, out_img)``, [B, H, T_txt, V] and [B, H, T_img, V].

        Raises:
            TypeError, ValueError: bad dtype, shape, device or scale. UnsupportedProblem: this backend does not run it.

        Source: docs/contracts/ordered-v1.md, section 3; docs/contracts/sm90-v1.md, section 5.
        """
        tensors = autocast(q_txt, k_txt, v_txt, q_img, k_img, v_img)
        names = ("q_txt", "k_txt", "v_txt", "q_img", "k_img", "v_img")
        arrays = {**dict(zip(names, tensors, strict=True)), "prompt_mask": prompt_mask}
        self._check("joint_attention", arrays, {"scale": scale}, contract, *tensors)
        if contract == sm90.CONTRACT:
            _check_scale(scale_of(scale, tensors[0]), contract, "joint_attention")
            copies = prompt_mask is not None and hasattr(self._kernels, "join_rows") and unseen((*tensors, prompt_mask))
            layout = JointLayout(prompt_mask, q_txt.shape[2], q_img.shape[2], cast("Any", self._kernels) if copies else None)
            k = layout.keys(tensors[1], tensors[4])
            joined = layout.queries(tensors[0], tensors[3]), k, layout.keys(tensors[2], tensors[5]), None, layout.key_mask(k)
            return layout.parts(self._run(1, (*joined, *(None,) * 10), False, scale, None, 0.0, contract)[0])
        q, k, v = (torch.cat((tensors[index], tensors[index + 3]), dim=2) for index in range(3))
        text = tensors[0].shape[2]
        mask = None
        if prompt_mask is not None:
            mask = torch.cat((prompt_mask, prompt_mask.new_ones(q.shape[0], q.shape[2] - text)), dim=1)
        out = self._among_all(q, k, v, mask, scale)
        return out[:, :, :text], out[:, :, text:]

    @remembered
    def _among_all(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """Attention of every kept token to every kept token, of checked tensors; mask bool [B, S]."""
        found: Tensor = self._run(1, (q, k, v, mask, mask, *(None,) * 10), False, scale, None, 0.0)[0]
        return found

    @remembered
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
        key_padding_mask: Tensor | None = None,
        kv_lengths: Tensor | None = None,
        q_start: int | Tensor | None = None,
        k_start: int | Tensor | None = None,
        window: tuple[int | None, int | None] | None = None,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
        dropout_p: float = 0.0,
        dropout_seed: int | Tensor | None = None,
        return_lse: bool = False,
        contract: str | None = None,
    ) -> Outputs:
        """Softmax attention with softmax sinks, O(S) memory.

        Args:
            q: [B, H, S, D]; k: [B, K, T, D]; v: [B, K, T, V]; one dtype of float32, bfloat16, float16; any strides; H a multiple of K.
            causal: key j is visible to query i iff ``k_start + j <= q_start + i`` (bottom-right by default; ``q_start=0`` is top-left).
            scale: None is 1/sqrt(D); 0.0 and negative values are used as they are (sm90-v1: positive ones alone).
            key_padding_mask: bool [B, T], True keeps the key. Dropped keys are compacted away.
            kv_lengths: int [B], used keys of each batch item; default T.
            q_start: position of query 0, int or int [B]; default ``k_start + kv_lengths - S``.
            k_start: position of stored key 0, int or int [B], at least 0 (rolling caches); default 0.
            window: ``(left, right)`` positions visible besides the diagonal one; None for no bound.
            sinks: [H] logits after scaling, float32 (other float dtypes are converted); -inf is no sink, 0 is off-by-one softmax.
            bias: [B|1, H|1, S|1, T|1], added after scaling; -inf masks.
            dropout_p: probability that a pair is dropped after normalisation, with ``dropout_seed`` (64-bit int or int64 scalar tensor;
                None draws one from torch's default CPU generator).
            return_lse: also return the log-sum-exp.
            contract: None is ordered-v1; sm90-v1 is tensor-core attention of halves with other bits and fewer options.

        Returns:
            ``out`` [B, H, S, V] in the dtype of v, or ``(out, lse)`` with lse float32 [B, H, S], natural logarithm, sink included. A row
            without a visible key is +0 with lse -inf (with a sink: the sink).

        Raises:
            TypeError, ValueError: bad dtype, shape, device or option. UnsupportedProblem: this backend does not run it.

        Source: docs/contracts/ordered-v1.md, section 3; docs/contracts/sm90-v1.md.
        """
        q, k, v = autocast(q, k, v)
        arrays = {"q": q, "k": k, "v": v, "key_padding_mask": key_padding_mask, "kv_lengths": kv_lengths, "sinks": sinks, "bias": bias}
        options: dict[str, Any] = {
            "causal": causal,
            "scale": scale,
            "window": window,
            "dropout_p": dropout_p,
            "dropout_seed": dropout_seed,
            "return_lse": return_lse,
        }
        if q_start is not None:
            (arrays if isinstance(q_start, Tensor) else options)["q_start"] = q_start  # type: ignore[assignment]
        if k_start is not None:
            (arrays if isinstance(k_start, Tensor) else options)["k_start"] = k_start  # type: ignore[assignment]
        self._check("attention", arrays, options, contract, q, k, v, sinks, bias)
        places = lengths("attention", "kv_lengths", kv_lengths, k.shape[2]), starts(q_start, q), starts(k_start, q)
        seed = seed_of(dropout_seed, q) if dropout_p > 0.0 else None
        tensors = (q, k, v, None, key_padding_mask, *places, float32(sinks), float32(bias), None, None, None, None, seed)
        found = self._run(2 if return_lse else 1, tensors, causal, scale, window, dropout_p, contract)
        return (found[0], found[1]) if return_lse else found[0]

    @remembered
    def attention_varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        *,
        seqlens_q: Tensor | None = None,
        seqlens_k: Tensor | None = None,
        causal: bool = True,
        scale: float | None = None,
        window: tuple[int | None, int | None] | None = None,
        sinks: Tensor | None = None,
        dropout_p: float = 0.0,
        dropout_seed: int | Tensor | None = None,
        return_lse: bool = False,
        contract: str | None = None,
    ) -> Outputs:
        """Attention over packed segments; each segment is one ``attention`` call of its own lengths.

        Args:
            q: [total_q, H, D]; k: [total_k, K, D]; v: [total_k, K, V]; one dtype; H a multiple of K.
            cu_seqlens_q, cu_seqlens_k: int [segments + 1], offsets of the segments, not decreasing, within the packed arrays.
            seqlens_q, seqlens_k: int [segments], used lengths when segments are padded; default: up to the next offset.
            causal, scale, window, sinks, dropout_p, dropout_seed, return_lse: as in ``attention``; positions count within a segment.

        Returns:
            ``out`` [total_q, H, V], or ``(out, lse)`` with lse float32 [H, total_q]. Rows outside every used segment are +0 with lse
            -inf, and their gradients are +0.

        Raises:
            TypeError, ValueError: bad dtype, shape, device, offsets or option. UnsupportedProblem: this backend does not run it.

        Source: docs/contracts/ordered-v1.md, section 3; docs/contracts/sm90-v1.md.
        """
        q, k, v = autocast(q, k, v)
        arrays = {
            "q": q,
            "k": k,
            "v": v,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "seqlens_q": seqlens_q,
            "seqlens_k": seqlens_k,
            "sinks": sinks,
        }
        options: dict[str, Any] = {
            "causal": causal,
            "scale": scale,
            "window": window,
            "dropout_p": dropout_p,
            "dropout_seed": dropout_seed,
            "return_lse": return_lse,
        }
        self._check("attention_varlen", arrays, options, contract, q, k, v, sinks)
        offsets_q, used_q = offsets_of("attention_varlen", "q", cu_seqlens_q, seqlens_q, q.shape[0])
        offsets_k, used_k = offsets_of("attention_varlen", "k", cu_seqlens_k, seqlens_k, k.shape[0])
        seed = seed_of(dropout_seed, q) if dropout_p > 0.0 else None
        tensors = (q, k, v, *(None,) * 5, float32(sinks), None, offsets_q, offsets_k, used_q, used_k, seed)
        found = self._run(2 if return_lse else 1, tensors, causal, scale, window, dropout_p, contract)
        return (found[0], found[1]) if return_lse else found[0]

    def _run(
        self,
        wanted: int,
        tensors: tuple[Tensor | None, ...],
        causal: bool,
        scale: float | None,
        window: tuple[int | None, int | None] | None,
        dropout_p: float,
        contract: str | None = None,
    ) -> tuple[Any, ...]:
        """Results of the tensors of ``AttentionInputs``, in its order: out and, if two are ``wanted``, LSE; there may be more."""
        left, right = (None, None) if window is None else window
        sides = -1 if left is None else int(left), -1 if right is None else int(right)
        q, v = cast("tuple[Tensor, Tensor]", (tensors[0], tensors[2]))
        options = causal, scale_of(scale, q), *sides, float(dropout_p)
        found: tuple[Any, ...]
        if contract == sm90.CONTRACT:
            if self._out_dtype is not None:
                raise UnsupportedProblem(self._backend.name, [f"a float32 result with contract {contract} (ordered-v1 has it)"])
            _check_scale(options[1], contract, "attention_varlen" if q.ndim == 3 else "attention")
            found = self._operations["attention_sm90"](*tensors, *options, wanted=wanted)
        else:
            found = self._operations["attention"](*tensors, *options, self._out_dtype or v.dtype, wanted=wanted)
        return found


def _installed(name: str, engine: str, out_dtype: torch.dtype | None) -> Operators:
    functions = get_backend(name).operators(engine)
    found: Any = functions["joint_attn_softmax" if out_dtype is None else "joint_attn_softmax.forward_fp32"]
    operators: Operators = found.__self__
    return operators

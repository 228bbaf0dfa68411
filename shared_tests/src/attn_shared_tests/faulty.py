"""Backends with one fault each, made from a right one: the negative controls of the clauses.

A fault takes a right ``evaluate`` and gives a wrong one. Most change the call and not the result, so that each is a whole, plausible
attention with the mistake of a public bug; ``k_start`` moved together with ``q_start`` is another tiling of the same mathematics. The
halves tree does not notice a rotation, so only a shift that moves keys across a tile edge shows: CROSSING puts three keys before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from attn_spec import Call
from attn_spec._arrays import dtype_name, from_float32, to_float32
from attn_spec.testing.runner import Evaluate

from attn_shared_tests.problems import edited, shifted, some_heads

Fault = Callable[[Evaluate], Evaluate]
Results = dict[str, np.ndarray]
CROSSING = 253
_MASKS = ("key_padding_mask", "prompt_mask", "kv_lengths")


def returns_zeros(evaluate: Evaluate) -> Evaluate:
    return lambda call: {name: np.zeros_like(array) for name, array in evaluate(call).items()}


def stores_negative_zero(evaluate: Evaluate) -> Evaluate:
    def minus(array: np.ndarray) -> np.ndarray:
        values = to_float32(array)
        return from_float32(np.where(values == 0.0, np.float32(-0.0), values), dtype_name(array.dtype))

    return lambda call: {name: minus(array) for name, array in evaluate(call).items()}


def rounds_twice(evaluate: Evaluate) -> Evaluate:
    """Keeps results in half precision on the way."""

    def twice(array: np.ndarray) -> np.ndarray:
        return from_float32(to_float32(from_float32(to_float32(array), "bfloat16")), dtype_name(array.dtype))

    return lambda call: {name: twice(array) for name, array in evaluate(call).items()}


def gives_float32_gradients(evaluate: Evaluate) -> Evaluate:
    return lambda call: {name: to_float32(array) if name.startswith("d") else array for name, array in evaluate(call).items()}


def drops_the_sink(evaluate: Evaluate) -> Evaluate:
    def faulty(call: Call) -> Results:
        if "sinks" not in call.arrays:
            return evaluate(call)
        found = evaluate(edited(call, drop=("sinks",)))
        return found | ({"dsinks": np.zeros_like(call.arrays["sinks"])} if "sinks" in call.wrt else {})

    return faulty


def counts_the_sink_twice(evaluate: Evaluate) -> Evaluate:
    def faulty(call: Call) -> Results:
        return evaluate(edited(call, sinks=call.arrays["sinks"] + np.float32(np.log(2.0))) if "sinks" in call.arrays else call)

    return faulty


def floors_the_sink(evaluate: Evaluate) -> Evaluate:
    """A sink of -inf becomes a large finite number."""
    return lambda call: evaluate(edited(call, sinks=np.maximum(call.arrays["sinks"], np.float32(-1e4))) if "sinks" in call.arrays else call)


def ignores_masks(evaluate: Evaluate) -> Evaluate:
    return lambda call: evaluate(edited(call, drop=_MASKS))


def ignores_the_bias(evaluate: Evaluate) -> Evaluate:
    return lambda call: evaluate(edited(call, drop=("bias",)))


def masks_with_a_large_number(evaluate: Evaluate) -> Evaluate:
    """-inf in the bias becomes a large finite number, as kernels do that fear NaN."""

    def faulty(call: Call) -> Results:
        if "bias" not in call.arrays:
            return evaluate(call)
        bias = to_float32(call.arrays["bias"])
        finite = from_float32(np.where(np.isneginf(bias), np.float32(-1e4), bias), dtype_name(call.arrays["bias"].dtype))
        return evaluate(edited(call, bias=finite))

    return faulty


def masks_large_negative_bias(evaluate: Evaluate) -> Evaluate:
    """A finite bias at the end of the range is taken for a mask."""

    def faulty(call: Call) -> Results:
        if "bias" not in call.arrays:
            return evaluate(call)
        bias = to_float32(call.arrays["bias"])
        masked = from_float32(np.where(bias < -1e30, -np.inf, bias).astype(np.float32), dtype_name(call.arrays["bias"].dtype))
        return evaluate(edited(call, bias=masked))

    return faulty


def lets_masked_values_in(evaluate: Evaluate) -> Evaluate:
    """Multiplies masked values by a zero weight instead of leaving them out."""

    def faulty(call: Call) -> Results:
        found = evaluate(call)
        leak = {name: _leak(call, array) for name, array in found.items()}
        return {name: from_float32(to_float32(array) + leak[name], dtype_name(array.dtype)) for name, array in found.items()}

    return faulty


def aligns_causal_top_left(evaluate: Evaluate) -> Evaluate:
    def faulty(call: Call) -> Results:
        named = "q_start" in call.options or "q_start" in call.arrays
        causal = call.op == "attention" and call.options.get("causal", True)
        return evaluate(edited(call, q_start=0) if causal and not named else call)

    return faulty


def ignores_q_start(evaluate: Evaluate) -> Evaluate:
    return lambda call: evaluate(edited(call, drop=("q_start",)))


def ignores_k_start(evaluate: Evaluate) -> Evaluate:
    return lambda call: evaluate(edited(call, drop=("k_start",)))


def widens_the_window(evaluate: Evaluate) -> Evaluate:
    def faulty(call: Call) -> Results:
        left, right = call.options.get("window") or (None, None)
        return evaluate(call if left is None else edited(call, window=(left + 1, right)))

    return faulty


def narrows_the_window(evaluate: Evaluate) -> Evaluate:
    def faulty(call: Call) -> Results:
        left, right = call.options.get("window") or (None, None)
        return evaluate(edited(call, window=(left - 1, right)) if left else call)

    return faulty


def ignores_the_window(evaluate: Evaluate) -> Evaluate:
    return lambda call: evaluate(edited(call, drop=("window",)))


def averages_dead_rows(evaluate: Evaluate) -> Evaluate:
    """A row without a visible key becomes the mean of v."""

    def faulty(call: Call) -> Results:
        found = evaluate(call)
        out, v = to_float32(found["out"]), to_float32(call.arrays["v"])
        mean = np.nan_to_num(v).mean(axis=2, keepdims=True).repeat(out.shape[1] // v.shape[1], axis=1)
        dead = np.isneginf(found["lse"])[..., None]
        return {**found, "out": from_float32(np.where(dead, mean, out), dtype_name(found["out"].dtype))}

    return faulty


def divides_by_zero_in_dead_rows(evaluate: Evaluate) -> Evaluate:
    """A row without a visible key is NaN, and so is every gradient that it shares."""

    def faulty(call: Call) -> Results:
        found = evaluate(call)
        dead = np.isneginf(found["lse"])
        nan = {name: to_float32(found[name]) for name in ("out", "dk", "dv") if name in found}
        for name, array in nan.items():
            array[dead if name == "out" else dead.any(axis=(1, 2))] = np.nan
        return found | {name: from_float32(array, dtype_name(found[name].dtype)) for name, array in nan.items()}

    return faulty


def reports_zero_for_a_dead_lse(evaluate: Evaluate) -> Evaluate:
    return lambda call: {name: np.where(np.isneginf(a), np.float32(0), a) if name == "lse" else a for name, a in evaluate(call).items()}


def reports_lse_in_base_two(evaluate: Evaluate) -> Evaluate:
    return lambda call: {name: a * np.float32(1.4426950408889634) if name == "lse" else a for name, a in evaluate(call).items()}


def tiles_by_batch_size(evaluate: Evaluate) -> Evaluate:
    """Another key tiling for larger batches, as a kernel that splits keys by occupancy."""
    return lambda call: evaluate(shifted(call, CROSSING) if call.arrays["q"].shape[0] > 1 else call)


def tiles_by_head_count(evaluate: Evaluate) -> Evaluate:
    return lambda call: evaluate(shifted(call, CROSSING) if call.arrays["q"].shape[1] > 1 else call)


def tiles_by_slot(evaluate: Evaluate) -> Evaluate:
    """Later slots of the batch get another key tiling."""
    return lambda call: evaluate(shifted(call, CROSSING * (np.arange(call.arrays["q"].shape[0]) % 2)))


def tiles_by_the_longest(evaluate: Evaluate) -> Evaluate:
    """The key tiling follows the longest sequence of the batch, or for packed input its largest segment."""

    def faulty(call: Call) -> Results:
        lengths = call.arrays.get("kv_lengths")
        return evaluate(call if lengths is None else shifted(call, int(lengths.max()) % 256))

    return faulty


def tiles_by_query_count(evaluate: Evaluate) -> Evaluate:
    """Decode and short chunks run another kernel than long prefill."""
    return lambda call: evaluate(shifted(call, CROSSING) if call.arrays["q"].shape[2] < 8 else call)


def tiles_by_stored_keys(evaluate: Evaluate) -> Evaluate:
    """The tile grid starts at the first stored key instead of position 0."""

    def faulty(call: Call) -> Results:
        start = call.arrays.get("k_start", call.options.get("k_start"))
        return evaluate(call if start is None else shifted(call, -np.asarray(start, np.int64)))

    return faulty


def mixes_the_batch(evaluate: Evaluate) -> Evaluate:
    """One non-finite neighbour reaches every row, as a shared maximum or a shared zero weight does."""

    def faulty(call: Call) -> Results:
        found = evaluate(call)
        if all(np.isfinite(to_float32(call.arrays[name])).all() for name in ("k", "v")):
            return found
        return {name: from_float32(np.full(array.shape, np.nan, np.float32), dtype_name(array.dtype)) for name, array in found.items()}

    return faulty


def pads_in_place(evaluate: Evaluate) -> Evaluate:
    """Padding becomes a mask that keeps its place in the tiles."""

    def faulty(call: Call) -> Results:
        if call.op == "joint_attn_softmax" and "key_padding_mask" in call.arrays:
            scores, mask = call.arrays["scores"], call.arrays["key_padding_mask"]
            wide = mask.reshape(mask.shape[0], *(1,) * (scores.ndim - 2), mask.shape[1])
            masked = from_float32(np.where(wide, to_float32(scores), np.float32(-np.inf)), dtype_name(scores.dtype))
            return evaluate(edited(call, drop=("key_padding_mask",), scores=masked))
        if call.op == "attention" and "key_padding_mask" in call.arrays and "bias" not in call.arrays:
            mask = call.arrays["key_padding_mask"]
            bias = np.where(mask, np.float32(0), np.float32(-np.inf))[:, None, None, :]
            return evaluate(edited(call, drop=("key_padding_mask",), bias=bias))
        return evaluate(call)

    return faulty


def forgets_the_group_sum(evaluate: Evaluate) -> Evaluate:
    """dk and dv come from the first head of each group alone."""

    def faulty(call: Call) -> Results:
        found = evaluate(call)
        group = call.arrays["q"].shape[1] // call.arrays["k"].shape[1]
        first = evaluate(some_heads(call, slice(0, None, group)))
        return found | {name: first[name] for name in ("dk", "dv") if name in found}

    return faulty


def drops_the_lse_gradient(evaluate: Evaluate) -> Evaluate:
    def faulty(call: Call) -> Results:
        kept = {name: array for name, array in (call.cotangents or {}).items() if name == "out"}
        return evaluate(replace(call, cotangents=kept) if kept else call)

    return faulty


def computes_gradients_by_request(evaluate: Evaluate) -> Evaluate:
    """Another tiling when a single gradient is asked for."""
    return lambda call: evaluate(shifted(call, CROSSING) if len(call.wrt) == 1 else call)


def forgets_the_mask_in_backward(evaluate: Evaluate) -> Evaluate:
    def faulty(call: Call) -> Results:
        found, full = evaluate(call), evaluate(edited(call, causal=False))
        return {name: full[name] if name in ("dk", "dv") else array for name, array in found.items()}

    return faulty


def ignores_segments(evaluate: Evaluate) -> Evaluate:
    """Packed input is taken for one sequence."""

    def faulty(call: Call) -> Results:
        if call.op != "attention_varlen":
            return evaluate(call)
        ends = {name: np.array([0, call.arrays[name][-1]], np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        return evaluate(edited(call, drop=("seqlens_q", "seqlens_k"), **ends))

    return faulty


def ignores_used_lengths(evaluate: Evaluate) -> Evaluate:
    return lambda call: evaluate(edited(call, drop=("seqlens_q", "seqlens_k")))


def leaves_rows_unwritten(evaluate: Evaluate) -> Evaluate:
    """Rows past the last segment keep what was in memory."""

    def faulty(call: Call) -> Results:
        found = evaluate(call)
        end = {"out": int(call.arrays["cu_seqlens_q"][-1]), "dq": int(call.arrays["cu_seqlens_q"][-1])}
        end |= {name: int(call.arrays["cu_seqlens_k"][-1]) for name in ("dk", "dv")}
        garbage = {name: to_float32(array) for name, array in found.items() if name in end}
        for name, array in garbage.items():
            array[end[name] :] = np.nan
        return found | {name: from_float32(array, dtype_name(found[name].dtype)) for name, array in garbage.items()}

    return faulty


def drifts(evaluate: Evaluate) -> Evaluate:
    """Every second call gets another tiling: an order that depends on timing."""
    count = 0

    def faulty(call: Call) -> Results:
        nonlocal count
        count += 1
        found = evaluate(call)
        return {name: _last_bit(array) if count % 2 == 0 else array for name, array in found.items()}

    return faulty


def remembers_by_shape(evaluate: Evaluate) -> Evaluate:
    """A plan cached by shapes alone keeps the first call's options."""
    plans: dict[tuple[object, ...], Call] = {}

    def faulty(call: Call) -> Results:
        key = (call.op, *sorted((name, array.shape) for name, array in call.arrays.items() if name in ("q", "k", "v")))
        first = plans.setdefault(key, call)
        return evaluate(replace(call, options=first.options))

    return faulty


def repeats_one_dropout_seed(evaluate: Evaluate) -> Evaluate:
    return lambda call: evaluate(edited(call, dropout_seed=0))


def scales_dropped_probabilities_late(evaluate: Evaluate) -> Evaluate:
    """No division by the keep probability."""

    def faulty(call: Call) -> Results:
        found = evaluate(call)
        keep = np.float32(1.0 - call.options.get("dropout_p", 0.0))
        return {**found, "out": from_float32(to_float32(found["out"]) * keep, dtype_name(found["out"].dtype))}

    return faulty


def accepts_anything(evaluate: Evaluate) -> Evaluate:
    """Bad input gives zeros instead of an error."""
    return lambda call: {"out": np.zeros(1, np.float32)}


def _leak(call: Call, result: np.ndarray) -> np.ndarray:
    """0 * (sum of v) for each batch item, shaped to add to ``result``."""
    with np.errstate(invalid="ignore"):
        zero = (to_float32(call.arrays["v"]) * np.float32(0)).reshape(call.arrays["v"].shape[0], -1).sum(axis=1)
    if result.ndim == 1 or result.shape[0] != zero.shape[0]:
        return zero.sum()
    return zero.reshape(-1, *(1,) * (result.ndim - 1))


def _last_bit(array: np.ndarray) -> np.ndarray:
    if array.dtype != np.float32:
        return array
    return (array.view(np.uint32) ^ np.uint32(1)).view(np.float32)

"""Joint attention: text first, then image; prompt padding moves no bit; the fused operator is byte for byte its three parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attn_spec import Call
from attn_spec.testing.asserts import assert_bytes, assert_zero
from attn_spec.testing.runner import Evaluate, Runner

from attn_shared_tests import faulty, problems
from attn_shared_tests.controls import assert_bites, control_id
from attn_shared_tests.test_forward import check_bytes

TOKENS = 5
PAD_LENGTHS = (8, 77, 512)
Results = dict[str, np.ndarray]


def padded(call: Call, length: int, places: list[int], value: float) -> Call:
    """The prompt of ``call`` at ``places`` of ``length`` text slots, which otherwise hold ``value`` and have no cotangent."""
    arrays: dict[str, np.ndarray] = {}
    for part in ("q", "k", "v"):
        text = call.arrays[f"{part}_txt"]
        wide = np.zeros((*text.shape[:2], length, text.shape[3]), text.dtype)
        wide[...] = problems.scalar(value, text)
        wide[:, :, places] = text
        arrays[f"{part}_txt"] = wide
    mask = np.zeros((arrays["q_txt"].shape[0], length), bool)
    mask[:, places] = True
    cotangents = dict(call.cotangents or {})
    if cotangents:
        narrow = cotangents["out_txt"]
        cotangents["out_txt"] = np.zeros((*narrow.shape[:2], length, narrow.shape[3]), narrow.dtype)
        cotangents["out_txt"][:, :, places] = narrow
    return problems.edited(call, cotangents=cotangents or None, prompt_mask=mask, **arrays)


def check_prompt_padding(
    evaluate: Evaluate,
    side: str,
    dtype: str,
    gradient: bool,
    lengths: tuple[int, ...] = PAD_LENGTHS,
    image: int = 6,
    head_dim: int = 4,
) -> None:
    """A prompt of 5 tokens in 8, 77 or 512 slots, and alone: image rows, text rows and gradients have the same bytes, pads are zero."""
    call = problems.joint(batch=1, text=TOKENS, image=image, head_dim=head_dim, kv_heads=1, dtype=dtype, gradient=gradient)
    alone = evaluate(call)
    for length in lengths:
        first = {"right": 0, "left": length - TOKENS, "middle": 2}[side]
        places = list(range(first, first + TOKENS))
        found = evaluate(padded(call, length, places, np.nan))
        for name, array in found.items():
            if name.endswith("_img"):
                assert_bytes(array, alone[name], f"{length} slots: {name}")
            else:
                assert_bytes(array[:, :, places], alone[name], f"{length} slots: {name}")
                assert_zero(np.delete(array, places, axis=2), f"{length} slots: {name} of pads")


def check_batched_prompts(evaluate: Evaluate) -> None:
    """Prompts of 8 and 3 tokens in one batch equal each alone, image rows and text rows."""
    call = problems.joint(text=8, image=16, head_dim=16)
    mask = problems.mask_of((8, 3), 8)
    arrays = {name: call.arrays[name].copy() for name in call.arrays}
    for part in ("q_txt", "k_txt", "v_txt"):
        arrays[part][1, :, 3:] *= 1000
    found = evaluate(problems.edited(call, prompt_mask=mask, **arrays))
    for item, length in enumerate((8, 3)):
        short = {
            name: array[item : item + 1, :, :length] if name.endswith("_txt") else array[item : item + 1] for name, array in arrays.items()
        }
        alone = evaluate(problems.edited(call, **short))
        assert_bytes(found["out_img"][item : item + 1], alone["out_img"], f"item {item}: image rows")
        assert_bytes(found["out_txt"][item : item + 1, :, :length], alone["out_txt"], f"item {item}: text rows")
        assert_zero(found["out_txt"][item, :, length:], f"item {item}: pad rows")


def check_parts(evaluate: Evaluate, call: Call, with_mask: bool) -> None:
    """qk, softmax and av with float32 scores give the same bytes at the kept queries, backward included."""
    text = call.arrays["q_txt"].shape[2]
    joined = {part: np.concatenate([call.arrays[f"{part}_txt"], call.arrays[f"{part}_img"]], axis=2) for part in ("q", "k", "v")}
    batch, keys = joined["k"].shape[0], joined["k"].shape[2]
    mask = np.ones((batch, keys), bool)
    if with_mask:
        mask[:, :text] = problems.mask_of(range(2, 2 + batch), text)
        call = problems.edited(call, prompt_mask=mask[:, :text])
    cotangents = dict(call.cotangents or {})
    dout = np.concatenate([cotangents["out_txt"], cotangents["out_img"]], axis=2)
    dout = np.where(mask[:, None, :, None], dout, np.float32(0)) if dout.dtype == np.float32 else dout
    call = problems.edited(call, cotangents={"out_txt": dout[:, :, :text], "out_img": dout[:, :, text:]})
    fused = evaluate(call)
    scores = evaluate(Call("joint_attn_qk_gemm", {"q": joined["q"], "k": joined["k"]}))["scores"]
    probs = evaluate(Call("joint_attn_softmax", {"scores": scores, "key_padding_mask": mask}))["probs"]
    last = evaluate(Call("joint_attn_av_gemm", {"probs": probs, "v": joined["v"]}, {}, {"out": dout}, ("probs", "v")))
    softmax = {"scores": scores, "key_padding_mask": mask}
    middle = evaluate(Call("joint_attn_softmax", softmax, {}, {"probs": last["dprobs"]}, ("scores",)))
    first = evaluate(Call("joint_attn_qk_gemm", {"q": joined["q"], "k": joined["k"]}, {}, {"scores": middle["dscores"]}, ("q", "k")))
    parts = {"out": last["out"], "dv": last["dv"], "dq": first["dq"], "dk": first["dk"]}
    for name, array in parts.items():
        whole = np.concatenate([fused[f"{name}_txt"], fused[f"{name}_img"]], axis=2)
        for item in range(batch):
            assert_bytes(whole[item][:, mask[item]], array[item][:, mask[item]], f"{name} of item {item}")


def check_order(evaluate: Evaluate) -> None:
    """Text comes first in keys and results: with v filled by source, an image row reads both in their places."""
    call = problems.joint(batch=1, heads=1, kv_heads=1, text=2, image=3, head_dim=2)
    zero = {name: np.zeros_like(call.arrays[name]) for name in ("q_txt", "q_img", "k_txt", "k_img")}
    v = {"v_txt": np.array([[[[1, 0], [1, 0]]]], np.float32), "v_img": np.array([[[[0, 1]] * 3]], np.float32)}
    found = evaluate(problems.edited(call, **zero, **v))
    assert found["out_txt"].shape == (1, 1, 2, 2) and found["out_img"].shape == (1, 1, 3, 2), "shapes"
    for name, array in found.items():
        assert np.abs(array - np.array([0.4, 0.6], np.float32)).max() < 1e-6, name


def check_mask_matters(evaluate: Evaluate) -> None:
    call = problems.joint()
    masked = evaluate(problems.edited(call, prompt_mask=np.zeros((2, 8), bool)))
    plain = evaluate(call)
    assert (masked["out_img"] != plain["out_img"]).any(), "the mask changes nothing"
    assert_zero(masked["out_txt"], "rows of a dropped prompt")


@pytest.mark.parametrize("gradient", (False, True), ids=("forward", "gradient"))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("side", ("right", "left", "middle"))
def test_prompt_padding_moves_no_bit(backend: Runner, side: str, dtype: str, gradient: bool) -> None:
    backend.run(check_prompt_padding, side, dtype, gradient)


def test_prompts_of_a_batch_equal_each_alone(backend: Runner) -> None:
    backend.run(check_batched_prompts)


@pytest.mark.parametrize("with_mask", (False, True), ids=("plain", "padded"))
def test_the_fused_operator_equals_its_parts(backend: Runner, with_mask: bool) -> None:
    backend.run(check_parts, problems.joint(heads=4, kv_heads=2, gradient=True), with_mask)
    backend.run(check_parts, problems.joint(batch=1, text=9, image=260, head_dim=4, gradient=True), with_mask)


def test_text_comes_first(backend: Runner) -> None:
    backend.run(check_order)


def test_a_prompt_mask_is_used(backend: Runner) -> None:
    backend.run(check_mask_matters)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_joint_attention_gives_the_bytes_of_the_reference(backend: Runner, reference: Evaluate, dtype: str) -> None:
    mask = problems.mask_of((8, 3), 8)
    backend.run(check_bytes, reference, problems.joint(heads=4, dtype=dtype, gradient=True, prompt_mask=mask))


def tiles_by_text_slots(evaluate: Evaluate) -> Evaluate:
    """Rounds once more when the prompt is padded far."""
    return lambda call: (faulty.rounds_twice(evaluate) if call.arrays["q_txt"].shape[2] > 100 else evaluate)(call)


def drops_the_prompt_mask(evaluate: Evaluate) -> Evaluate:
    """The fused operator accepts the mask and does not use it."""
    return lambda call: evaluate(problems.edited(call, drop=("prompt_mask",)))


@pytest.mark.parametrize(
    ("check", "fault", "arguments"),
    (
        (check_prompt_padding, faulty.ignores_masks, ("right", "float32", True)),
        (check_prompt_padding, tiles_by_text_slots, ("left", "float32", False)),
        (check_batched_prompts, faulty.ignores_masks, ()),
        (check_parts, drops_the_prompt_mask, (problems.joint(gradient=True), True)),
        (check_order, faulty.returns_zeros, ()),
        (check_mask_matters, faulty.ignores_masks, ()),
    ),
    ids=control_id,
)
def test_the_clause_catches(reference: Evaluate, check: Any, fault: faulty.Fault, arguments: tuple[Any, ...]) -> None:
    assert_bites(check, fault, reference, *arguments)

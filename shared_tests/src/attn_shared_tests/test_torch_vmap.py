"""torch.func: mapped calls and gradients have the bytes of a loop, whatever is mapped, and whatever ties batch items together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attn_spec import Call
from attn_spec.testing.runner import Runner

from attn_shared_tests import problems
from attn_shared_tests.torch_calls import EVERY, Operator, outputs_of, same, with_torch

pytestmark = pytest.mark.attn_framework("torch")
SAMPLES = 3
DROPPING = problems.attention(dropout_p=0.4, dropout_seed=7, wrt=problems.QKV)
ONE_ITEM = problems.attention(batch=1, with_sinks=True, bias_shape=(1, 1, 5, 7), wrt=(*problems.QKV, "sinks", "bias"))
CALLS = {**EVERY, "one item": ONE_ITEM, "dropout": DROPPING}
Axes = Mapping[str, int]
"""The mapped axis of each mapped argument."""

MAPPED: dict[str, tuple[str, Axes]] = {
    "softmax": ("softmax", {"scores": 1}),
    "softmax v2": ("softmax v2", {"scores": 2}),
    "softmax, last axis": ("softmax", {"scores": 3}),
    "softmax, all": ("masked softmax", {"scores": 2, "key_padding_mask": 0}),
    "softmax, mask alone": ("masked softmax", {"key_padding_mask": 1}),
    "qk_gemm, q": ("qk_gemm", {"q": 2}),
    "qk_gemm, both": ("qk_gemm", {"q": 0, "k": 4}),
    "av_gemm, v": ("av_gemm", {"v": 1}),
    "joint, all but the mask": ("joint", dict.fromkeys(("q_txt", "k_txt", "v_txt", "q_img", "k_img", "v_img"), 0)),
    "joint, image queries and mask": ("joint", {"q_img": 3, "prompt_mask": 1}),
    "attention, q": ("attention", {"q": 2}),
    "attention, k and v": ("attention", {"k": 0, "v": 4}),
    "attention, everything": ("masked", {"q": 1, "k": 0, "v": 3, "key_padding_mask": 2, "kv_lengths": 1}),
    "attention beside sinks and bias": ("biased", {"q": 0, "k": 1}),
    "sinks": ("biased", {"sinks": 0}),
    "bias": ("biased", {"bias": 2}),
    "q, sinks and bias": ("biased", {"q": 0, "sinks": 1, "bias": 0}),
    "one item": ("one item", {"q": 0, "v": 1}),
    "one item, bias": ("one item", {"bias": 0}),
    "packed": ("packed", {"q": 1, "k": 0, "v": 0}),
    "dropout": ("dropout", {"q": 0}),
}


def stacked(call: Call, axes: Axes, device: str) -> dict[str, Any]:
    """The inputs of a call; a mapped one holds other values for each sample, on its mapped axis."""
    import torch
    from attn_spec.torch import from_numpy

    rng = np.random.default_rng(5)
    inputs = {}
    for name, array in call.arrays.items():
        if name not in axes:
            inputs[name] = from_numpy(array, device)
            continue
        samples = [rng.permutation(array.reshape(-1)).reshape(array.shape) for _ in range(SAMPLES)]
        inputs[name] = torch.stack([from_numpy(sample, device) for sample in samples], dim=axes[name])
    return inputs


def sample_of(inputs: Mapping[str, Any], axes: Axes, sample: int) -> dict[str, Any]:
    return {name: tensor.select(axes[name], sample) if name in axes else tensor for name, tensor in inputs.items()}


def loss_of(function: Operator, call: Call, inputs: Mapping[str, Any]) -> Any:
    """A scalar that every output enters, with other weights for each element."""
    import torch

    total = torch.zeros((), device=inputs[call.wrt[0]].device)
    for output in outputs_of(function, call, inputs).values():
        flat = output.float().reshape(-1)
        finite = torch.where(torch.isfinite(flat), flat, torch.zeros_like(flat))
        total = total + (finite * torch.linspace(-1.0, 1.0, flat.numel(), device=flat.device)).sum()
    return total


def check_vmap(function: Operator, device: str, call: Call, axes: Axes) -> None:
    """vmap, vmap of grad and grad of vmap: each sample as in a loop; gradients of what is not mapped come for each sample too."""
    from torch.func import grad, vmap

    inputs = stacked(call, axes, device)
    dims = ({name: axes.get(name) for name in inputs},)
    mapped = vmap(lambda given: outputs_of(function, call, given), in_dims=dims)(inputs)

    def gradients(given: dict[str, Any]) -> dict[str, Any]:
        rest = {name: tensor for name, tensor in given.items() if name not in call.wrt}
        found: dict[str, Any] = grad(lambda wanted: loss_of(function, call, {**rest, **wanted}))({name: given[name] for name in call.wrt})
        return found

    mapped_gradients = vmap(gradients, in_dims=dims)(inputs)
    name = next((name for name in call.wrt if name in axes), "")
    outer = None
    if name:
        outer = grad(lambda x: vmap(lambda given: loss_of(function, call, given), in_dims=dims)({**inputs, name: x}).sum())(inputs[name])
    for sample in range(SAMPLES):
        alone = sample_of(inputs, axes, sample)
        for output, wanted in outputs_of(function, call, alone).items():
            same(mapped[output][sample], wanted, f"sample {sample}: {output}")
        leaves = {key: tensor.detach().clone().requires_grad_(key in call.wrt) for key, tensor in alone.items()}
        loss_of(function, call, leaves).backward()
        for key in call.wrt:
            same(mapped_gradients[key][sample], leaves[key].grad, f"sample {sample}: d{key}")
        if outer is not None:
            same(outer.select(axes[name], sample), leaves[name].grad, f"sample {sample}: d{name} outside vmap")


def check_nested(attention: Operator, device: str, call: Call) -> None:
    """A map over heads groups inside one over samples, and a gradient inside both."""
    import torch
    from torch.func import grad, vmap

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, SAMPLES, 2, 4, 5, 8, generator=generator).to(device)
    k, v = (torch.randn(SAMPLES, 2, 2, 7, 8, generator=generator).to(device) for _ in range(2))
    plain: Callable[..., Any] = lambda q, k, v: attention(q, k, v, window=(3, None))  # noqa: E731
    loss: Callable[..., Any] = lambda q, k, v: plain(q, k, v).square().sum()  # noqa: E731
    for function in (plain, grad(loss)):
        found = vmap(vmap(function), in_dims=(0, None, None))(q, k, v)
        for outer in range(2):
            for inner in range(SAMPLES):
                same(found[outer, inner], function(q[outer, inner], k[inner], v[inner]), f"sample {outer}, {inner}")


def check_rows(softmax: Operator, device: str) -> None:
    """Scores of one axis, mapped over rows, are the rows of one call."""
    import torch
    from torch.func import grad, vmap

    scores = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)).to(device)
    same(vmap(softmax)(scores), softmax(scores), "probs")
    leaf = scores.clone().requires_grad_()
    softmax(leaf).square().sum().backward()
    same(vmap(grad(lambda row: softmax(row).square().sum()))(scores), leaf.grad, "dscores")


def check_randomness(attention: Operator, device: str) -> None:
    """A mask drawn under vmap asks how, as torch's own dropout does; one mask for all is the mask of a call alone."""
    import torch
    from torch.func import vmap

    q = torch.randn(SAMPLES, 2, 4, 5, 8, generator=torch.Generator().manual_seed(0)).to(device)

    def dropping(q: Any) -> Any:
        return attention(q, q[:, :2], q[:, :2], dropout_p=0.5)

    with pytest.raises(RuntimeError, match="randomness"):
        vmap(dropping)(q)
    torch.manual_seed(3)
    found = vmap(dropping, randomness="same")(q)
    for sample in range(SAMPLES):
        torch.manual_seed(3)
        same(found[sample], dropping(q[sample]), f"sample {sample}")


@pytest.mark.parametrize("name", MAPPED)
def test_mapped_calls_equal_a_loop(backend: Runner, name: str) -> None:
    key, axes = MAPPED[name]
    with_torch(backend, CALLS[key], check_vmap, CALLS[key], axes)


def test_nested_maps_equal_a_loop(backend: Runner) -> None:
    with_torch(backend, EVERY["attention"], check_nested, EVERY["attention"])


def test_rows_are_mapped_as_one_call(backend: Runner) -> None:
    with_torch(backend, EVERY["softmax"], check_rows)


def test_a_mapped_mask_is_drawn_on_request(backend: Runner) -> None:
    with_torch(backend, DROPPING, check_randomness)


def test_the_check_catches_samples_that_see_each_other() -> None:
    """A function whose result for a sample depends on how many there are, or on another one, fails."""
    import torch
    from attn_reference.pytorch import joint_attn_softmax

    call = replace(EVERY["softmax"], wrt=("scores",))
    check_vmap(joint_attn_softmax, "cpu", call, {"scores": 0})

    class Leaky(torch.autograd.Function):
        @staticmethod
        def forward(scores: Any) -> Any:
            return joint_attn_softmax(scores)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(output)

        @staticmethod
        def backward(ctx: Any, *given: Any) -> Any:
            return given[0]

        @staticmethod
        def vmap(info: Any, in_dims: Any, scores: Any) -> Any:
            return joint_attn_softmax(scores.roll(1, in_dims[0])), in_dims[0]

    with pytest.raises(AssertionError, match="sample 0: probs"):
        check_vmap(Leaky.apply, "cpu", call, {"scores": 0})

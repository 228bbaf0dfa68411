"""Strides, offsets and sizes: any view gives the bytes of its copy, and nothing is counted in 32 bits."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attn_spec import Call
from attn_spec.testing.runner import Runner

from attn_shared_tests import problems
from attn_shared_tests.torch_calls import (
    EVERY,
    Data,
    Operator,
    on_gpu,
    same,
    same_results,
    tensors,
    with_function,
    with_kernels,
)

pytestmark = pytest.mark.attn_framework("torch")
LAYOUTS = ("BSHD storage", "strided head dim", "transposed", "expanded", "slice of a wider buffer", "reversed axes")
FAR = problems.attention(bias_shape=(2, 1, 5, 7), wrt=(*problems.QKV, "bias"), dtype="bfloat16")
ROWS = 2**31


def laid_out(tensor: Any, layout: str) -> Any:
    """A view with the values of ``tensor`` (for "expanded": of its first item on axis 0) in another layout."""
    import torch

    source = tensor.detach()
    if layout == "BSHD storage":
        return (
            source.transpose(0, 1).contiguous().transpose(0, 1) if source.ndim < 4 else source.transpose(1, 2).contiguous().transpose(1, 2)
        )
    if layout == "strided head dim":
        return torch.stack([source, torch.full_like(source, float("nan"))], dim=-1)[..., 0]
    if layout == "transposed":
        return source.transpose(-2, -1).contiguous().transpose(-2, -1)
    if layout == "expanded":
        return source[:1].expand(source.shape)
    if layout == "reversed axes":
        return source.permute(*reversed(range(source.ndim))).contiguous().permute(*reversed(range(source.ndim)))
    wide = torch.full((*source.shape[:-1], source.shape[-1] + 5), float("nan"), dtype=source.dtype, device=source.device)
    wide[..., 1 : source.shape[-1] + 1] = source
    return wide[..., 1 : source.shape[-1] + 1]


def check_layout(function: Operator, device: str, call: Call, layout: str) -> None:
    """Any strides of every floating input and cotangent give the bytes of contiguous copies."""
    views, copies = Data(call, device), Data(call, device)
    for mine, theirs in ((views.inputs, copies.inputs), (views.cotangents, copies.cotangents)):
        for name, tensor in list(mine.items()):
            if tensor.is_floating_point() and tensor.ndim > 1:
                mine[name] = laid_out(tensor, layout).requires_grad_(tensor.requires_grad)
                theirs[name] = mine[name].detach().contiguous().clone().requires_grad_(tensor.requires_grad)
    same_results(views.results(function), copies.results(function), layout)


def far(tensor: Any) -> Any:
    """A view with the values of ``tensor`` whose batch items lie 2^31 elements apart; its untouched pages take no memory on a CPU."""
    import torch

    step = 2**31
    size = (tensor.shape[0] - 1) * step + tensor[0].numel()
    if tensor.device.type == "cpu":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        room = torch.frombuffer(mmap.mmap(-1, size * tensor.element_size(), flags=flags), dtype=tensor.dtype)
    else:
        room = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
    view = room.as_strided(tensor.shape, (step, *tensor[0].contiguous().stride()))
    return view.copy_(tensor.detach())


def check_far(function: Operator, device: str, call: Call, name: str) -> None:
    """One array with a batch stride of 2^31 elements gives the bytes of a contiguous copy, forward and backward."""
    near, distant = Data(call, device), Data(call, device)
    group = distant.cotangents if name.startswith("cotangent ") else distant.inputs
    key = name.removeprefix("cotangent ")
    group[key] = far(group[key]).requires_grad_(group[key].requires_grad)
    same_results(distant.results(function), near.results(function), f"{name} with a stride of 2^31")


def check_huge_softmax(softmax: Operator, device: str) -> None:
    """Rows on both sides of element 2^31 have the bytes that they have alone, forward and backward."""
    import torch

    keys = 65536
    scores = torch.full((ROWS // keys + 3, keys), -1.0, dtype=torch.bfloat16, device=device)
    dprobs = torch.zeros_like(scores)
    places = [0, 1, scores.shape[0] - 4, scores.shape[0] - 3, scores.shape[0] - 1]
    generator = torch.Generator().manual_seed(0)
    for place in places:
        scores[place] = torch.randn(keys, generator=generator).to(scores)
        dprobs[place] = torch.randn(keys, generator=generator).to(scores)
    some = scores[places].clone().requires_grad_()
    wanted = softmax(some)
    (wanted_gradient,) = torch.autograd.grad(wanted, some, dprobs[places])
    leaf = scores.requires_grad_()
    probs = softmax(leaf)
    same(probs[places], wanted, "probs")
    same(torch.autograd.grad(probs, leaf, dprobs)[0][places], wanted_gradient, "dscores")


def check_huge_attention(attention: Operator, device: str) -> None:
    """Queries on both sides of element 2^31 have the bytes that they have alone; dk and dv are sums over all of them."""
    import torch

    heads, dim = 8, 128
    queries = ROWS // (heads * dim) + 1000
    q = torch.zeros(1, heads, queries, dim, dtype=torch.bfloat16, device=device)
    dout = torch.zeros_like(q)
    places = [0, 1, queries // 2, queries - 2, queries - 1]
    generator = torch.Generator().manual_seed(0)
    for place in places:
        q[:, :, place] = torch.randn(heads, dim, generator=generator).to(q)
        dout[:, :, place] = torch.randn(heads, dim, generator=generator).to(q)
    k, v = (torch.randn(1, 1, 3, dim, generator=generator).to(q).requires_grad_() for _ in range(2))
    results = []
    for rows, cotangent in ((q[:, :, places].clone(), dout[:, :, places].clone()), (q, dout)):
        leaf = rows.requires_grad_()
        out = attention(leaf, k, v, causal=False)
        results.append((out.detach(), *torch.autograd.grad(out, (leaf, k, v), cotangent)))
    some, whole = results
    for name, found, wanted in zip(("out", "dq"), whole, some, strict=False):
        same(found[:, :, places], wanted, name)
    same(whole[2], some[2], "dk, to which rows without a cotangent add zeros")
    same(whole[3], some[3], "dv, to which rows without a cotangent add zeros")


def check_far_rows(attention: Operator, device: str) -> None:
    """One head of a fused projection whose rows end beyond element 2^31 has the bytes of a copy, forward and backward."""
    import torch

    heads, dim, length = 56, 128, 99_900
    fused = torch.empty(length, 3 * heads * dim, dtype=torch.bfloat16, device=device)
    assert fused.numel() > ROWS
    views = [fused.as_strided((1, 1, length, dim), (0, dim, fused.stride(0), 1), part * heads * dim) for part in range(3)]
    generator = torch.Generator().manual_seed(0)
    for view in views:
        view.copy_(torch.randn(length, dim, generator=generator).to(device))
    results = []
    for inputs in ([view.contiguous() for view in views], views):
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        out = attention(*leaves, window=(15, 0))
        results.append((out.detach(), *torch.autograd.grad(out, leaves, inputs[0].detach())))
    for name, found, wanted in zip(("out", "dq", "dk", "dv"), results[1], results[0], strict=True):
        same(found, wanted, name)


def check_grid(function: Operator, device: str, call: Call, axis: int) -> None:
    """70,000 copies of an item along an axis have the bytes of one, forward and backward."""
    one, many = Data(call, device), Data(call, device)
    for mine, theirs in ((one.inputs, many.inputs), (one.cotangents, many.cotangents)):
        for name, tensor in list(mine.items()):
            item = tensor.detach().narrow(axis, 0, 1)
            mine[name] = item.clone().requires_grad_(tensor.requires_grad)
            theirs[name] = item.expand(*tensor.shape[:axis], 70_000, *tensor.shape[axis + 1 :]).requires_grad_(tensor.requires_grad)
    alone, among = (data.results(function) for data in (one, many))
    for name, output in among.items():
        for place in (0, 65_535, 65_536, 69_999):
            same(output.narrow(axis, place, 1), alone[name], f"{name} at {place} of axis {axis}")


def check_many_segments(attention_varlen: Operator, device: str) -> None:
    """80,000 packed segments of one query and one or two keys: those at either end and around 65,536 have the bytes of each part alone."""
    import torch

    segments = 80_000
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(1, 3, (segments,), generator=generator)
    q_ends, k_ends = torch.arange(segments + 1), torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    keys = int(k_ends[-1])
    data = [torch.randn(size, heads, 8, generator=generator) for size, heads in ((segments, 4), (keys, 2), (keys, 2), (segments, 4))]

    def run(first: int, last: int) -> tuple[Any, ...]:
        rows, columns = slice(first, last), slice(int(k_ends[first]), int(k_ends[last]))
        q, k, v, dout = (tensor[part].to(device) for tensor, part in zip(data, (rows, columns, columns, rows), strict=True))
        offsets = [(ends[first : last + 1] - ends[first]).to(device, torch.int32) for ends in (q_ends, k_ends)]
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        out = attention_varlen(*leaves, *offsets)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    whole = run(0, segments)
    for first, last in ((0, 10), (65_530, 65_545), (segments - 10, segments)):
        rows, columns = slice(first, last), slice(int(k_ends[first]), int(k_ends[last]))
        for name, found, alone, part in zip(
            ("out", "dq", "dk", "dv"), whole, run(first, last), (rows, rows, columns, columns), strict=True
        ):
            same(found[part], alone, f"{name} of segments {first} to {last}")


def check_offsets(attention_varlen: Operator, device: str) -> None:
    """Offsets of either integer dtype and any stride agree; bad ones raise before work where reading them is free."""
    import torch

    q, k, v = (torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(0)).to(device) for _ in range(3))
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    plain = attention_varlen(q, k, v, offsets, offsets)
    strided = torch.tensor([0, 9, 2, 9, 5, 9], dtype=torch.int32, device=device)[::2]
    for other in (offsets.long(), strided, strided.long()):
        same(attention_varlen(q, k, v, other, other), plain, f"{other.dtype}, stride {other.stride()}")
    if device == "cpu":
        for bad in ([0, 3, 2], [0, 2, 6], [-1, 2, 5]):
            with pytest.raises(ValueError, match="must not decrease and must lie in"):
                attention_varlen(q, k, v, torch.tensor(bad), offsets)


def check_empty_batch(attention: Operator, device: str) -> None:
    import torch

    for shape in ((0, 4, 6, 8), (2, 4, 0, 8)):
        q, k, v = tensors(device, shape=shape)
        out, lse = attention(q, k, v, return_lse=True)
        assert out.shape == q.shape and lse.shape == q.shape[:3]
        gradients = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
        assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in (q, k, v)]


def check_misread(read: Callable[[Any], Any]) -> None:
    """The layout check notices a kernel that reads a strided tensor as contiguous."""
    given = laid_out(tensors("cpu")[0], "strided head dim")
    same(read(given), given.contiguous(), "read")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ("qk_gemm", "softmax", "av_gemm", "joint", "biased", "packed"))
def test_any_strides_give_the_bytes_of_a_copy(backend: Runner, name: str, layout: str) -> None:
    with_function(backend, EVERY[name], check_layout, EVERY[name], layout)


@pytest.mark.parametrize("name", ("q", "k", "v", "bias", "cotangent out"))
def test_offsets_beyond_32_bits_are_right(backend: Runner, name: str) -> None:
    with_function(backend, FAR, check_far, FAR, name)


@pytest.mark.parametrize(
    ("call", "name"), (("softmax", "scores"), ("softmax", "cotangent probs"), ("qk_gemm", "k"), ("av_gemm", "probs"), ("joint", "k_img"))
)
def test_offsets_of_the_joint_operators_beyond_32_bits_are_right(backend: Runner, call: str, name: str) -> None:
    with_function(backend, EVERY[call], check_far, EVERY[call], name)


@on_gpu
def test_a_softmax_of_more_than_2_to_the_31_elements(backend: Runner) -> None:
    with_kernels(backend, EVERY["softmax"], check_huge_softmax)


@on_gpu
def test_attention_of_more_than_2_to_the_31_elements(backend: Runner) -> None:
    with_kernels(backend, EVERY["attention"], check_huge_attention)


@on_gpu
def test_rows_beyond_element_2_to_the_31(backend: Runner) -> None:
    with_kernels(backend, EVERY["attention"], check_far_rows)


@on_gpu
@pytest.mark.parametrize(
    ("name", "axis"), (("softmax", 0), ("softmax", 1), ("masked", 0), ("attention", 0), ("attention", 1), ("qk_gemm", 0), ("av_gemm", 1))
)
def test_grids_hold_more_than_65535_blocks(backend: Runner, name: str, axis: int) -> None:
    with_kernels(backend, EVERY[name], check_grid, EVERY[name], axis)


@on_gpu
def test_more_packed_segments_than_a_grid_axis_holds(backend: Runner) -> None:
    with_kernels(backend, EVERY["packed"], check_many_segments)


def test_empty_batches_pass(backend: Runner) -> None:
    with_function(backend, EVERY["attention"], check_empty_batch)


def test_offsets_are_read_as_they_are(backend: Runner) -> None:
    with_function(backend, EVERY["packed"], check_offsets)


def test_the_layout_check_catches_a_misread() -> None:
    check_misread(lambda tensor: tensor.clone())
    with pytest.raises(AssertionError):
        check_misread(lambda tensor: tensor.as_strided(tensor.shape, tensor.contiguous().stride()))


def test_the_reference_of_a_view_differs_from_its_neighbours() -> None:
    """Every layout holds other memory than its values, so that reading it as contiguous would show."""
    for layout in LAYOUTS:
        view = laid_out(tensors("cpu")[0], layout)
        assert not view.is_contiguous(), layout
        assert np.isfinite(view.numpy()).all(), layout

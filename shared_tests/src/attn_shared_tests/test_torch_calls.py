"""Torch backends as torch code meets them: strides, autograd flags, autocast, mutated and shared tensors, fake kernels, odd offsets."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attn_spec.testing.asserts import assert_bytes
from attn_spec.testing.runner import Refused, Runner

from attn_shared_tests import problems

Operator = Callable[..., Any]
pytestmark = pytest.mark.attn_framework("torch")
LAYOUTS = ("BSHD storage", "strided head dim", "transposed", "expanded", "slice of a wider buffer")


def run(backend: Runner, op: str, check: Callable[..., None], *arguments: Any) -> None:
    """``check(operator, device, ...)`` with the public function; an engine without that operator or feature ends it as a refusal."""
    call = {
        "attention": problems.attention(wrt=problems.QKV, return_lse=False),
        "joint_attn_softmax": problems.softmax((2, 3), gradient=True),
    }
    backend.run(lambda evaluate: _run(backend, op, call.get(op), check, arguments))


def _run(backend: Runner, op: str, call: Any, check: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    problem = (call or problems.varlen((2,), return_lse=False)).problem(backend.device)
    if reasons := backend.reasons(problem):
        raise Refused(problem, reasons)
    check(backend.backend.operators(backend.engine)[op], "cuda" if backend.device == "rocm" else backend.device, *arguments)


def same(left: Any, right: Any, what: str) -> None:
    from attn_spec.torch import to_numpy

    assert_bytes(to_numpy(left), to_numpy(right), what)


def tensors(
    device: str, dtype: str = "float32", *, shape: tuple[int, ...] = (2, 4, 6, 8), kv_heads: int = 2, requires_grad: bool = True
) -> list[Any]:
    """q, k, v."""
    import torch

    generator = torch.Generator().manual_seed(0)
    shapes = (shape, (shape[0], kv_heads, *shape[2:]), (shape[0], kv_heads, *shape[2:]))
    made = [torch.randn(size, generator=generator).to(device=device, dtype=getattr(torch, dtype)) for size in shapes]
    return [tensor.requires_grad_(requires_grad) for tensor in made]


def laid_out(tensor: Any, layout: str) -> Any:
    """A view with the values of ``tensor`` (for "expanded": of its first batch item) in another layout."""
    import torch

    source = tensor.detach()
    if layout == "BSHD storage":
        return source.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided head dim":
        return torch.stack([source, torch.full_like(source, float("nan"))], dim=-1)[..., 0]
    if layout == "transposed":
        return source.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "expanded":
        return source[:1].expand(source.shape)
    wide = torch.full((*source.shape[:-1], source.shape[-1] + 5), float("nan"), dtype=source.dtype, device=source.device)
    wide[..., 1 : source.shape[-1] + 1] = source
    return wide[..., 1 : source.shape[-1] + 1]


def check_layout(attention: Operator, device: str, layout: str) -> None:
    """Any strides of q, k, v, bias and dO give the bytes of contiguous copies."""
    import torch

    base = [laid_out(tensor, layout) for tensor in tensors(device)]
    bias = laid_out(torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1)).to(device), layout)
    dout = laid_out(torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(2)).to(device), layout)
    results = []
    for copy in (False, True):
        inputs = [(tensor.contiguous().clone() if copy else tensor).requires_grad_() for tensor in (*base, bias)]
        out = attention(*inputs[:3], bias=inputs[3])
        results.append((out, *torch.autograd.grad(out, inputs, dout.contiguous() if copy else dout)))
    for name, left, right in zip(("out", "dq", "dk", "dv", "dbias"), *results, strict=True):
        same(left, right, f"{layout}: {name}")


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


def check_far(attention: Operator, device: str, name: str) -> None:
    """One input with a batch stride of 2^31 elements gives the bytes of a contiguous copy, forward and backward."""
    import torch

    q, k, v = tensors(device, "bfloat16")
    generator = torch.Generator().manual_seed(3)
    given = {
        "q": q,
        "k": k,
        "v": v,
        "bias": torch.randn(2, 1, 6, 6, generator=generator).to(device),
        "dout": torch.randn(q.shape, generator=generator).to(q),
    }
    results = []
    for place in (lambda tensor: tensor, far):
        inputs = {key: (place(tensor) if key == name else tensor).detach().requires_grad_(key != "dout") for key, tensor in given.items()}
        out = attention(inputs["q"], inputs["k"], inputs["v"], bias=inputs["bias"])
        results.append((out, *torch.autograd.grad(out, [inputs[key] for key in ("q", "k", "v", "bias")], inputs["dout"])))
    for what, left, right in zip(("out", "dq", "dk", "dv", "dbias"), *results, strict=True):
        same(right, left, f"{name} with a stride of 2^31: {what}")


def check_far_softmax(softmax: Operator, device: str) -> None:
    import torch

    scores = tensors(device, "bfloat16")[0].detach()
    near, distant = (tensor.requires_grad_() for tensor in (scores.clone(), far(scores)))
    results = [(probs := softmax(given), *torch.autograd.grad(probs.float().square().sum(), [given])) for given in (near, distant)]
    for what, left, right in zip(("probs", "dscores"), *results, strict=True):
        same(right, left, f"scores with a stride of 2^31: {what}")


def check_softmax_layout(softmax: Operator, device: str, layout: str) -> None:
    import torch

    scores = laid_out(tensors(device)[0], layout)
    dout = laid_out(torch.randn(scores.shape, generator=torch.Generator().manual_seed(2)).to(device), layout)
    results = []
    for copy in (False, True):
        given = (scores.contiguous().clone() if copy else scores).requires_grad_()
        probs = softmax(given)
        results.append((probs, *torch.autograd.grad(probs, [given], dout.contiguous() if copy else dout)))
    for name, left, right in zip(("probs", "dscores"), *results, strict=True):
        same(left, right, f"{layout}: {name}")


def check_gradient_flags(attention: Operator, device: str) -> None:
    """Gradients come for the inputs that ask, and for nothing under no_grad and inference_mode."""
    import torch

    q, k, v = tensors(device)
    plain = attention(q, k, v)
    assert plain.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = attention(q, k, v)
        assert not out.requires_grad
        same(out, plain, mode.__name__)
    sinks = torch.zeros(4, device=device, requires_grad=True)
    frozen = [tensor.detach() for tensor in (q, k, v)]
    attention(*frozen, sinks=sinks).sum().backward()
    assert sinks.grad is not None and sinks.grad.dtype == sinks.dtype and all(tensor.grad is None for tensor in frozen)


def check_inputs_survive(attention: Operator, device: str) -> None:
    """Forward and two backwards change no input and no cotangent; an edit of a saved input between them raises."""
    import torch

    q, k, v = tensors(device)
    dout = torch.ones(2, 4, 6, 8, device=device)
    before = [tensor.detach().clone() for tensor in (q, k, v, dout)]
    out = attention(q, k, v)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    second = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    for index, (one, two) in enumerate(zip(first, second, strict=True)):
        same(two, one, f"second backward of input {index}")
    for index, (now, then) in enumerate(zip((q, k, v, dout), before, strict=True)):
        same(now, then, f"input {index} after backward")
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, (q,), dout)


def check_shared_tensor(attention: Operator, device: str, dtype: str) -> None:
    """One tensor as q, k and v has the sum of the three gradients, in its dtype."""
    import torch

    (shared,) = tensors(device, dtype, kv_heads=4)[:1]
    attention(shared, shared, shared).sum().backward()
    apart = [shared.detach().clone().requires_grad_() for _ in range(3)]
    gradients = torch.autograd.grad(attention(*apart).sum(), apart)
    assert shared.grad is not None and shared.grad.dtype == shared.dtype
    total = torch.stack([gradient.float() for gradient in gradients]).sum(dim=0)
    assert (shared.grad.float() - total).abs().max() <= 0.02 * total.abs().max(), dtype


def check_double_backward(attention: Operator, device: str) -> None:
    """A second derivative raises by name and is never zero in silence."""
    import torch

    q, k, v = tensors(device)
    (dq,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dq.sum().backward()


def check_autocast(attention: Operator, device: str) -> None:
    """Under autocast everything is cast first; gradients keep the dtype of their inputs."""
    import torch

    q, k, v = tensors(device)
    half = v.detach().bfloat16().requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        out = attention(q, k, half)
    assert out.dtype == torch.bfloat16
    same(out, attention(q.bfloat16(), k.bfloat16(), half), "autocast")
    out.float().sum().backward()
    assert (q.grad.dtype, k.grad.dtype, half.grad.dtype) == (torch.float32, torch.float32, torch.bfloat16)


def check_hostile_settings(attention: Operator, device: str) -> None:
    """TF32, reduced precision and thread settings move no bit."""
    import torch

    q, k, v = tensors(device, requires_grad=False)
    plain, threads = attention(q, k, v), torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        same(attention(q, k, v), plain, "medium precision, one thread, flushed subnormals")
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def check_empty_batch(attention: Operator, device: str) -> None:
    import torch

    for shape in ((0, 4, 6, 8), (2, 4, 0, 8)):
        q, k, v = tensors(device, shape=shape)
        out, lse = attention(q, k, v, return_lse=True)
        assert out.shape == q.shape and lse.shape == q.shape[:3]
        gradients = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
        assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in (q, k, v)]


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


def check_opcheck(softmax: Operator, device: str, namespace: str) -> None:
    """Schema, fake kernel and autograd registration hold under torch's own checks."""
    import torch

    scores = tensors(device, shape=(2, 3, 4, 5))[0]
    operator = getattr(torch.ops, namespace).joint_attn_softmax
    torch.library.opcheck(
        operator, (scores, None, torch.float32), test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )


def check_compile(softmax: Operator, device: str) -> None:
    """One graph under torch.compile with changing shapes, bytes as in eager mode."""
    import torch

    compiled = torch.compile(lambda scores: softmax(scores * 1.0), fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (100, 129, 2):
        eager, graph = (tensors(device, shape=(2, 3, 4, length))[0] for _ in range(2))
        expected, found = softmax(eager * 1.0), compiled(graph)
        same(found, expected, f"length {length}")
        expected.square().sum().backward()
        found.square().sum().backward()
        same(graph.grad, eager.grad, f"gradient, length {length}")


def check_misread(read: Callable[[Any], Any]) -> None:
    """The layout check notices a kernel that reads a strided tensor as contiguous."""
    given = laid_out(tensors("cpu")[0], "strided head dim")
    same(read(given), given.contiguous(), "read")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_give_the_bytes_of_a_copy(backend: Runner, layout: str) -> None:
    run(backend, "attention", check_layout, layout)
    run(backend, "joint_attn_softmax", check_softmax_layout, layout)


@pytest.mark.parametrize("name", ("q", "k", "v", "bias", "dout"))
def test_offsets_beyond_32_bits_are_right(backend: Runner, name: str) -> None:
    run(backend, "attention", check_far, name)
    run(backend, "joint_attn_softmax", check_far_softmax)


def test_gradients_follow_the_flags(backend: Runner) -> None:
    run(backend, "attention", check_gradient_flags)


def test_inputs_and_cotangents_survive(backend: Runner) -> None:
    run(backend, "attention", check_inputs_survive)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_one_tensor_in_three_places(backend: Runner, dtype: str) -> None:
    run(backend, "attention", check_shared_tensor, dtype)


def test_a_second_derivative_raises(backend: Runner) -> None:
    run(backend, "attention", check_double_backward)


def test_autocast_casts_first(backend: Runner) -> None:
    run(backend, "attention", check_autocast)


def test_hostile_settings_move_no_bit(backend: Runner) -> None:
    run(backend, "attention", check_hostile_settings)


def test_empty_batches_pass(backend: Runner) -> None:
    run(backend, "attention", check_empty_batch)


def test_offsets_are_read_as_they_are(backend: Runner) -> None:
    run(backend, "attention_varlen", check_offsets)


def test_registration_passes_opcheck(backend: Runner) -> None:
    softmax: Any = backend.backend.operators(backend.engine)["joint_attn_softmax"]
    run(backend, "joint_attn_softmax", check_opcheck, softmax.__self__._ops.name)


def test_compiled_graphs_keep_the_bytes(backend: Runner) -> None:
    run(backend, "joint_attn_softmax", check_compile)


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

"""Torch's autograd around the operators: flags, subsets, saved tensors, recomputation, autocast, dtypes of gradients."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from attn_spec import Call
from attn_spec.testing.runner import Runner

from attn_shared_tests import problems
from attn_shared_tests.torch_calls import EVERY, Data, Operator, outputs_of, same, same_results, tensors, with_function, with_torch

pytestmark = pytest.mark.attn_framework("torch")
SUBSETS = problems.attention(with_sinks=True, bias_shape=(2, 1, 5, 1), wrt=(*problems.QKV, "sinks", "bias"))
DROPPING = problems.attention(queries=16, keys=40, dropout_p=0.3, dropout_seed=11, wrt=problems.QKV)
SAVED = {
    "softmax": problems.softmax((2, 3, 600), gradient=True, dtype="bfloat16"),
    "softmax v2": replace(problems.softmax((2, 3, 600), gradient=True), contract="ordered-v2"),
    "attention": problems.attention(queries=40, keys=300, with_sinks=True, bias_shape=(1, 4, 1, 300), wrt=(*problems.QKV, "sinks", "bias")),
    "packed": problems.varlen((40, 30), (300, 200), with_sinks=True, wrt=(*problems.QKV, "sinks")),
    "joint": problems.joint(text=30, image=100, gradient=True),
    "tensor cores": replace(
        problems.attention(batch=1, queries=40, keys=300, head_dim=64, kv_heads=1, dtype="bfloat16", wrt=problems.QKV), contract="sm90-v1"
    ),
}
"""Calls with many more pairs than anything else."""
MIXED = problems.attention(with_sinks=True, bias_shape=(1, 4, 1, 7), wrt=(*problems.QKV, "sinks", "bias"))


def check_subsets(attention: Operator, device: str, call: Call) -> None:
    """Every subset of the inputs has the gradients that it has among all, and the others have none."""

    whole = Data(call, device).results(attention)
    for size in range(len(call.wrt) + 1):
        for wanted in itertools.combinations(call.wrt, size):
            data = Data(call, device)
            for name in call.wrt:
                data.inputs[name].requires_grad_(name in wanted)
            outputs = data.outputs(attention)
            assert all(output.requires_grad == bool(wanted) for output in outputs.values()), wanted
            if wanted:
                data.accumulated(outputs)
            for name in call.wrt:
                gradient = data.inputs[name].grad
                assert (gradient is not None) == (name in wanted), (wanted, name)
                if gradient is not None:
                    same(gradient, whole[f"d{name}"], f"d{name} of {wanted}")


def check_modes(function: Operator, device: str, call: Call) -> None:
    """no_grad and inference_mode keep the bytes and ask for no gradient."""
    import torch

    data = Data(call, device)
    plain = data.outputs(function)
    assert all(output.requires_grad for output in plain.values())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = Data(call, device).outputs(function)
        for name, output in found.items():
            assert not output.requires_grad and output.is_inference() == (mode is torch.inference_mode)
            same(output, plain[name], f"{mode.__name__}: {name}")


def check_backward_begins_with_its_operator(function: Operator, device: str, call: Call) -> None:
    """Nothing comes before it: no zeros for the statistics, whose cotangents nobody gave."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            names.append(function.name())
            return function(*arguments, **(keywords or {}))

    names: list[str] = []
    data = Data(call, device)
    outputs = data.outputs(function)
    with Recorded():
        torch.autograd.grad(list(outputs.values()), [data.inputs[name] for name in call.wrt], list(data.cotangents.values()))
    assert names[0].endswith("_backward") and "::joint_attn_softmax" in names[0], names


def check_inputs_survive(function: Operator, device: str, call: Call) -> None:
    """Forward and two backwards change no input and no cotangent; an edit of a saved input between them raises."""
    import torch

    data, untouched = Data(call, device), Data(call, device)
    wanted, given = [data.inputs[name] for name in call.wrt], list(data.cotangents.values())
    outputs = data.outputs(function)
    results = [outputs[name] for name in data.cotangents]
    first = torch.autograd.grad(results, wanted, given, retain_graph=True)
    second = torch.autograd.grad(results, wanted, given, retain_graph=True)
    for name, one, two in zip(call.wrt, first, second, strict=True):
        same(two, one, f"second backward: d{name}")
    for now, then in ((data.inputs, untouched.inputs), (data.cotangents, untouched.cotangents)):
        for name, tensor in now.items():
            same(tensor, then[name], f"{name} after backward")
    with torch.no_grad():
        wanted[1 if len(wanted) > 1 else 0].add_(1)
    if call.op not in ("joint_attention", "attention_varlen"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(results, wanted[:1], given)


def check_saved(function: Operator, device: str, call: Call) -> None:
    """What waits for backward: inputs, joined ones for a joint layer, and at most two float32 numbers a row; no P, in any dtype.

    Under a contract of tensor cores out waits too.
    """
    import torch

    saved: list[Any] = []
    data = Data(call, device)

    def noted(tensor: Any) -> Any:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        outputs = data.outputs(function)
    inputs, softmax = data.inputs, call.op == "joint_attn_softmax"
    rows = sum(tensor.numel() // tensor.shape[-1] for name, tensor in inputs.items() if name in ("scores", "q", "q_txt", "q_img"))
    known = {tensor.untyped_storage().data_ptr() for tensor in (*inputs.values(), *([] if softmax else outputs.values()))}
    more = {tensor.data_ptr(): tensor for tensor in saved if tensor.untyped_storage().data_ptr() not in known}
    numbers = sum(tensor.numel() for tensor in more.values() if tensor.is_floating_point())
    joined = sum(tensor.numel() for tensor in inputs.values()) if call.op == "joint_attention" else 0
    assert rows and saved and numbers <= 2 * rows + joined, [(tuple(tensor.shape), tensor.dtype) for tensor in more.values()]


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


def check_double_backward(function: Operator, device: str, call: Call) -> None:
    """A second derivative raises by name and is never zero in silence; so does forward mode."""
    import torch

    data = Data(call, device)
    outputs = data.outputs(function)
    name = next(iter(data.cotangents))
    (gradient,) = torch.autograd.grad(outputs[name].float().square().sum(), data.inputs[call.wrt[0]], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.float().sum().backward()
    first = data.inputs[call.wrt[0]].detach()
    with pytest.raises(NotImplementedError, match=r"forward-mode differentiation \(jvp\) is not supported"):
        torch.func.jvp(lambda tensor: outputs_of(function, call, {**data.inputs, call.wrt[0]: tensor})[name], (first,), (first,))


def check_autocast(attention: Operator, device: str, call: Call) -> None:
    """Under autocast mixed inputs take its dtype, sinks and bias stay float32; gradients come back in each input's dtype."""
    import torch

    for dtype in (torch.bfloat16, torch.float16):
        data = Data(call, device)
        for name, own in {"q": torch.float32, "k": torch.float16, "v": torch.bfloat16}.items():
            data.inputs[name] = data.inputs[name].detach().to(own).requires_grad_()
        cast = Data(call, device)
        cast.inputs = {name: tensor.detach() for name, tensor in data.inputs.items()}
        cast.inputs.update({name: data.inputs[name].detach().to(dtype) for name in problems.QKV})
        for tensor in cast.inputs.values():
            tensor.requires_grad_()
        with torch.autocast(device, dtype=dtype):
            outputs = data.outputs(attention)
        assert outputs["out"].dtype == dtype and outputs["lse"].dtype == torch.float32
        for each in (data, cast):
            each.cotangents["out"] = each.cotangents["out"].to(dtype)
        found, wanted = data.gradients(outputs), cast.results(attention)
        same(outputs["out"], wanted["out"], f"autocast to {dtype}: out")
        for name in call.wrt:
            assert found[f"d{name}"].dtype == data.inputs[name].dtype, (dtype, name)
            same(found[f"d{name}"], wanted[f"d{name}"].to(data.inputs[name].dtype), f"autocast to {dtype}: d{name}")


def check_checkpoint(function: Operator, device: str, call: Call, *, reentrant: bool, compiled: bool) -> None:
    """Recomputation in backward gives the bytes of a plain call."""
    import torch
    from torch.utils.checkpoint import checkpoint

    data, plain = Data(call, device), Data(call, device)
    names = list(data.inputs)

    def layer(*inputs: Any) -> tuple[Any, ...]:
        return tuple(outputs_of(function, call, dict(zip(names, inputs, strict=True))).values())

    def recomputed(*inputs: Any) -> tuple[Any, ...]:
        found: tuple[Any, ...] = checkpoint(layer, *inputs, use_reentrant=reentrant)
        return found

    run = torch.compile(recomputed, fullgraph=True, backend="aot_eager") if compiled else recomputed
    outputs = dict(zip(plain.outputs(function), run(*data.inputs.values()), strict=True))
    found = {name: output.detach() for name, output in outputs.items()} | data.accumulated(outputs)
    same_results(found, plain.results(function), f"checkpoint, reentrant {reentrant}, compiled {compiled}")


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


def test_every_subset_of_gradients_equals_the_whole(backend: Runner) -> None:
    with_torch(backend, SUBSETS, check_subsets, SUBSETS)


@pytest.mark.parametrize("name", ("qk_gemm", "av_gemm", "joint", "packed"))
def test_subsets_of_the_other_operators(backend: Runner, name: str) -> None:
    with_torch(backend, EVERY[name], check_subsets, EVERY[name])


@pytest.mark.parametrize("name", EVERY)
def test_gradients_follow_the_flags(backend: Runner, name: str) -> None:
    with_torch(backend, EVERY[name], check_modes, EVERY[name])


@pytest.mark.parametrize("name", EVERY)
def test_inputs_and_cotangents_survive(backend: Runner, name: str) -> None:
    with_torch(backend, EVERY[name], check_inputs_survive, EVERY[name])


@pytest.mark.parametrize("name", SAVED)
def test_no_probabilities_wait_for_backward(backend: Runner, name: str) -> None:
    with_function(backend, SAVED[name], check_saved, SAVED[name])


def test_the_check_of_what_waits_catches(backend: Runner) -> None:
    """torch's softmax keeps P, and attention of plain operations keeps it too."""
    import torch

    def softmax(scores: Any, **options: Any) -> Any:
        return torch.softmax(scores, -1)

    def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
        scores = q.unflatten(1, (k.shape[1], -1)) @ k.mT.unsqueeze(2)
        return (torch.softmax(scores, -1) @ v.unsqueeze(2)).flatten(1, 2), scores.logsumexp(-1).flatten(1, 2)

    def check(_: Operator, device: str, call: Call, plain: Operator) -> None:
        with pytest.raises(AssertionError):
            check_saved(plain, device, call)

    for name, plain in (("softmax", softmax), ("attention", attention)):
        with_function(backend, SAVED[name], check, SAVED[name], plain)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_one_tensor_in_three_places(backend: Runner, dtype: str) -> None:
    with_function(backend, EVERY["attention"], check_shared_tensor, dtype)


@pytest.mark.parametrize("name", EVERY)
def test_a_second_derivative_raises(backend: Runner, name: str) -> None:
    with_torch(backend, EVERY[name], check_double_backward, EVERY[name])


def test_autocast_casts_first(backend: Runner) -> None:
    with_function(backend, MIXED, check_autocast, MIXED)


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("name", EVERY)
def test_recomputation_gives_the_same_bytes(backend: Runner, name: str, reentrant: bool) -> None:
    with_torch(backend, EVERY[name], lambda *given: check_checkpoint(*given, reentrant=reentrant, compiled=False), EVERY[name])


@pytest.mark.parametrize("name", ("softmax", "biased"))
def test_recomputation_under_compile_gives_the_same_bytes(backend: Runner, name: str) -> None:
    with_torch(backend, EVERY[name], lambda *given: check_checkpoint(*given, reentrant=False, compiled=True), EVERY[name])


def test_recomputation_draws_the_same_mask(backend: Runner) -> None:
    with_torch(backend, DROPPING, lambda *given: check_checkpoint(*given, reentrant=False, compiled=False), DROPPING)
    drawn = problems.edited(DROPPING, drop=("dropout_seed",))
    with_torch(backend, drawn, check_drawn_mask, drawn)


def check_drawn_mask(attention: Operator, device: str, call: Call) -> None:
    """A mask drawn in forward is drawn again when it is recomputed: v's gradient is the one of a plain call with the same generator."""
    import torch

    results = []
    for reentrant in (None, False, True):
        torch.manual_seed(5)
        data = Data(call, device)
        if reentrant is None:
            outputs = data.outputs(attention)
        else:
            from torch.utils.checkpoint import checkpoint

            found = checkpoint(
                lambda q, k, v: attention(q, k, v, **call.options), *(data.inputs[name] for name in problems.QKV), use_reentrant=reentrant
            )
            outputs = dict(zip(("out", "lse"), found, strict=True))
        results.append({name: output.detach() for name, output in outputs.items()} | data.accumulated(outputs))
    for found in results[1:]:
        same_results(found, results[0], "drawn again")
    torch.manual_seed(6)
    assert not torch.equal(Data(call, device).outputs(attention)["out"], results[0]["out"])


def test_hostile_settings_move_no_bit(backend: Runner) -> None:
    with_function(backend, EVERY["attention"], check_hostile_settings)


@pytest.mark.parametrize("name", ["softmax", "masked softmax", "softmax v2"])
def test_backward_begins_with_its_operator(backend: Runner, name: str) -> None:
    with_torch(backend, EVERY[name], check_backward_begins_with_its_operator, EVERY[name])

"""No process-wide setting of the caller moves a bit, and each is as it was afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType

import pytest
import torch
from float_bits import bits, differing, same_bits
from torch import Tensor


def _flushes() -> bool:
    smallest = torch.ones(1, dtype=torch.int32, device="cpu").view(torch.float32)
    return int((smallest * 1.0).view(torch.int32)) != 1


@contextmanager
def _flush_to_zero() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
        assert _flushes(), "the caller's mode must come back"
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def _tf32() -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(precision)


@contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 3)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


SETTINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "flush_to_zero": _flush_to_zero,
    "tf32": _tf32,
    "default_dtype": _default_dtype,
    "default_device": lambda: torch.device("meta"),
    "deterministic_algorithms": _deterministic,
    "threads": _threads,
    "no_grad": torch.no_grad,
}


def _subnormal_heavy(seed: int, *shape: int) -> Tensor:
    """Magnitudes from 2^-140 to 1, so that products, sums and inputs are subnormal often."""
    draw = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-140, 1, shape, generator=draw)
    return torch.ldexp(torch.randn(shape, generator=draw).double(), exponent).float()


def _everything(engine: ModuleType, gradients: bool) -> Callable[[], list[Tensor]]:
    q, k = _subnormal_heavy(0, 1, 2, 5, 8), _subnormal_heavy(1, 1, 2, 300, 8)
    v, dout = _subnormal_heavy(2, 1, 2, 300, 8), _subnormal_heavy(3, 1, 2, 5, 8)
    scores = 100 * torch.randn(2, 3, 300, generator=torch.Generator().manual_seed(4))
    dprobs = _subnormal_heavy(5, 2, 3, 300)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v, scores)]

    def run() -> list[Tensor]:
        results = [engine.attention(q, k, v), engine.joint_attn_softmax(scores), engine.joint_attn_qk_gemm(q, k, out_dtype=torch.bfloat16)]
        if gradients:
            results += torch.autograd.grad(results[:2], leaves, (dout, dprobs))
        return [result.detach() for result in results]

    return run


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_setting_moves_a_bit(engine: ModuleType, setting: str) -> None:
    run = _everything(engine, gradients=setting != "no_grad")
    wanted = run()
    threads = torch.get_num_threads()
    with SETTINGS[setting]():
        found = run()
    assert torch.get_num_threads() == threads
    assert [differing(a, b) for a, b in zip(found, wanted, strict=True)] == [0] * len(wanted)
    subnormal = sum(
        int(((bits(tensor.float()) & 0x7F800000) == 0).logical_and(bits(tensor.float()) & 0x7FFFFF != 0).sum()) for tensor in wanted
    )
    assert subnormal > 50, "the data must make subnormal results for this to say anything"


def test_flushing_would_show() -> None:
    """Negative control: an unguarded operation under the same mode loses subnormals."""
    x = _subnormal_heavy(0, 1000)
    wanted = x * 2.0**-10
    with _flush_to_zero():
        found = x * 2.0**-10
    assert not same_bits(found, wanted)


def test_autocast_casts_first_and_gradients_keep_their_dtype(engine: ModuleType) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 6, 8, generator=draw, requires_grad=True) for _ in range(2))
    v = torch.randn(1, 2, 6, 8, generator=draw).bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = engine.attention(q, k, v)
    assert out.dtype == torch.bfloat16
    cast = [tensor.detach().bfloat16().requires_grad_() for tensor in (q, k, v)]
    wanted = engine.attention(*cast)
    assert same_bits(out, wanted)
    dout = torch.randn(out.shape, generator=draw).bfloat16()
    found, reference = torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(wanted, cast, dout)
    assert [gradient.dtype for gradient in found] == [torch.float32, torch.float32, torch.bfloat16]
    assert all(same_bits(a.bfloat16(), b) for a, b in zip(found, reference, strict=True))

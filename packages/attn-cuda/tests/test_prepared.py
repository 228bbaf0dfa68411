"""Prepared calls: which calls share one, and that one runs with the addresses of its own call. With a device, also the bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attn_cuda
import pytest
import torch
from attn_spec.torch import Launches, Operators
from torch import Tensor

Same = Callable[..., None]


class _Recorder:
    """Kernels whose launches answer with the addresses that they were given; the long way answers None."""

    def __init__(self) -> None:
        self.prepared: list[str] = []

    def softmax_forward(self, scores: Tensor, mask: Tensor | None, out_dtype: torch.dtype) -> tuple[None, ...]:
        return (None,)

    def attention_forward(self, inputs: Any, out_dtype: torch.dtype) -> tuple[None, ...]:
        return None, None

    def prepare(self, operation: str, arguments: tuple[Any, ...], wanted: int) -> Callable[[list[int]], Any]:
        self.prepared.append(operation)
        return lambda addresses: addresses


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> tuple[Operators, _Recorder]:
    """Operators of attn_cuda without its checks and kernels."""
    from attn_spec.torch._operation import Operation
    from attn_spec.torch._remembered import Remembered

    kernels = _Recorder()
    operators: Any = object.__new__(Operators)
    vars(operators).update(vars(_operators()))
    operators._check = lambda *arguments: None
    operators._remembered = Remembered(kernels.prepare)
    monkeypatch.setattr(Operation, "__call__", lambda self, *arguments, wanted=0: (None, None))
    return operators, kernels


def _operators() -> Operators:
    operators: Operators = attn_cuda.attention.__self__  # type: ignore[attr-defined]
    return operators


def _qkv(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, 3, 8, generator=generator) for heads in (4, 2, 2)]


def _addresses(*tensors: Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_a_second_call_of_a_kind_runs_with_its_own_addresses(recorder: tuple[Operators, _Recorder]) -> None:
    operators, kernels = recorder
    first, second = _qkv(), _qkv(1)
    assert operators.attention(*first) is None
    assert operators.attention(*second) == _addresses(*second)
    assert operators.attention(*first) == _addresses(*first)
    assert kernels.prepared == ["attention"]


def test_a_tensor_given_twice_does_not_stand_for_others_later(recorder: tuple[Operators, _Recorder]) -> None:
    operators, _ = recorder
    one, q, k, v = (torch.randn(1, 2, 3, 8) for _ in range(4))
    operators.attention(one, one, one)
    assert operators.attention(q, k, v) == _addresses(q, k, v)


def test_keywords_in_another_order_reach_their_places(recorder: tuple[Operators, _Recorder]) -> None:
    operators, _ = recorder
    q, k, v = _qkv()
    sinks, bias, mask = torch.zeros(4), torch.zeros(1, 1, 3, 3), torch.ones(1, 3, dtype=torch.bool)
    for _ in range(2):
        found = operators.attention(q, bias=bias, v=v, key_padding_mask=mask, sinks=sinks, k=k)
    assert found == _addresses(q, k, v, mask, sinks, bias)


def test_what_a_launch_depends_on_makes_another_kind(recorder: tuple[Operators, _Recorder]) -> None:
    """Each call differs from the first in one thing; all are prepared apart, and none is prepared twice."""
    operators, kernels = recorder
    q, k, v = _qkv()
    calls: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = [
        ((q, k, v), {}),
        ((q, k, v), {"causal": False}),
        ((q, k, v), {"causal": 0}),
        ((q, k, v), {"scale": 1.0}),
        ((q, k, v), {"scale": 1}),
        ((q, k, v), {"scale": 0.0}),
        ((q, k, v), {"scale": -0.0}),
        ((q, k, v), {"window": (1, 0)}),
        ((q, k, v), {"window": (True, 0)}),
        ((q, k, v), {"return_lse": True}),
        ((q.bfloat16(), k.bfloat16(), v.bfloat16()), {}),
        ((q.transpose(1, 2).contiguous().transpose(1, 2), k, v), {}),
        ((torch.empty(1 * 4 * 3 * 8 + 1)[1:].view(q.shape), k, v), {}),
        ((q[:, :2], k, v), {}),
    ]
    for _ in range(2):
        for arguments, options in calls:
            operators.attention(*arguments, **options)
    assert kernels.prepared == ["attention"] * len(calls)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
def test_calls_that_need_more_than_a_launch_go_the_long_way(recorder: tuple[Operators, _Recorder]) -> None:
    operators, kernels = recorder
    q, k, v = _qkv()

    class Tagged(Tensor):
        pass

    leaf, tagged = q.clone().requires_grad_(), q.as_subclass(Tagged)
    for _ in range(2):
        assert operators.attention(leaf, k, v) is None
        assert operators.attention(tagged, k, v) is None
        assert operators.attention(torch._neg_view(q), k, v) is None
        with torch.autocast("cpu"):
            assert operators.attention(q, k, v) is None
        with torch.utils._python_dispatch.TorchDispatchMode():
            assert operators.attention(q, k, v) is None
        assert torch.func.vmap(lambda q: torch.zeros(()) if operators.attention(q, k, v) is None else torch.ones(()))(q[None]) == 0
        for strange in (q.to_sparse(), q[0, 0].to_sparse_csr(), torch.nested.nested_tensor([q[0], q[0, :1]]), q.to_mkldnn()):
            assert operators.joint_attn_softmax(strange) is None
        assert operators.attention(q, k, v, q_start=0) is None  # a start becomes a tensor that the caller does not hold
        assert operators.attention(q, k, v, sinks=torch.zeros(4, dtype=torch.float64)) is None
    assert kernels.prepared == []
    with torch.no_grad():
        operators.attention(leaf, k, v)
        assert operators.attention(leaf, k, v) == _addresses(leaf, k, v)


def test_launches_are_made_once_a_kind_whether_or_not_a_gradient_is_asked_for() -> None:
    made: list[float] = []

    def prepare(tensor: Tensor, scale: float) -> Callable[[list[int]], list[int]]:
        made.append(scale)
        return lambda addresses: addresses

    launches = Launches(prepare)
    one, two = torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)
    negated = torch._neg_view(one)
    for scale in (0.0, -0.0):
        assert launches(one, scale) == _addresses(one)
        assert launches(two, scale) == _addresses(two)
    assert [str(scale) for scale in made] == ["0.0", "-0.0"]
    for _ in range(2):
        assert launches(negated, 1.0) == _addresses(negated)
    assert made[2:] == [1.0, 1.0]


def test_ever_new_kinds_take_no_memory(recorder: tuple[Operators, _Recorder]) -> None:
    from attn_spec.torch import _remembered

    operators, _ = recorder
    rows = torch.zeros(1, _remembered._KINDS + 10)
    for keys in range(1, _remembered._KINDS + 5):
        operators.joint_attn_softmax(rows[:, :keys])
    assert operators._remembered is not None
    assert 0 < len(operators._remembered.launches) < _remembered._KINDS


def test_a_prepared_call_has_the_bytes_of_the_registered_operator(cuda: torch.device, assert_same_bits: Same) -> None:
    """Every operation twice, the second time with other data; the outer call makes both ways differ only in how they reach the kernels."""
    launches = _operators()._remembered
    assert launches is not None
    launches.launches.clear()
    ops = torch.ops.attn_cuda
    for seed in (0, 1):
        q, k, v = (tensor.to(cuda, torch.bfloat16) for tensor in _qkv(seed))
        scores = torch.randn(1, 4, 3, 77, generator=torch.Generator().manual_seed(seed)).to(cuda)
        mask = torch.arange(77, device=cuda)[None] % (2 + seed) == 0
        sinks, bias = scores[0, :, 0, 0].contiguous(), scores[..., :3]
        options = (None, None, None, None, None, sinks, bias, *(None,) * 5, True, 0.5, 1, 0, 0.0, torch.bfloat16)
        pairs = {
            "softmax": (attn_cuda.joint_attn_softmax(scores), ops.joint_attn_softmax(scores, None, torch.float32)[0]),
            "masked": (
                attn_cuda.joint_attn_softmax(scores, key_padding_mask=mask),
                ops.joint_attn_softmax(scores, mask, torch.float32)[0],
            ),
            "v2": (
                attn_cuda.joint_attn_softmax(scores, contract="ordered-v2"),
                ops.joint_attn_softmax_v2(scores, None, torch.float32)[0],
            ),
            "qk": (attn_cuda.joint_attn_qk_gemm(q, k, scale=0.5), ops.joint_attn_qk_gemm(q, k, 0.5, torch.float32)),
            "av": (attn_cuda.joint_attn_av_gemm(bias, v.float()), ops.joint_attn_av_gemm(bias, v.float(), torch.float32)),
        }
        out, lse = attn_cuda.attention(q, k, v, sinks=sinks, bias=bias, window=(1, 0), scale=0.5, return_lse=True)
        wanted = ops.attention(q, k, v, *options)
        pairs |= {"out": (out, wanted[0]), "lse": (lse, wanted[1])}
        for name, (found, of_operator) in pairs.items():
            assert_same_bits(found, of_operator, f"{name}, call {seed}")
    assert len(launches.launches) == 6
    assert None not in launches.launches.values()

"""Prepared calls: which calls share one, and that one runs with the addresses of its own call. With a device, also the bytes."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import attn_cuda
import pytest
import torch
from attn_cuda import _sm90_launch
from attn_cuda._arrays import dtype_codes
from attn_cuda._attention_launch import problem_of, tensors_of
from attn_cuda._describer import describer
from attn_cuda._prepared import prepare
from attn_spec._registry import get_backend
from attn_spec.torch import AttentionInputs, Launches, Operators
from attn_spec.torch._operation import Operation
from attn_spec.torch._remembered import Describer, Remembered, python_describer
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

    def attention_sm90_forward(self, inputs: Any) -> tuple[None, ...]:
        return None, None

    def prepare(self, operation: str, arguments: tuple[Any, ...], wanted: int) -> Callable[[list[int]], Any]:
        self.prepared.append(operation)
        return lambda addresses: addresses


@pytest.fixture(params=[python_describer, describer])
def describe(request: pytest.FixtureRequest) -> Callable[[], Describer]:
    """The describer in Python and that of this build."""
    return request.param


@pytest.fixture
def recorder(describe: Callable[[], Describer], monkeypatch: pytest.MonkeyPatch) -> tuple[Operators, _Recorder]:
    """Operators of attn_cuda without its checks and kernels: calls the long way answer None, recorded ones with their arguments."""
    kernels = _Recorder()
    operators: Any = object.__new__(Operators)
    vars(operators).update(vars(_operators()))
    operators._check = lambda *arguments: None
    operators._remembered = Remembered(kernels.prepare, describe)
    monkeypatch.setattr(Operation, "__call__", lambda self, *arguments, wanted=0: (None, None))
    monkeypatch.setattr(Operation, "record", lambda self, *arguments: (arguments, None))
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
        ((q, k, v), {"window": (1, None)}),
        ((q, k, v), {"window": (2**62, 0)}),
        ((q, k, v), {"return_lse": True}),
        ((q, k, v), {"contract": "ordered-v1"}),
        ((q, k, v), {"causal": True}),
        ((q, k, v), {"causal": True, "scale": None}),
        ((q, k, v), {"scale": None, "causal": True}),
        ((q, k, v), {"sinks": torch.zeros(4)}),
        ((q, k, v), {"sinks": torch.zeros(8)[::2]}),
        ((q, k, v), {"bias": torch.zeros(1, 1, 3, 3)}),
        ((q.half(), k.half(), v.half()), {}),
        ((q.bfloat16(), k.bfloat16(), v.bfloat16()), {}),
        ((q.transpose(1, 2).contiguous().transpose(1, 2), k, v), {}),
        ((torch.empty(1 * 4 * 3 * 8 + 1)[1:].view(q.shape), k, v), {}),
        ((q[:, :2], k, v), {}),
    ]
    for _ in range(2):
        for arguments, options in calls:
            operators.attention(*arguments, **options)
    assert kernels.prepared == ["attention"] * len(calls)


def test_a_tensor_changed_in_place_is_read_anew(recorder: tuple[Operators, _Recorder]) -> None:
    """The same tensor objects: shape, strides, dtype, memory and requires_grad are those of the call, not of an earlier one."""
    operators, kernels = recorder
    q, k, v = _qkv()
    operators.attention(q, k, v)
    assert operators.attention(q, k, v) == _addresses(q, k, v)

    q.resize_(1, 4, 2, 8)
    assert operators.attention(q, k, v) is None
    assert operators.attention(q, k, v) == _addresses(q, k, v)
    q.transpose_(1, 2).resize_(1, 4, 2, 8).transpose_(1, 2).transpose_(2, 1)
    before = len(kernels.prepared)
    k.as_strided_(k.shape, (48, 8, 16, 1))
    assert operators.attention(q, k, v) is None
    assert len(kernels.prepared) == before + 1
    held = v.clone()
    v.data = held
    assert operators.attention(q, k, v) == _addresses(q, k, held)
    v.data = held.double()
    assert operators.attention(q, k, v) is None
    v.data = held
    v.requires_grad_()
    assert operators.attention(q, k, v) is None
    assert operators.attention(q, k, v)[:3] == (q, k, v)
    with torch.no_grad():
        assert operators.attention(q, k, v) == _addresses(q, k, v)


def test_a_call_that_needs_a_gradient_is_recorded_with_its_own_tensors(recorder: tuple[Operators, _Recorder]) -> None:
    operators: Any = recorder[0]
    first, second = _qkv(), _qkv(1)
    sinks = [torch.zeros(4), torch.ones(4)]
    for tensors in (first, second):
        tensors[1].requires_grad_()
    assert operators.attention(*first, sinks=sinks[0], causal=False) is None
    q, k, v, *others = operators.attention(*second, sinks=sinks[1], causal=False)
    assert q is second[0] and k is second[1] and v is second[2] and sum(other is sinks[1] for other in others) == 1
    assert not any(other is mine for other in others for mine in (*first, sinks[0]))
    for needs in ((True, False, False), (True, True, True), (False, True, True)):  # each is a kind of its own
        for tensor, need in zip(second, needs, strict=True):
            tensor.requires_grad_(need)
        assert operators.attention(*second, sinks=sinks[1], causal=False) is None
    again = operators.attention(v=second[2], k=second[1], q=second[0], causal=False)
    assert again is None
    again = operators.attention(v=second[2], k=second[1], q=second[0], causal=False)
    assert all(found is given for found, given in zip(again, second, strict=False))
    assert recorder[1].prepared == []


def test_gradients_of_recorded_calls(describe: Callable[[], Describer]) -> None:
    """The reference's kernels, remembered: bytes of results and gradients, the second and third time by the short way."""
    plain: Any = get_backend("attn_reference").operators("pytorch")["attention"].__self__  # type: ignore[attr-defined]
    remembering: Any = object.__new__(Operators)
    vars(remembering).update(vars(plain), _remembered=Remembered(lambda *arguments: None, describe))
    for seed in range(3):
        q, k, v = (tensor.requires_grad_() for tensor in _qkv(seed))
        sinks, scores = torch.randn(4, generator=torch.Generator().manual_seed(seed)).requires_grad_(), q.transpose(2, 3)
        found: list[Any] = []
        wanted: list[Any] = []
        for operators, results in ((remembering, found), (plain, wanted)):
            out, lse = operators.attention(q, k, v, sinks=sinks, window=(1, 0), return_lse=True)
            probs = operators.joint_attn_softmax(scores)
            products = operators.joint_attn_qk_gemm(q, k, scale=0.5)
            total = (out.sin().sum() + (lse * 0.5).sum() + probs.sin().sum()) * products.sin().sum()
            results += [out, lse, probs, products, *torch.autograd.grad(total, (q, k, v, sinks))]
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert found[0].grad_fn is not None and found[0].grad_fn.name() == wanted[0].grad_fn.name()
    assert len(remembering._remembered.launches) == 3
    assert all(remembering._remembered.launches.values())


@pytest.mark.parametrize("masked", (False, True))
def test_joint_attention_is_prepared_behind_its_copies(
    recorder: tuple[Operators, _Recorder], masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text and image are copied side by side first; a prompt mask is the mask of queries and of keys."""
    operators, taken, out = recorder[0], [], torch.zeros(1, 4, 5, 8)  # type: tuple[Operators, list[list[int]], Tensor]
    assert operators._remembered is not None

    def launch(addresses: list[int]) -> Tensor:
        taken.append(addresses)
        return out

    operators._remembered.prepare = lambda *arguments: launch
    monkeypatch.setattr(Operation, "__call__", lambda self, *arguments, wanted=0: (out, None))
    tensors = [torch.randn(1, heads, rows, 8) for rows in (2, 3) for heads in (4, 2, 2)]
    mask = torch.ones(1, 2, dtype=torch.bool) if masked else None
    for scale in (1.0, 1.0, 0.5, 1.0):
        text, image = operators.joint_attention(*tensors, prompt_mask=mask, scale=scale)
        assert (text.shape, image.shape) == ((1, 4, 2, 8), (1, 4, 3, 8))
    assert [len(addresses) for addresses in taken] == ([5, 5] if masked else [3, 3])
    assert all(addresses[3] == addresses[4] for addresses in taken if masked)


def test_another_contract_is_another_operation(recorder: tuple[Operators, _Recorder]) -> None:
    operators, kernels = recorder
    q, k, v = _qkv()
    for _ in range(2):
        operators.attention(q, k, v, contract="sm90-v1")
        operators.attention(q, k, v)
        for contract in ("ordered-v1", "ordered-v2"):
            operators.joint_attn_softmax(q, contract=contract)
    assert kernels.prepared == ["attention_sm90", "attention", "joint_attn_softmax", "joint_attn_softmax_v2"]


def test_a_prepared_call_of_sm90_has_its_own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed segments, with one tensor as offsets of queries and of keys; another call has two."""
    calls: list[tuple[Any, ...]] = []
    module = ModuleType("a module that notes its calls")
    vars(module).update(
        {"FLOAT32": 0, "BFLOAT16": 1, "FLOAT16": 2},
        sm90_forward_workspace=lambda device, problem, scale: 64,
        sm90_forward=lambda device, stream, problem, scale, factor, *results: calls.append((problem, scale)),
    )
    monkeypatch.setattr(_sm90_launch, "_module", lambda inputs: module)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)

    def inputs(offsets: Tensor, others: Tensor) -> AttentionInputs:
        q, k, v = (torch.randn(9, heads, 64).bfloat16() for heads in (4, 2, 2))
        used, sinks = torch.tensor([3, 2]), torch.zeros(4)
        return AttentionInputs(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=others, seqlens_k=used, sinks=sinks, causal=True, scale=0.125)

    offsets = torch.tensor([0, 5, 9])
    first, second = inputs(offsets, offsets), inputs(offsets.clone(), offsets.clone())
    fields = [getattr(first, name) for name in AttentionInputs.__slots__]
    launch = prepare("attention_sm90", tuple(fields), 2)
    assert launch is not None
    out, lse = launch(_addresses(*tensors_of(second).values()))
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((9, 4, 64), torch.bfloat16, (4, 9), torch.float32)
    ((batch, *arrays, pointers, bias, causal, left, right), scale) = calls[0]
    wanted = problem_of(dtype_codes(module), second)
    assert (batch, *arrays, tuple(pointers), bias, causal, left, right) == wanted and scale == 0.125
    assert wanted != problem_of(dtype_codes(module), first)
    alone = prepare("attention_sm90", tuple(fields), 1)
    assert alone is not None and alone(_addresses(*tensors_of(first).values())).shape == (9, 4, 64)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
def test_calls_that_need_more_than_a_launch_go_the_long_way(recorder: tuple[Operators, _Recorder]) -> None:
    operators, kernels = recorder
    q, k, v = _qkv()

    class Tagged(Tensor):
        pass

    leaf, tagged = q.clone().requires_grad_(), q.as_subclass(Tagged)
    for _ in range(2):
        assert operators.attention(leaf.as_subclass(Tagged), k, v) is None
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


def test_launches_are_made_once_a_kind_whether_or_not_a_gradient_is_asked_for(describe: Callable[[], Describer]) -> None:
    made: list[float] = []

    def prepare(tensor: Tensor, scale: float) -> Callable[[list[int]], list[int]]:
        made.append(scale)
        return lambda addresses: addresses

    launches = Launches(prepare, describe)
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
        if torch.cuda.get_device_capability(cuda) == (9, 0):
            wide = [torch.randn(9, heads, 64, device=cuda).bfloat16() for heads in (4, 2, 2)]
            offsets = torch.tensor([0, 4 + seed, 9], device=cuda)
            packed = attn_cuda.attention_varlen(wide[0], wide[1], wide[2], offsets, offsets, scale=0.5, return_lse=True, contract="sm90-v1")
            order = (*wide, *(None,) * 7, offsets, offsets, None, None, None, True, 0.5, -1, -1, 0.0)
            pairs |= dict(zip(("packed out", "packed lse"), zip(packed, ops.attention_sm90(*order), strict=True), strict=True))
        for name, (found, of_operator) in pairs.items():
            assert_same_bits(found, of_operator, f"{name}, call {seed}")
    assert len(launches.launches) == 6 + (torch.cuda.get_device_capability(cuda) == (9, 0))
    assert None not in launches.launches.values()

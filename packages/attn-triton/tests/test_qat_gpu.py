"""4-bit attention on a Hopper GPU: the bytes of the CPU's definitions under both contracts, and what may not move them.

``TRITON_INTERPRET=0 pytest packages/attn-triton/tests/test_qat_gpu.py``; without such a GPU there is nothing to run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import attn_reference
import attn_triton
import pytest
import torch
import triton
import triton.language as tl
from attn_spec import Problem as Described
from attn_spec import QATConfig
from attn_triton import _qat_sm90_launch
from attn_triton._nvfp4_kernel import quantized_along_columns, quantized_along_rows
from attn_triton._nvfp4_launch import constant_scales
from attn_triton._nvfp4_sm90_kernel import p_along_columns, p_along_rows, reciprocal
from attn_triton._qat_sm90_launch import CONFIGS, QatConfigs
from attn_triton._sm90_configuration import TileConfig
from attn_triton.backend import BACKEND
from sm90_calls import HALF, Problem, dense, packed, turned
from test_sm90_gpu import assert_same, part

TENSOR_CORES, ORDERED = "nvfp4-sm90-v1", "nvfp4-ordered-v1"
CONTRACTS = (TENSOR_CORES, ORDERED)
KEYS, CAUSAL = QATConfig.training(), QATConfig.fastvideo()
UNLIKE = replace(KEYS, quantized_backward=False, qkv_outer="row", p_outer="row")
LOW = replace(KEYS, high_precision_delta=False, qkv_outer="tile", p_outer="none")
ONLY_P = replace(KEYS, quantize_q=False, quantize_k=False, quantize_v=False)


@pytest.fixture(autouse=True)
def hopper() -> None:
    described = Described(op="qat_attention", dtype="bfloat16", device="cuda", contract=TENSOR_CORES, head_dim=64, value_dim=64)
    reasons = BACKEND.reasons(described)
    if reasons:
        pytest.skip("; ".join(reasons))


def on_gpu(problem: Problem) -> dict[str, torch.Tensor]:
    return problem.results(attn_triton, "cuda")


def free(config: QATConfig = KEYS, **options: Any) -> Problem:
    return dense(causal=False, config=config, **options)


def causal(config: QATConfig = CAUSAL, **options: Any) -> Problem:
    return dense(causal=True, config=config, **options)


CALLS = {
    "training": free,
    "training, D 128, groups": lambda: free(head_dim=128, heads=4, kv_heads=2, queries=140, keys=300),
    "float16": lambda: free(dtype=HALF),
    "one pair": lambda: free(queries=1, keys=1),
    "causal with sinks": lambda: causal(queries=300, keys=300, sinks=True),
    "causal, D 128": lambda: causal(head_dim=128, heads=4, kv_heads=2, queries=150, keys=150),
    "causal, more keys": lambda: causal(queries=70, keys=200),
    "causal, more queries": lambda: causal(queries=150, keys=20, sinks=True),
    "rows, original operands in the backward": lambda: free(UNLIKE),
    "tiles, delta of the quantized P": lambda: free(LOW),
    "P as it is": lambda: free(replace(KEYS, quantize_p=False)),
    "only P": lambda: free(ONLY_P, head_dim=128),
    "P by a constant that is no power of two": lambda: free(replace(KEYS, p_outer=1000.0, qkv_outer=3.0)),
    "smooth keys": lambda: free(replace(KEYS, smooth_k=True, quantized_backward=False), return_lse=False),
    "disabled": lambda: free(QATConfig(enabled=False)),
    "large scores": lambda: free(spread=30.0),
    "another layout": lambda: turned(free(heads=2, kv_heads=2)),
    "no keys": lambda: free(keys=0, sinks=True),
    "no queries": lambda: free(queries=0),
    "no batch": lambda: free(batch=0),
    "packed": lambda: packed((17, 0, 130, 5, 64), (40, 30, 130, 0, 300), causal=False, config=KEYS),
    "packed, causal with sinks": lambda: packed(
        (17, 200, 1), (17, 200, 1), head_dim=128, sinks=True, dtype=HALF, causal=True, config=CAUSAL
    ),
    "packed, padded segments": lambda: packed(
        (20, 140, 9), (30, 150, 9), used={"seqlens_q": torch.tensor([15, 140, 0]), "seqlens_k": torch.tensor([30, 131, 9])}, causal=False,
        config=KEYS,
    ),
}  # fmt: skip
"""Kinds of calls; each builds fresh inputs."""
ORDERED_CALLS = {
    "float32, D 80, smooth both": lambda: free(
        replace(KEYS, smooth_q=True, smooth_k=True), dtype=torch.float32, head_dim=80, return_lse=False
    ),
    "scale 0": lambda: free(scale=0.0),
    "a negative scale": lambda: free(scale=-0.3),
    "padding": lambda: free(more={"key_padding_mask": torch.arange(200).unsqueeze(0) % 7 != 3}),
    "D 256, causal": lambda: causal(head_dim=256, queries=33, keys=40, sinks=True),
}


def under(contract: str, problem: Problem) -> Problem:
    return replace(problem, contract=contract)


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("name", CALLS)
def test_bytes_equal_the_definition(name: str, contract: str) -> None:
    problem = under(contract, CALLS[name]())
    assert_same(on_gpu(problem), problem.results(attn_reference), name)


@pytest.mark.parametrize("name", ORDERED_CALLS)
def test_bytes_of_what_the_ordered_contract_has_alone(name: str) -> None:
    problem = under(ORDERED, ORDERED_CALLS[name]())
    assert_same(on_gpu(problem), problem.results(attn_reference), name)


OTHERS = (
    QatConfigs(TileConfig(16, 4, 1), TileConfig(32, 4, 1), TileConfig(16, 4, 1), TileConfig(16, 4, 1, others=16)),
    QatConfigs(TileConfig(128, 8, 2), TileConfig(16, 4, 2), TileConfig(64, 4, 1), TileConfig(32, 4, 1, others=32)),
)
"""Other blocks, warps and stages: among them the 32 by 32 of FastVideo's kernel."""


@pytest.mark.parametrize("head_dim", CONFIGS)
def test_no_configuration_moves_a_bit(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for problem in (free(head_dim=head_dim, heads=4, kv_heads=2, queries=200, keys=500), causal(head_dim=head_dim, queries=300, keys=300)):
        call = under(TENSOR_CORES, problem)
        wanted = on_gpu(call)
        for config in OTHERS:
            with monkeypatch.context() as other:
                other.setitem(_qat_sm90_launch.CONFIGS, head_dim, config)
                assert_same(on_gpu(call), wanted, str(config))


@pytest.mark.parametrize("contract", CONTRACTS)
def test_batch_size_and_slot(contract: str) -> None:
    problem = under(contract, free(batch=3, heads=4, kv_heads=2, queries=150, keys=150))
    whole = on_gpu(problem)
    for slot in range(3):
        alone = on_gpu(problem.items(slice(slot, slot + 1)))
        assert_same(alone, {name: tensor[slot : slot + 1] for name, tensor in whole.items()}, f"slot {slot}")


@pytest.mark.parametrize("contract", CONTRACTS)
def test_later_tokens_move_no_bit(contract: str) -> None:
    problem = under(contract, causal(queries=400, keys=400, heads=2, kv_heads=2))
    whole = on_gpu(problem)
    for count in (1, 37, 127, 128, 129, 300):
        found = on_gpu(problem.queries(slice(0, count)).keys(count))
        assert_same(part(found), part(whole, queries=slice(0, count)), f"{count} tokens")


def test_a_scale_over_later_tokens_is_noticed() -> None:
    """Control: with an outer scale that grows with the length, a prefix has other bits."""
    problem = under(TENSOR_CORES, causal(queries=100, keys=100))
    whole = on_gpu(problem)
    found = on_gpu(problem.queries(slice(0, 50)).keys(50).with_options(config=replace(CAUSAL, qkv_outer=50.0)))
    with pytest.raises(AssertionError, match="differ"):
        assert_same(part(found), part(whole, queries=slice(0, 50)))


def test_repetition_beside_other_work() -> None:
    """Twenty training steps while another stream keeps the GPU busy."""
    problem = under(TENSOR_CORES, free(batch=2, heads=4, kv_heads=2, queries=500, keys=500, head_dim=128))
    wanted = on_gpu(problem)
    other, square = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        with torch.cuda.stream(other):
            for _ in range(4):
                square = torch.tanh(square @ square)
        assert_same(on_gpu(problem), wanted, "beside other work")
    torch.cuda.synchronize()


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("keys", (192, 1024, 4096, 31_200))
def test_dv_does_not_collapse_with_length(keys: int, contract: str) -> None:
    """P of one part in ``keys``: uniform, and with logits of standard deviation 1. The control quantizes P after it is normalised."""
    problem = under(contract, free(ONLY_P, heads=1, kv_heads=1, queries=64, keys=keys))
    q, k, dout = (tensor.double()[0, 0] for tensor in (problem.tensors["q"], problem.tensors["k"], problem.dout))
    found = on_gpu(problem)["dv"][0, 0].double()
    probs = torch.softmax(q @ k.T / 8, -1)
    assert cosine(found, probs.T @ dout) >= 0.99
    faulty = attn_reference.nvfp4.fake_quantize(probs.float()).double().T @ dout
    assert cosine(faulty, probs.T @ dout) < 0.95 or keys == 192
    uniform = on_gpu(problem.edited(q=torch.zeros_like(problem.tensors["q"])))["dv"][0, 0].double()
    expected = (dout.sum(0, keepdim=True) / keys).expand_as(uniform)
    assert cosine(uniform, expected) > 0.9999 and abs(float(uniform.norm() / expected.norm()) - 1) < 0.01


@triton.jit
def _reciprocals(x, out, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, reciprocal(tl.load(x + at)))


@pytest.mark.parametrize("exponent", (-60, -33, -1, 0, 33))
def test_the_reciprocal_is_ieee(exponent: int) -> None:
    """Every binary32 number of a binade."""
    x = (torch.arange(1 << 23, dtype=torch.int32, device="cuda") | ((127 + exponent) << 23)).view(torch.float32)
    found = torch.empty_like(x)
    _reciprocals[(len(x) // 1024,)](x, found, 1024, enable_fp_fusion=False)
    assert torch.equal(found, 1 / x)


@triton.jit(do_not_specialize=["encode", "decode"])
def _quantizers(x, found, wanted, encode, decode, HALF: tl.constexpr, ALONG_ROWS: tl.constexpr):
    at = tl.program_id(0) * 64 * 128 + (tl.arange(0, 64)[:, None] * 128 + tl.arange(0, 128)[None, :])
    p = tl.load(x + at)
    up, down = tl.full([1, 1], encode, tl.float32), tl.full([1, 1], decode, tl.float32)
    if ALONG_ROWS:
        tl.store(found + at, p_along_rows(p, up, down) * down)
        tl.store(wanted + at, quantized_along_rows(p, up, down))
    else:
        tl.store(found + at, p_along_columns(p, up, down, HALF).to(tl.float32) * down)
        tl.store(wanted + at, quantized_along_columns(p, up, down))


@pytest.mark.parametrize("outer", (1.0, 2688.0, 2.0**24, 2.0**-24, 3.7, 1e5))
def test_the_branchless_quantizer_has_the_bits(outer: float) -> None:
    """Blocks of every size from zero to far beyond what a scale holds, and ties of codes."""
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.rand(256, 64, 128, device="cuda", generator=generator)
    x *= torch.exp2(-30 * torch.rand(256, 64, 8, device="cuda", generator=generator) ** 2).repeat_interleave(16, 2)
    x[:8] = torch.randint(0, 256, (8, 64, 128), device="cuda", generator=generator) / 16 / max(1.0, outer)
    x[8:12], x[12:16, :, ::3] = 0, 0
    for half in (tl.bfloat16, tl.float16):
        for along_rows in (False, True):
            found, wanted = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
            _quantizers[(len(x),)](x, found, wanted, *constant_scales(outer), half, along_rows, enable_fp_fusion=False)
            assert torch.equal(found.view(torch.int32), wanted.view(torch.int32)), f"{half} {along_rows}"


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0))


def test_what_it_lacks_is_refused() -> None:
    q = torch.zeros(1, 1, 32, 96, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(NotImplementedError, match="head_dim=96, value_dim=96 with contract nvfp4-sm90-v1"):
        attn_triton.qat_attention(q, q, q, contract=TENSOR_CORES)

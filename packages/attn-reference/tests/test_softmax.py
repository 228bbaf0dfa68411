"""``joint_attn_softmax``: logical compaction, tiles, dead rows and specials, forward and backward."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from float_bits import bits, same_bits
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INF, NAN = float("inf"), float("nan")


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, size: float = 4.0) -> Tensor:
    return (size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def _with_gradient(engine: ModuleType, scores: Tensor, upstream: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    leaf = scores.clone().requires_grad_()
    probs = engine.joint_attn_softmax(leaf, key_padding_mask=mask)
    (gradient,) = torch.autograd.grad(probs, leaf, upstream)
    return probs.detach(), gradient


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [1, 255, 256, 257, 513, 1024])
def test_agrees_with_float64(engine: ModuleType, keys: int, dtype: torch.dtype) -> None:
    scores, upstream = _random(3, 2, keys, dtype=dtype), _random(3, 2, keys, seed=1, dtype=dtype)
    probs, gradient = _with_gradient(engine, scores, upstream)
    leaf = scores.double().requires_grad_()
    exact = torch.softmax(leaf, -1)
    (wanted,) = torch.autograd.grad(exact, leaf, upstream.double())
    step = torch.finfo(dtype).eps
    assert probs.dtype == gradient.dtype == dtype
    assert bool(((probs.double() - exact).abs() <= (0.5 * step + 3e-6) * exact + torch.finfo(dtype).smallest_normal * step).all())
    assert bool(
        (
            (gradient.double() - wanted).abs()
            <= 0.5 * step * wanted.abs() + 3e-6 * exact.abs().amax() + torch.finfo(dtype).smallest_normal * step
        ).all()
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("negative_zero", [False, True])
def test_padded_is_compact(engine: ModuleType, dtype: torch.dtype, negative_zero: bool) -> None:
    """73 prompt and 257 image keys: 330 compact, or 769 with 439 padded ones between."""
    text, image, pad = 73, 257, 439
    compact, upstream = _random(1, 2, 3, text + image, dtype=dtype), _random(1, 2, 3, text + image, seed=1, dtype=dtype)
    if negative_zero:
        upstream = torch.where(torch.rand(upstream.shape, generator=torch.Generator().manual_seed(2)) < 0.5, -0.0, upstream.float()).to(
            dtype
        )
    mask = torch.cat([torch.ones(text), torch.zeros(pad), torch.ones(image)]).bool().unsqueeze(0)

    def padded(values: Tensor, fill: float) -> Tensor:
        return torch.cat([values[..., :text], torch.full((1, 2, 3, pad), fill, dtype=dtype), values[..., text:]], dim=-1)

    wanted = _with_gradient(engine, compact, upstream)
    found = _with_gradient(engine, padded(compact, NAN), padded(upstream, NAN), mask)
    for full, short in zip(found, wanted, strict=True):
        assert same_bits(full[..., mask[0]], short)
        assert not bits(full[..., ~mask[0]]).any()
    in_place = _with_gradient(engine, padded(compact, -INF), padded(upstream, 0.0))
    if dtype == torch.float32:
        # Negative control: -inf keeps positions, so the tiles differ.
        assert not same_bits(in_place[0][..., mask[0]], wanted[0])


def test_irregular_masks_are_per_batch_item(engine: ModuleType) -> None:
    scores, upstream = _random(3, 2, 2, 600), _random(3, 2, 2, 600, seed=1)
    mask = torch.rand(3, 600, generator=torch.Generator().manual_seed(3)) < 0.6
    mask[1] = False
    probs, gradient = _with_gradient(engine, scores, upstream, mask)
    for item in range(3):
        kept = mask[item]
        if not kept.any():
            assert not bits(probs[item]).any() and not bits(gradient[item]).any()
            continue
        alone = _with_gradient(engine, scores[item][..., kept], upstream[item][..., kept])
        assert same_bits(probs[item][..., kept], alone[0]) and same_bits(gradient[item][..., kept], alone[1])


@pytest.mark.parametrize("dead", [256, 512])
def test_leading_dead_tiles_change_nothing(engine: ModuleType, dead: int) -> None:
    live, upstream = _random(4, 300), _random(4, 300, seed=1)
    wanted = _with_gradient(engine, live, upstream)
    found = _with_gradient(
        engine, torch.cat([torch.full((4, dead), -INF), live], -1), torch.cat([torch.full((4, dead), NAN), upstream], -1)
    )
    for full, short in zip(found, wanted, strict=True):
        assert same_bits(full[:, dead:], short)
        assert not bits(full[:, :dead]).any()
    shifted = _with_gradient(engine, torch.cat([torch.full((4, 100), -INF), live], -1), torch.cat([torch.zeros(4, 100), upstream], -1))
    assert not same_bits(shifted[0][:, 100:], wanted[0]), "negative control: a shift inside a tile moves bits"


def test_trailing_dead_tile_changes_nothing(engine: ModuleType) -> None:
    live = _random(4, 256)
    longer = engine.joint_attn_softmax(torch.cat([live, torch.full((4, 300), -INF)], -1))
    assert same_bits(longer[:, :256], engine.joint_attn_softmax(live))


def test_row_without_a_key_is_positive_zero(engine: ModuleType) -> None:
    probs, gradient = _with_gradient(engine, torch.full((2, 300), -INF), torch.full((2, 300), NAN))
    assert not bits(probs).any() and not bits(gradient).any()


@pytest.mark.parametrize("special", [NAN, INF])
def test_special_score_spoils_its_row_only(engine: ModuleType, special: float) -> None:
    scores, upstream = _random(3, 600), _random(3, 600, seed=1)
    scores[:, 5] = -INF
    spoiled = scores.clone()
    spoiled[1, 400] = special
    wanted, found = _with_gradient(engine, scores, upstream), _with_gradient(engine, spoiled, upstream)
    for clean, dirty in zip(wanted, found, strict=True):
        assert same_bits(dirty[0::2], clean[0::2])
        assert dirty[1].isnan().sum() == 599
        assert not bits(dirty[:, 5]).any()


@pytest.mark.parametrize("value", [-1e30, -1000.0, torch.finfo(torch.float32).min])
def test_large_finite_scores_are_numbers(engine: ModuleType, value: float) -> None:
    probs, gradient = _with_gradient(engine, torch.full((1, 512), value), torch.ones(1, 512))
    assert bool((probs == 1 / 512).all())
    assert not bits(gradient).any()


def test_masked_softmax_has_a_finite_gradient(engine: ModuleType) -> None:
    scores = torch.tensor([[1.0, 1.0, 100.0]])
    probs, gradient = _with_gradient(engine, scores, torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[True, True, False]]))
    assert probs.tolist() == [[0.5, 0.5, 0.0]]
    assert gradient.tolist() == [[-0.25, 0.25, 0.0]]


def test_half_results_are_one_conversion(engine: ModuleType) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        scores = _random(4, 700, dtype=dtype, size=6.0)
        wide = engine.joint_attn_softmax(scores.float())
        assert same_bits(engine.joint_attn_softmax(scores), wide.to(dtype))
        assert same_bits(engine.FUNCTIONS["joint_attn_softmax.forward_fp32"](scores), wide)


def test_subnormal_probabilities_are_kept(engine: ModuleType) -> None:
    scores = torch.tensor([[0.0, -88.0, -90.0, -103.0]])
    probs = engine.joint_attn_softmax(scores)
    assert bool((probs > 0).all()) and bool((probs[0, 1:] < 2.0**-126).all())
    assert bool((engine.joint_attn_softmax(scores.bfloat16())[0, 1:3] > 0).all())


@pytest.mark.parametrize("shape", [(0, 5), (0, 3, 2, 7), (2, 0, 5), (9,)])
def test_empty_and_single_rows(engine: ModuleType, shape: tuple[int, ...]) -> None:
    probs, gradient = _with_gradient(engine, _random(*shape), _random(*shape, seed=1))
    assert probs.shape == gradient.shape == shape


def test_strides_are_read(engine: ModuleType) -> None:
    base = _random(300, 4, 6)
    for view in (base.permute(1, 2, 0), base.permute(1, 2, 0).flip(2)[:, ::2], base[:, :1].permute(1, 2, 0).expand(5, 6, 300)):
        upstream = _random(*view.shape, seed=1)
        for strided, compact in zip(
            _with_gradient(engine, view, upstream), _with_gradient(engine, view.contiguous(), upstream), strict=True
        ):
            assert same_bits(strided, compact)


def test_inputs_are_not_written(engine: ModuleType) -> None:
    scores, upstream = _random(2, 300), _random(2, 300, seed=1)
    before = scores.clone(), upstream.clone()
    _with_gradient(engine, scores, upstream)
    assert same_bits(scores, before[0]) and same_bits(upstream, before[1])

"""joint_attn_softmax of ordered-v2, forward and backward: the bytes of the PyTorch definition."""

import numpy as np
import pytest
import softmax_calls
import torch
from attn_spec.testing.asserts import assert_bytes
from attn_triton import _softmax_launch
from attn_triton._configuration import TileConfig
from attn_triton._softmax_v2_kernel import TILE
from softmax_calls import both, normal

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INF = float("inf")


def check(device, *call):
    return softmax_calls.check(device, *call, contract="ordered-v2")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", (1, 31, 48, 1023, 1024, 1025, 1040, 1600, 2100))
def test_lengths(device, keys, dtype):
    check(device, *normal(1, 3, keys, seed=keys, dtype=dtype))


@pytest.mark.parametrize("scale", (1e-40, 30.0, 1e30))
def test_spreads(device, scale):
    check(device, *normal(2, 1100, scale=scale))


@pytest.mark.parametrize("keys", (40, 1300))
def test_padding(device, keys):
    scores, upstream = normal(4, 2, keys, seed=keys, dtype=torch.bfloat16)
    mask = torch.rand(4, keys, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[1], mask[2] = False, True
    dropped = ~mask[:, None, :].expand(scores.shape)
    scores[dropped], upstream[dropped] = float("nan"), INF
    probs, gradient = check(device, scores, upstream, mask)
    for result in (probs, gradient):
        assert_bytes(result[1], np.zeros_like(result[1]), "all keys dropped")


@pytest.mark.parametrize("group", (1, 2, 8))
@pytest.mark.parametrize("kept", (0, 8192), ids=("walked", "kept"))
@pytest.mark.parametrize("keys", (2064, 5001))
def test_tiles_of_a_step(device, monkeypatch, keys, kept, group):
    config = TileConfig(rows=1, groups=(1, group), kept=kept, few=2)
    monkeypatch.setitem(_softmax_launch.CONFIGS_V2, device, config)
    scores, upstream = normal(1, 2, keys, seed=keys, dtype=torch.bfloat16)
    scores[0, 1, 1024:2048] = -INF
    check(device, scores, upstream)
    check(device, scores, upstream, torch.rand(1, keys, generator=torch.Generator().manual_seed(1)) < 0.9)


@pytest.mark.parametrize("large", (1e28, 1e38, 3e38, INF, float("nan")))
def test_large_upstream_of_masked_and_of_other_keys(device, large):
    """Rows that are kept take no care of masked keys unless delta says so: 3e38 less a delta of -1e38 would overflow."""
    scores, upstream = normal(1, 4, 1100)
    scores[..., ::7] = -INF
    upstream[0, 1, ::7], upstream[0, 2, 1], upstream[0, 3, ::7], upstream[0, 3, 1:1100:7] = large, large, large, -1e38
    check(device, scores, upstream)


@pytest.mark.parametrize("keys", (1500, 2100))
def test_infinities_and_nan(device, keys):
    scores, upstream = normal(1, 9, keys)
    rows = scores[0]
    rows[0, :1200] = -INF
    rows[1, 1000:] = -INF
    rows[2] = -INF
    rows[3, ::3] = -INF
    rows[4, 5], rows[4, 1400] = -INF, float("nan")
    rows[5, 5], rows[5, 0] = -INF, INF
    rows[6] = -1e30
    rows[7, ::2], rows[7, 1::2] = -3e38, -INF
    rows[8] = -torch.linspace(0, 110, keys)
    upstream[scores == -INF] = float("nan")
    probs, gradient = check(device, scores, upstream)
    masked = (scores == -INF).numpy()
    for result in (probs, gradient):
        assert not result[masked].view(np.int32).any()
    assert np.isnan(probs[0, [4, 5]][~masked[0, [4, 5]]]).all() and not np.isnan(probs[0, [0, 1, 2, 3, 6, 7, 8]]).any()


def test_another_contract_gives_other_bits(device):
    """Control: the comparisons above see the tile and the exp."""
    scores, upstream = normal(1, 3 * TILE.value)
    second, first = (both(scores.to(device), upstream.to(device), contract=contract)[0] for contract in ("ordered-v2", "ordered-v1"))
    assert (second.view(np.int32) != first.view(np.int32)).any()
    assert np.allclose(second, first, rtol=4e-6, atol=0)

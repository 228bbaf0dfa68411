"""Plans of packed segments and the gap of joint attention, as the device computes them, against plain Python."""

import pytest
import torch
from attn_spec.torch import AttentionInputs
from attn_triton._configuration import on_device
from attn_triton._problem import attention_problem
from attn_triton._remembered_launch import Launches
from attn_triton._sm90_grid import fill_gap, key_blocks, new_gap, new_plans, row_blocks

HEADS, KV_HEADS = 6, 2


def numbers(*values, device):
    return torch.tensor(values, dtype=torch.int64, device=device)


def packed(lengths_q, lengths_k, used_q=None, used_k=None, *, device):
    """Offsets from 3 on; the arrays end with the last offset."""
    offsets = [torch.tensor([3, *lengths]).cumsum(0).to(device) for lengths in (lengths_q, lengths_k)]
    q, k = (torch.empty(int(offset[-1]), heads, 64, device=device) for offset, heads in zip(offsets, (HEADS, KV_HEADS), strict=True))
    used = [None if values is None else numbers(*values, device=device) for values in (used_q, used_k)]
    return AttentionInputs(q, k, k, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], seqlens_q=used[0], seqlens_k=used[1])


def counted(lengths, used, repeats, size):
    used = lengths if used is None else [min(max(value, 0), length) for value, length in zip(used, lengths, strict=True)]
    return [-(-length * repeats // size) for length in used]


def before(counts):
    return [sum(counts[:number]) for number in range(len(counts) + 1)]


MANY = [number * 37 % 200 for number in range(300)]
LENGTHS = {
    "one": ([5], [9], None, None),
    "some empty": ([0, 17, 0, 130, 1], [2100, 0, 5, 1024, 1025], None, None),
    "padded": ([20, 140, 9], [30, 1500, 9], [15, 140, -1], [30, 1025, 100]),
    "more than are counted at a time": (MANY, MANY[::-1], None, None),
}


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("size", (1, 16, 64))
def test_plans(device, name, size):
    lengths_q, lengths_k, used_q, used_k = LENGTHS[name]
    inputs = packed(lengths_q, lengths_k, used_q, used_k, device=device)
    sizes, plans, launch = attention_problem(inputs).sizes, new_plans(inputs, 3), Launches()
    with on_device(inputs.q):
        rows = row_blocks(launch, inputs, sizes, plans[0], size)
        split = row_blocks(launch, inputs, sizes, plans[1], size, 4)
        keys = key_blocks(launch, inputs, sizes, plans[2], size)
    blocks = counted(lengths_q, used_q, HEADS // KV_HEADS, size)
    segments = [max(count, 1) for count in counted(lengths_k, used_k, 1, 1024)]
    assert rows.plan.tolist() == before(blocks)
    assert split.plan.tolist() == before([count * many for count, many in zip(blocks, segments, strict=True)])
    assert keys.plan.tolist() == before(counted(lengths_k, used_k, 1, size))
    assert rows.programs >= sum(blocks) * KV_HEADS and keys.programs >= keys.plan[-1] * KV_HEADS


def test_no_packed_segments(device):
    inputs = packed([], [], device=device)
    grid = row_blocks(Launches(), inputs, attention_problem(inputs).sizes, new_plans(inputs, 1)[0], 16)
    assert grid.programs == 0


@pytest.mark.parametrize(("kept", "keys"), (((3, 0, 70), 1100), ((1024,), 2050), ((7, 7), 7)))
def test_gap(device, kept, keys):
    """Each item keeps its first keys and those from the last multiple of 1024 on."""
    first = max(kept) if keys < 1024 else keys // 1024 * 1024
    place = torch.arange(keys, device=device)
    mask = (place < numbers(*kept, device=device)[:, None]) | (place >= first)
    inputs = AttentionInputs(*(torch.empty(len(kept), 1, keys, 64, device=device),) * 3, key_mask=mask)
    gap = new_gap(inputs)
    with on_device(gap):
        fill_gap(Launches(), inputs, gap)
    assert gap.tolist() == [[begin, first] if begin < first else [keys, keys] for begin in kept]


def test_dense_inputs_have_none(device):
    q = torch.empty(2, 2, 3, 64, device=device)
    inputs = AttentionInputs(q, q, q)
    assert new_plans(inputs, 2) == () and new_gap(inputs) is None
    grid = row_blocks(Launches(), inputs, attention_problem(inputs).sizes, None, 2, 5)
    assert grid.plan is None and grid.programs == 2 * 2 * 2 * 5

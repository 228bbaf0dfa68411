"""Contract sm90-v1 on a Hopper GPU: the bytes of the CPU model, forward and backward, and what may not move them.

Every test runs with attn_triton and, where it is installed, with the kernels of attn_cuda.

``TRITON_INTERPRET=0 pytest packages/attn-triton/tests/test_sm90_gpu.py``; without such a GPU there is nothing to run.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import attn_reference
import attn_reference.partials
import attn_triton.partials
import pytest
import torch
from attn_triton import _sm90_configuration, _sm90_launch
from attn_triton._remembered_launch import Kinds, Launches
from attn_triton._sm90_configuration import CONFIGS, Sm90Config, TileConfig
from sm90_calls import CALLS, CONTRACT, JOINTS, Problem, demand_hopper, dense, joint, packed
from torch import Tensor

ROWS = ("out", "lse", "dq")


HEAD_DIMS = {"attn_triton": tuple(CONFIGS)}
if find_spec("attn_cuda") is not None:
    HEAD_DIMS["attn_cuda"] = tuple(importlib.import_module("attn_cuda._sm90_launch").HEAD_DIMS)


@dataclass(frozen=True)
class Run:
    """A backend's results on the GPU."""

    functions: Any
    head_dims: tuple[int, ...]

    def __call__(self, problem: Problem) -> dict[str, Tensor]:
        return problem.results(self.functions, "cuda")


def runner(name: str) -> Run:
    demand_hopper(name, "attention", CONTRACT)
    return Run(importlib.import_module(name), HEAD_DIMS[name])


@pytest.fixture(params=HEAD_DIMS)
def on_gpu(request: pytest.FixtureRequest) -> Run:
    return runner(request.param)


@pytest.fixture
def on_triton() -> Run:
    return runner("attn_triton")


def on_each(names: Iterable[str]) -> pytest.MarkDecorator:
    """Every backend with every call of a head dim that it has."""
    found = [(backend, name) for backend, sizes in HEAD_DIMS.items() for name in names if "D 256" not in name or 256 in sizes]
    return pytest.mark.parametrize(("on_gpu", "name"), found, indirect=["on_gpu"])


every_call, every_joint = on_each(CALLS), on_each(JOINTS)
every_head_dim = pytest.mark.parametrize(
    ("on_gpu", "head_dim"), [(backend, size) for backend, sizes in HEAD_DIMS.items() for size in sizes], indirect=["on_gpu"]
)


def bits(tensor: Tensor) -> Tensor:
    """Integers, with one value for every NaN."""
    kind = torch.int32 if tensor.dtype == torch.float32 else torch.int16
    return torch.where(torch.isnan(tensor), -1, tensor.contiguous().view(kind))


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str = "") -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape and found[name].dtype == tensor.dtype, f"{what} {name}"
        different = bits(found[name]) != bits(tensor)
        count = int(different.sum())
        assert count == 0, f"{what} {name}: {count} of {different.numel()} differ, the first at {different.nonzero()[0].tolist()}"


def part(
    results: dict[str, Tensor], *, names: tuple[str, ...] = ROWS, items: slice = slice(None), queries: slice = slice(None)
) -> dict[str, Tensor]:
    return {name: results[name][items][:, :, queries] for name in names}


@every_call
def test_bytes_equal_the_model(on_gpu: Run, name: str) -> None:
    problem = CALLS[name]()
    assert_same(on_gpu(problem), problem.results(attn_reference), name)


@pytest.mark.parametrize(
    "name", ("three segments", "starts, many rows", "lengths", "packed decode", "packed, padded segments", "another layout")
)
def test_launches_of_a_kind_are_remembered(on_triton: Run, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of one kind with other values and at other addresses, forward and backward."""
    again: list[Launches] = []
    original = Launches.again
    monkeypatch.setattr(Launches, "again", lambda self, tensors: (again.append(self), original(self, tensors))[1])
    problem = CALLS[name]()
    on_triton(problem)
    again.clear()  # another test may have run a call of this kind
    for sign in (-1, 1):
        other = problem.edited(q=torch.neg(problem.tensors["q"]) if sign < 0 else problem.tensors["q"])
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            assert_same(on_triton(other), other.results(attn_reference), name)
    copies = name == "another layout"
    assert len(again) == (0 if copies else 4) and len({id(launches) for launches in again}) == (0 if copies else 2)


def test_joint_launches_are_remembered(on_triton: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of other lengths in as many slots, forward and backward."""
    again: list[Launches] = []
    original = Launches.again
    monkeypatch.setattr(Launches, "again", lambda self, tensors: (again.append(self), original(self, tensors))[1])
    for lengths in ((70, 0, 33), (1, 69, 70)):
        again.clear()  # another test may have run a call of this kind
        problem = joint(lengths, image=150, heads=4, kv_heads=2)
        assert_same(problem.results(on_triton.functions, "cuda"), problem.results(attn_reference), str(lengths))
    assert len(again) == 2


@every_joint
def test_joint_bytes_equal_the_model(on_gpu: Run, name: str) -> None:
    problem = JOINTS[name]()
    assert_same(problem.results(on_gpu.functions, "cuda"), problem.results(attn_reference), name)


def test_a_joint_call_in_a_graph(on_gpu: Run) -> None:
    """Another prompt of another length in the slots of a recorded call, forward and backward, over poisoned results."""
    first, second = joint((200, 1), text=1030, heads=1), joint((1030, 500), text=1030, heads=1)
    leaves = [tensor.cuda().requires_grad_() for tensor in first.tensors]
    assert first.mask is not None and second.mask is not None
    mask, dout = first.mask.cuda(), [tensor.cuda() for tensor in first.dout]

    def run() -> tuple[Tensor, ...]:
        out = on_gpu.functions.joint_attention(*leaves, prompt_mask=mask, contract=CONTRACT)
        return (*out, *torch.autograd.grad(out, leaves, dout))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = run()
    with torch.no_grad():
        for given, tensor in zip((*leaves, *dout), (*(-x for x in second.tensors), *second.dout), strict=True):
            given.copy_(tensor)
        mask.copy_(second.mask)
        for tensor in found:
            tensor.fill_(torch.nan)
    graph.replay()
    wanted = replace(second, tensors=tuple(-x for x in second.tensors)).results(attn_reference)
    assert_same(dict(zip(wanted, (tensor.detach().cpu() for tensor in found), strict=True)), wanted, "replayed")


def test_joint_rows_of_any_strides(on_gpu: Run) -> None:
    """Rows of heads side by side, rows that do not begin at a multiple of 16 bytes, one gradient for all rows, and a mask by columns."""
    problem = joint((70, 33), image=150, heads=4, kv_heads=2)
    assert problem.mask is not None
    problem = replace(problem, dout=(problem.dout[0][:, :, :1].expand_as(problem.dout[0]), problem.dout[1]))
    wanted = problem.results(on_gpu.functions, "cuda")
    mask = problem.mask.T.contiguous().T
    turned = tuple(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in problem.tensors)
    shifted = tuple(torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor) for tensor in problem.tensors)
    for name, tensors in (("heads side by side", turned), ("shifted", shifted)):
        assert_same(replace(problem, tensors=tensors, mask=mask).results(on_gpu.functions, "cuda"), wanted, name)


@every_head_dim
def test_prompt_padding(on_gpu: Run, head_dim: int) -> None:
    """Seventy tokens alone, and anywhere in a prompt of other lengths, within a segment and over its end."""
    problem = joint(image=150, head_dim=head_dim)
    wanted = problem.results(on_gpu.functions, "cuda")
    for first, length in ((0, 71), (1, 128), (3, 1100), (1030, 1100)):
        places = list(range(first, first + 70))
        found = problem.padded(places, length).results(on_gpu.functions, "cuda")
        text = {name: tensor for name, tensor in found.items() if name.endswith("_txt")}
        padding = [slot for slot in range(length) if slot not in places]
        for name, tensor in text.items():
            assert not bits(tensor[:, :, padding]).any(), f"{name} of padding is not +0, {first} in {length}"
        assert_same({**found, **{name: tensor[:, :, places] for name, tensor in text.items()}}, wanted, f"{first} in {length}")


def test_a_common_grid_is_noticed(on_gpu: Run) -> None:
    """Control: text and image as keys of one grid have other bits."""
    problem = joint(image=150)
    q, k, v = (torch.cat((problem.tensors[index], problem.tensors[index + 3]), dim=2).cuda() for index in range(3))
    out = on_gpu.functions.attention(q, k, v, causal=False, contract=CONTRACT).cpu()
    with pytest.raises(AssertionError, match="differ"):
        assert_same({"out_img": out[:, :, 70:]}, {"out_img": problem.results(on_gpu.functions, "cuda")["out_img"]})


@pytest.mark.parametrize("head_dim", CONFIGS)
def test_partials(on_triton: Run, head_dim: int) -> None:
    """States of the segments of parts of the keys, and their merge, against the CPU model and one call."""
    problem = dense(batch=2, heads=4, kv_heads=2, queries=70, keys=2500, head_dim=head_dim, sinks=True)
    q, k, v, sinks = (problem.tensors[name] for name in ("q", "k", "v", "sinks"))
    found, wanted = [], []
    for begin, end in ((0, 1024), (1024, 2048), (2048, 2500)):
        keys = k[:, :, begin:end], v[:, :, begin:end]
        wanted.append(attn_reference.partials.attention_partial(q, *keys, q_start=2430, k_start=begin))
        found.append(attn_triton.partials.attention_partial(q.cuda(), *(x.cuda() for x in keys), q_start=2430, k_start=begin))
        for name in ("n", "l", "o"):
            assert_same({name: getattr(found[-1], name).cpu()}, {name: getattr(wanted[-1], name)}, f"keys from {begin}")
    merged = attn_triton.partials.merge_partials(found, sinks=sinks.cuda())
    whole = on_triton.functions.attention(q.cuda(), k.cuda(), v.cuda(), sinks=sinks.cuda(), return_lse=True, contract=CONTRACT)
    model = attn_reference.partials.merge_partials(wanted, sinks=sinks)
    for name, *values in zip(("out", "lse"), merged, whole, model, strict=True):
        for other in values[1:]:
            assert_same({name: values[0].cpu()}, {name: other.cpu()}, "merged")


@pytest.mark.parametrize("programs", (1, 3))
def test_packed_segments_share_programs(on_triton: Run, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer programs than blocks and segments, and none split at all."""
    problem = CALLS["packed decode, D 128, unequal"]()
    wanted, blocks = problem.results(attn_reference), _sm90_launch.row_blocks

    def fewer(launch: Launches, inputs: Any, sizes: Any, plan: Any, size: int, segments: int | None = None) -> Any:
        grid = blocks(launch, inputs, sizes, plan, size, segments)
        return grid if segments is None else replace(grid, programs=programs)

    with monkeypatch.context() as few:
        few.setattr(_sm90_launch, "row_blocks", fewer)
        few.setattr(_sm90_launch, "_KINDS", Kinds())
        assert_same(on_triton(problem), wanted, f"{programs} programs")
    monkeypatch.setattr(_sm90_launch, "MOST_WORKSPACE", 0)
    assert_same(on_triton(problem), wanted, "whole")


@pytest.mark.parametrize("name", ("three segments, many rows", "starts, many rows", "window", "lengths", "starts"))
def test_splitting_by_segments_moves_no_bit(on_triton: Run, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = CALLS[name]()
    wanted = problem.results(attn_reference)
    with monkeypatch.context() as whole:
        whole.setattr(_sm90_launch, "_segments", lambda *_: 1)
        assert_same(on_triton(problem), wanted, f"{name}, whole")
    monkeypatch.setattr(_sm90_launch, "FEW_PROGRAMS", 1 << 30)
    assert_same(on_triton(problem), wanted, f"{name}, split")


def other_configs(head_dim: int, config: Sm90Config) -> Iterator[Sm90Config]:
    """Other blocks, warps and stages; larger ones do not fit a head dim of 256."""
    small = TileConfig(16, 4, 1)
    yield Sm90Config(
        forward=small, segments=TileConfig(32, 4, 1), merge=TileConfig(4, 4, 1), delta=small, queries=TileConfig(64, 4, 1),
        keys=TileConfig(64, 4, 1, others=16),
    )  # fmt: skip
    if head_dim == 256:
        return
    yield Sm90Config(
        forward=TileConfig(128, 8, 2), segments=TileConfig(64, 4, 2), merge=config.merge, delta=config.delta,
        queries=TileConfig(32, 4, 2), keys=TileConfig(128, 8, 2, others=32),
    )  # fmt: skip


@pytest.mark.parametrize("head_dim", CONFIGS)
def test_no_configuration_moves_a_bit(on_triton: Run, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = dense(head_dim=head_dim, heads=4, kv_heads=2, queries=200, keys=1400, window=(1300, 0), sinks=True)
    wanted = on_triton(problem)
    for config in other_configs(head_dim, CONFIGS[head_dim]):
        monkeypatch.setitem(_sm90_configuration.CONFIGS, head_dim, config)
        assert_same(on_triton(problem), wanted, str(config))


@every_head_dim
def test_batch_size_and_slot(on_gpu: Run, head_dim: int) -> None:
    problem = dense(batch=3, heads=4, kv_heads=2, queries=150, keys=150, head_dim=head_dim)
    whole = on_gpu(problem)
    for slot in range(3):
        alone = on_gpu(problem.items(slice(slot, slot + 1)))
        wanted = {name: tensor[slot : slot + 1] for name, tensor in whole.items()}
        assert_same(alone, wanted, f"slot {slot}")


def test_neighbours_lengths(on_gpu: Run) -> None:
    """A neighbour's queue grows from 9 to 10 tokens beside a decode step."""
    problem = packed((1, 10), (1500, 10))
    results = []
    for length in (9, 10):
        offsets = {"cu_seqlens_q": torch.tensor([3, 4, 4 + length]), "cu_seqlens_k": torch.tensor([3, 1503, 1503 + length])}
        found = on_gpu(problem.edited(**offsets))
        assert not torch.equal(found["out"][4:], torch.zeros_like(found["out"][4:]))
        results.append({**{name: found[name][3:4] for name in ("out", "dq")}, **{name: found[name][3:1503] for name in ("dk", "dv")}})
        results[-1]["lse"] = found["lse"][:, 3:4]
    assert_same(results[1], results[0], "9 and 10 tokens")


@every_head_dim
def test_chunked_prefill(on_gpu: Run, head_dim: int) -> None:
    problem = dense(queries=400, keys=1500, head_dim=head_dim, heads=2, kv_heads=2, sinks=True)
    whole = on_gpu(problem)
    for cut in (1, 37, 127, 128, 129, 300, 399):
        for begin, end in ((0, cut), (cut, 400)):
            chunk = problem.queries(slice(begin, end)).keys(1100 + end)
            assert_same(part(on_gpu(chunk)), part(whole, queries=slice(begin, end)), f"rows {begin} to {end}")


@every_head_dim
def test_decode_equals_prefill(on_gpu: Run, head_dim: int) -> None:
    """Steps of one token, alone and two at a time in a batch of other lengths, near tile and segment edges."""
    problem = dense(queries=2100, keys=2100, head_dim=head_dim, heads=4, kv_heads=1, sinks=True)
    whole = part(on_gpu(problem), names=("out", "lse"))
    for step in (0, 1, 63, 126, 127, 128, 129, 1000, 1022, 1023, 1024, 1025, 1151, 1152, 2046, 2047, 2048, 2049, 2099):
        token = problem.queries(slice(step, step + 1)).keys(step + 1)
        wanted = {name: tensor[:, :, step : step + 1] for name, tensor in whole.items()}
        assert_same(part(on_gpu(token), names=("out", "lse")), wanted, f"step {step}")
        tensors = {name: token.tensors[name].repeat(2, 1, 1, 1) for name in ("q", "k", "v")}
        lengths = torch.tensor([step + 1, min(5, step)])
        cotangents = token.dout.repeat(2, 1, 1, 1), token.dlse.repeat(2, 1, 1)
        pair = Problem({**tensors, "sinks": token.tensors["sinks"], "kv_lengths": lengths}, *cotangents)
        assert_same(part(on_gpu(pair), names=("out", "lse"), items=slice(0, 1)), wanted, f"step {step} in a batch")


def test_packed_padded_and_alone(on_gpu: Run) -> None:
    """Segments of a packed call, of a padded batch and of calls of their own."""
    lengths = (17, 300, 1, 128, 1030)
    call = packed(lengths, lengths, heads=4, kv_heads=2)
    whole = on_gpu(call)
    first = 3
    for length in lengths:
        rows = slice(first, first + length)
        tensors = {name: call.tensors[name][rows].transpose(0, 1)[None] for name in ("q", "k", "v")}
        dout, dlse = call.dout[rows].transpose(0, 1)[None], call.dlse[:, rows][None]
        wanted = {name: whole[name][rows].transpose(0, 1)[None] for name in ("out", "dq", "dk", "dv")} | {
            "lse": whole["lse"][:, rows][None]
        }
        assert_same(on_gpu(Problem(tensors, dout, dlse)), wanted, f"segment of {length} alone")
        pad = [torch.nn.functional.pad(tensors[name], (0, 0, 0, 7), value=torch.nan) for name in ("k", "v")]
        padded = {"q": tensors["q"], "k": pad[0], "v": pad[1], "kv_lengths": torch.tensor([length])}
        found = on_gpu(Problem(padded, dout, dlse))
        assert not found["dk"][:, :, length:].count_nonzero() and not found["dv"][:, :, length:].count_nonzero()
        found |= {name: found[name][:, :, :length] for name in ("dk", "dv")}
        assert_same(found, wanted, f"segment of {length} padded with NaN")
        first += length


def test_a_rolling_cache(on_gpu: Run) -> None:
    """Keys that left the window may leave the cache: the grid of tiles and segments stays."""
    problem = dense(queries=3, keys=1500, heads=2, kv_heads=2, window=(700, 0))
    whole = part(on_gpu(problem))
    for dropped in (1, 100, 790):
        rolled = problem.edited(
            k=problem.tensors["k"][:, :, dropped:], v=problem.tensors["v"][:, :, dropped:], k_start=torch.tensor([dropped])
        )
        assert_same(part(on_gpu(rolled)), whole, f"{dropped} keys dropped")


def test_a_shifted_grid_is_noticed(on_gpu: Run) -> None:
    """Control: the same keys at other positions lie in other tiles and have other bits."""
    problem = dense(queries=3, keys=1500, heads=2, kv_heads=2, causal=False)
    shifted = problem.edited(k_start=torch.tensor([500]))
    with pytest.raises(AssertionError, match="differ"):
        assert_same(part(on_gpu(shifted)), part(on_gpu(problem)))


def test_repetition_beside_other_work(on_gpu: Run) -> None:
    """Twenty backward passes while another stream keeps the GPU busy."""
    problem = dense(batch=2, heads=4, kv_heads=2, queries=500, keys=500, head_dim=128, sinks=True)
    wanted = on_gpu(problem)
    other, square = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        with torch.cuda.stream(other):
            for _ in range(4):
                square = torch.tanh(square @ square)
        assert_same(on_gpu(problem), wanted, "beside other work")
    torch.cuda.synchronize()


def test_a_nan_stays_in_its_row(on_gpu: Run) -> None:
    problem = dense(queries=70, keys=150)
    q = problem.tensors["q"].clone()
    q[:, :, 7] = torch.nan
    wanted, found = on_gpu(problem), on_gpu(problem.edited(q=q))
    for name in ("out", "lse", "dq"):
        assert torch.isnan(found[name][:, :, 7]).all()
        rest = [row for row in range(70) if row != 7]
        assert torch.equal(bits(found[name][:, :, rest]), bits(wanted[name][:, :, rest])), name


def test_what_it_lacks_is_refused(on_gpu: Run) -> None:
    head_dim = next(size for size in (256, 96) if size not in on_gpu.head_dims)
    q = torch.zeros(1, 1, 2, head_dim, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(NotImplementedError, match=rf"head_dim={head_dim}.*with contract sm90-v1.*ordered-v1"):
        on_gpu.functions.attention(q, q, q, contract=CONTRACT)

"""What only a GPU has: graphs, streams, other devices, other work beside, and no wait for any of it. Bytes are those of plain calls."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from attn_spec import Call
from attn_spec.testing.runner import Runner

from attn_shared_tests import problems
from attn_shared_tests.torch_calls import EVERY, Data, Operator, every_operator, on_gpu, same, same_results, with_kernels, without_gradients

pytestmark = [pytest.mark.attn_framework("torch"), on_gpu]
OTHER = every_operator(seed=1)
"""Other numbers, masks, lengths and offsets: a graph must read them when it is replayed."""
REPEATED = {
    "attention": problems.attention(
        batch=2, heads=8, kv_heads=2, queries=256, keys=600, head_dim=128, dtype="bfloat16", with_sinks=True, wrt=(*problems.QKV, "sinks")
    ),
    "wide": problems.attention(
        heads=4, queries=130, keys=300, head_dim=256, bias_shape=(1, 4, 1, 300), wrt=(*problems.QKV, "bias"), causal=False
    ),
    "packed": problems.varlen((100, 0, 257), heads=8, kv_heads=2, head_dim=64, dtype="bfloat16", wrt=problems.QKV),
    "joint": problems.joint(heads=4, kv_heads=4, text=40, image=300, head_dim=64, dtype="bfloat16", gradient=True),
    "softmax": problems.softmax((64, 6544), gradient=True, dtype="bfloat16"),
}
BUSY_CLOCKS = 200_000_000
"""About 0.1 s of a GPU."""


@pytest.fixture(autouse=True)
def poisoned() -> None:
    """Graphs and pools as users have them: torch's deterministic mode adds work of its own to a capture. Replays write over NaN anyway."""


def captured(function: Operator, data: Data) -> tuple[Any, dict[str, Any]]:
    """A graph of forward and backward, and the results that its replay writes."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        data.results(function)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = data.results(function)
    return graph, results


def replayed(graph: Any, results: dict[str, Any]) -> dict[str, Any]:
    """Results of a replay, into memory that held NaN."""
    import torch

    for result in results.values():
        result.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return results


def check_graph(function: Operator, device: str, call: Call, other: Call) -> None:
    """Forward and backward are captured, and forward alone; replays on new data have the bytes of plain calls on it."""
    assert all((call.arrays[name] != array).any() for name, array in other.arrays.items()), "other data is the same somewhere"
    plain = [Data(given, device).results(function) for given in (other, call, other)]
    data = Data(call, device)
    graph, results = captured(function, data)
    for given, wanted in zip((other, call, other), plain, strict=True):
        data.copy_from(Data(given, device))
        same_results(replayed(graph, results), wanted, "replay")


def check_replay_after_others(function: Operator, device: str, call: Call, larger: Call) -> None:
    """Memory of plain calls that is freed, reused by a larger call and overwritten is none of a graph's."""
    import torch

    wanted = Data(call, device).results(function)
    data = Data(call, device)
    graph, results = captured(function, data)
    Data(larger, device).results(function)
    torch.cuda.empty_cache()
    poison = [torch.full((size,), float("nan"), device=device) for size in (2**12, 2**16, 2**20, 2**24)]
    same_results(replayed(graph, results), wanted, "replay after other calls")
    del data, poison


def check_pool(function: Operator, device: str, call: Call) -> None:
    """Everything that a captured call allocates comes from the graph's pool."""
    import torch

    data = Data(call, device)
    data.results(function)
    # While any graph lives, torch keeps its generator's seed and offset outside the pools: this one makes them part of `before`.
    other = torch.cuda.CUDAGraph()
    with torch.cuda.graph(other):
        torch.zeros(1, device=device)
    torch.cuda.synchronize()
    gc.collect()
    graph, before = torch.cuda.CUDAGraph(), active_bytes()
    with torch.cuda.graph(graph):
        results = data.results(function)
    after = active_bytes()
    own = tuple(graph.pool())
    assert after.pop(own, 0) > 0, "nothing was allocated in the graph's pool"
    assert after == before, f"captured memory outside pool {own}"
    del results, other


def active_bytes() -> dict[tuple[int, ...], int]:
    """Bytes in use by memory pool."""
    import torch

    found: dict[tuple[int, ...], int] = {}
    for segment in torch.cuda.memory_snapshot():
        pool = tuple(segment["segment_pool_id"])
        found[pool] = found.get(pool, 0) + sum(block["size"] for block in segment["blocks"] if block["state"] == "active_allocated")
    return {pool: size for pool, size in found.items() if size}


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Torch raises where it would wait for the device."""
    import torch

    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_no_wait(function: Operator, device: str, call: Call) -> None:
    """Forward and backward return while the device is still busy with earlier work, warm or not."""
    import torch

    wanted = Data(call, device).results(function)
    data = Data(call, device)
    torch.cuda.synchronize()
    with no_synchronisation():
        torch.cuda._sleep(BUSY_CLOCKS)
        marker = torch.cuda.Event()
        marker.record()
        found = data.results(function)
        waited = marker.query()
    assert not waited, "the call waited for the device"
    same_results(found, wanted, "beside earlier work")


def check_stream(function: Operator, device: str, call: Call) -> None:
    """Work goes to the current stream: behind a slow copy there it reads the copied values, and backward follows it."""
    import torch

    wanted = Data(call, device).results(function)
    source, target = Data(call, device), Data(call, device)
    with torch.no_grad():
        for tensor in (*target.inputs.values(), *target.cotangents.values()):
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY_CLOCKS)
        target.copy_from(source)
        outputs = target.outputs(function)
    found = target.gradients(outputs)
    stream.synchronize()
    torch.cuda.synchronize()
    same_results({name: output.detach() for name, output in outputs.items()} | found, wanted, "on a side stream")


def check_other_device(function: Operator, device: str, call: Call) -> None:
    """Tensors on a device that is not the current one, with the current one unchanged; two devices at once raise."""
    import torch

    current = torch.cuda.current_device()
    other = torch.device(device, (current + 1) % torch.cuda.device_count())
    wanted = Data(call, device).results(function)
    data = Data(call, str(other))
    found = data.results(function)
    assert all(result.device == other for result in found.values()) and torch.cuda.current_device() == current
    same_results(found, wanted, f"on {other}")
    name = call.wrt[0]
    data.inputs[name] = data.inputs[name].detach().to(f"{device}:{current}").requires_grad_()
    if len(data.inputs) > 1:
        with pytest.raises(ValueError, match="all tensors must be on one device"):
            data.outputs(function)


def check_repeated_backward(function: Operator, device: str, call: Call, turns: int) -> None:
    """Backwards beside a busy stream, with the bytes of the first."""
    import torch

    data = Data(call, device)
    outputs = data.outputs(function)
    wanted = [data.inputs[name] for name in call.wrt]
    given = [outputs[name] for name in data.cotangents]
    cotangents = list(data.cotangents.values())
    first = torch.autograd.grad(given, wanted, cotangents, retain_graph=True)
    busy, factor = torch.cuda.Stream(), torch.randn(2048, 2048, device=device)
    torch.cuda.synchronize()
    again = []
    for _ in range(turns):
        with torch.cuda.stream(busy):
            for _ in range(4):
                factor = torch.tanh(factor @ factor)
        again.append(torch.autograd.grad(given, wanted, cotangents, retain_graph=True))
    torch.cuda.synchronize()
    for turn, gradients in enumerate(again):
        for name, gradient, expected in zip(call.wrt, gradients, first, strict=True):
            same(gradient, expected, f"turn {turn}: d{name}")


@pytest.mark.parametrize("name", EVERY)
def test_a_graph_replays_on_new_data(backend: Runner, name: str) -> None:
    with_kernels(backend, EVERY[name], check_graph, EVERY[name], OTHER[name])
    forward = without_gradients(EVERY[name])
    with_kernels(backend, forward, check_graph, forward, without_gradients(OTHER[name]))


@pytest.mark.parametrize("name", ("attention", "packed", "softmax"))
def test_a_replay_does_not_use_freed_memory(backend: Runner, name: str) -> None:
    with_kernels(backend, REPEATED[name], check_replay_after_others, EVERY[name], REPEATED[name])


@pytest.mark.parametrize("name", EVERY)
def test_captured_temporaries_come_from_the_pool(backend: Runner, name: str) -> None:
    with_kernels(backend, EVERY[name], check_pool, EVERY[name])


@pytest.mark.parametrize("name", EVERY)
def test_no_call_waits_for_the_device(backend: Runner, name: str) -> None:
    for call in (EVERY[name], without_gradients(EVERY[name])):
        with_kernels(backend, call, check_no_wait, call)


@pytest.mark.parametrize("name", EVERY)
def test_work_goes_to_the_current_stream(backend: Runner, name: str) -> None:
    with_kernels(backend, EVERY[name], check_stream, EVERY[name])


@pytest.mark.parametrize("name", EVERY)
def test_another_device_than_the_current_one(backend: Runner, name: str) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    with_kernels(backend, EVERY[name], check_other_device, EVERY[name])


@pytest.mark.parametrize("name", REPEATED)
def test_repeated_backward_beside_other_work(backend: Runner, name: str) -> None:
    with_kernels(backend, REPEATED[name], check_repeated_backward, REPEATED[name], 50)


def test_the_check_of_waiting_catches(backend: Runner) -> None:
    """A function that reads a value from the device, and one that waits for it, are noticed."""
    import torch

    def reading(scores: Any, **keywords: Any) -> Any:
        return torch.softmax(scores, -1) * float(scores.abs().sum() >= 0)

    def waiting(scores: Any, **keywords: Any) -> Any:
        event = torch.cuda.Event()
        event.record()
        while not event.query():
            pass
        return torch.softmax(scores, -1)

    def check(function: Operator, device: str, call: Call) -> None:
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            check_no_wait(reading, device, call)
        with pytest.raises(AssertionError, match="waited for the device"):
            check_no_wait(waiting, device, call)

    with_kernels(backend, EVERY["softmax"], check, EVERY["softmax"])


def test_the_check_of_streams_catches(backend: Runner) -> None:
    """A function that works on a stream of its own is noticed."""
    import torch

    def elsewhere(scores: Any, **keywords: Any) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            return torch.softmax(scores, -1)

    def check_often(device: str, call: Call) -> None:
        for _ in range(5):  # a host that is later than the busy time does not see the fault
            check_stream(elsewhere, device, call)

    def check(function: Operator, device: str, call: Call) -> None:
        check_stream(lambda scores, **keywords: torch.softmax(scores, -1), device, call)
        with pytest.raises(AssertionError):
            check_often(device, without_gradients(call))

    with_kernels(backend, EVERY["softmax"], check, EVERY["softmax"])

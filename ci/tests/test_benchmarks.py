"""The benchmarks count work, time calls and compare bytes as they say. Where there is no GPU, the host kernels stand for one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import attn_spec
import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ROW = {"case", "contender", "direction", "median_ms", "min_ms", "rounds"}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a file of benchmarks/ afresh."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


class Event:
    """A CUDA event that notes what happens to it; each interval is one millisecond."""

    log: ClassVar[list[str]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.log.append("record")

    def synchronize(self) -> None:
        self.log.append("wait")

    def elapsed_time(self, end: Event) -> float:
        return 1.0


@pytest.fixture
def host(module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """The benchmarks with attn_reference in the place of the GPU backends, and a report."""
    measuring = module("measuring")

    def get_op(name: str, *, device: str, backend: str, contract: str | None = None) -> Any:
        if backend == "absent":
            raise attn_spec.UnsupportedProblem("absent", ["it is absent"])
        return attn_spec.get_op(name, device="cpu", backend=backend, contract=contract)

    monkeypatch.setattr(Event, "log", [])
    for name, value in {
        "Event": Event,
        "synchronize": lambda: None,
        "memory_allocated": lambda: 0,
        "max_memory_allocated": lambda: 1 << 30,
        "reset_peak_memory_stats": lambda: None,
        "mem_get_info": lambda device: (1 << 34, 1 << 34),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(measuring, "GPU_BACKENDS", ("attn_reference", "absent"))
    monkeypatch.setattr(measuring.usable, "__defaults__", (("attn_reference", "absent"),))
    for name in ("measuring", "softmax_gpu", "attention_gpu", "latency_gpu"):
        monkeypatch.setattr(module(name), "get_op", get_op)
    return SimpleNamespace(report=measuring.Report(tmp_path / "result.json", "a test"), flush=torch.zeros(4), measuring=measuring)


def rows(host: SimpleNamespace) -> list[dict[str, Any]]:
    """The rows of the saved file, each complete."""
    host.report.save()
    found: list[dict[str, Any]] = json.loads(host.report.path.read_text())["results"]
    assert found and all(row.keys() >= ROW for row in found)
    return found


def test_only_the_call_is_timed(host: SimpleNamespace) -> None:
    """The cache is flushed before the window, and the end is waited for."""
    flush = SimpleNamespace(zero_=lambda: Event.log.append("flush"))
    assert host.measuring.timed(lambda: Event.log.append("call"), flush) == 1.0
    assert Event.log == ["flush", "record", "call", "record", "wait"]


def test_rounds_are_interleaved_after_warm_ups(host: SimpleNamespace) -> None:
    order: list[str] = []
    times = host.measuring.interleaved({name: lambda name=name: order.append(name) for name in "ab"}, 2, host.flush, warm_ups=1)
    assert order == list("ababab")
    assert times == {"a": [1.0, 1.0], "b": [1.0, 1.0]}


def test_a_different_bit_is_noticed(host: SimpleNamespace) -> None:
    zero, other = torch.zeros(3), torch.tensor([0.0, -0.0, 0.0])
    host.measuring.demand_same_bytes({"one": [zero], "two": [zero.clone()]}, "zeros")
    for tensors in ([other], [zero.to(torch.bfloat16)], [zero, zero]):
        with pytest.raises(host.measuring.Different, match="two and one differ on zeros; nothing was timed"):
            host.measuring.demand_same_bytes({"one": [zero], "two": tensors}, "zeros")


def test_memory_counts_each_result_once(host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = iter((1000, 1000 + 2048 + 512))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1000 + 9216)
    found = host.measuring.memory(lambda: torch.zeros(500).split(250))
    assert (found.peak_bytes, found.result_bytes, found.kept_bytes) == (9216 - 2048, 2048, 512)


def test_a_case_beyond_the_time_is_recorded(host: SimpleNamespace) -> None:
    host.report.seconds = -1.0
    assert not host.report.has_time("late")
    host.report.save()
    assert json.loads(host.report.path.read_text())["not_run"] == ["late"]


def test_a_failure_is_kept_while_the_rest_runs(host: SimpleNamespace) -> None:
    host.report.finish()
    with host.report.guarded("one"):
        raise ValueError("broken")
    with pytest.raises(SystemExit, match="failed: one"):
        host.report.finish()
    assert json.loads(host.report.path.read_text())["failed"] == {"one": "ValueError: broken"}


def test_ratios_name_what_is_faster(host: SimpleNamespace) -> None:
    for contender, time in (("a", 2.0), ("b", 6.0)):
        host.report.results.append({"case": "c", "direction": "forward", "contender": contender, "median_ms": time})
    for _ in range(2):
        host.report.compare("a", "b")
        host.report.compare("a", "absent")
    assert host.report.ratios == [{"case": "c", "direction": "forward", "contender": "a", "beside": "b", "times_faster": 3.0}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_rows(host: SimpleNamespace, module: Callable[[str], ModuleType], dtype: torch.dtype) -> None:
    softmax = module("softmax_gpu")
    contenders = [*softmax.ours(host.report), *softmax.peers(host.report), softmax.Contender("wrong", lambda x: torch.softmax(x + x, -1))]
    softmax.run_case(40, 300, dtype, contenders, host.report, 2, host.flush)
    found = rows(host)
    names = {row["contender"] for row in found}
    assert {"attn_reference ordered-v1", "torch.softmax", "copy"} <= names and "wrong" not in names
    assert all(row["of_copy"] == 1.0 and row["rows"] == 40 for row in found)
    bytes_forward = 2 * 40 * 300 * dtype.itemsize
    assert {row["terabytes_per_second"] for row in found if row["direction"] == "forward"} == {bytes_forward / 1e9}
    assert "away from torch's" in host.report.refused[f"wrong 40x300 {str(dtype).removeprefix('torch.')}"]
    assert any(name.startswith("absent joint_attn_softmax") for name in host.report.refused)
    for peer in ("quack", "liger"):
        assert (peer in names) != (peer in host.report.refused)


def test_softmax_bytes_are_compared_first(host: SimpleNamespace, module: Callable[[str], ModuleType]) -> None:
    softmax = module("softmax_gpu")
    right = softmax.ours(host.report)[0]
    wrong = softmax.Contender("wrong", lambda x: right.softmax(x).flip(0).flip(0) + 0.0 * x.sum() + 2.0**-30, right.contract)
    for contenders in ([right, wrong], [wrong]):
        host.report.failed.clear()
        softmax.run_case(40, 300, torch.float32, contenders, host.report, 1, host.flush)
        assert "nothing was timed" in host.report.failed["wrong 40x300 float32"] and len(host.report.failed) == 1
    assert {row["contender"] for row in host.report.results} == {right.name, "copy"}


SMALL: dict[str, dict[str, Any]] = {
    "attention": {"causal": True, "window": (7, 0), "sinks": True, "queries": 70, "keys": 90},
    "attention_varlen": {"segments": (9, 70, 1), "queries": 80, "keys": 80, "causal": True},
    "joint_attention": {"text": 9, "kv_heads": 4, "queries": 80, "keys": 80},
}


@pytest.mark.parametrize("operator", SMALL)
def test_attention_rows(host: SimpleNamespace, module: Callable[[str], ModuleType], operator: str) -> None:
    attention = module("attention_gpu")
    shape = module("attention_shapes").Shape(**{"heads": 4, "kv_heads": 2, "head_dim": 8, **SMALL[operator]})
    assert shape.operator == operator
    attention.run_case("small", shape, ["attn_reference", "absent"], host.report, 50.0, 2, host.flush)
    found = {row["direction"]: row for row in rows(host)}
    for direction, products in (("forward", 2), ("backward", 5)):
        row = found[direction]
        assert row["useful_tflops"] == pytest.approx(2 * products * shape.pairs * 8 / 1e9)
        assert row["of_fp32_gemm"] == pytest.approx(row["useful_tflops"] / 50)
        assert row["peak_bytes"] > 0
    assert host.report.refused[f"absent {operator} ordered-v1"]


def test_attention_bytes_are_compared_with_the_host_kernels(host: SimpleNamespace, module: Callable[[str], ModuleType]) -> None:
    attention, shapes = module("attention_gpu"), module("attention_shapes")
    data = shapes.inputs(shapes.Shape(heads=4, kv_heads=2, queries=70, keys=90, head_dim=8), "cpu")
    before = shapes.Sample.part_of
    shapes.Sample.part_of = lambda self, whole: before(self, whole) + 2.0**-9
    with pytest.raises(host.measuring.Different, match="the host kernels differ on small out; nothing was timed"):
        attention.ours("small", data, ["attn_reference"], host.report)


def test_peers_and_the_materialised_baseline(
    host: SimpleNamespace, module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    attention, baseline, shapes = module("attention_gpu"), module("baseline"), module("attention_shapes")
    monkeypatch.setattr(baseline.forward, "__defaults__", (lambda a, b, scale=1.0: a @ b * scale,))
    monkeypatch.setattr(baseline.backward, "__defaults__", (lambda a, b, scale=1.0: a @ b * scale,))
    shape = shapes.Shape(heads=2, kv_heads=2, queries=70, keys=70, head_dim=8, dtype=torch.float32)
    attention.run_case("d128", shape, ["attn_reference"], host.report, 50.0, 1, host.flush)
    names = {(row["contender"], row["direction"]) for row in rows(host)}
    assert names >= {(name, way) for name in ("attn_reference", "materialised", "torch math") for way in ("forward", "backward")}
    assert any(name.startswith("torch cudnn") for name in host.report.refused)
    data = shapes.inputs(shape, "cpu")
    _, probs = baseline.forward(data.q, data.k, data.v)
    leaves = [tensor.requires_grad_() for tensor in (data.q, data.k, data.v)]
    wanted = torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(*leaves), leaves, data.dout)
    for found, gradient in zip(baseline.backward(data.dout, data.q, data.k, data.v, probs), wanted, strict=True):
        torch.testing.assert_close(found, gradient)


def test_product_rows(host: SimpleNamespace, module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    attention = module("attention_gpu")
    ready = attention.product_calls(attention.torch_qk, torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8))
    assert ready.calls["forward"]().shape == (1, 2, 5, 7)
    assert [tensor.shape for tensor in ready.calls["backward"]()] == [(1, 2, 5, 8), (1, 2, 7, 8)]


def test_decode_and_overhead_rows(host: SimpleNamespace, module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    latency, baseline = module("latency_gpu"), module("baseline")
    monkeypatch.setattr(latency, "kernel_microseconds", lambda call: {})
    shape = module("attention_shapes").Shape(heads=4, kv_heads=2, queries=1, keys=600, head_dim=8, causal=True)
    latency.run_decode("decode", shape, baseline.Latency(2.0, 4.0, 2000.0), host.report, 2, host.flush)
    found = {row["contender"]: row for row in rows(host)}
    assert found["attn_reference"]["bound_ms"] == pytest.approx(600 * 2e-6)
    assert found["attn_reference"]["of_bound"] == pytest.approx(1 / 0.0012)
    monkeypatch.setattr(latency, "BATCH", 2)
    monkeypatch.setattr(latency, "BATCHES", 3)
    latency.run_overhead(torch.device("cpu"), host.report)
    overheads = [row for row in rows(host) if row["direction"] == "eager"]
    assert {row["contender"] for row in overheads} == {"attn_reference", "torch"} and all(row["host_us"] > 0 for row in overheads)


def test_kernel_names_are_shortened(module: Callable[[str], ModuleType]) -> None:
    short = module("latency_gpu").short_name
    assert short("void attn_cuda::(anonymous namespace)::tile_kernel<1, true>(attn_cuda::SplitArguments)") == "tile_kernel<1, true>"
    assert short("attn_cuda::(anonymous namespace)::values_kernel(attn_cuda::SplitArguments)") == "values_kernel"
    assert short("Memset (Device)") == "Memset (Device)"


def test_the_baseline_compiles(module: Callable[[str], ModuleType], tmp_path: Path) -> None:
    try:
        library = module("baseline").compiled(tmp_path, "sm_90")
    except RuntimeError as error:
        assert str(error) == "nvcc is not on PATH"
        return
    assert library.stat().st_size > 0


@pytest.mark.parametrize(
    ("sizes", "pairs"),
    [
        ({"queries": 4, "keys": 10, "causal": True}, 4 * 6 + 10),
        ({"queries": 4, "keys": 10}, 40),
        ({"queries": 5, "keys": 2, "causal": True}, 3),
        ({"queries": 1, "keys": 7, "causal": True}, 7),
        ({"queries": 6, "keys": 6, "causal": True, "window": (1, 0)}, 1 + 5 * 2),
        ({"queries": 9, "keys": 9, "causal": True, "segments": (2, 4, 3)}, 3 + 10 + 6),
        ({"queries": 4, "keys": 4, "batch": 2}, 32),
    ],
)
def test_visible_pairs_are_counted_exactly(module: Callable[[str], ModuleType], sizes: dict[str, Any], pairs: int) -> None:
    assert module("attention_shapes").Shape(heads=3, kv_heads=3, **sizes).pairs == 3 * pairs


def test_tile_errors_are_measured_in_the_last_place(module: Callable[[str], ModuleType]) -> None:
    sweep = module("tile_sweep")
    assert sweep.spacing(torch.tensor([1.0, 0.75])).tolist() == [2.0**-23, 2.0**-24]

    def forward(scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
        row_max = scores.max(-1).values
        row_sum = (scores - row_max.unsqueeze(-1)).double().exp().sum(-1)
        probs = torch.softmax(scores.double(), -1).float()
        return torch.nextafter(probs, torch.ones(())), row_max, row_sum.float() * (1 + 2.0**-10)

    found = sweep.accuracy(SimpleNamespace(forward=forward), torch.randn(3, 50))
    assert 0.5 <= found["max_ulp"] <= 1.5 and found["sum_relative"] == pytest.approx(2.0**-10, rel=1e-2)


def test_the_budget_is_shared_and_never_exceeded(module: Callable[[str], ModuleType], tmp_path: Path) -> None:
    gpu = module("gpu")
    now, granted = [0.0], []

    def run(command: list[str], limit: float) -> int | None:
        seconds = float(command[command.index("--seconds") + 1])
        granted.append(seconds)
        now[0] += seconds if len(granted) > 1 else limit
        return 0 if len(granted) > 1 else None

    names = list(gpu.BENCHMARKS)
    assert not gpu.run_all(names, tmp_path, "x", 300.0, run, lambda: now[0])
    assert now[0] <= 300.0 and len(granted) == len(names)
    assert not gpu.run_all(names, tmp_path, "x", 20.0, run, lambda: now[0])
    assert all((gpu.ROOT / one.script).is_file() for one in gpu.BENCHMARKS.values())
    assert gpu.run([sys.executable, "-c", "raise SystemExit(3)"], 60.0) == 3
    assert gpu.run([sys.executable, "-c", "import time; time.sleep(60)"], 0.2) is None


def test_only_the_largest_layers_may_run_once(module: Callable[[str], ModuleType]) -> None:
    job = module("cross_backend")
    chosen = {(name, dtype): job.engines(case, dtype, True) for name, case in job.ALL_CASES.items() for dtype in case.dtypes}
    assert {key for key, engines in chosen.items() if engines == 1} == {("qwen-image-7401", "bfloat16"), ("qwen3-8b-load", "bfloat16")}
    assert {key for key, engines in chosen.items() if engines == 0} == {("qwen-image-7401", "float16")}
    assert {job.engines(case, dtype, False) for case in job.ALL_CASES.values() for dtype in case.dtypes} == {sys.maxsize}


PROFILER = """#!/bin/sh
cat <<'END'
==PROF== Connected
--profiled one, two
--profiled three
{lines}
END
exit $FAKE_STATUS
"""


def test_nsight_compute_is_read_by_call_and_kernel(
    module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ncu = module("ncu")
    stall = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
    units = {"nanoseconds": "us", "bytes_read": "Mbyte"}

    def line(kernel: str, time: float, issue: float = 50.0) -> list[str]:
        values = dict.fromkeys(ncu.METRICS, "1") | {"nanoseconds": f"{time:,}", "issue": str(issue), "bytes_read": "1,234.5"}
        return [kernel, "(2, 1, 1)", "(32, 1, 1)", *values.values(), "0.75", "0.01"]

    lines = [
        ["Kernel Name", "Grid Size", "Block Size", *ncu.METRICS.values(), stall.format("wait"), stall.format("barrier")],
        ["", "", "", *(units.get(name, "%") for name in ncu.METRICS), "inst", "inst"],
        line("void at::cuda::<unnamed>::spin_kernel(long)", 1),
        line("void attn_cuda::<unnamed>::sums_kernel<(int)2, attn::bfloat16>(attn_cuda::Arguments)", 1000, 80.0),
        line("void attn_cuda::<unnamed>::sums_kernel<(int)2, attn::bfloat16>(attn_cuda::Arguments)", 3000, 40.0),
        line("void at::native::fill(float *)", 2),
        line("void at::cuda::<unnamed>::spin_kernel(long)", 1),
        line("row_sums", 2),
    ]
    tool = tmp_path / "ncu"
    tool.write_text(PROFILER.format(lines="\n".join(",".join(f'"{cell}"' for cell in cells) for cells in lines)))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("FAKE_STATUS", "0")
    first, second = ncu.profile("program.py")
    assert (first["case"], first["kernel"], first["launches"]) == ("one, two", "sums_kernel<2, bfloat16>", 2)
    assert first["nanoseconds"] == 4e6 and first["issue"] == 50.0, "times add up, and shares are means weighted by time"
    assert first["bytes_read"] == pytest.approx(2 * 1234.5e6) and first["stalls"] == {"wait": 0.75}
    assert (second["case"], second["kernel"], second["launches"]) == ("three", "row_sums", 1)
    monkeypatch.setenv("FAKE_STATUS", "7")
    with pytest.raises(RuntimeError, match="ended with 7"):
        ncu.profile("program.py")

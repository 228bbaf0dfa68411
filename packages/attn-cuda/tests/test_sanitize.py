"""The sanitizer's runner counts what the tools print; its work covers what it says. Here attn_reference stands for the kernels."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import attn_reference
import pytest
from attn_reference.backend import BACKEND as REFERENCE
from attn_spec.torch._operation import watched
from torch.profiler import ProfilerActivity, profile

HERE = Path(__file__).parent


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"attn_cuda_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


sanitize, work = load("sanitize"), load("every_kernel")


@pytest.mark.parametrize(
    ("output", "errors"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0),
        ("========= ERROR SUMMARY: 1 error", 1),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)", 3),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings) ", 0),
        ("Target application returned an error", None),
    ],
)
def test_the_summary_of_a_tool_is_counted(output: str, errors: int | None) -> None:
    assert sanitize.summarised(f"something\n{output}\n") == errors


LISTING = """
 Function _ZN9attn_cuda50_GLOBAL__N__4ea7dbf7_17_attention_sums_cu_b26b4bcd15key_sums_kernelILi128ELi4EEEvNS0_12SumArgumentsE:
  REG:90
 Function _ZN9attn_cuda50_GLOBAL__N__4ea7dbf7_17_attention_sums_cu_b26b4bcd15key_sums_kernelILi64ELi8EEEvNS0_12SumArgumentsE:
 Function plain:
"""


def test_kernels_of_the_module_are_named_as_the_profiler_names_them() -> None:
    kernels = sanitize.module_kernels(LISTING)
    assert kernels == [
        "plain",
        "void attn_cuda::(anonymous namespace)::key_sums_kernel<128, 4>(attn_cuda::(anonymous namespace)::SumArguments)",
        "void attn_cuda::(anonymous namespace)::key_sums_kernel<64, 8>(attn_cuda::(anonymous namespace)::SumArguments)",
    ]
    missing, other_devices = sanitize.left_out(kernels, ["plain"])
    assert missing == [kernels[2]] and other_devices == [kernels[1]]
    assert sanitize.left_out(kernels, kernels) == ([], [])


def outcome(tool: str, errors: int | None, in_rings: int = 0) -> Any:
    return sanitize.Outcome(tool, "1/1", errors, 2.0, "", in_rings)


@pytest.mark.parametrize(
    ("outcomes", "kernels", "good"),
    [
        ([("memcheck", 0), ("racecheck", 0)], ["a"], True),
        ([("memcheck", 1), ("racecheck", 0)], ["a"], False),
        ([("memcheck", None), ("racecheck", 0)], ["a"], False),
        ([("memcheck", 0)], ["a"], False),
        ([("memcheck", 0), ("racecheck", 0)], ["a", "b"], False),
    ],
)
def test_it_succeeds_only_when_every_tool_ended_clean_on_every_kernel(
    outcomes: list[tuple[str, int | None]], kernels: list[str], good: bool
) -> None:
    found = [outcome("none", 0), *(outcome(*one) for one in outcomes)]
    document = sanitize.report(found, kernels, {"a"}, ("memcheck", "racecheck"), {})
    assert sanitize.succeeded(document) is good
    assert document["tools"]["racecheck"]["parts"] == sum(tool == "racecheck" for tool, _ in outcomes)


@pytest.mark.parametrize(
    ("counts", "errors", "false_reports"),
    [((8, 8, 8), 1, 2), ((8, 0, 8), 1, 2), ((0, 0, 8), 3, 0), ((8, 8, 0), 3, 0), ((None, 8, 8), 3, 0)],
)
def test_reports_of_rings_are_false_only_where_the_tool_reports_the_control(
    counts: tuple[int | None, ...], errors: int, false_reports: int
) -> None:
    found = [outcome("none", 0), outcome("racecheck", 3, 2)]
    controls = dict(zip(sanitize.CONTROLS, counts, strict=True))
    document = sanitize.report(found, ["a"], {"a"}, ("racecheck",), controls)
    assert not sanitize.succeeded(document)
    assert document["tools"]["racecheck"]["errors"] == errors and document["tools"]["racecheck"]["false_reports"] == false_reports
    document = sanitize.report([outcome("none", 0), outcome("racecheck", 2, 2)], ["a"], {"a"}, ("racecheck",), controls)
    assert sanitize.succeeded(document) is (false_reports > 0)


def test_parts_that_ended_clean_are_taken_from_an_earlier_run_of_the_same_build() -> None:
    found = [outcome("none", 0), outcome("racecheck", 0), outcome("racecheck", None), outcome("memcheck", 1)]
    document = {"environment": {"fingerprint": "a"}, **sanitize.report(found, ["k"], {"k"}, ("racecheck",), {})}
    assert sanitize.earlier(document, "a") == [outcome("racecheck", 0)]
    with pytest.raises(ValueError, match="build a, and this is b"):
        sanitize.earlier(document, "b")


TOOL = """#!{python}
import sys
assert sys.argv[1:3] == ["--tool", "racecheck"] and sys.argv[-2:] == ["--part", "1/2"] and "kns=attn_cuda" in sys.argv
{body}
"""


@pytest.mark.parametrize(
    ("body", "errors"),
    [
        ("print('9 problems ran'); print('========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)')", 0),
        ("print('========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)'); sys.exit(1)", None),
        (
            "print('9 problems ran'); print('========= Error: Race reported between Write access at void attn_cuda::hopper::<unnamed>::"
            "key_gradients_kernel<attn::bfloat16, (int)64>(Call)+0x82'); print('========= Error: Race reported between Write access at "
            "void attn_cuda::other_kernel(Call)+0x82'); print('========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)'); "
            "sys.exit(9)",
            2,
        ),
        ("import time; time.sleep(60)", None),
    ],
)
def test_a_tool_that_fails_or_does_not_end_has_no_result(tmp_path: Path, body: str, errors: int | None) -> None:
    tool = tmp_path / "tool"
    tool.write_text(TOOL.format(python=sys.executable, body=body))
    tool.chmod(0o755)
    found = sanitize.checked(str(tool), "racecheck", "1/2", 50000, "0", time.monotonic() + (0.5 if "sleep" in body else 30))
    assert found.errors == errors and bool(found.text) == (errors != 0) and found.in_rings == (1 if errors == 2 else 0)


def test_the_first_report_of_a_tool_is_kept() -> None:
    output = (
        "========= COMPUTE-SANITIZER\nfirst\n========= Barrier error detected\n" + "frame\n" * 100 + "========= ERROR SUMMARY: 1 error\n"
    )
    assert sanitize.reports(output).splitlines() == ["========= Barrier error detected", *["frame"] * 11]
    assert sanitize.reports("========= COMPUTE-SANITIZER\nstopped\n").endswith("stopped")


def test_kernels_are_recorded_of_the_ways_without_a_profiler() -> None:
    with profile(activities=[ProfilerActivity.CPU]):
        assert watched()
        with work.as_without_a_profiler():
            assert not watched()
        assert watched()


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = SimpleNamespace(
        operators=REFERENCE.operators, capabilities=REFERENCE.capabilities, reasons=REFERENCE.reasons, unavailable=lambda device: None
    )
    monkeypatch.setattr(work, "DEVICE", "cpu")
    monkeypatch.setattr(work, "attn_cuda", attn_reference)
    monkeypatch.setattr(work, "BACKEND", backend)
    monkeypatch.setattr(work.torch.cuda, "synchronize", lambda: None)


@pytest.mark.usefixtures("on_the_host")
def test_every_problem_is_one_that_a_backend_runs() -> None:
    work.run_all(work.problems())


@pytest.mark.usefixtures("on_the_host")
def test_the_parts_together_are_all_problems(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    listed: list[str] = []
    for part in range(1, 4):
        monkeypatch.setattr(sys, "argv", ["every_kernel.py", "--part", f"{part}/3", "--list"])
        work.main()
        listed += capsys.readouterr().out.splitlines()
    names = [problem.name for problem in work.problems()]
    assert sorted(listed) == sorted(names) and len(set(names)) == len(names) > 40
    monkeypatch.setattr(sys, "argv", ["every_kernel.py", "--part", "4/3"])
    with pytest.raises(SystemExit):
        work.main()


def test_racecheck_has_more_parts_than_the_quick_tools() -> None:
    assert sanitize.parts_of("racecheck", 8) == [f"{part}/8" for part in range(1, 9)]
    assert sanitize.parts_of("memcheck", 8) == ["1/2", "2/2"]
    assert sanitize.parts_of("none", 2) == ["1/1"]

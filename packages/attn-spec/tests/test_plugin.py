"""The pytest plugin: which engines a run tests, what it says about them, and the rule on refusals."""

from __future__ import annotations

import pytest

BACKENDS = """
    import pytest
    from attn_spec import _registry as registry
    from importlib.metadata import EntryPoint
    import sys, types
    from doubles import Double, Silent

    made = {"good": Double("good"), "gone": Double("gone", reason="no device here"), "silent": Silent("silent")}
    points = []
    for name, backend in made.items():
        module = types.ModuleType("made_" + name)
        module.BACKEND = backend
        sys.modules[module.__name__] = module
        points.append(EntryPoint(name, module.__name__ + ":BACKEND", registry.GROUP))
    registry.entry_points = lambda group: points
    registry.load.cache_clear()
"""
DOUBLES = """
    class Silent(Double):
        def evaluate(self, call, *, device="cpu", engine=None):
            return {"probs": call.arrays["scores"]}
"""
TESTS = """
    import numpy as np
    from attn_spec import Call

    def call(dtype):
        return Call("joint_attn_softmax", {"scores": np.ones((2, 3), dtype)})

    def check(evaluate, dtype):
        assert (evaluate(call(dtype))["probs"] == 2).all()

    def test_supported(backend):
        backend.run(check, np.float32)

    def test_refused(backend):
        backend.run(check, np.float16)
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, request: pytest.FixtureRequest) -> pytest.Pytester:
    source = (request.path.parent / "doubles.py").read_text()
    pytester.makepyfile(doubles=source + "\n\n" + "\n".join(line[4:] for line in DOUBLES.splitlines()))
    pytester.makeconftest(BACKENDS)
    pytester.makepyfile(test_one=TESTS)
    return pytester


def run(suite: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return suite.runpytest_subprocess("-p", "no:cacheprovider", *arguments)


def test_every_usable_engine_is_tested_and_the_rest_is_named(suite: pytest.Pytester) -> None:
    result = run(suite, "-v", "-k", "not silent")
    result.assert_outcomes(passed=4, deselected=4)
    result.stdout.fnmatch_lines(
        ["*attn backends installed: gone, good, silent; testing: every usable engine*", "*test_supported[[]good:plain[[]cpu[]][]] PASSED*"]
    )
    result.stdout.fnmatch_lines(["*good:plain[[]cpu[]] *1 *1 *1*", "*gone:plain[[]cpu[]] *absent: no device here*"])
    result.stdout.fnmatch_lines(["*good:plain[[]cpu[]] refused 1 problems: dtype float16 (supported: float32)*"])


def test_a_backend_that_ignores_its_capabilities_fails(suite: pytest.Pytester) -> None:
    result = run(suite, "--attn-backend", "silent:plain")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        ["*ContractViolation: silent:plain[[]cpu[]] ran joint_attn_softmax *float16*which its capabilities refuse*"]
    )


def test_a_name_and_an_engine_choose(suite: pytest.Pytester) -> None:
    result = run(suite, "-v", "--attn-backend", "good:other")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*testing: good:other*"])


def test_an_absent_device_is_the_only_skip(suite: pytest.Pytester) -> None:
    result = run(suite, "-rs", "--attn-backend", "gone:plain")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["*gone:plain[[]cpu[]]: no device here*"])


def test_a_device_can_be_chosen(suite: pytest.Pytester) -> None:
    result = run(suite, "--attn-backend", "good:plain", "--attn-device", "cuda")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*refused * problems: device cuda (supported: cpu)*"])


@pytest.mark.parametrize(
    ("name", "message"),
    (
        ("bad", "*--attn-backend bad: not installed; installed backends: gone, good, silent*"),
        ("good:bad", "*unknown engine of good 'bad'; known: plain, other*"),
    ),
)
def test_an_unknown_name_is_a_usage_error(suite: pytest.Pytester, name: str, message: str) -> None:
    result = run(suite, "--attn-backend", name)
    assert result.ret in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERRUPTED)
    (result.stderr if result.ret == pytest.ExitCode.USAGE_ERROR else result.stdout).fnmatch_lines([message])


def test_a_test_of_one_framework_leaves_the_others_out(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_one="import pytest\n\n@pytest.mark.attn_framework('torch')\ndef test_torch(backend):\n    raise AssertionError\n")
    run(suite, "--attn-backend", "good").assert_outcomes(deselected=2)


def test_a_test_of_one_device_leaves_the_others_out(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_one="import pytest\n\n@pytest.mark.attn_device('cuda')\ndef test_gpu(backend):\n    raise AssertionError\n")
    run(suite, "--attn-backend", "good").assert_outcomes(deselected=2)
    run(suite, "--attn-backend", "good:plain", "--attn-device", "cuda").assert_outcomes(failed=1)


def test_a_fixture_of_the_same_name_elsewhere_is_left_alone(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_one="import pytest\n\n@pytest.fixture\ndef backend():\n    return 3\n\ndef test_mine(backend):\n    assert backend == 3\n"
    )
    run(suite).assert_outcomes(passed=1)


def test_a_slow_engine_runs_a_sample(suite: pytest.Pytester) -> None:
    """The first case of each test, then every Nth; an engine that runs whole layers is not slow and runs all."""
    suite.makepyfile(
        test_one="import pytest\n\n@pytest.mark.parametrize('case', range(5))\ndef test_many(backend, case):\n    pass\n\n"
        "def test_single(backend):\n    pass\n"
    )
    run(suite, "--attn-backend", "good:plain", "--attn-sample", "2").assert_outcomes(passed=6)
    slow = (suite.path / "doubles.py").read_text() + "\n\nDouble.runs_layers = lambda self, device, engine=None: False\n"
    suite.makepyfile(doubles=slow)
    run(suite, "--attn-backend", "good:plain", "--attn-sample", "2").assert_outcomes(passed=4, deselected=2)
    run(suite, "--attn-backend", "good:plain").assert_outcomes(passed=6)

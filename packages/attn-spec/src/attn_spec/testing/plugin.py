"""pytest plugin: the ``backend`` fixture runs a test on every installed engine, and the run ends with what each one ran and refused.

Backends are imported only when a collected test asks for ``backend``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from attn_spec._errors import UnknownName
from attn_spec._registry import get_backend, installed, load, parse

if TYPE_CHECKING:
    from attn_spec._backend import Backend
    from attn_spec.testing.runner import Runner

_TARGETS = pytest.StashKey["Targets"]()


@dataclass
class Targets:
    """Engines to test, and those that cannot run here with the reason; ``asked``: those of them that were asked for by name."""

    runners: dict[str, Runner] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)

    def add(self, backend: Backend, engine: str, device: str) -> bool:
        from attn_spec.testing.runner import Runner

        runner = Runner(backend, engine, device)
        reason = backend.unavailable(device, engine)
        if reason is None:
            self.runners[runner.name] = runner
        else:
            self.absent[runner.name] = reason
        return reason is None


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attn", "attention backends")
    group.addoption(
        "--attn-backend",
        action="append",
        default=[],
        metavar="NAME[:ENGINE]",
        help="backend (or one engine of it) to test; repeatable; default: every installed engine that runs on this machine",
    )
    group.addoption(
        "--attn-device",
        action="append",
        default=[],
        metavar="DEVICE",
        help="device to test on (cpu, cuda, rocm); repeatable; default: every device that an engine supports",
    )
    group.addoption(
        "--attn-sample",
        type=int,
        default=1,
        metavar="N",
        help="on engines that are too slow for whole layers (interpreters, the definition) run of every test the first of its cases and "
        "then every Nth; default: 1, all",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "attn_framework(name): run on the engines of one framework (torch, jax) alone")
    config.addinivalue_line("markers", "attn_device(name, ...): run on engines on these devices (cpu, cuda, rocm) alone")
    if config.getoption("--attn-sample") < 1:
        raise pytest.UsageError(f"--attn-sample {config.getoption('--attn-sample')}: must be at least 1")
    for name in config.getoption("--attn-backend"):
        if parse(name)[0] not in installed():
            raise pytest.UsageError(f"--attn-backend {name}: not installed; installed backends: {', '.join(installed()) or 'none'}")


def pytest_report_header(config: pytest.Config) -> list[str]:
    asked = [*config.getoption("--attn-backend"), *(f"on {device}" for device in config.getoption("--attn-device"))]
    if not asked and not installed():
        return []
    return [f"attn backends installed: {', '.join(installed()) or 'none'}; testing: {', '.join(asked) or 'every usable engine'}"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not _ours(metafunc):
        return
    targets = _targets(metafunc.config)
    parameters: list[object] = [pytest.param(name, id=name) for name in targets.runners]
    for name in sorted(targets.asked):
        parameters.append(pytest.param(name, id=name, marks=pytest.mark.skip(reason=f"{name}: {targets.absent[name]}")))
    metafunc.parametrize("backend", parameters, indirect=True, scope="session")


def _ours(metafunc: pytest.Metafunc) -> bool:
    """Whether ``backend`` in this test is the fixture below, and not one that a suite of other things defines for itself."""
    found = metafunc._arg2fixturedefs.get("backend")
    return found is not None and found[-1].func.__module__ == __name__


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test of one framework or device is not one for the engines of another; slow engines run a sample, if one is asked for."""
    left_out = {item for item in items if _foreign(item)}
    left_out |= _beyond_the_sample([item for item in items if item not in left_out], config)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _beyond_the_sample(items: list[pytest.Item], config: pytest.Config) -> set[pytest.Item]:
    every = config.getoption("--attn-sample")
    if every == 1:
        return set()
    seen: Counter[tuple[str, str]] = Counter()
    beyond = set()
    for item in items:
        call = getattr(item, "callspec", None)
        runner = None if call is None or "backend" not in call.params else _targets(config).runners.get(str(call.params["backend"]))
        if runner is None or runner.backend.runs_layers(runner.device, runner.engine):
            continue
        test = (runner.name, item.nodeid.partition("[")[0])
        if seen[test] % every:
            beyond.add(item)
        seen[test] += 1
    return beyond


def _foreign(item: pytest.Item) -> bool:
    call = getattr(item, "callspec", None)
    if call is None or "backend" not in call.params:
        return False
    name, _, device = str(call.params["backend"]).rstrip("]").partition("[")
    framework, devices = item.get_closest_marker("attn_framework"), item.get_closest_marker("attn_device")
    elsewhere = devices is not None and device not in devices.args
    return elsewhere or (framework is not None and str(get_backend(name).framework) not in framework.args)


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Runner:
    """The engine under test (``attn_spec.testing.runner.Runner``)."""
    return _targets(request.config).runners[request.param]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    targets = config.stash.get(_TARGETS, None)
    if targets is None:
        return
    terminalreporter.section("attn backends")
    rows = [("backend", "ran", "refused", "checks ended by a refusal")]
    for name, runner in targets.runners.items():
        rows.append((name, str(runner.tally.ran), str(runner.tally.refused), str(runner.tally.ended)))
    width = max(len(row[0]) for row in [*rows, *((name,) for name in targets.absent)])
    for row in rows:
        terminalreporter.line(f"{row[0]:{width}}  {row[1]:>6}  {row[2]:>7}  {row[3]}")
    for name, reason in targets.absent.items():
        terminalreporter.line(f"{name:{width}}  absent: {reason}")
    for name, runner in targets.runners.items():
        for reason, count in runner.tally.reasons.most_common():
            terminalreporter.line(f"{name} refused {count} problems: {reason}")


def _targets(config: pytest.Config) -> Targets:
    targets = config.stash.get(_TARGETS, None)
    if targets is None:
        asked = config.getoption("--attn-backend")
        devices = config.getoption("--attn-device")
        targets = _named(asked, devices) if asked else _every(devices)
        config.stash[_TARGETS] = targets
    return targets


def _named(names: list[str], devices: list[str]) -> Targets:
    """Engines asked for by name, on the devices asked for or on every device that is there; where none is, the tests are skipped with the
    reason."""
    targets = Targets()
    for name in names:
        if load(parse(name)[0]).backend is None:
            raise pytest.UsageError(f"--attn-backend {name}: {load(parse(name)[0]).error}")
        found = get_backend(name)
        try:
            engines = (found.engine(parse(name)[1]),) if parse(name)[1] else found.engines
        except UnknownName as error:
            raise pytest.UsageError(f"--attn-backend {name}: {error}") from error
        for engine in engines:
            places = devices or found.capabilities(engine).devices
            usable = [targets.add(found, engine, device) for device in places]
            if devices or not any(usable):
                targets.asked |= {f"{found.name}:{engine}[{device}]" for device, use in zip(places, usable, strict=True) if not use}
    return targets


def _every(devices: list[str]) -> Targets:
    """Every installed engine on every device that it supports."""
    targets = Targets()
    for name in installed():
        loaded = load(name)
        if loaded.backend is None:
            targets.absent[name] = str(loaded.error)
            continue
        for engine in loaded.backend.engines:
            for device in loaded.backend.capabilities(engine).devices:
                if not devices or device in devices:
                    targets.add(loaded.backend, engine, device)
    return targets

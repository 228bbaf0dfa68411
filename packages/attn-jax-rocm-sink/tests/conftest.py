"""Where tests run, and fixtures of the engines that run over fakes here."""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from engine_fakes import Fakes, build, installed


@pytest.fixture(autouse=True)
def on_the_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests run on JAX's CPU where it has a GPU too, but for those that name one."""
    if "gpu" in request.path.stem:
        yield
        return
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


@pytest.fixture(scope="session")
def fake_libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The fakes' library, with a new and an old AITER. The first of the processes that test side by side compiles it, in about 10 s."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "engine_fakes"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build(folder)


@pytest.fixture(scope="session")
def fakes(fake_libraries: tuple[Path, Path]) -> Fakes:
    """The library of the fakes."""
    return Fakes(fake_libraries[0])


@pytest.fixture(scope="session")
def old_fakes(fake_libraries: tuple[Path, Path]) -> Fakes:
    """The same over an AITER without sinks."""
    return Fakes(fake_libraries[1])


@pytest.fixture
def fake_cuda(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    """``engine="cuda"`` runs on the CPU over a recording table of attn-cuda."""
    yield from _over_attn_cuda(fakes, "cuda", monkeypatch)


@pytest.fixture
def fake_sm90(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    """The same for contract sm90-v1 over its own table."""
    from attn_jax_rocm_sink import _cuda
    from attn_spec._sm90 import ex2_table

    fakes.handle.fake_sm90_set(ctypes.c_void_p(ex2_table().ctypes.data))
    assert _cuda.bind_sm90(fakes.handle, fakes.sm90_table()) == ""
    yield from _over_attn_cuda(fakes, "cuda_sm90", monkeypatch)


def _over_attn_cuda(fakes: Fakes, engine: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    from attn_jax_rocm_sink import _cuda

    fakes.handle.fake_cuda_set(0, 0, 0)
    assert _cuda.bind(fakes.handle, fakes.handle.attn_cuda_interface_v1()).reason is None
    for _ in installed(fakes, engine, monkeypatch):
        fakes.take_log()
        yield fakes
    fakes.handle.fake_cuda_set(0, 0, 0)


@pytest.fixture
def fake_ck(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    """``engine="ck"`` runs on the CPU over a recording AITER that takes sinks."""
    yield from _over_aiter(fakes, monkeypatch)


@pytest.fixture
def fake_old_ck(old_fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    """The same over an AITER that knows no sinks."""
    yield from _over_aiter(old_fakes, monkeypatch)


def _over_aiter(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    fakes.set_aiter()
    for _ in installed(fakes, "ck", monkeypatch):
        fakes.take_log()
        yield fakes
    fakes.set_aiter()

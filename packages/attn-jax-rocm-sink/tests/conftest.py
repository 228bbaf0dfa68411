"""Fixtures of the engines that run over fakes here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_fakes import Fakes, build, installed


@pytest.fixture(scope="session")
def fake_libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The fakes' library, with a new and an old AITER. Compiling them takes about 20 s."""
    return build(tmp_path_factory.mktemp("engine_fakes"))


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
    from attn_jax_rocm_sink import _cuda

    fakes.handle.fake_cuda_set(0, 0, 0)
    assert _cuda.bind(fakes.handle, fakes.handle.attn_cuda_interface_v1()).reason is None
    for _ in installed(fakes, "cuda", monkeypatch):
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

"""Fixtures of the engines that run over fakes here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_fakes import Fakes, build, installed


@pytest.fixture(scope="session")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Fakes:
    """The fakes' library. Compiling it takes about 10 s."""
    return Fakes(build(tmp_path_factory.mktemp("engine_fakes")))


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

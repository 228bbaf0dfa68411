"""The guard before the download of torch: no NVIDIA package on a machine without a GPU, and one message that says what to do."""

from __future__ import annotations

import cpu_torch
import pytest

CPU = "Would install 2 packages\n + sympy==1.14.0\n + torch==2.13.0+cpu\n"
CUDA = "Would install 3 packages\n + nvidia-cublas==13.1.0.3\n + cuda-toolkit==13.0.3\n + torch==2.13.0\n"
UNREACHABLE = "error: Failed to fetch\n  cause: failed to lookup address information\n"


def answers(plain, backend):
    return lambda extra: backend if "--torch-backend" in extra else plain


def test_a_local_cpu_wheel_is_taken_as_it_is() -> None:
    assert cpu_torch.cpu_source(answers((True, CPU), (False, UNREACHABLE))) == ()


def test_uvs_option_is_used_where_the_plain_index_offers_cuda() -> None:
    assert cpu_torch.cpu_source(answers((True, CUDA), (True, CPU))) == ("--torch-backend", "cpu")


def test_an_installed_torch_is_kept() -> None:
    assert cpu_torch.cpu_source(answers((True, "Would make no changes\n"), (False, UNREACHABLE))) == ()


def test_only_cuda_stops_with_what_was_tried_and_the_remedy() -> None:
    with pytest.raises(cpu_torch.CudaTorchOnly) as stop:
        cpu_torch.cpu_source(answers((True, CUDA), (False, UNREACHABLE)))
    text = str(stop.value)
    assert "nothing was downloaded" in text
    assert "2 NVIDIA packages (cuda-toolkit, nvidia-cublas, ...)" in text
    assert "failed to lookup address information" in text
    assert "UV_FIND_LINKS" in text


def test_nvidia_packages_reads_only_what_would_be_installed() -> None:
    assert cpu_torch.nvidia_packages(CUDA) == ["cuda-toolkit", "nvidia-cublas"]
    assert cpu_torch.nvidia_packages(" - nvidia-cublas==13.1.0.3\n + torch==2.13.0+cpu\n") == []

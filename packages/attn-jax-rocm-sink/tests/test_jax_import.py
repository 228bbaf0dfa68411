"""Importing loads no torch; a missing or unfit library, and an old JAX, are told in plain words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import attn_jax_rocm_sink
import attn_spec
import pytest
from attn_jax_rocm_sink import __main__ as command
from attn_jax_rocm_sink import _ffi, _versions


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)


NO_TORCH = """
import sys
{extra}
import attn_jax_rocm_sink, attn_jax_rocm_sink.backend, attn_jax_rocm_sink.__main__
import jax.numpy as jnp
x = jnp.ones((1, 1, 2, 4))
attn_jax_rocm_sink.attention(x, x, x).block_until_ready()
found = [name for name in ("torch", "triton") if name in sys.modules]
assert not found, found
"""


def test_torch_is_never_imported() -> None:
    done = run(NO_TORCH.format(extra=""))
    assert done.returncode == 0, done.stderr


def test_the_import_check_can_fail() -> None:
    done = run(NO_TORCH.format(extra="import types; sys.modules['torch'] = types.ModuleType('torch')"))
    assert done.returncode == 1 and "AssertionError: ['torch']" in done.stderr


def test_an_old_jax_gets_a_version_message() -> None:
    done = run(
        "import sys, types\nold = types.ModuleType('jax')\nold.__version__ = '0.4.30'\nsys.modules['jax'] = old\nimport attn_jax_rocm_sink"
    )
    assert done.returncode == 1
    assert "ImportError: attn_jax_rocm_sink needs jax >= 0.10; found jax 0.4.30" in done.stderr
    assert "AttributeError" not in done.stderr


@pytest.mark.parametrize(
    ("version", "accepted"), [("0.9.2", False), ("0.10.0", True), ("0.10.2.dev1", True), ("0.11.2", True), ("1.0", True)]
)
def test_jax_versions(version: str, accepted: bool) -> None:
    if accepted:
        _versions.check_jax(version)
    else:
        with pytest.raises(ImportError, match=r"needs jax >= 0\.10"):
            _versions.check_jax(version)


def test_handlers_of_a_newer_jaxlib_are_not_registered() -> None:
    assert _ffi.too_old("0.10.2", "0.10.2") is None
    assert _ffi.too_old("0.10.2", "0.12.0") is None
    assert "built against jaxlib 0.11.2" in str(_ffi.too_old("0.11.2", "0.10.2"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder without a library; what was loaded before is forgotten for the test."""
    monkeypatch.setattr(attn_jax_rocm_sink, "__path__", [str(tmp_path)])
    _ffi.load.cache_clear()
    yield tmp_path
    _ffi.load.cache_clear()


def test_a_missing_library_is_a_reason(folder: Path) -> None:
    assert _ffi.load().reason == "libattn_jax_rocm_sink.so is not installed beside the package"
    assert "engine host (cpu): not usable: libattn_jax_rocm_sink.so is not installed" in command.info()


def test_a_build_without_a_compiler_says_so(folder: Path) -> None:
    (folder / "missing.txt").write_text("no C++ compiler was found when the package was built\n")
    assert _ffi.load().reason == "no C++ compiler was found when the package was built"


def test_a_broken_library_is_a_reason(folder: Path) -> None:
    (folder / "libattn_jax_rocm_sink.so").write_bytes(b"not a library")
    assert "libattn_jax_rocm_sink.so does not load" in str(_ffi.load().reason)


def test_info_names_the_build() -> None:
    done = subprocess.run([sys.executable, "-m", "attn_jax_rocm_sink", "info"], capture_output=True, text=True, check=True, timeout=120)
    assert f"engine host (cpu): usable, build {_ffi.load().fingerprint}" in done.stdout
    assert len(_ffi.load().fingerprint) == 64
    assert _versions.release(_ffi.load().ffi_version) <= (0, 3)


def test_the_readme_example_runs() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    example = text.split("```python\n")[1].split("```")[0]
    done = run(example + "\nassert dsinks.shape == (8,) and dq.dtype == jnp.bfloat16 and float(value) == float(value)")
    assert done.returncode == 0, done.stderr


def test_versions_agree() -> None:
    assert attn_jax_rocm_sink.__version__ == attn_spec.__version__
    assert len(attn_jax_rocm_sink.__all__) <= 12


def test_the_backend_is_found_by_name_only() -> None:
    found = attn_spec.backends()["attn_jax_rocm_sink"]
    assert found.engines == ("host", "cuda", "hip") and found.priority == {}
    op = attn_spec.get_op("attention", backend="attn_jax_rocm_sink")
    assert op.trace.selected_backend == "attn_jax_rocm_sink:host"
    assert op.trace.kernel_fingerprint == _ffi.load().fingerprint

"""Each package installed alone: its README runs, nothing undeclared comes along, and importing it touches no driver."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("attn-spec", "attn-reference", "attn-triton", "attn-cuda", "attn-jax-rocm-sink")
TORCH = ("attn-reference", "attn-triton", "attn-cuda")
FRAMEWORKS = {
    "attn-spec": set(),
    "attn-reference": {"torch"},
    "attn-triton": {"torch", "triton"},
    "attn-cuda": {"torch"},
    "attn-jax-rocm-sink": {"jax", "jaxlib"},
}
INSTALLED = "import importlib.metadata as m, json; print(json.dumps(sorted({d.name.lower() for d in m.distributions()})))"
DRIVERS = """
import {module}, os, sys
maps = open('/proc/self/maps').read()
assert 'libcuda.so' not in maps and 'libamdhip64' not in maps and 'libnvidia' not in maps, 'importing loaded a GPU driver'
child = os.fork()
if child == 0:
    from attn_spec import backends
    os._exit(0 if '{module}' in backends() else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("name", PACKAGES)
def test_readme_examples_run(run, python_of: Callable[[str], str], name: str) -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", (ROOT / "packages" / name / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert examples, f"packages/{name}/README.md has no Python example"
    for code in examples:
        result = run(python_of(name), "-c", code, PYTHONWARNINGS="error::DeprecationWarning:__main__")
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", PACKAGES)
def test_only_declared_frameworks_come_along(run, python_of: Callable[[str], str], name: str) -> None:
    installed = set(json.loads(run(python_of(name), "-c", INSTALLED).stdout))
    assert installed & {"torch", "triton", "jax", "jaxlib"} == FRAMEWORKS[name]
    assert {entry for entry in installed if entry.startswith("attn-")} == {"attn-spec", name}
    if name == "attn-spec":
        assert installed == {"attn-spec", "numpy"}


@pytest.mark.parametrize("name", PACKAGES[1:])
def test_the_backend_is_found_and_says_what_it_lacks(run, python_of: Callable[[str], str], name: str) -> None:
    result = run(python_of(name), "-m", "attn_spec", "info", "--json")
    assert result.returncode == 0, result.stderr
    assert name.replace("-", "_") in result.stdout


@pytest.mark.parametrize("name", PACKAGES[1:])
def test_import_loads_no_driver_and_survives_fork(run, python_of: Callable[[str], str], name: str) -> None:
    result = run(python_of(name), "-c", DRIVERS.format(module=name.replace("-", "_")), CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cpu")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", TORCH)
def test_importable_before_and_after_torch(run, python_of: Callable[[str], str], name: str) -> None:
    module = name.replace("-", "_")
    for order in (f"import {module}, torch", f"import torch, {module}"):
        result = run(python_of(name), "-c", f"{order}; assert not torch.cuda.is_initialized()")
        assert result.returncode == 0, result.stderr


def test_torch_for_rocm_is_not_taken_for_cuda(run, python_of: Callable[[str], str]) -> None:
    code = "import torch; torch.version.hip, torch.version.cuda = '7.1.0', None; torch.cuda.is_available = lambda: True\n"
    code += "from attn_spec._registry import get_backend; print(get_backend('attn_cuda').unavailable('cuda'))"
    result = run(python_of("attn-cuda"), "-c", code, CUDA_HOME=None, ROCM_HOME=None)
    assert result.returncode == 0, result.stderr
    assert ("has no CUDA" if shutil.which("nvcc") else "was built") in result.stdout

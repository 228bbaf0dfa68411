"""Imports: attn_spec loads no framework, and the JAX package no torch; the check itself is shown to fail."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

FRAMEWORKS = ("torch", "jax", "jaxlib", "triton", "tensorflow", "cupy")
SUITE = (
    "import attn_spec.testing.runner, attn_spec.testing.asserts, attn_spec.testing.strategies, attn_spec.testing.plugin, "
    "attn_shared_tests.problems, attn_shared_tests.faulty, attn_shared_tests.oracle, attn_shared_tests.test_cross_backend"
)


def loaded_by(statement: str, environment: dict[str, str] | None = None) -> set[str]:
    """Frameworks in sys.modules of a fresh interpreter after ``statement``."""
    code = f"{statement}\nimport sys, json\nprint(json.dumps([name for name in {FRAMEWORKS!r} if name in sys.modules]))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120, env=environment)
    return set(json.loads(found.stdout.splitlines()[-1]))


def check_loads_none(statement: str, forbidden: set[str]) -> None:
    found = loaded_by(statement) & forbidden
    assert not found, f"{statement!r} loads {sorted(found)}"


@pytest.mark.parametrize("statement", ("import attn_spec", "import attn_spec; attn_spec._registry.installed()", SUITE))
def test_the_specification_loads_no_framework(statement: str) -> None:
    check_loads_none(statement, set(FRAMEWORKS))


if find_spec("attn_jax_rocm_sink") is not None:

    def test_the_jax_package_loads_no_torch() -> None:
        check_loads_none("import attn_jax_rocm_sink, attn_jax_rocm_sink.backend", {"torch", "triton"})


def test_the_check_can_fail() -> None:
    check_loads_none("import attn_spec", {"torch"})
    with pytest.raises(AssertionError, match="torch"):
        check_loads_none("import attn_spec.torch", {"torch"})


def test_importing_a_backend_starts_no_driver() -> None:
    """A process that imports every backend can still fork, and sees no initialised device."""
    code = (
        "import os, attn_spec\nfound = attn_spec.backends()\nassert 'attn_reference' in found\n"
        "import torch\nassert not torch.cuda.is_initialized()\n"
        "child = os.fork()\n"
        "if child == 0:\n    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_collection_of_other_tests_loads_no_framework(tmp_path: object) -> None:
    """The plugin is loaded in every pytest run of its users; it must cost them no framework."""
    code = (
        "import pathlib, sys, pytest\n"
        f"path = pathlib.Path({str(tmp_path)!r}) / 'test_other.py'\n"
        "path.write_text('def test_nothing():\\n    assert True\\n')\n"
        "assert pytest.main(['-q', '-p', 'no:cacheprovider', str(path)]) == 0"
    )
    assert not loaded_by(code), "the plugin loads a framework"

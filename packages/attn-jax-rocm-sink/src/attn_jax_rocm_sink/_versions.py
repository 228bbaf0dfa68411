"""The supported JAX, checked before anything of its newer interfaces is touched."""

from __future__ import annotations

import re

import jax

__all__ = ["MINIMUM_JAX", "check_jax", "release"]

MINIMUM_JAX = "0.10"


def release(version: str) -> tuple[int, ...]:
    """``"0.10.2.dev3"`` to ``(0, 10, 2)``."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")[:3]) if found else ()


def check_jax(version: str) -> None:
    """Raise ImportError that names both versions when ``version`` is older than the supported ones."""
    if release(version) < release(MINIMUM_JAX):
        raise ImportError(
            f"attn_jax_rocm_sink needs jax >= {MINIMUM_JAX}; found jax {version}. Upgrade with: pip install -U 'jax>={MINIMUM_JAX}'"
        )


check_jax(jax.__version__)

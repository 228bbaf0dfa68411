"""``python -m attn_jax_rocm_sink info``: versions, and for each engine why it is or is not usable here."""

from __future__ import annotations

import argparse

import jax
from jaxlib import version as jaxlib_version

import attn_jax_rocm_sink
from attn_jax_rocm_sink import _xla
from attn_jax_rocm_sink._engines import ENGINES


def info() -> str:
    """The report as text."""
    lines = [f"attn_jax_rocm_sink {attn_jax_rocm_sink.__version__}, jax {jax.__version__}, jaxlib {jaxlib_version.__version__}"]
    for engine in ENGINES.values():
        reason = engine.unavailable()
        devices = ", ".join(engine.capabilities.devices)
        state = f"usable, build {engine.fingerprint()}" if reason is None else f"not usable: {reason}"
        lines.append(f"engine {engine.name} ({devices}): {state}")
        for name, support in engine.capabilities.operators.items():
            lines.append(f"  {name}: {', '.join(support.dtypes)}; {', '.join(sorted(support.features))}")
    lines.append(f"engine {_xla.NAME} (any device): plain jax.numpy, outside every contract; only when asked for by name")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m attn_jax_rocm_sink", description=__doc__)
    parser.add_subparsers(dest="command", required=True).add_parser("info", help="versions, engines and their state")
    parser.parse_args()
    print(info())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

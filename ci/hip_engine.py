"""Exits 1, with the reason, unless the installed attn-jax-rocm-sink has a hip engine that loads."""

from __future__ import annotations

import sys

from attn_jax_rocm_sink import _ffi


def main() -> int:
    found = _ffi.load("hip")
    print(f"hip engine: build {found.fingerprint}" if found.reason is None else f"hip engine: not usable: {found.reason}")
    return 0 if found.reason is None else 1


if __name__ == "__main__":
    sys.exit(main())

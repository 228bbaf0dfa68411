"""Compiles what the launches of attention and the products compile, for every target: ``python ahead_attention.py OUT.json``.

It must run without TRITON_INTERPRET=1, and needs no GPU: the launch functions are called with CPU tensors, a driver that only names the
target, and launches that stop after compilation. Every entry of the file is one compiled kernel: its assembly and its resources.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import triton
from ahead import AMD, TARGETS, cuobjdump
from attention_calls import inputs, kept, normal
from attn_triton import _attention_backward_launch, _attention_launch, _pairs_launch, _products_launch
from transposed_products import controls, products, transposed_products
from triton.runtime.jit import JITFunction


class NamedTarget:
    """A driver that launches nothing. Triton keeps compiled kernels by device, so each target is a device of its own."""

    def __init__(self, arch):
        self.target, self.device = TARGETS[arch], list(TARGETS).index(arch)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 0


def _forward(call):
    _attention_launch.attention_forward(call, call.v.dtype)


def _backward(call):
    row = torch.zeros(call.row_shape)
    dout = torch.zeros((*call.q.shape[:-1], call.v.shape[-1]), dtype=call.v.dtype)
    _attention_backward_launch.attention_backward(call, dout, row, row, row, frozenset({"q", "k", "v", "sinks"}))


def _products():
    q, k, scores = normal(1, 4, 64, 64, seed=1), normal(1, 2, 64, 64, seed=2), torch.zeros(1, 4, 64, 64)
    _products_launch.qk_gemm_forward(q, k, 1.0, torch.float32)
    _products_launch.qk_gemm_backward(scores, q, k, 1.0, (True, False))
    _products_launch.qk_gemm_backward(scores.bfloat16(), q.bfloat16(), k.bfloat16(), 1.0, (False, True))


def _grouped(head_dim, **options):
    return inputs(heads=4, kv_heads=2, queries=128, keys=64, head_dim=head_dim, causal=True, sinks=torch.zeros(4), **options)


CASES = {
    "products": _products,
    "forward": lambda: _forward(_grouped(128, dtype=torch.bfloat16)),
    "wide forward": lambda: _forward(_grouped(256, key_mask=kept(64), bias=torch.zeros(1, 4, 128, 64))),
    "decode": lambda: _forward(inputs(heads=4, kv_heads=2, queries=1, keys=512, head_dim=128, causal=True, dtype=torch.bfloat16)),
    "backward": lambda: _backward(_grouped(128, dtype=torch.bfloat16)),
}


@contextmanager
def _compiling(arch) -> Iterator[list]:
    """Launches compile for ``arch`` and are listed: (name, options, compiled kernel)."""
    found = []
    original = JITFunction.run

    def run(self, *arguments, grid, warmup, **options):
        compiled = original(self, *arguments, grid=grid, warmup=True, **options)
        if compiled is not None:
            found.append((self.fn.__name__, options, compiled))
        return compiled

    modules = (_pairs_launch, _attention_backward_launch, _products_launch)
    platforms = [module.platform for module in modules]
    JITFunction.run = run
    triton.runtime.driver.set_active(NamedTarget(arch))
    for module in modules:
        module.platform = lambda device: "rocm" if arch in AMD else "cuda"
    try:
        yield found
    finally:
        JITFunction.run = original
        for module, platform in zip(modules, platforms, strict=True):
            module.platform = platform


def described(arch, case, name, options, compiled):
    found = {"name": f"{case}, {name}" + (", select" if options.get("SELECT") else ""), "arch": arch, "llir": compiled.asm["llir"]}
    found["shared"] = compiled.metadata.shared
    found |= {"products": products(compiled.asm["ttir"]), "transposed": transposed_products(compiled.asm["ttir"])}
    if arch in AMD:
        return found | {"assembly": compiled.asm["amdgcn"]}
    usage = cuobjdump(compiled, "-res-usage")
    resources = {key: int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("STACK", "LOCAL", "REG")}
    return found | {"assembly": compiled.asm["ptx"], **{key.lower(): value for key, value in resources.items()}}


def compiled_cases(arch, names, cases=CASES):
    for case in names:
        with _compiling(arch) as launches:
            cases[case]()
        seen = set()
        for name, options, compiled in launches:
            if compiled.hash not in seen:
                seen.add(compiled.hash)
                yield described(arch, case, name, options, compiled)


def main(path):
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("ahead_attention.py: TRITON_INTERPRET must not be 1")
    entries = []
    for arch in TARGETS:
        entries += compiled_cases(arch, CASES)
    Path(path).write_text(json.dumps({"entries": entries, "controls": controls(TARGETS["sm_90"])}))


if __name__ == "__main__":
    main(sys.argv[1])

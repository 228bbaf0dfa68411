"""Compiles what the launches of 4-bit attention compile, without a GPU: ``python ahead_qat.py OUT.json``.

It must run without TRITON_INTERPRET=1. Every entry of the file is one compiled kernel: its assembly and its resources.
"""

import json
import os
import sys
from pathlib import Path

import ahead_attention
import torch
from ahead import AMD
from attention_calls import inputs
from attn_spec import QATConfig
from attn_triton import _nvfp4_launch, _qat_launch

ORDERED = ("sm_100", "sm_120", "gfx942")
"""Targets of nvfp4-ordered-v1 whose code is read; the kernels that it shares with ordered-v1 are read elsewhere."""
OWN = ("fake_quantize", "qat_outputs", "qat_value_sums", "qat_delta", "token_means", "qat_forward", "qat_row_values", "qat_query_gradients")
OWN += ("qat_key_gradients",)


def _both(contract, config, head_dim, **options):
    call = inputs(heads=4, kv_heads=2, queries=200, keys=200, head_dim=head_dim, dtype=torch.bfloat16, **options)
    saved = _qat_launch.qat_forward(call, config, contract)
    needs = frozenset({"v"} if contract == "nvfp4-ordered-v1" else {"q", "k", "v"})
    _qat_launch.qat_backward(call, config, contract, torch.zeros_like(saved[0]), None, saved, needs)


CASES = {
    "ordered": lambda: _both("nvfp4-ordered-v1", QATConfig.fastvideo(), 128, causal=True),
    "sm90": lambda: _both("nvfp4-sm90-v1", QATConfig(), 128),
}


def main(path):
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("ahead_qat.py: TRITON_INTERPRET must not be 1")
    entries = list(ahead_attention.compiled_cases("sm_90", ["sm90"], CASES))
    for arch in ORDERED:
        for module in (_qat_launch, _nvfp4_launch):
            module.platform = lambda device, arch=arch: "rocm" if arch in AMD else "cuda"
        entries += ahead_attention.compiled_cases(arch, ["ordered"], CASES)
    Path(path).write_text(json.dumps([entry for entry in entries if entry["name"].split(", ")[1] in OWN]))


if __name__ == "__main__":
    main(sys.argv[1])

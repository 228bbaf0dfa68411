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
from attn_triton import _nvfp4_launch, _qat_backward_launch, _qat_configuration, _qat_launch

ORDERED = ("sm_80", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950")
"""Targets of nvfp4-ordered-v1."""
READ = ("sm_80", "sm_100", "sm_120", "gfx942", "gfx950")
"""Targets for which the forward is compiled; the others have the quantizer of Q, K and V."""
WHOLE = ("sm_100", "gfx942")
"""Targets for which the gradients are compiled too."""
OWN = (
    "fake_quantize",
    "attention_row_states",
    "attention_query_sums",
    "attention_key_sums",
    "qat_outputs",
    "qat_value_sums",
    "qat_delta",
    "token_means",
    "qat_forward",
    "qat_row_values",
    "qat_query_gradients",
)
OWN += ("qat_key_gradients",)


def _call(head_dim, **options):
    return inputs(heads=4, kv_heads=2, queries=200, keys=200, head_dim=head_dim, dtype=torch.bfloat16, **options)


def _both(contract, config, call, needs):
    saved = _qat_launch.qat_forward(call, config, contract)
    _qat_backward_launch.qat_backward(call, config, contract, torch.zeros_like(saved[0]), None, saved, frozenset(needs))


CASES = {
    "quantizer": lambda: _nvfp4_launch.operands(_call(128), QATConfig.fastvideo(), torch.float32),
    "ordered forward": lambda: _qat_launch.qat_forward(_call(128, causal=True), QATConfig.fastvideo(), "nvfp4-ordered-v1"),
    "ordered": lambda: _both("nvfp4-ordered-v1", QATConfig.fastvideo(), _call(128, causal=True), "qkv"),
    "sm90": lambda: _both("nvfp4-sm90-v1", QATConfig(), _call(128), "qkv"),
}


def main(path):
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("ahead_qat.py: TRITON_INTERPRET must not be 1")
    entries = list(ahead_attention.compiled_cases("sm_90", ["sm90"], CASES))
    for arch in ORDERED:
        for module in (_nvfp4_launch, _qat_backward_launch, _qat_configuration, _qat_launch):
            module.platform = lambda device, arch=arch: "rocm" if arch in AMD else "cuda"
        case = "ordered" if arch in WHOLE else "ordered forward" if arch in READ else "quantizer"
        entries += ahead_attention.compiled_cases(arch, [case], CASES)
    Path(path).write_text(json.dumps([entry for entry in entries if entry["name"].split(", ")[1] in OWN]))


if __name__ == "__main__":
    main(sys.argv[1])

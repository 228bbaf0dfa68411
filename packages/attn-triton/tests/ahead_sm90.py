"""Compiles what the launches of contract sm90-v1 compile, for sm_90 without a GPU: ``python ahead_sm90.py OUT.json``.

It must run without TRITON_INTERPRET=1. Every entry of the file is one compiled kernel: its assembly and its resources.
"""

import json
import os
import sys
from pathlib import Path

import torch
from ahead_attention import compiled_cases
from attention_calls import inputs
from attn_triton import _sm90_backward_launch, _sm90_launch

ARCH = "sm_90"


def _call(head_dim, **options):
    return inputs(heads=4, kv_heads=2, queries=200, keys=200, head_dim=head_dim, dtype=torch.bfloat16, **{"causal": True, **options})


def _packed(head_dim):
    call = _call(head_dim)
    rows = {name: getattr(call, name)[0].transpose(0, 1).contiguous() for name in ("q", "k", "v")}
    offsets = torch.tensor([0, 70, 200])
    return type(call)(**rows, cu_seqlens_q=offsets, cu_seqlens_k=offsets, scale=0.1, causal=True)


def _both(call, few=0):
    """Forward, whole below no number of programs, and backward."""
    _sm90_launch.FEW_PROGRAMS = few
    out, lse = _sm90_launch.attention_forward(call)
    needs = frozenset({"q", "k", "v"} | ({"sinks"} if call.sinks is not None else set()))
    _sm90_backward_launch.attention_backward(call, torch.zeros_like(out), torch.zeros_like(lse), torch.zeros_like(out), lse, needs)


def _decode(head_dim):
    _sm90_launch.FEW_PROGRAMS = 1 << 30
    call = inputs(heads=4, kv_heads=1, queries=1, keys=4096, head_dim=head_dim, dtype=torch.float16, kv_lengths=torch.tensor([9]))
    _sm90_launch.attention_forward(call)


def _joint(head_dim):
    """A prompt of 70 and an image of 200."""
    mask = torch.ones(1, 1024 + 200, dtype=torch.bool)
    mask[:, 70:1024] = False
    options = {"heads": 4, "kv_heads": 2, "queries": 280, "keys": 1224, "head_dim": head_dim, "dtype": torch.bfloat16}
    _both(inputs(**options, key_mask=mask))


def _packed_decode(head_dim):
    call = _packed(head_dim)
    offsets, keys = torch.tensor([0, 1, 2]), torch.zeros(3000, 2, head_dim, dtype=torch.bfloat16)
    few = {"q": call.q[:2].contiguous(), "k": keys, "v": keys.clone()}
    _sm90_launch.attention_forward(type(call)(**few, cu_seqlens_q=offsets, cu_seqlens_k=offsets * 1500, scale=0.1, causal=True))


CASES = {
    "D 128": lambda: _both(_call(128, sinks=torch.zeros(4))),
    "D 64, packed": lambda: _both(_packed(64)),
    "D 128, decode": lambda: _decode(128),
    "D 128, packed decode": lambda: _packed_decode(128),
    "D 128, joint": lambda: _joint(128),
    "D 256": lambda: _both(_call(256)),
}


def main(path):
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("ahead_sm90.py: TRITON_INTERPRET must not be 1")
    entries = list(compiled_cases(ARCH, list(CASES), CASES))
    for item in entries:
        del item["llir"]
    Path(path).write_text(json.dumps(entries))


if __name__ == "__main__":
    main(sys.argv[1])

"""Golden results: small recordings of calls and their bytes. ``python -m attn_shared_tests.goldens`` writes them anew.

The PyTorch definition makes them and the compiled engine, where it is usable, must agree before a file is written.
"""

from __future__ import annotations

import argparse
import datetime
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from attn_spec import Call
from attn_spec._registry import get_backend
from attn_spec.testing.asserts import assert_same
from attn_spec.testing.recordings import record

from attn_shared_tests import problems
from attn_shared_tests.problems import QKV
from attn_shared_tests.reference import NAME

FOLDER = Path(__file__).with_name("goldens")
CONTRACT = "ordered-v1"
"""The contract of a call that names none."""
MOST_BYTES = 65536


def golden_calls() -> dict[str, Call]:
    """The calls by file name: each operator and each feature once, with gradients."""
    every = (*QKV, "sinks", "bias")
    mask = problems.mask_of((9, 20), 20)[:, ::-1].copy()
    return {
        "attention-causal-float32": problems.attention(queries=6, keys=20, wrt=QKV),
        "attention-tiles-bfloat16": problems.attention(
            batch=1, heads=2, kv_heads=1, queries=2, keys=600, head_dim=4, dtype="bfloat16", wrt=QKV
        ),
        "attention-sinks-window-float16": problems.attention(
            queries=8, keys=20, dtype="float16", with_sinks=True, window=(3, 0), wrt=(*QKV, "sinks")
        ),
        "attention-bias-dropout-float32": problems.attention(
            queries=5, keys=20, with_sinks=True, bias_shape=(1, 4, 1, 20), dropout_p=0.25, dropout_seed=2**63 + 5, wrt=every
        ),
        "attention-padding-bfloat16": problems.attention(queries=5, keys=20, dtype="bfloat16", key_padding_mask=mask, wrt=QKV),
        "attention-starts-float32": problems.attention(
            queries=5, keys=20, kv_lengths=np.array([20, 7]), q_start=np.array([250, 259]), k_start=np.array([245, 255]), wrt=QKV
        ),
        "attention-dead-rows-float32": problems.attention(queries=12, keys=5, wrt=QKV),
        "varlen-float32": problems.varlen((3, 0, 6), (5, 4, 0), trailing=2, with_sinks=True, wrt=(*QKV, "sinks")),
        "joint-attention-bfloat16": problems.joint(dtype="bfloat16", gradient=True, prompt_mask=problems.mask_of((8, 3), 8)),
        "softmax-float32": problems.softmax((2, 2, 700), gradient=True, key_padding_mask=problems.mask_of((700, 300), 700)[:, ::-1].copy()),
        "softmax-bfloat16": problems.softmax((2, 513), dtype="bfloat16", gradient=True),
        "softmax-v2-float32": replace(
            problems.softmax((2, 1300), gradient=True, key_padding_mask=problems.mask_of((1300, 1100), 1300)[:, ::-1].copy()),
            contract="ordered-v2",
        ),
        "softmax-v2-bfloat16": replace(problems.softmax((2, 2049), dtype="bfloat16", gradient=True), contract="ordered-v2"),
        "qk-gemm-float16": _gemm(
            "joint_attn_qk_gemm", {"q": (1, 4, 5, 72), "k": (1, 2, 7, 72)}, "scores", (1, 4, 5, 7), "float16", "float32"
        ),
        "av-gemm-bfloat16": _gemm(
            "joint_attn_av_gemm", {"probs": (1, 4, 5, 40), "v": (1, 2, 40, 9)}, "out", (1, 4, 5, 9), "bfloat16", "bfloat16"
        ),
    }


def tensor_core_calls() -> dict[str, Call]:
    """Calls of sm90-v1 by file name, recorded on a GPU: causal groups, a segment's edge with sinks and a window, wide
    heads, text with image, and packed input."""
    small: dict[str, Any] = {"head_dim": 64, "heads": 2, "kv_heads": 1}
    calls = {
        "attention-sm90-causal-bfloat16": problems.attention(batch=1, queries=20, keys=40, dtype="bfloat16", wrt=QKV, **small),
        "attention-sm90-segments-float16": problems.attention(
            batch=1, queries=7, keys=50, k_start=1000, window=(40, 0), dtype="float16", with_sinks=True, wrt=(*QKV, "sinks"), **small
        ),
        "attention-sm90-wide-bfloat16": problems.attention(
            batch=1, heads=1, kv_heads=1, queries=12, keys=30, head_dim=128, causal=False, dtype="bfloat16", wrt=QKV
        ),
        "attention-sm90-widest-bfloat16": problems.attention(
            batch=1, heads=1, kv_heads=1, queries=5, keys=9, head_dim=256, dtype="bfloat16", with_sinks=True, wrt=(*QKV, "sinks")
        ),
        "joint-attention-sm90-bfloat16": problems.joint(
            text=5, image=7, dtype="bfloat16", gradient=True, prompt_mask=problems.mask_of((5, 2), 5), **small
        ),
        "varlen-sm90-float16": problems.varlen((3, 0, 9), (5, 4, 17), trailing=2, dtype="float16", wrt=QKV, **small),
    }
    return {name: replace(call, contract="sm90-v1") for name, call in calls.items()}


def main(arguments: list[str] | None = None) -> None:
    """Write every golden file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="date in the header (default: today)")
    chosen = parser.parse_args(arguments)
    backend = get_backend(NAME)
    engines = [engine for engine in ("pytorch", "host") if backend.unavailable("cpu", engine) is None]
    chosen.folder.mkdir(parents=True, exist_ok=True)
    for name, call in golden_calls().items():
        results = backend.evaluate(call, engine=engines[0])
        for other in engines[1:]:
            assert_same(backend.evaluate(call, engine=other), results, f"{name}: {other} against {engines[0]}")
        header = {"device": f"cpu {platform.machine()}", "date": chosen.date, "made_by": f"{NAME}:{engines[0]}", "agreed": engines[1:]}
        path = chosen.folder / f"{name}.safetensors"
        record(call, results, header).save(path)
        print(f"{path.name}: {path.stat().st_size} bytes")


def _gemm(op: str, shapes: dict[str, tuple[int, ...]], output: str, out_shape: tuple[int, ...], dtype: str, out_dtype: str) -> Call:
    rng = np.random.default_rng(0)
    arrays = {name: problems.normal(rng, shape, dtype) for name, shape in shapes.items()}
    return Call(op, arrays, {}, {output: problems.normal(rng, out_shape, out_dtype)}, tuple(arrays))


if __name__ == "__main__":
    main()

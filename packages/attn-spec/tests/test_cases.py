"""The named cases: data that is the same everywhere, and samples that are parts of the layer."""

from __future__ import annotations

import numpy as np
import pytest
from attn_spec._compare import digest
from attn_spec.testing.cases import CASES, draw


def test_data_is_pinned():
    assert digest(draw((1, 2, 3), 64, 16)) == "8bf59d8f7702b3cddb5c2972a0506e15e3a50738e3a44f3c6cfd887eb7dcc4b3"


def test_data_has_outlier_channels_and_unit_scale():
    data = draw((5, 1), 4096, 128)
    peaks = np.sort(np.abs(data).max(axis=0))
    assert peaks[-3] > 3 * np.median(peaks)
    assert 0.8 < np.median(data.std(axis=0)) < 1.6


@pytest.mark.parametrize("name", ["qwen3-8b-decode", "qwen3-8b-packed", "gpt-oss-window"])
def test_sampled_queries_are_rows_of_the_layer(name):
    case = CASES[name]
    layer = case.layer_call("float32")
    (sample,) = case.sample_calls("float32", lambda call: {})
    part = case.sampled_part({"out": layer.arrays["q"], "dq": layer.arrays["q"], "lse": (layer.cotangents or {})["lse"]})
    assert np.array_equal(part["out"], sample.call.arrays["q"])
    assert np.array_equal(part["lse"], (sample.call.cotangents or {})["lse"])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.joint])
def test_joint_samples_run_every_joint_operator(name):
    case = CASES[name]

    def reference(call):
        rows, heads = len(case.sample_rows) * case.sample_width, len(case.sampled_heads())
        return {output: np.zeros((1, heads, rows, case.keys), np.float32) for output in ("scores", "probs")}

    operators = [sample.call.op for sample in case.sample_calls("bfloat16", reference)]
    assert set(operators) == {"joint_attn_qk_gemm", "joint_attn_softmax", "joint_attn_av_gemm", "attention", "joint_attention"}


def test_cases_keep_the_true_sizes_of_their_models():
    assert {(case.keys, case.heads, case.head_dim) for case in CASES.values() if case.joint} == {
        (4608, 24, 128),
        (6544, 24, 128),
        (7401, 24, 128),
    }
    load = CASES["qwen3-8b-load"]
    assert (load.batch, load.keys, load.heads, load.kv_heads, load.head_dim) == (8, 4096, 32, 8, 128)
    window = CASES["gpt-oss-window"]
    assert (window.heads, window.kv_heads, window.head_dim, window.window, window.sinks) == (64, 8, 64, (127, 0), True)

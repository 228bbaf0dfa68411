"""Packed segments behind the engine interface: the cuda and ck engines over their fakes against the host engine, gaps included."""

from __future__ import annotations

import ctypes

import jax
import numpy as np
import pytest
from attn_jax_rocm_sink._config import config_of
from engine_fakes import Fakes

H, K, D, V = 4, 2, 16, 8
QUERIES, KEYS = 10, 12
HALF = np.dtype("float16")
OFFSETS = {"cu_seqlens_q": [0, 3, 3, 8], "cu_seqlens_k": [0, 4, 6, 11], "seqlens_q": [2, 0, 5], "seqlens_k": [4, 2, 5]}


def run(fakes: Fakes, engine: str, *, padded: bool) -> dict[str, np.ndarray]:
    """Results of forward and backward, which start as junk."""
    rng = np.random.default_rng(1)
    arrays = {"q": (QUERIES, H, D), "k": (KEYS, K, D), "v": (KEYS, K, V)}
    operands = {name: rng.standard_normal(shape).astype(HALF) for name, shape in arrays.items()}
    operands |= {name: np.array(values, np.int64) for name, values in OFFSETS.items() if padded or name.startswith("cu")}
    operands["sinks"] = np.array([0.5, -np.inf, 20.0, -3.0], np.float32)
    dout = rng.standard_normal((QUERIES, H, V)).astype(HALF)
    dout[8:] = np.nan
    found = {"out": np.full((QUERIES, H, V), np.nan, HALF)} | {
        name: np.full((H, QUERIES), np.nan, np.float32) for name in ("lse", "row_max", "row_sum")
    }
    gradients = {f"d{name}": np.full(operands[name].shape, np.nan, operands[name].dtype) for name in ("q", "k", "v", "sinks")}
    options = {"causal": True, "window_left": -1, "window_right": -1, "scale": 0.25, "dropout_p": 0.0}

    def described(values: dict[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
        return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in values.items()}

    for direction, given, written in (("forward", operands, found), ("backward", {**operands, **found, "dout": dout}, gradients)):
        config = config_of(described(given), described(written), options)
        names = {name for part in fakes.buffers(engine, direction, config) for name in part}
        workspace = np.full(fakes.plan(engine, direction, config)[""][1] + 256, 0xFF, np.uint8)
        used = {name: array for name, array in {**given, **written}.items() if name in names}
        assert fakes.run(engine, direction, config, used, workspace[-workspace.ctypes.data % 256 :], workspace.size - 256) == ""
    return {name: found[name].astype(np.float32) for name in ("out", "lse")} | {
        name: array.astype(np.float32) for name, array in gradients.items()
    }


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("engine", "library"), [("cuda", "fakes"), ("ck", "fakes"), ("ck", "old_fakes")])
def test_packed_segments_and_the_gaps_between_them(request: pytest.FixtureRequest, engine: str, library: str, padded: bool) -> None:
    fakes: Fakes = request.getfixturevalue(library)
    fakes.handle.fake_cuda_set(0, 0, ctypes.c_int64(0))
    fakes.handle.attn_jax_rocm_sink_cuda_bind(ctypes.c_void_p(fakes.handle.attn_cuda_interface_v1()))
    fakes.set_aiter()
    wanted, found = run(fakes, "host", padded=padded), run(fakes, engine, padded=padded)
    gaps = [2, 8, 9] if padded else [8, 9]
    assert (found["lse"][:, gaps] == -np.inf).all()
    assert not found["out"][gaps].any() and not found["dq"][gaps].any() and not found["dk"][11:].any() and not found["dv"][11:].any()
    for name, value in wanted.items():
        if engine == "cuda":
            assert found[name].tobytes() == value.tobytes(), name
            continue
        assert np.array_equal(np.isfinite(found[name]), np.isfinite(value)), name
        finite = np.isfinite(value)
        far, size = np.abs(found[name][finite] - value[finite]).max(), np.abs(value[finite]).max()
        roundings = 40 if name == "dsinks" else 4  # its terms come from a rounded output and cancel
        assert far <= roundings * 2.0**-11 * size and size > 0.01, f"{name}: {far}, largest {size}"
    calls = [line for line in fakes.take_log() if line["call"].startswith("mha")]
    assert [line["group"] for line in calls] == (["1", "1"] if engine == "ck" else [])
    assert {(line["seqstart"], line["cu"], line["seqlen_q"], line["max_seqlen_q"]) for line in calls} <= {
        ("1", str(int(padded)), str(QUERIES), str(QUERIES))
    }

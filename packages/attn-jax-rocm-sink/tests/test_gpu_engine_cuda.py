"""The cuda engine on an NVIDIA GPU: the bytes of attn_reference and of attn_cuda, forward and backward, under jit and grad.

It needs JAX's CUDA plugin, attn-cuda with kernels and torch with CUDA in one process: set XLA_PYTHON_CLIENT_PREALLOCATE=false.
"""

from __future__ import annotations

import os
import subprocess
import sys

import attn_jax_rocm_sink
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attn_jax_rocm_sink._engines import ENGINES
from attn_jax_rocm_sink.backend import BACKEND
from attn_spec import Call, Problem
from attn_spec._arrays import from_float32
from attn_spec._registry import get_backend
from attn_spec.testing.asserts import assert_bytes
from jax_calls import SM90, SM90_CASES, bits, sm90_call

CASES: dict[str, dict[str, object]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": (100, 3), "causal": False},
    "gpt_oss": {"window": (127, None), "sinks": True},
    "everything": {"window": (200, None), "sinks": True, "bias": True, "kv_lengths": True, "mask": True},
    "chunk": {"q_start": np.array([7, 250], np.int32), "k_start": np.array([300, 0], np.int32), "sinks": True},
}
SHAPES = {
    "gqa": (2, 8, 2, 200, 333, 64, 64),
    "wide": (1, 4, 4, 130, 520, 128, 96),
    "odd": (3, 6, 1, 33, 70, 40, 24),
    "one": (2, 8, 2, 1, 777, 64, 64),
}


@pytest.fixture(scope="module", autouse=True)
def cuda(request: pytest.FixtureRequest) -> None:
    """A CUDA device of JAX. Its absence is the only reason to skip, unless the device was asked for."""
    try:
        jax.local_devices(backend="cuda")
    except RuntimeError as error:
        if "cuda" in request.config.getoption("--attn-device"):
            pytest.fail(f"a CUDA device was asked for: {error}")
        pytest.skip("JAX has no CUDA device")
    reason = ENGINES["cuda"].unavailable()
    assert reason is None, reason


def make(case: str, shape: str, dtype: str) -> Call:
    B, H, K, S, T, D, V = SHAPES[shape]
    rng = np.random.default_rng(len(case) + 10 * len(shape))

    def normal(*sizes: int, name: str = dtype) -> np.ndarray:
        return from_float32(rng.standard_normal(sizes).astype(np.float32), name)

    options = dict(CASES[case])
    arrays = {"q": normal(B, H, S, D), "k": normal(B, K, T, D), "v": normal(B, K, T, V)}
    if options.pop("sinks", False):
        arrays["sinks"] = (4 * rng.standard_normal(H)).astype(np.float32)
        arrays["sinks"][0] = -np.inf
    if options.pop("bias", False):
        arrays["bias"] = normal(1, H, S, T)
    if options.pop("kv_lengths", False):
        arrays["kv_lengths"] = rng.integers(0, T + 1, B).astype(np.int32)
    if options.pop("mask", False):
        arrays["key_padding_mask"] = rng.random((B, T)) < 0.8
    for name in ("q_start", "k_start"):
        if name in options:
            arrays[name] = np.resize(np.asarray(options.pop(name)), B)
    wrt = tuple(name for name in ("q", "k", "v", "sinks", "bias") if name in arrays)
    cotangents = {"out": normal(B, H, S, V), "lse": normal(B, H, S, name="float32")}
    return Call("attention", arrays, {**options, "return_lse": True}, cotangents, wrt)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_of_the_reference_and_of_attn_cuda(case: str, shape: str, dtype: str) -> None:
    call = make(case, shape, dtype)
    found = BACKEND.evaluate(call, device="cuda", engine="cuda")
    for name, device in (("attn_reference", "cpu"), ("attn_cuda", "cuda")):
        wanted = get_backend(name).evaluate(call, device=device)
        assert set(found) == set(wanted) and len(wanted) >= 5
        for output, value in wanted.items():
            assert_bytes(found[output], value, f"{case} {shape} {dtype}: {output} against {name}")


@pytest.mark.parametrize("case", SM90_CASES)
def test_the_tensor_cores_have_the_bytes_of_the_reference(case: str) -> None:
    call = sm90_call(case)
    described = Problem(op="attention", dtype="bfloat16", device="cuda", contract=SM90, head_dim=64, value_dim=64)
    if jax.local_devices(backend="cuda")[0].compute_capability != "9.0":
        pytest.skip("no NVIDIA GPU of compute capability 9.0")
    assert not BACKEND.reasons(described, "cuda")
    found, wanted = BACKEND.evaluate(call, device="cuda", engine="cuda"), get_backend("attn_reference").evaluate(call)
    assert set(found) == set(wanted)
    for output, value in wanted.items():
        assert_bytes(found[output], value, f"{case}: {output}")


def gpu(call: Call) -> dict[str, jax.Array]:
    device = jax.local_devices(backend="cuda")[0]
    return {name: jax.device_put(jnp.asarray(array), device) for name, array in call.arrays.items()}


def test_arrays_on_the_gpu_choose_the_engine() -> None:
    arrays = gpu(make("gpt_oss", "gqa", "float32"))
    text = jax.jit(lambda given: attn_jax_rocm_sink.attention(**given, window=(127, None))).lower(arrays).as_text()
    assert "attn_jax_rocm_sink_cuda_forward" in text


def test_scan_and_repetition_move_no_bit() -> None:
    arrays = gpu(make("gpt_oss", "gqa", "float32"))

    def layers(x: jax.Array) -> jax.Array:
        step = jax.checkpoint(lambda x, _: (attn_jax_rocm_sink.attention(x, arrays["k"], arrays["v"], sinks=arrays["sinks"]), None))
        return jax.lax.scan(step, x, length=5)[0].sum()

    run = jax.jit(jax.value_and_grad(layers))
    first = jax.tree.map(bits, run(arrays["q"]))
    for _ in range(3):
        for got, wanted in zip(jax.tree.map(bits, run(arrays["q"])), first, strict=True):
            assert_bytes(got, wanted, "repetition")
    on_cpu = jax.device_put(arrays, jax.local_devices(backend="cpu")[0])
    wanted = attn_jax_rocm_sink.attention(on_cpu["q"], on_cpu["k"], on_cpu["v"], sinks=on_cpu["sinks"], engine="host")
    got = attn_jax_rocm_sink.attention(arrays["q"], arrays["k"], arrays["v"], sinks=arrays["sinks"])
    assert_bytes(bits(got), bits(wanted), "one layer")


GRAPHS = """
import hashlib, jax, jax.numpy as jnp, numpy as np
from attn_jax_rocm_sink import attention
key = jax.random.split(jax.random.key(0), 3)
q = jax.random.normal(key[0], (2, 8, 96, 64), jnp.bfloat16)
k, v = (jax.random.normal(part, (2, 2, 96, 64), jnp.bfloat16) for part in key[1:])
sinks = jnp.linspace(-2.0, 4.0, 8)

def loss(q, k, v, sinks):
    return jnp.square(attention(attention(q, k, v, sinks=sinks) * 2, k, v, sinks=sinks).astype(jnp.float32)).sum()

run = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
for _ in range(4):
    found = run(q, k, v, sinks)
    digest = hashlib.sha256(b"".join(np.asarray(part).tobytes() for part in found)).hexdigest()
    print(digest)
"""


def test_command_buffers_move_no_bit() -> None:
    digests = []
    for classes in ("", "FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"):
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer={classes}"
        environment = os.environ | {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        done = subprocess.run([sys.executable, "-c", GRAPHS], capture_output=True, text=True, check=False, timeout=600, env=environment)
        assert done.returncode == 0, done.stderr
        digests += done.stdout.split()
    assert len(digests) == 8 and len(set(digests)) == 1, digests

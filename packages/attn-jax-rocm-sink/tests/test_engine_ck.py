"""The ck engine over a recording AITER, one that takes sinks and an old one that does not: values, arguments and refusals."""

from __future__ import annotations

from typing import Any

import attn_jax_rocm_sink
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attn_jax_rocm_sink import _vjp
from attn_spec import UnsupportedProblem
from engine_fakes import Fakes

B, S, T = 2, 5, 9
XLA_ERRORS = (jax.errors.JaxRuntimeError, ValueError)

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "causal": {},
    "top_left": {"q_start": 0},
    "window": {"causal": False, "window": (2, 1)},
    "causal_window": {"window": (1, None)},
    "lengths": {"kv_lengths": np.array([4, 9], np.int32)},
    "no_key": {"kv_lengths": np.array([0, 2], np.int32)},
    "bias": {"bias": (1, True)},
    "bias_b1": {"bias": (True, 1)},
    "bias_bh": {"bias": (True, True)},
    "bias_11": {"bias": (1, 1)},
}
SINKS = {"vanilla": None, "off_by_one": (0.0, 0.0, 0.0, 0.0), "learnable": (0.5, -np.inf, 8.0, -3.0), "large": (20.0, 100.0, -20.0, 2.0)}
HEADS = {"mha": 4, "gqa": 2, "mqa": 1}


@pytest.fixture(scope="module", params=["native", "rescaled"])
def generation(request: pytest.FixtureRequest) -> str:
    """Of the module, so that all tests over one library run together."""
    return str(request.param)


@pytest.fixture
def ck(generation: str, request: pytest.FixtureRequest) -> Fakes:
    """The engine over an AITER that takes sinks, then over one that does not."""
    found: Fakes = request.getfixturevalue("fake_ck" if generation == "native" else "fake_old_ck")
    return found


def call(options: str, sinks: str, heads: str = "gqa", dtype: str = "bfloat16", dims: tuple[int, int] = (16, 8)) -> dict[str, Any]:
    """Arguments of one attention call."""
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape).astype(np.float32)).astype(dtype)

    found: dict[str, Any] = {
        "q": normal(B, 4, S, dims[0]),
        "k": normal(B, HEADS[heads], T, dims[0]),
        "v": normal(B, HEADS[heads], T, dims[1]),
    }
    found |= OPTIONS[options]
    if "bias" in found:
        batch, head = found["bias"]
        found["bias"] = normal(B if batch is True else 1, 4 if head is True else 1, S, T)
    if SINKS[sinks] is not None:
        found["sinks"] = jnp.asarray(np.array(SINKS[sinks], np.float32))
    return found


def evaluate(arguments: dict[str, Any], engine: str, **options: Any) -> dict[str, np.ndarray]:
    """out, lse and the gradients of a weighted sum of out, as float32."""
    wrt = {name: arguments[name] for name in ("q", "k", "v", "sinks", "bias") if name in arguments}
    rest = {name: value for name, value in arguments.items() if name not in wrt} | options

    def loss(moving: dict[str, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        out, lse = attn_jax_rocm_sink.attention(**moving, **rest, return_lse=True, engine=engine)
        weight = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return (out.astype(jnp.float32) * weight).sum(), (out, jax.lax.stop_gradient(lse))

    gradients, (out, lse) = jax.jit(jax.grad(loss, has_aux=True))(wrt)
    found = {"out": out, "lse": lse} | {f"d{name}": value for name, value in gradients.items()}
    return {name: np.asarray(value.astype(jnp.float32)) for name, value in found.items()}


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference against the largest value; the same infinities are no difference, others and NaN are infinite."""
    same = (found == wanted) | (np.abs(wanted) < 1e-30) & (np.abs(found) < 1e-6)
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(found - wanted))
    scale = max(float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0)), 1e-3)
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0)) / scale


def assert_close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], dtype: str = "bfloat16", sinks: Any = None) -> None:
    """Within three roundings to ``dtype`` of the largest value. dsinks adds products with a rounded output: of the sum of their sizes."""
    step = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        limit = 1e-5 if name == "lse" else 3 * step
        size = 1.0
        if name == "dsinks":
            with np.errstate(invalid="ignore"):
                share = np.nan_to_num(np.exp(np.asarray(sinks, np.float64)[:, None] - wanted["lse"]))
            weight = np.abs(np.cos(np.arange(wanted["out"].size))).reshape(wanted["out"].shape)
            sizes = (share * (weight * np.abs(wanted["out"])).sum(-1)).sum((0, 2))
            size = max(1.0, float(sizes.max()) / max(float(np.abs(value).max()), 1e-3))
        far = error(found[name], value)
        assert far <= limit * size, f"{name}: {far:.2e} of its largest value (at most {limit * size:.2e})"


PAIRS = {(options, "learnable") for options in OPTIONS} | {("causal", sinks) for sinks in SINKS}
PAIRS |= {("bias", "large"), ("lengths", "large"), ("no_key", "vanilla"), ("window", "off_by_one"), ("top_left", "large")}


@pytest.mark.parametrize(("options", "sinks"), sorted(PAIRS))
def test_values_are_those_of_the_host_engine(ck: Fakes, options: str, sinks: str) -> None:
    arguments = call(options, sinks)
    assert_close(evaluate(arguments, "ck"), evaluate(arguments, "host"), sinks=arguments.get("sinks"))
    assert [line["call"] for line in ck.take_log()] == ["mha_fwd", "mha_bwd"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("heads", HEADS)
def test_grouped_heads_and_dtypes(ck: Fakes, heads: str, dtype: str) -> None:
    arguments = call("causal", "learnable", heads, dtype)
    assert_close(evaluate(arguments, "ck"), evaluate(arguments, "host"), dtype, arguments["sinks"])


@pytest.mark.parametrize("dropped", ["sinks", "kv_lengths", "window", "bias"])
def test_the_comparison_finds_an_ignored_argument(fake_ck: Fakes, dropped: str) -> None:
    name = {"sinks": "causal", "kv_lengths": "lengths", "window": "causal_window", "bias": "bias"}[dropped]
    arguments = call(name, "learnable")
    wanted = evaluate(arguments, "host")
    found = evaluate({key: value for key, value in arguments.items() if key != dropped}, "ck")
    with pytest.raises(AssertionError, match="largest value"):
        assert_close(found, {key: wanted[key] for key in found}, sinks=arguments["sinks"])


def test_the_comparison_finds_a_backward_from_the_log_sum_exp_of_the_keys_alone(fake_ck: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = call("causal", "learnable")
    wanted, whole_call = evaluate(arguments, "host"), _vjp._call

    def without_the_sink(direction: str, inputs: Any, operands: dict[str, jax.Array], *rest: Any) -> dict[str, jax.Array]:
        if direction == "backward":
            lse = operands["lse"]
            operands = operands | {"lse": lse + jnp.log1p(-jnp.exp(operands["sinks"].astype(jnp.float32)[:, None] - lse))}
        return whole_call(direction, inputs, operands, *rest)

    monkeypatch.setattr(_vjp, "_call", without_the_sink)
    with pytest.raises(AssertionError, match="largest value"):
        assert_close(evaluate(arguments, "ck"), wanted, sinks=arguments["sinks"])


def test_the_sink_is_native_exactly_where_aiter_takes_it(fake_ck: Fakes) -> None:
    evaluate(call("causal", "learnable"), "ck")
    forward, backward = fake_ck.take_log()
    assert (forward["has_sink"], forward["sink_ptr"], forward["sink_size"], forward["mask"]) == ("1", "1", "0", "2")
    assert (backward["sink_ptr"], backward["d_sink_ptr"]) == ("0", "0")


def test_a_vanilla_call_passes_no_sink(fake_ck: Fakes) -> None:
    evaluate(call("causal", "vanilla"), "ck")
    forward, _ = fake_ck.take_log()
    assert (forward["has_sink"], forward["sink_ptr"]) == ("0", "0")


def test_arguments_by_name(fake_ck: Fakes) -> None:
    evaluate(call("bias_b1", "learnable"), "ck")
    forward, backward = fake_ck.take_log()
    wanted = {"stream": 0x5EED, "timed": 0, "type": "bf16", "group": 0, "bias": 1, "mask": 2, "left": -1, "right": 0}
    wanted |= {"seqlen_q": S, "seqlen_k": T, "batch": B, "max_seqlen_q": S, "nhead_q": 4, "nhead_k": 2, "hdim_q": 16, "hdim_v": 8}
    wanted |= {"asm": 0, "probe": 0, "p_drop": 0, "seqstart": 0, "cu": 0, "seqlens": 0}
    wanted |= {"q_strides": f"16,{16 * S},{64 * S}", "bias_strides": f"{T},0,{S * T}"}
    for line in (forward, backward):
        assert {name: line[name] for name in wanted} == {name: str(value) for name, value in wanted.items()}
    assert forward["lse_strides"] == f"{S},{4 * S}" == backward["lsed"]
    assert (backward["deterministic"], backward["dbias"], backward["max_seqlen_k"], backward["p_undrop"]) == ("1", "1", str(T), "1")
    assert backward["dk_strides"] == f"16,{16 * T},{64 * T}"


@pytest.mark.parametrize(
    ("options", "mask"),
    [("full", "0,-1,-1"), ("causal", "2,-1,0"), ("top_left", "1,-1,0"), ("window", "2,2,1"), ("causal_window", "2,1,0")],
)
def test_masks_have_cks_numbers(fake_ck: Fakes, options: str, mask: str) -> None:
    evaluate(call(options, "vanilla"), "ck")
    for line in fake_ck.take_log():
        assert f"{line['mask']},{line['left']},{line['right']}" == mask


def test_lengths_go_as_cumulative_used_lengths_in_batch_mode(fake_ck: Fakes) -> None:
    evaluate(call("lengths", "learnable"), "ck")
    for line in fake_ck.take_log():
        assert (line["group"], line["seqstart"], line["cu"], line["seqlens"]) == ("0", "0", "1", "0")


@pytest.mark.parametrize(("sinks", "asm"), [("vanilla", "1"), ("off_by_one", "0"), ("learnable", "0")])
def test_a_sink_turns_the_assembly_kernels_off(fake_ck: Fakes, sinks: str, asm: str) -> None:
    evaluate(call("causal", sinks, dims=(128, 128)), "ck")
    forward, backward = fake_ck.take_log()
    assert (forward["asm"], backward["asm"]) == (asm, "0")
    fake_ck.set_aiter(gpu="gfx90a")
    evaluate(call("causal", sinks, dims=(128, 128)), "ck")
    assert fake_ck.take_log()[0]["asm"] == "0"


def test_the_sink_gradient_under_dropout_has_no_factor(ck: Fakes) -> None:
    """Finite differences with the mask held fixed; CK's own sum would be too small by 1 - p."""
    arguments = call("full", "learnable", dtype="float16") | {"sinks": jnp.array([0.5, 1.0, 2.0, -1.0])}
    options = {"dropout_p": 0.5, "dropout_seed": 7}
    found = evaluate(arguments, "ck", **options)

    def loss(sinks: jax.Array) -> float:
        out = attn_jax_rocm_sink.attention(**{**arguments, "sinks": sinks}, **options, engine="ck").astype(jnp.float32)
        return float((out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)).sum())

    step = 0.25
    for head in range(4):
        moved = jnp.zeros(4).at[head].set(step)
        numeric = (loss(arguments["sinks"] + moved) - loss(arguments["sinks"] - moved)) / (2 * step)
        assert abs(found["dsinks"][head] - numeric) <= 0.05 * np.abs(found["dsinks"]).max()
    assert np.abs(found["dsinks"]).min() > 0.01
    assert all(line["p_drop"] == "0.5" for line in ck.take_log())


def test_gradients_are_the_same_bits_each_time(ck: Fakes) -> None:
    arguments = call("causal", "learnable", "mqa")
    first, second = (evaluate(arguments, "ck") for _ in range(2))
    for name, value in first.items():
        assert value.tobytes() == second[name].tobytes(), name


def test_only_sinks_need_no_kernel_of_ck(fake_ck: Fakes) -> None:
    arguments = call("causal", "learnable")
    sinks = arguments.pop("sinks")
    jax.grad(lambda sinks: attn_jax_rocm_sink.attention(**arguments, sinks=sinks, engine="ck").astype(jnp.float32).sum())(sinks)
    assert [line["call"] for line in fake_ck.take_log()] == ["mha_fwd"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"k_start": 3}, "k_start"),
        ({"key_padding_mask": jnp.ones((B, T), bool)}, "key_padding_mask"),
        ({"q_start": jnp.array([0, 1])}, r"q_start \(supported: top-left and bottom-right alignment\)"),
        ({"scale": 0.0}, r"scale 0\.0+ \(supported: above 0\)"),
        ({"bias": jnp.zeros((1, 1, S, T), jnp.float32)}, r"a bias of float32 \(supported: the dtype of q\)"),
        ({"bias": jnp.zeros((1, 1, 1, T), jnp.bfloat16)}, "a bias that broadcasts over queries or keys"),
        ({"bias": jnp.zeros((1, 1, S, T), jnp.bfloat16), "kv_lengths": 3}, "a bias together with lengths"),
        ({"dropout_p": 1.0, "dropout_seed": 1}, "dropout_p=1"),
        ({"contract": "ordered-v1"}, r"contract ordered-v1 \(engine ck keeps none\)"),
    ],
)
def test_what_ck_does_not_run_is_refused_by_reason(ck: Fakes, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedProblem, match=reason):
        attn_jax_rocm_sink.attention(**{**call("causal", "learnable"), **change}, engine="ck")
    assert ck.take_log() == []


@pytest.mark.parametrize(
    ("dims", "dtype", "reason"),
    [
        ((20, 16), "bfloat16", "head dims 20 and 16"),
        ((192, 192), "bfloat16", None),
        ((264, 64), "bfloat16", "head_dim=264"),
        ((16, 16), "float32", "dtype float32"),
    ],
)
def test_head_dims_and_dtypes_are_a_table(fake_ck: Fakes, dims: tuple[int, int], dtype: str, reason: str | None) -> None:
    arguments = call("causal", "learnable", dtype=dtype, dims=dims)
    if reason is None:
        attn_jax_rocm_sink.attention(**arguments, engine="ck")
        return
    with pytest.raises(UnsupportedProblem, match=reason):
        attn_jax_rocm_sink.attention(**arguments, engine="ck")


def test_an_unknown_gpu_is_refused(fake_ck: Fakes) -> None:
    fake_ck.set_aiter(gpu="gfx1100")
    jax.clear_caches()
    with pytest.raises(UnsupportedProblem, match=r"GPU gfx1100 \(supported: gfx90a, gfx942, gfx950\)"):
        attn_jax_rocm_sink.attention(**call("causal", "learnable"), engine="ck")


def test_a_gradient_through_the_log_sum_exp_is_refused(ck: Fakes) -> None:
    arguments = call("causal", "learnable")
    q = arguments.pop("q")
    with pytest.raises(UnsupportedProblem, match="backward: a gradient through the log-sum-exp"):
        jax.grad(lambda q: attn_jax_rocm_sink.attention(q, **arguments, return_lse=True, engine="ck")[1].sum())(q)


def test_a_kernel_that_aiter_lacks_is_an_error(ck: Fakes) -> None:
    ck.set_aiter(has_kernel=False)
    with pytest.raises(XLA_ERRORS, match="AITER has no kernel for this call of mha_fwd"):
        jax.block_until_ready(attn_jax_rocm_sink.attention(**call("causal", "learnable"), engine="ck"))


def test_a_workspace_beyond_the_plan_is_an_error(ck: Fakes) -> None:
    ck.set_aiter(more_bytes=4096)
    evaluate(call("causal", "vanilla"), "ck")
    ck.set_aiter(more_bytes=4097)
    with pytest.raises(XLA_ERRORS, match=r"AITER asks for .* bytes of workspace and the plan has"):
        evaluate(call("causal", "vanilla"), "ck")


def test_no_keys_and_no_queries(ck: Fakes) -> None:
    q, k, sinks = jnp.ones((2, 4, 3, 16), jnp.bfloat16), jnp.ones((2, 2, 0, 16), jnp.bfloat16), jnp.array([0.5, 1.0, 2.0, 3.0])

    def loss(q: jax.Array, k: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, lse = attn_jax_rocm_sink.attention(q, k, k, sinks=sinks, return_lse=True, engine="ck")
        return out.astype(jnp.float32).sum(), lse

    (value, lse), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, sinks)
    assert value == 0 and np.array_equal(lse, np.broadcast_to(np.asarray(sinks)[:, None], (2, 4, 3)))
    assert [np.abs(np.asarray(part, np.float32)).max(initial=0) for part in gradients] == [0, 0, 0]
    (value, _), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q[:, :, :0], jnp.ones((2, 2, 4, 16), jnp.bfloat16), sinks)
    assert value == 0 and not np.asarray(gradients[1], np.float32).any() and not np.asarray(gradients[2]).any()
    assert ck.take_log() == []


def test_it_is_never_chosen_unasked() -> None:
    from attn_jax_rocm_sink._engines import select
    from attn_jax_rocm_sink.backend import BACKEND

    assert select("rocm") != "ck" and "ck" not in BACKEND.engines

"""No keyword is ignored: each one alone, away from its default, changes the result or is refused."""

from __future__ import annotations

import inspect
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from attn_jax_rocm_sink import attention
from attn_spec._errors import UnknownName
from jax_calls import B, H, S, T, bits, jax_arrays, make_call

CHANGES: dict[str, dict[str, Any]] = {
    "causal": {"causal": False},
    "scale": {"scale": 0.1},
    "key_padding_mask": {"key_padding_mask": jnp.arange(T)[None].repeat(B, 0) != 2},
    "kv_lengths": {"kv_lengths": 7},
    "q_start": {"q_start": 1},
    "k_start": {"k_start": 254},
    "window": {"window": (1, None)},
    "sinks": {"sinks": jnp.zeros(H)},
    "bias": {"bias": jnp.linspace(0.0, 1.0, T).reshape(1, 1, 1, T)},
    "dropout_p": {"dropout_p": 0.5, "dropout_seed": 3},
    "dropout_seed": {"dropout_p": 0.5, "dropout_seed": 4},
}
REFUSED: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "contract": ({"contract": "ordered-v0"}, UnknownName),
    "engine": ({"engine": "nothing"}, UnknownName),
    "dropout_p": ({"dropout_p": 0.5}, ValueError),
}


def run(**keywords: Any) -> bytes:
    return bits(attention(**jax_arrays(make_call()), **keywords)).tobytes()


@pytest.mark.parametrize("keyword", CHANGES)
def test_each_keyword_changes_the_result(keyword: str) -> None:
    default = {"dropout_p": 0.5, "dropout_seed": 3} if keyword == "dropout_seed" else {}
    if keyword == "k_start":
        # Positions move together, so k_start shows where its tiles split the row.
        default = {"k_start": 0}
    assert run(**CHANGES[keyword]) != run(**default)


@pytest.mark.parametrize("keyword", REFUSED)
def test_each_other_value_is_refused(keyword: str) -> None:
    keywords, error = REFUSED[keyword]
    with pytest.raises(error):
        run(**keywords)


def test_return_lse_adds_the_lse() -> None:
    out, lse = attention(**jax_arrays(make_call()), return_lse=True)
    assert bits(out).tobytes() == run() and lse.shape == (B, H, S) and lse.dtype == np.float32


def test_every_keyword_is_tested() -> None:
    keywords = {name for name, value in inspect.signature(attention).parameters.items() if value.kind is value.KEYWORD_ONLY}
    assert keywords == set(CHANGES) | set(REFUSED) | {"return_lse"}


@pytest.mark.parametrize("name", ["q_start", "k_start", "kv_lengths"])
def test_an_integer_equals_its_array(name: str) -> None:
    for dtype in (np.int32, np.int64):
        assert run(**{name: 3}) == run(**{name: np.full((B,), 3, dtype)})
    assert run(**{name: 3}) == run(**{name: np.int64(3)})

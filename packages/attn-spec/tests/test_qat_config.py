"""QATConfig: presets, fingerprint, refusals."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from attn_spec import QATConfig, get_op

CAUSAL = frozenset({"causal"})


def test_presets() -> None:
    assert QATConfig() == QATConfig.training() and QATConfig().p_outer == 2688
    assert QATConfig.fastvideo().v_axis == "head_dim" and QATConfig.fastvideo().qkv_outer == "none"
    assert QATConfig.training(causal=True).reasons(features=CAUSAL) == () == QATConfig.fastvideo().reasons(features=CAUSAL)
    with pytest.raises(FrozenInstanceError):
        QATConfig().enabled = False  # type: ignore[misc]


def test_every_field_moves_the_fingerprint_which_no_process_changes() -> None:
    base = QATConfig()
    others: dict[str, Any] = {"qkv_outer": "row", "p_outer": "row", "v_axis": "head_dim"}
    changed = [replace(base, **{field.name: others.get(field.name, not getattr(base, field.name))}) for field in fields(base)]
    assert len({base.fingerprint, *(config.fingerprint for config in changed)}) == len(changed) + 1
    assert len({base, *changed}) == len(changed) + 1
    assert replace(base, p_outer=2688).fingerprint == base.fingerprint
    code = "from attn_spec import QATConfig; print(QATConfig().fingerprint)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == base.fingerprint


def test_the_scale_of_p_is_a_number() -> None:
    scales = {"none": 1.0, "row": 2688.0, 2688.0: 2688.0, 3: 3.0}
    assert {outer: QATConfig(p_outer=outer).p_scale for outer in scales} == scales  # type: ignore[arg-type]


def test_get_op_takes_nothing_else_for_a_configuration() -> None:
    with pytest.raises(TypeError, match="get_op: config must be a QATConfig; got dict"):
        get_op("qat_attention", config={})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"smooth_k": 1}, TypeError, "smooth_k must be True or False; got 1"),
        ({"qkv_outer": "global"}, ValueError, "qkv_outer must be one of none, tile, row or a number; got 'global'"),
        ({"p_outer": "tile"}, ValueError, "p_outer 'tile' would let one query change another's output"),
        ({"p_outer": -1.0}, ValueError, "p_outer as a number must lie in"),
        ({"v_axis": "tokens"}, ValueError, "v_axis must be 'keys' or 'head_dim'; got 'tokens'"),
    ],
)
def test_bad_values_are_named(keywords: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        QATConfig(**keywords)


def test_a_causal_call_refuses_what_would_read_later_tokens() -> None:
    config = QATConfig(smooth_q=True, smooth_k=True, qkv_outer="tile")
    reasons = " ".join(config.reasons(features=CAUSAL))
    assert all(name in reasons for name in ("smooth_q", "smooth_k", "qkv_outer='tile'", "v_axis='keys'"))
    assert len(config.reasons(features=CAUSAL)) == 4 and config.reasons() == ()
    assert replace(config, enabled=False).reasons(features=CAUSAL) == ()

"""``python -m attn_spec``: what it prints, and that a failure is an exit status."""

from __future__ import annotations

import json

import attn_spec.cli.check as check_module
import numpy as np
import pytest
from attn_spec.__main__ import main
from attn_spec._registry import get_backend
from attn_spec._trace import Recording

SMALL = ["--batch", "3", "--heads", "4", "--kv-heads", "2", "--seq", "5", "--keys", "9", "--head-dim", "8"]


def test_info_lists_every_engine_with_its_state(capsys):
    assert main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["backends"]["attn_reference:pytorch"]["cpu"] == "usable"
    assert all(state for states in report["backends"].values() for state in states.values())
    assert report["environment"]["packages"]["attn-spec"]


def test_info_says_why_an_engine_is_not_usable(capsys):
    main(["info"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("attn_cuda")]
    assert lines and all(len(line.split(maxsplit=2)[2]) > 5 for line in lines)


def test_explain_names_the_runner_and_each_refusal(capsys):
    assert main(["explain", "--op", "attention", "--features", "causal", "sinks", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["chosen"].startswith("attn_reference:")
    assert any("device cpu (supported: cuda)" in reason for reason in answer["reasons"]["attn_cuda:cuda"])


@pytest.mark.parametrize(
    "op", ["joint_attn_qk_gemm", "joint_attn_softmax", "joint_attn_av_gemm", "joint_attention", "attention", "attention_varlen"]
)
def test_check_passes_for_the_definition_and_prints_the_trace(op, capsys):
    assert (
        main(["check", "--op", op, "--candidate", "pytorch", "--reference", "attn_reference:pytorch", *SMALL, "--check-grad", "--padding"])
        == 0
    )
    printed = capsys.readouterr().out
    assert "FAIL" not in printed and "trace kernel_fingerprint" in printed and "among twice its neighbours" in printed


class Splitting:
    """The reference with one addition that depends on the batch size, as a split over the batch would."""

    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def evaluate(self, call, **keywords):
        results = dict(self._backend.evaluate(call, **keywords))
        batch = next(iter(call.arrays.values())).shape[0]
        results["out"] = (results["out"].astype(np.float64) * (1 + 1e-7 * batch)).astype(np.float32)
        return results


def test_check_fails_when_bits_depend_on_the_batch(monkeypatch, capsys):
    faulty = Splitting(get_backend("attn_reference"))
    monkeypatch.setattr(check_module, "get_backend", lambda name: faulty)
    assert main(["check", "--candidate", "pytorch", "--dtype", "fp32", *SMALL]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert any("item 0 alone" in line for line in failed)


def test_unknown_candidates_are_named(capsys):
    assert main(["check", "--candidate", "atn_cuda"]) == 2
    assert "unknown backend 'atn_cuda'; known:" in capsys.readouterr().err


def test_compare_tells_zeros_apart_and_counts(tmp_path, capsys):
    left = np.array([0.0, 1.0, np.nan], np.float32)
    Recording({"out.x": left}).save(tmp_path / "a")
    Recording({"out.x": np.array([-0.0, 1.0, np.nan], np.float32), "out.y": left}).save(tmp_path / "b")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    printed = capsys.readouterr().out
    assert "1 elements differ, by up to 0 ulp; first at [0]: 0x00000000 against 0x80000000" in printed
    assert "only in" in printed

"""``python -m attn_spec``: what it prints, and that a failure is an exit status."""

from __future__ import annotations

import json
from dataclasses import replace

import attn_spec.cli.check as check_module
import numpy as np
import pytest
from attn_spec.__main__ import main
from attn_spec._registry import get_backend
from attn_spec._trace import Recording
from attn_spec.testing.inputs import Sizes, random_call
from attn_spec.testing.recordings import record, replay

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
    sizes = [option for option in SMALL if op != "joint_attention" or option not in ("--keys", "9")]
    padding = ["--padding"] if op in ("joint_attention", "joint_attn_softmax", "attention") else []
    assert (
        main(["check", "--op", op, "--candidate", "pytorch", "--reference", "attn_reference:pytorch", *sizes, *padding, "--check-grad"])
        == 0
    )
    printed = capsys.readouterr().out
    assert "FAIL" not in printed and "trace kernel_fingerprint" in printed and "among twice its neighbours" in printed


@pytest.mark.parametrize("window", (("2", "none"), ("none", "1"), ("none", "none"), ("0", "0")))
def test_check_takes_a_window_that_is_open(window, capsys):
    assert main(["check", *SMALL, "--no-causal", "--window", *window, "--candidate", "host"]) == 0
    assert "FAIL" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["check", *SMALL, "--window", "wide", "none"])


def test_an_open_window_is_not_a_bounded_one(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(check_module, "check", lambda call, *rest: seen.append(call.options["window"]) or {})
    for window in (("2", "none"), ("2", "0")):
        main(["check", *SMALL, "--window", *window])
    assert seen == [(2, None), (2, 0)]


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "joint_attention", "--sinks"], "--sinks does not apply to joint_attention"),
        (["--op", "joint_attn_softmax", "--causal"], "--causal does not apply to joint_attn_softmax"),
        (["--op", "joint_attention", "--keys", "7"], "--keys does not apply to joint_attention"),
        (["--batch", "0"], "--batch must be 1 or more; got 0"),
        (["--seq", "-3"], "--seq must be 0 or more; got -3"),
        (["--kv-heads", "3"], "query heads must be a positive multiple of kv heads"),
    ],
)
def test_check_refuses_what_it_would_ignore(arguments, message, capsys):
    assert main(["check", "--candidate", "pytorch", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_check_without_keys_tests_empty_rows(capsys):
    assert (
        main(["check", "--candidate", "pytorch", "--reference", "attn_reference:pytorch", "--keys", "0", "--seq", "3", "--check-grad"]) == 0
    )
    assert "T=0" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "5", "--kv-heads", "2"], "query heads must be a positive multiple of kv heads; got 5 query heads and 2 kv heads"),
        (["--batch", "-1"], "--batch must be 0 or more; got -1"),
        (["--head-dim", "0"], "the head dim of q must be at least 1; got 0"),
        (["--value-dim", "0"], "the head dim of v must be at least 1; got 0"),
        (["--op", "qat_attention", "--head-dim", "24"], "qat_attention: the head dim must be a multiple of 16 from 16 to 256; got 24"),
        (["--op", "attn", "--contract", "ordered-v1"], "attn: it stands outside every contract, ordered-v1 included"),
        (["--op", "joint_attn_softmax", "--features", "sinks"], "joint_attn_softmax: unknown argument 'sinks'"),
        (["--contract", "nope"], "unknown contract 'nope'"),
        (["--features", "nonsense"], "unknown feature 'nonsense'"),
    ],
)
def test_explain_refuses_problems_that_cannot_exist(arguments, message, capsys):
    assert main(["explain", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_explain_describes_the_call_that_a_user_would_make(capsys):
    sizes = ["--batch", "3", "--heads", "4", "--kv-heads", "2", "--seq", "5", "--keys", "9"]
    for arguments, words in (
        ([], "B=3 H=4 K=2 S=5 T=9 D=128 V=128 bfloat16 cpu ordered-v1 causal\n"),
        (["--no-causal", "--features", "window", "bias", "gradient"], "ordered-v1 bias gradient window\n"),
        (["--op", "attention_varlen", "--features", "seqlens_q"], "S=5 T=9 D=128 V=128 bfloat16 cpu ordered-v1 causal seqlens_q\n"),
        (["--op", "qat_attention"], "cpu nvfp4-ordered-v1 config="),
        (["--op", "joint_attn_softmax", "--features", "key_padding_mask"], "B=3 H=1 K=1 S=20 T=9"),
    ):
        main(["explain", *sizes, *arguments])
        assert words in capsys.readouterr().out


def test_explain_exits_1_when_nothing_runs_the_problem(capsys):
    assert main(["explain", "--device", "rocm", "--features", "causal,dropout"]) == 1
    assert "no installed backend" in capsys.readouterr().out


def test_production_attention_has_no_contract(capsys):
    main(["explain", "--op", "attn"])
    assert "cpu none" in capsys.readouterr().out


@pytest.mark.parametrize("contract", ("ordered-v1", "sm90-v1"))
def test_check_runs_the_contract_that_it_names(contract, monkeypatch, capsys):
    assert main(["check", "--contract", contract, "--seq", "5", "--heads", "2", "--candidate", "host", "--check-grad"]) == 0
    assert f"trace contract: {contract}" in capsys.readouterr().out
    seen = []
    monkeypatch.setattr(check_module, "check", lambda call, *rest: seen.append(call.contract) or {})
    main(["check", "--contract", contract])
    assert seen == [contract]


def recorded(path, flip=False):
    """A small call of sm90-v1 with its results, one bit of them wrong with ``flip``."""
    call = replace(random_call("attention", "bfloat16", Sizes(batch=1, heads=2, queries=3, keys=130), gradients=True), contract="sm90-v1")
    results = get_backend("attn_reference").evaluate(call, engine="host")
    if flip:
        results["lse"] = np.nextafter(results["lse"], np.float32(9))
    record(call, results, {"device": "somewhere"}).save(path)
    return str(path)


def test_check_computes_a_recording_again(tmp_path, capsys):
    assert main(["check", "--recording", recorded(tmp_path / "a")]) == 0
    printed = capsys.readouterr().out
    assert "5 of 5 passed" in printed and "recorded device: somewhere" in printed and "recorded contract: sm90-v1" in printed
    assert main(["check", "--recording", recorded(tmp_path / "b", flip=True), "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [name for name, row in rows.items() if not row["passed"]] == ["lse"]


def test_check_records_what_it_computes_again(tmp_path, capsys):
    for number, arguments in enumerate(
        (["--window", "2", "none", "--check-grad"], ["--op", "qat_attention", "--head-dim", "16"], ["--contract", "sm90-v1"])
    ):
        path = str(tmp_path / f"{number}.safetensors")
        sizes = ["--batch", "2", "--heads", "2", "--seq", "5"]
        assert main(["check", "--candidate", "pytorch", *sizes, *arguments, "--record", path]) == 0
        assert main(["check", "--candidate", "pytorch", "--recording", path]) == 0
        assert "recorded build: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "option", (["--seq", "77"], ["--dtype", "fp16"], ["--op", "attention"], ["--no-causal"], ["--seed", "0"], ["--sinks"], ["--check-grad"])
)
def test_a_recording_takes_no_option_that_it_decides(option, tmp_path, capsys):
    assert main(["check", "--recording", recorded(tmp_path / "a"), *option]) == 2
    assert f"a recording has its own call; it takes no {option[0].replace('--no-', '--')}" in capsys.readouterr().err


def test_the_reference_is_an_engine_that_can_run_the_call(capsys):
    sizes = ["--batch", "2", "--heads", "2", "--seq", "3", "--head-dim", "16"]
    assert main(["check", "--candidate", "pytorch", "--op", "qat_attention", *sizes]) == 0
    assert "reference: attn_reference:pytorch" in capsys.readouterr().out
    assert main(["check", "--candidate", "pytorch", "--reference", "host", *sizes]) == 0
    assert "reference: attn_reference:host" in capsys.readouterr().out


def test_check_refuses_a_recording_without_a_call(tmp_path):
    Recording({"out.lse": np.zeros(1, np.float32)}, {"op": "attention"}).save(tmp_path / "c")
    with pytest.raises(ValueError, match="describes no call: its header lacks options, wrt, contract"):
        replay(Recording.load(tmp_path / "c"))

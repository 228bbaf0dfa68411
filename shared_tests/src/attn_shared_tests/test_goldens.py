"""Goldens: recorded bytes come back on every backend and machine."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from attn_spec._trace import Recording
from attn_spec.testing.asserts import assert_same
from attn_spec.testing.recordings import record, replay
from attn_spec.testing.runner import Evaluate, Runner

from attn_shared_tests import faulty, goldens
from attn_shared_tests.controls import assert_bites, control_id
from attn_shared_tests.reference import identity

FILES = sorted(goldens.FOLDER.glob("*.safetensors"))
FROM_A_GPU = sorted((goldens.FOLDER / "h200").glob("*.safetensors"))
"""Recorded on an H200 by tensor cores."""


def check_golden(evaluate: Evaluate, path: Path) -> None:
    call, expected = replay(Recording.load(path))
    assert_same(evaluate(call), expected, path.stem)


@pytest.mark.parametrize("path", [*FILES, *FROM_A_GPU], ids=lambda path: path.stem)
def test_recorded_bytes_come_back(backend: Runner, path: Path) -> None:
    backend.run(check_golden, path)


def test_every_golden_call_has_its_file() -> None:
    assert [path.stem for path in FILES] == sorted(goldens.golden_calls())
    assert [path.stem for path in FROM_A_GPU] == sorted(goldens.tensor_core_calls())


@pytest.mark.parametrize("path", FROM_A_GPU, ids=lambda path: path.stem)
def test_a_recording_of_a_gpu_holds_its_call_and_says_where_it_is_from(path: Path) -> None:
    recording = Recording.load(path)
    assert identity(replay(recording)[0]) == identity(goldens.tensor_core_calls()[path.stem])
    assert recording.header["device"] == "NVIDIA H200" and recording.header["made_by"] == "attn_triton:triton"
    assert datetime.date.fromisoformat(recording.header["date"]) and path.stat().st_size <= goldens.MOST_BYTES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_golden_is_small_and_says_where_it_is_from(path: Path) -> None:
    header = Recording.load(path).header
    assert (
        header["contract"] == (goldens.golden_calls()[path.stem].contract or goldens.CONTRACT)
        and header["made_by"] == "attn_reference:pytorch"
    )
    assert header["device"].startswith("cpu ") and datetime.date.fromisoformat(header["date"])
    assert path.stat().st_size <= goldens.MOST_BYTES


def test_recordings_hold_the_calls_of_the_generator(tmp_path: Path) -> None:
    """A golden file is the recording of its call; a changed call needs a new file."""
    for name, call in goldens.golden_calls().items():
        stored, results = replay(Recording.load(goldens.FOLDER / f"{name}.safetensors"))
        record(call, results, {}).save(tmp_path / name)
        again, _ = replay(Recording.load(tmp_path / name))
        assert identity(again) == identity(stored), name


@pytest.mark.parametrize("fault", (faulty.returns_zeros, faulty.rounds_twice, faulty.aligns_causal_top_left), ids=control_id)
def test_the_clause_catches(reference: Evaluate, fault: faulty.Fault) -> None:
    for name in ("attention-causal-float32", "h200/attention-sm90-causal-bfloat16"):
        assert_bites(check_golden, fault, reference, goldens.FOLDER / f"{name}.safetensors")

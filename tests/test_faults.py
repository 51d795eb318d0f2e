"""benchmarks/faults: lost and doubled samples are counted from logs, and dtrain loses none."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import protocol, runs
from tests.test_benchmarks import run


@pytest.fixture
def four_samples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FAULTS_SAMPLES", "4")
    size = protocol.SAMPLES
    protocol.resize(4)
    yield
    protocol.resize(size)
    os.environ.pop("FAULTS_SAMPLES", None)


def write(folder: Path, start: int, rank: int, first: int, *steps: list[int]) -> None:
    lines: list[dict[str, Any]] = [{"from": first}]
    lines += [{"step": first + n, "samples": samples, "loss": float(rank)} for n, samples in enumerate(steps)]
    (folder / f"start-{start}-rank-{rank}-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.usefixtures("four_samples")
def test_the_history_of_a_run_has_the_last_execution_of_each_step(tmp_path: Path) -> None:
    # Two epochs of two steps on two ranks. The first start is killed in step 3, and saved after step 1.
    write(tmp_path, 0, 0, 0, [0], [2], [1], [3])
    write(tmp_path, 0, 1, 0, [1], [3], [0])
    write(tmp_path, 1, 0, 2, [0], [2])
    write(tmp_path, 1, 1, 2, [1], [3])
    result = runs.count(tmp_path, 1.0)
    assert (result.lost, result.doubled, result.repeated) == (0, 0, 2)
    assert result.losses == {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5}


@pytest.mark.usefixtures("four_samples")
def test_an_order_that_begins_anew_loses_and_doubles_samples(tmp_path: Path) -> None:
    write(tmp_path, 0, 0, 0, [0], [1], [2])
    write(tmp_path, 1, 0, 2, [0], [1], [2], [3], [0], [1])
    result = runs.count(tmp_path, 1.0)
    assert (result.lost, result.doubled, result.repeated) == (2, 2, 1)


@pytest.mark.usefixtures("four_samples")
def test_a_line_that_was_cut_by_a_kill_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, 0, 0, 0, [0, 1], [2, 3])
    path = tmp_path / "start-0-rank-0-1.jsonl"
    path.write_text(path.read_text() + '{"step": 2, "sam')
    assert runs.count(tmp_path, 1.0).lost == 4  # of the second epoch


def test_kills_are_the_same_for_all_contenders() -> None:
    assert runs.random_kills(3, 5) == runs.random_kills(3, 5) != runs.random_kills(3, 6)
    assert all(0 < kill.step < protocol.STEPS for kill in runs.random_kills(20, 1))


@pytest.mark.slow
def test_dtrain_loses_and_doubles_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    printed = run("faults", "--only", "dtrain", "--quick", "--json", out, cache=tmp_path / "cache")
    (measured,) = json.loads(out.read_text())["measured"]["dtrain"]
    for ranks in ("", ", other ranks"):
        assert (measured[ranks]["lost"], measured[ranks]["doubled"]) == (0, 0)
    assert measured[""]["difference"] == 0
    assert "equal bits" in printed
    assert "-m benchmarks.faults --only dtrain" in printed

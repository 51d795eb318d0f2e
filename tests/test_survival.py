"""Runs that change their world, and runs that are killed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kill_soak
from tests.forked_python import forked_python
from tests.whole_runs import ROOT, metrics, train_on

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("digits")]


def keys_of_steps(run_dir: Path) -> dict[int, list[str]]:
    """The samples of every step over all ranks, sorted."""
    keys: dict[int, list[str]] = {}
    for path in (run_dir / "logs").glob("keys-rank-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            keys.setdefault(line["step"], []).extend(line["keys"])
    return {step: sorted(found) for step, found in sorted(keys.items())}


def test_one_epoch_on_4_then_2_then_3_ranks_and_1_uses_every_sample_once(tmp_path: Path) -> None:
    common = ("data.record_keys=true", "train.eval_every=0", "model.width=8", "schedule=constant")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_on(2, whole, "train.max_epochs=1", *common)
    for ranks, last_step in ((4, 6), (2, 12), (3, 18)):
        train_on(ranks, parts, f"train.max_steps={last_step}", *common, f"data.num_workers={ranks % 3}")
    train_on(1, parts, "train.max_epochs=1", *common)
    used = keys_of_steps(parts)
    assert used == keys_of_steps(whole)
    times = Counter(key for keys in used.values() for key in keys)
    assert set(times.values()) == {1}
    assert len(times) == 1437
    assert metrics(parts) == pytest.approx(metrics(whole), rel=1e-4)


def test_another_global_batch_in_mid_epoch_uses_what_remains_once(tmp_path: Path) -> None:
    common = ("data.record_keys=true", "train.eval_every=0", "model.width=8", "schedule=constant")
    train_on(3, tmp_path, "train.max_steps=7", *common)
    train_on(2, tmp_path, "train.max_steps=10", "train.global_batch_size=90", *common)
    train_on(4, tmp_path, "train.max_epochs=1", "train.global_batch_size=128", "train.micro_batch_size=16", *common)
    times = Counter(key for keys in keys_of_steps(tmp_path).values() for key in keys)
    assert set(times.values()) == {1}
    assert len(times) == 1437


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks to kill in /proc, which is Linux's")
def test_killed_ranks_and_jobs_leave_no_trace_in_what_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # One rank and a whole job are killed; `python -m benchmarks.kill_soak` does it 50 times.
    finish = kill_soak.finish

    def finish_in_forks(*arguments: Any) -> None:  # these starts are not killed
        with monkeypatch.context() as forked:
            forked.setattr(sys, "executable", forked_python())
            finish(*arguments)

    monkeypatch.setattr(kill_soak, "finish", finish_in_forks)
    options = ["--rounds=2", "--ranks=2", "--seed=51", f"--dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", [kill_soak.__file__, *options])
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    kill_soak.main()
    assert "survived 2 of 2 rounds" in capsys.readouterr().out

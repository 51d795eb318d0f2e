"""Doctor names what limits a run: three runs that are made slow in one place each, with real ranks."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dtrain.doctor import main
from tests.ranks import RanksFailed, run_ranks

SMALL = (
    "experiment=digits",
    "tracker=none",
    "train.global_batch_size=16",
    "model._target_=tests.diagnosis.slow.SleepyModel",
    "~model.classes",
    "~model.width",
)


def examined(folder: Path, *overrides: str, ranks: int = 2) -> tuple[dict[str, Any], list[str]]:
    """What doctor writes to its file, and what each rank prints."""
    file = folder / "doctor.json"

    def one(rank: int) -> str:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            assert main([*SMALL, f"run.dir={folder / 'run'}", *overrides, "--seconds=0.1", f"--json={file}"]) == 0
        return text.getvalue()

    texts = run_ranks(ranks, one, init=False)
    return json.loads(file.read_text()), texts


def test_a_run_is_examined_in_a_world_of_one_and_nothing_is_left_behind(tmp_path: Path, digits: Path) -> None:
    found, (text,) = examined(tmp_path, "data.num_workers=0", ranks=1)
    assert [path.name for path in tmp_path.iterdir()] == ["doctor.json"]
    run = found["run"]
    rates = run["samples_per_second"]
    assert set(rates) == {"data", "compute", "step", "together", "run"}
    assert rates["compute"] == rates["step"]
    assert all(rate > 0 for rate in rates.values())
    assert run["gains"]["communication"] == 1
    assert run["facts"]["reducing"] == 0
    for part in ("shards", "checkpoints", "loader alone", "step alone", "both together", "verdict"):
        assert re.search(rf"^  \w+ +{part}  +\S", text, re.MULTILINE), part
        assert part in [finding["subject"] for finding in found["findings"]]


@pytest.mark.slow
def test_a_static_graph_which_has_to_be_timed_in_another_order_is_judged_too(tmp_path: Path, digits: Path) -> None:
    hook = "parallel.comm_hook={_target_: tests.diagnosis.slow.sleepy_hook, state: {seconds: 0.3}}"
    found, _ = examined(tmp_path, hook, "parallel.static_graph=true")
    assert found["run"]["verdict"] == "communication"
    assert found["run"]["facts"]["times"]["compute"] < 0.3


@pytest.mark.slow
def test_slow_data_are_the_limit(tmp_path: Path, digits: Path) -> None:
    slow = "data.augment={_target_: tests.diagnosis.slow.SleepyAugmentation, seconds: 0.05}"
    found, (text, silence) = examined(tmp_path, slow)
    run = found["run"]
    assert run["verdict"] == "data"
    # 8 samples of 50 ms for each rank's only worker.
    assert run["facts"]["times"]["data"] >= 8 * 0.05 * 0.9
    assert run["facts"]["waiting"]
    assert re.search(r"data.num_workers=\d+, though there are fewer cores", run["advice"][0])
    assert "the data limit this run" in text
    assert silence == ""


@pytest.mark.slow
def test_a_slow_model_is_the_limit(tmp_path: Path, digits: Path) -> None:
    found, (text, _) = examined(tmp_path, "+model.seconds=0.5")
    assert found["run"]["verdict"] == "model"
    assert found["run"]["facts"]["times"]["compute"] >= 0.5
    assert "the model limits this run" in text


@pytest.mark.slow
def test_a_slow_all_reduce_is_the_limit(tmp_path: Path, digits: Path) -> None:
    hook = "parallel.comm_hook={_target_: tests.diagnosis.slow.sleepy_hook, state: {seconds: 0.5}}"
    found, (text, _) = examined(tmp_path, hook)
    run = found["run"]
    assert run["verdict"] == "communication"
    assert run["facts"]["times"]["step"] >= 0.5
    assert "parallel.comm_hook" in run["advice"][0]
    assert "communication limits this run" in text


@pytest.mark.slow
def test_a_mistake_of_one_rank_ends_all_of_them_and_leaves_nothing(
    tmp_path: Path, digits: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RanksFailed) as failed:
        examined(tmp_path, "task._target_=tests.diagnosis.slow.FailsOnRankOne")
    assert len(failed.value.reports) == 2
    assert not failed.value.hung
    shown = capfd.readouterr().err
    assert "dtrain: rank 1 failed\n" in shown
    assert "ZeroDivisionError: made up" in shown
    assert "dtrain: rank 0 stops: rank 1 failed" in shown
    assert list(tmp_path.iterdir()) == []

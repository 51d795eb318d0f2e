"""The same command again, a longer one, a shorter one, a run directory alone, and sweeps in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks.fault_hook import faulty
from dtrain import command_line, train
from dtrain.runs.recompose import recompose_if_run
from tests.ranks import RanksFailed, run_ranks
from tests.refusals import assert_refused
from tests.whole_runs import QUIET, metrics, records, status, train_on, tree

pytestmark = pytest.mark.usefixtures("digits")
SMALL = ("model.width=4", "checkpoint.best=null")


def command(ranks: int, *arguments: str) -> None:
    """The entry point with exactly these arguments."""
    run_ranks(ranks, lambda rank: command_line.run(train.train, arguments, recompose_if_run), init=False, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_finished_run_says_so_and_is_left_as_it_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], ranks: int
) -> None:
    train_on(1, tmp_path, *SMALL, "train.max_steps=2")
    before = tree(tmp_path)
    capfd.readouterr()
    train_on(ranks, tmp_path, *SMALL, "train.max_steps=2", "run.name=other", "train.log_every=5")
    assert tree(tmp_path) == before
    said = capfd.readouterr()
    assert_refused(said.out, "finished at step 2 already", str(tmp_path), "train.max_steps=MORE")
    # torch 2.9 writes a line of its own for each process group of gloo.
    assert len([line for line in said.out.splitlines() if not line.startswith("[Gloo]")]) == 1
    assert said.err == ""


@pytest.mark.slow
def test_a_run_directory_alone_resumes_and_a_longer_length_extends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "STOP").touch()
    train_on(1, tmp_path, *SMALL, "train.max_steps=4")
    assert status(tmp_path)["state"] == "stopped"
    command(1, f"run.dir={tmp_path}")
    assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("finished", 4)
    assert "changed since the last start" not in capfd.readouterr().out
    command(1, f"run.dir={tmp_path}", "train.max_steps=6")
    assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("finished", 6)
    assert "changed since the last start: train.max_steps: 4 -> 6" in capfd.readouterr().out
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["model"]["width"] == 4
    assert len(metrics(tmp_path)) == 6


@pytest.mark.slow
def test_a_stopped_run_that_is_asked_for_fewer_steps_is_refused_and_for_as_many_is_evaluated_and_finished(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "STOP").touch()
    train_on(1, tmp_path, *SMALL, "train.max_steps=100", faulty("slow@step=2,seconds=1.5"))
    done = status(tmp_path)["step"]
    assert done >= 2
    before = tree(tmp_path)
    with pytest.raises(RanksFailed):
        command(1, f"run.dir={tmp_path}", f"train.max_steps={done - 1}")
    assert_refused(capfd.readouterr().err, f"train.max_steps={done - 1}", f"has done {done} steps", "run.dir")
    assert tree(tmp_path) == before
    command(1, f"run.dir={tmp_path}", f"train.max_steps={done}")
    assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("finished", done)
    assert [record["step"] for record in records(tmp_path) if "eval/loss" in record] == [done]


@pytest.mark.slow
def test_fewer_epochs_than_a_run_has_done_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train_on(1, tmp_path, *SMALL, "train.max_epochs=2", "train.global_batch_size=1437")
    before = tree(tmp_path)
    with pytest.raises(RanksFailed):
        command(1, f"run.dir={tmp_path}", "train.max_epochs=1")
    assert_refused(capfd.readouterr().err, "train.max_epochs=1", "has done 2 steps", "end it after 1", "run.dir")
    with pytest.raises(RanksFailed):  # max_epochs ends it earlier
        command(1, f"run.dir={tmp_path}", "train.max_steps=9")
    assert_refused(
        capfd.readouterr().err, "train.max_epochs=2 ends it", "train.max_steps: null -> 9", "Increase train.max_epochs"
    )
    assert tree(tmp_path) == before


@pytest.mark.slow
def test_a_sweep_over_seeds_and_lengths_makes_a_run_for_each_and_can_be_repeated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = ("-m", "experiment=digits", *QUIET, *SMALL)
    command(1, *sweep, "run.seed=0,1", "train.max_steps=1")
    runs = sorted(path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert [(status(run)["state"], status(run)["step"]) for run in runs] == [("finished", 1)] * 2
    before = {run: tree(run) for run in runs}
    capfd.readouterr()
    command(1, *sweep, "run.seed=0", "train.max_steps=1,2")
    said = capfd.readouterr().out
    assert said.count("finished at step 1 already") == 1
    assert said.count("finished at step 2 (") == 1
    assert {run: tree(run) for run in runs} == before

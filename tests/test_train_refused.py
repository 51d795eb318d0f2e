"""A command that is refused changes nothing, neither in a new run directory nor in that of a finished run."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.fault_hook import faulty
from dtrain import command_line, train
from tests.ranks import RanksFailed, run_ranks
from tests.refusals import assert_refused
from tests.whole_runs import QUIET, metrics, status, train_on, tree

pytestmark = pytest.mark.usefixtures("digits")
SMALL = ("model.width=4", "checkpoint.best=null")

#: Overrides, and what the message names.
REFUSED = [
    (["train.log_every=0"], ["train.log_every", "0", "at least 1"]),
    (["train.max_steps=-5"], ["train.max_steps", "-5", "at least 1"]),
    (["train.micro_batch_size=24"], ["train.micro_batch_size", "24", "32", "does not fit"]),
    (["data.train=/nowhere/*.tar"], ["data.train", "/nowhere/*.tar"]),
    (["model._target_=dtrain.models.Nothing"], ["model._target_", "dtrain.models.Nothing", "cannot be imported"]),
    (["optimizer.lr=abc"], ["optimizer", "abc"]),
    (["schedule.warmup=9999"], ["schedule", "9999"]),
    (["train.hooks=[{_target_: no.Hook}]"], ["train.hooks[0]", "no.Hook"]),
    (["tracker=wandb", "tracker.mode=sometimes"], ["tracker.mode", "sometimes"]),
    (["run.weights_from=/nowhere"], ["run.weights_from", "/nowhere"]),
    (["checkpoint.keep_last=0"], ["checkpoint.keep_last", "0"]),
]
#: Those that only a finished run of 2 steps refuses.
REFUSED_BY_A_FINISHED_RUN = [
    (["run.seed=1"], ["run.dir", "run.seed: 0 -> 1"]),
    (["model.width=8"], ["run.dir", "model.width: 4 -> 8"]),
    (["train.max_steps=1"], ["train.max_steps=1", "has done 2 steps", "run.dir"]),
    (
        ["optimizer.lr=0.5"],
        ["is finished", "optimizer.lr: 0.003 -> 0.5", "Increase train.max_steps", "new run.dir"],
    ),
    (["train.global_batch_size=32"], ["is finished", "train.global_batch_size: 64 -> 32"]),
    (["run.resume=never"], ["run.resume=never", "step 2", "run.dir"]),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    train_on(1, run_dir, *SMALL, "train.max_steps=2")
    return run_dir


def command(run_dir: Path, overrides: Sequence[str]) -> list[str]:
    chosen = {override.partition("=")[0] for override in overrides}
    common = (*QUIET, *SMALL, "train.max_steps=2")
    return [
        "experiment=digits",
        f"run.dir={run_dir}",
        *(o for o in common if o.partition("=")[0] not in chosen),
        *overrides,
    ]


def messages_of(
    run_dir: Path, table: Sequence[tuple[list[str], list[str]]], capfd: pytest.CaptureFixture[str]
) -> list[str]:
    """What a process prints that gets all commands of a table, one after the other, and is refused each time."""

    def refuse_all(rank: int) -> None:
        for overrides, _ in table:
            with pytest.raises(SystemExit):
                command_line.run(train.train, command(run_dir, overrides))
            sys.stderr.write("----\n")

    run_ranks(1, refuse_all, init=False, timeout=240)
    return capfd.readouterr().err.split("----\n")[:-1]


@pytest.mark.slow
def test_a_refused_command_makes_no_directory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for (_, names), message in zip(REFUSED, messages_of(tmp_path / "new" / "run", REFUSED, capfd), strict=True):
        assert_refused(message, *names)
        assert message.count("dtrain: ") == 1, message
    assert tree(tmp_path) == {}


@pytest.mark.slow
def test_a_refused_command_leaves_a_finished_run_as_it_is(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = tree(finished)
    assert '"finished"' in before["status.json"][1].decode()
    table = [*REFUSED_BY_A_FINISHED_RUN, *REFUSED[-4:]]
    for (_, names), message in zip(table, messages_of(finished, table, capfd), strict=True):
        assert_refused(message, *names)
        assert message.count("dtrain: ") == 1, message
    assert tree(finished) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["optimizer.lr=abc"], ["optimizer", "abc"]),
        (["train.max_steps=1"], ["train.max_steps=1", "has done 2 steps"]),
        (["data.train=/nowhere/*.tar"], ["/nowhere/*.tar"]),
    ],
    ids=str,
)
def test_two_ranks_that_are_refused_leave_a_finished_run_as_it_is(
    finished: Path, capfd: pytest.CaptureFixture[str], overrides: list[str], names: list[str]
) -> None:
    before = tree(finished)
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, lambda rank: command_line.run(train.train, command(finished, overrides)), init=False, timeout=120)
    assert set(failed.value.reports) == {0, 1}
    assert not failed.value.hung
    message = capfd.readouterr().err
    assert_refused(message, *names)
    assert message.count("dtrain: ") == 1, message
    assert tree(finished) == before


def test_a_bug_of_the_user_before_the_start_leaves_a_finished_run_as_it_is(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = tree(finished)
    with pytest.raises(RanksFailed):
        train_on(1, finished, *SMALL, "train.max_steps=4", f"train.hooks=[{{_target_: {__name__}.BuggyHook}}]")
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert tree(finished) == before


@pytest.mark.slow
def test_a_run_whose_checkpoints_were_lost_is_left_as_it_is_until_it_is_told_to_begin_again(
    finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    shutil.rmtree(run_dir / "checkpoints")
    before = tree(run_dir)
    with pytest.raises(RanksFailed) as failed:
        train_on(2, run_dir, *SMALL, "train.max_steps=3")
    assert set(failed.value.reports) == {0, 1}
    message = capfd.readouterr().err
    assert_refused(message, "run.dir", "finished at step 2", "run.resume=never", "train.max_steps: 2 -> 3")
    assert message.count("dtrain: ") == 1, message
    assert tree(run_dir) == before

    train_on(1, run_dir, *SMALL, "train.max_steps=1", "run.resume=never")
    assert (status(run_dir)["state"], status(run_dir)["step"], status(run_dir)["restarts"]) == ("finished", 1, 0)
    (aside,) = (run_dir / "moved-aside").iterdir()
    moved = tree(aside)
    for name in ("metrics.jsonl", "status.json", "config.yaml", "logs/rank-00000.log"):
        assert moved[name] == before[name]
    assert "moved-aside" in capfd.readouterr().out
    assert len(metrics(run_dir)) == 1


@pytest.mark.slow
def test_a_run_that_failed_before_its_first_save_begins_again_and_keeps_its_records(tmp_path: Path) -> None:
    common = (*SMALL, "train.max_steps=3", faulty("kill@step=3"))
    with pytest.raises(RanksFailed):
        train_on(1, tmp_path, *common)
    before = (tmp_path / "metrics.jsonl").read_text()
    assert before
    for name in (".status.json.staged", ".config.yaml.staged"):  # in the place of dtrain's own files
        (tmp_path / name).mkdir()
    (tmp_path / "status.json").write_text("torn")
    train_on(1, tmp_path, *common)
    assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("finished", 3)
    assert len(metrics(tmp_path)) == 3
    assert (tmp_path / "cut-metrics.jsonl").read_text() == before
    assert not (tmp_path / "moved-aside").exists()


class BuggyHook:
    def __init__(self) -> None:
        raise ZeroDivisionError("a bug")

    def on_end(self, run: object, state: str) -> None:
        """Never called."""

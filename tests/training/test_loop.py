from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, unset_fake_temporarily

from benchmarks.fault_hook import faulty
from dtrain.data import Batch
from dtrain.distributed.world import World
from dtrain.precision import Precision
from dtrain.precision import vote as vote_module
from dtrain.precision.loss_scale import LossScale
from dtrain.precision.vote import Vote
from dtrain.runs.records import JsonlSink
from dtrain.tasks import Classification
from dtrain.training import evaluation, loop
from dtrain.training import step as step_module
from dtrain.training.checkpoint.checkpoints import Checkpoint, Checkpoints
from dtrain.training.checkpoint.manager import CheckpointManager
from dtrain.training.evaluation import evaluate
from dtrain.training.loop import warn_on_host_sync
from dtrain.training.monitor import run_logger
from dtrain.training.setup.ema import Ema
from dtrain.training.setup.loaders import eval_loader
from dtrain.training.step import TrainStep
from dtrain.training.task import Evaluation, Output, Task
from tests.config.command_lines import compose
from tests.fake_cuda import Collectives, on_fake_cuda
from tests.ranks import RanksFailed, run_ranks
from tests.refusals import assert_refused
from tests.toys import world
from tests.whole_runs import metrics, records, status, train_on, weights

# -- loop


pytestmark = pytest.mark.usefixtures("digits")
SMALL = (
    "model.width=4",
    "data.eval='${dtrain.cache:digits}/test-000000.tar'",  # half of the samples
    "checkpoint.every_minutes=null",
    "checkpoint.best=null",
)


def train(ranks: int, run_dir: Path, *overrides: str) -> None:
    chosen = {override.partition("=")[0] for override in overrides}
    train_on(ranks, run_dir, *(small for small in SMALL if small.partition("=")[0] not in chosen), *overrides)


def saved(run_dir: Path) -> list[int]:
    return Checkpoints(run_dir / "checkpoints").steps()


def full_disk_at(*steps: int) -> Callable[..., Path]:
    """In place of ``Checkpoints.save``: refuses those steps."""
    save = Checkpoints.save

    def refusing(self: Checkpoints, step: int, checkpoint: Checkpoint) -> Path:
        if step in steps:
            raise OSError(28, "No space left on device", "model.safetensors")
        return save(self, step, checkpoint)

    return refusing


# -- checkpoints that cannot be written


@pytest.mark.slow
def test_a_full_disk_ends_no_run_and_is_said_where_nobody_misses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Checkpoints, "save", full_disk_at(4))
    train(2, tmp_path, "train.max_steps=6", "checkpoint.every_steps=2", "checkpoint.keep_last=9", "data.eval=null")
    assert saved(tmp_path) == [2, 6]
    assert len(metrics(tmp_path)) == 6
    assert status(tmp_path)["state"] == "finished"
    message = capfd.readouterr().out
    assert message.count("WARNING: the checkpoint of step 4 could not be written") == 1
    assert "No space left on device" in message
    assert "step 4 could not be written" in (tmp_path / "logs" / "rank-00000.log").read_text()


@pytest.mark.slow
def test_a_final_checkpoint_that_cannot_be_written_is_a_failure_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", full_disk_at(5))
        with pytest.raises(RanksFailed) as failed:
            train(2, tmp_path, "train.max_steps=5", "checkpoint.every_steps=3", "data.eval=null")
    assert set(failed.value.reports) == {0, 1}
    assert not failed.value.hung
    assert status(tmp_path)["state"] == "failed"
    assert "step 5 could not be written" in status(tmp_path)["reason"]
    assert "the checkpoint of step 5 could not be written" in capfd.readouterr().err
    train(2, tmp_path, "train.max_steps=5", "checkpoint.every_steps=3", "data.eval=null")
    assert saved(tmp_path) == [3, 5]
    assert status(tmp_path)["state"] == "finished"
    assert [record["step"] for record in records(tmp_path) if "train/loss" in record] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_stop_without_room_for_the_checkpoint_is_a_failure_and_takes_the_stop_file_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoints, "save", full_disk_at(*range(2, 99)))
    monkeypatch.setattr(evaluation, "evaluate", stop_file_during_evaluation(tmp_path))
    monkeypatch.setattr("dtrain.distributed.stop._STOP_FILE_POLL", 0.0)
    with pytest.raises(RanksFailed):
        train(2, tmp_path, "train.max_steps=500", "train.eval_every=3")
    assert status(tmp_path)["state"] == "failed"
    assert not (tmp_path / "STOP").exists()


def stop_file_during_evaluation(run_dir: Path) -> Callable[..., Any]:
    """Evaluations go on as usual; the STOP file is there when one is done."""

    def evaluating(*args: Any, **kwargs: Any) -> Evaluation:
        (run_dir / "STOP").touch()
        return evaluate(*args, **kwargs)

    return evaluating


def test_a_save_that_failed_is_tried_again_at_the_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Checkpoints.save
    refused: list[int] = []

    def refusing_once(self: Checkpoints, step: int, checkpoint: Checkpoint) -> Path:
        if step not in refused:
            refused.append(step)
            if len(refused) == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
            raise OSError(28, "No space left on device")
        return save(self, step, checkpoint)

    monkeypatch.setattr(Checkpoints, "save", refusing_once)
    train(1, tmp_path, "train.max_steps=500", "checkpoint.every_steps=1")
    state = status(tmp_path)
    assert state["state"] == "stopped"
    assert saved(tmp_path) == [state["step"]]


def test_a_disk_that_is_slower_than_the_saves_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loops: list[loop.Loop] = []
    run, save = loop.Loop.run, Checkpoints.save

    def running(self: loop.Loop) -> tuple[str, str | None]:
        loops.append(self)
        return run(self)

    def until_the_waiting_loop_is_seen_to_move(self: Checkpoints, step: int, checkpoint: Checkpoint) -> Path:
        if step == 2:
            for _ in range(2000):
                place = loops[0].place()
                if place.step == 5 and place.waits_for_disk:  # step 4 is done, and its save waits for this one
                    break
                time.sleep(0.01)
            else:
                raise AssertionError("it looks as if it hung")
        return save(self, step, checkpoint)

    monkeypatch.setattr(loop.Loop, "run", running)
    monkeypatch.setattr(Checkpoints, "save", until_the_waiting_loop_is_seen_to_move)
    train(1, tmp_path, "train.max_steps=5", "checkpoint.every_steps=2", "data.eval=null")
    assert status(tmp_path)["state"] == "finished"


def test_a_slow_disk_does_not_hold_up_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Checkpoints.save

    def after_two_more_steps(self: Checkpoints, step: int, checkpoint: Checkpoint) -> Path:
        # No more than two: the save of step 4 waits for this one.
        while step == 2 and len(records(tmp_path)) < 4:
            time.sleep(0.01)
        return save(self, step, checkpoint)

    monkeypatch.setattr(Checkpoints, "save", after_two_more_steps)
    train(2, tmp_path, "train.max_steps=8", "checkpoint.every_steps=2", "data.eval=null", "checkpoint.keep_last=9")
    assert saved(tmp_path) == [2, 4, 6, 8]


def test_records_and_status_that_cannot_be_written_end_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    log, write_status = JsonlSink.log, run_logger.write_status

    def refusing(self: JsonlSink, record: Any) -> None:
        if record["step"] == 2:
            raise OSError(28, "No space left on device")
        log(self, record)

    def refusing_status(*args: Any, **kwargs: Any) -> None:
        if args[2] == 4:
            raise OSError(28, "No space left on device")
        write_status(*args, **kwargs)

    monkeypatch.setattr(JsonlSink, "log", refusing)
    monkeypatch.setattr(run_logger, "write_status", refusing_status)
    train(1, tmp_path, "train.max_steps=5", "checkpoint.every_steps=4", "checkpoint.keep_last=9")
    assert [record["step"] for record in records(tmp_path) if "train/loss" in record] == [1, 3, 4, 5]
    assert saved(tmp_path) == [4, 5]
    message = capfd.readouterr().out
    assert "WARNING: a record could not be written" in message
    assert "WARNING: status.json could not be written" in message


# -- when it saves, evaluates and stops


def test_checkpoints_come_every_n_steps_at_the_clock_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("train.max_steps=5", "checkpoint.keep_last=9", "data.eval=null")
    train(2, tmp_path / "steps", "checkpoint.every_steps=2", *common)
    assert saved(tmp_path / "steps") == [2, 4, 5]
    counters = Checkpoints(tmp_path / "steps" / "checkpoints").load(4).state["counters"]
    assert (counters["step"], counters["applied_steps"]) == (4, 4)
    # Rank 0's clock asks in the vote of a step, and all obey after the next one, once.
    monkeypatch.setattr(
        CheckpointManager, "is_due", lambda self: self._run.world.rank == 0 and self._run.step.step == 1
    )
    train(2, tmp_path / "clock", *common)
    assert saved(tmp_path / "clock") == [3, 5]


@pytest.mark.parametrize(
    ("eval_every", "steps"), [("2", [2, 4, 5]), ("0", [5]), ("null", [5])], ids=["every 2", "at the end", "each epoch"]
)
def test_evaluations_come_when_they_were_asked_for_and_at_the_end(
    tmp_path: Path, eval_every: str, steps: list[int]
) -> None:
    train(1, tmp_path, "train.max_steps=5", f"train.eval_every={eval_every}")
    assert [record["step"] for record in records(tmp_path) if "eval/loss" in record] == steps


def scripted_accuracies(*accuracies: float) -> Callable[..., Evaluation]:
    """In place of ``evaluate``: one value after the other."""
    values = iter(accuracies)
    return lambda *args, **kwargs: Evaluation({"loss": 1.0, "accuracy": next(values)})


@pytest.mark.slow
def test_the_best_checkpoint_stays_over_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = ("train.eval_every=1", "checkpoint.best=eval/accuracy", "checkpoint.keep_last=1")
    monkeypatch.setattr(evaluation, "evaluate", scripted_accuracies(0.1, 0.7, float("nan"), 0.5))
    train(1, tmp_path, "train.max_steps=4", *common)
    assert saved(tmp_path) == [2, 4]
    monkeypatch.setattr(evaluation, "evaluate", scripted_accuracies(0.6, 0.2))
    train(1, tmp_path, "train.max_steps=6", *common)
    assert saved(tmp_path) == [2, 6]
    monkeypatch.setattr(evaluation, "evaluate", scripted_accuracies(0.7, 0.3))
    train(1, tmp_path, "train.max_steps=8", *common)
    assert saved(tmp_path) == [7, 8]


@pytest.mark.slow
def test_what_is_best_may_change_when_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = ("train.eval_every=1", "checkpoint.keep_last=1")
    monkeypatch.setattr(evaluation, "evaluate", scripted_accuracies(0.9, 0.8))
    train(1, tmp_path, "train.max_steps=2", "checkpoint.best=eval/accuracy", *common)
    assert saved(tmp_path) == [1, 2]
    lowest = ("checkpoint.best=eval/accuracy", "checkpoint.best_mode=min")
    monkeypatch.setattr(evaluation, "evaluate", scripted_accuracies(0.85, 0.3, 0.4))
    train(1, tmp_path, "train.max_steps=5", *lowest, *common)
    assert saved(tmp_path) == [4, 5]


def test_a_best_metric_that_no_evaluation_has_is_refused_before_the_first_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RanksFailed) as failed:
        train(2, tmp_path, "train.max_steps=3", "checkpoint.best=eval/acc")
    assert set(failed.value.reports) == {0, 1}
    assert_refused(capfd.readouterr().err, "checkpoint.best: got 'eval/acc'", "Did you mean 'eval/accuracy'?")
    assert status(tmp_path)["step"] == 0


def test_a_run_that_ends_before_its_schedule_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(1, tmp_path, "train.max_steps=2", "train.eval_every=0")
    assert "2 (23 an epoch), schedule over 276, cut short by train.max_steps=2" in capfd.readouterr().out
    assert status(tmp_path)["reason"] == "its schedule was cut short by train.max_steps=2"


def test_a_sample_that_cannot_be_read_is_named_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    faults = faulty("corrupt_sample@step=1", "corrupt_sample@step=2,once=false")
    train(1, tmp_path, "train.max_steps=2", "train.eval_every=0", "data.max_bad=5", "data.shuffle=none", faults)
    lines = [line for line in capfd.readouterr().err.splitlines() if "bad sample" in line]
    assert len(lines) == 2
    assert all(line.startswith("dtrain: WARNING: bad sample ") and "injected fault" in line for line in lines)


# -- errors that end a run


class Fragile(Classification):
    """Raises what ``fails`` says at the name of the place, on ``ranks``."""

    place = ""
    ranks: tuple[int, ...] = (0, 1)
    calls = 0

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        self._reach("evaluation" if not model.training else "training")
        return super().__call__(model, batch)

    def conclude(self, model: nn.Module, metrics: dict[str, float]) -> dict[str, float]:
        self._reach("conclude")
        return {"score": 1.0}

    def _reach(self, place: str) -> None:
        self.calls += place == "training"
        late = place != "training" or self.calls == 7  # four calls before the first step, and two steps
        if place == self.place and dist.get_rank() in self.ranks and late:
            raise KeyError(f"of {place}")


FRAGILE = ("task._target_=tests.training.test_loop.Fragile", "train.max_steps=3")


@pytest.fixture(scope="module")
def undisturbed(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a run with given options in which nothing fails, once."""
    runs: dict[tuple[str, ...], Path] = {}

    def run(*options: str) -> Path:
        if options not in runs:
            train(2, run_dir := tmp_path_factory.mktemp("undisturbed"), *FRAGILE, *options)
            runs[options] = run_dir
        return runs[options]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "options", "at"),
    [
        ("conclude", ("train.eval_every=2",), 2),
        ("evaluation", (), 3),
        ("training", (), 2),
        ("conclude", ("parallel=fsdp", "train.eval_every=2"), 2),
    ],
)
def test_an_error_of_the_task_ends_a_run_whose_steps_are_saved(
    tmp_path: Path,
    undisturbed: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    place: str,
    options: Any,
    at: int,
) -> None:
    """Continued without the error, it equals a run that had none."""
    monkeypatch.setattr(Fragile, "place", place)
    with pytest.raises(RanksFailed):
        train(2, tmp_path / "failed", *FRAGILE, *options)
    assert f"KeyError: 'of {place}'" in status(tmp_path / "failed")["reason"]
    assert saved(tmp_path / "failed") == [at]
    assert f"saved after step {at}" in capfd.readouterr().out
    monkeypatch.setattr(Fragile, "place", "")
    train(2, tmp_path / "failed", *FRAGILE, *options)
    whole = undisturbed(*options)
    states = [weights(run_dir, 3) for run_dir in (tmp_path / "failed", whole)]
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())
    assert metrics(tmp_path / "failed", "eval/loss") == metrics(whole, "eval/loss")


@pytest.mark.slow
def test_an_error_of_another_rank_alone_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fragile, "place", "evaluation")
    monkeypatch.setattr(Fragile, "ranks", (1,))
    with pytest.raises(RanksFailed):
        train(2, tmp_path, *FRAGILE)
    assert "rank 1 failed: KeyError: 'of evaluation'" in status(tmp_path)["reason"]
    assert saved(tmp_path) == []


class Spoils:
    """A hook that fails after the second step, when a weight is infinite."""

    def on_step(self, run: Any, outcome: Any) -> None:
        if run.step.step == 2:
            with torch.no_grad():
                next(run.model.parameters()).fill_(float("inf"))
            raise KeyError("spoilt")


def test_weights_that_are_not_finite_are_not_saved_before_an_error_ends_the_run(tmp_path: Path) -> None:
    spoils = "train.hooks=[{_target_: tests.training.test_loop.Spoils}]"
    with pytest.raises(RanksFailed):
        train(1, tmp_path, "train.max_steps=3", spoils)
    assert "spoilt" in status(tmp_path)["reason"]
    assert saved(tmp_path) == []


@pytest.mark.slow
def test_a_best_metric_that_conclude_may_have_is_looked_for_again_in_the_first_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    train(1, tmp_path / "known", *FRAGILE, "checkpoint.best=eval/score", "checkpoint.best_mode=max")
    assert "WARNING" not in capfd.readouterr().err
    conclude = Fragile.conclude

    def raises_once(self: Fragile, model: nn.Module, given: dict[str, float]) -> dict[str, float]:
        if given["samples"] < 100:  # a micro-batch
            raise ValueError("one class only")
        return conclude(self, model, given)

    monkeypatch.setattr(Fragile, "conclude", raises_once)
    with pytest.raises(RanksFailed):
        train(1, tmp_path / "wrong", *FRAGILE, "checkpoint.best=eval/scorr", "checkpoint.best_mode=max")
    shown = capfd.readouterr()
    assert "WARNING: checkpoint.best: got 'eval/scorr'" in shown.err + shown.out
    assert "one class only" in shown.err + shown.out
    assert_refused(shown.err, "checkpoint.best: got 'eval/scorr'", "eval/score", "or null")
    assert saved(tmp_path / "wrong") == [3]
    assert (
        json.loads((tmp_path / "wrong/checkpoints/step-000000003/state.json").read_text())["metrics"]["eval/score"] == 1
    )


def test_a_stop_request_at_the_last_step_is_used_up(tmp_path: Path) -> None:
    (tmp_path / "STOP").touch()
    train(1, tmp_path, "train.max_steps=1", "data.eval=null")
    assert status(tmp_path)["state"] == "finished"
    assert not (tmp_path / "STOP").exists()


def test_a_stop_request_that_comes_too_late_for_the_last_evaluation_is_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluating(*args: Any, **kwargs: Any) -> Evaluation:
        result = evaluate(*args, **kwargs)
        (tmp_path / "STOP").touch()
        return result

    monkeypatch.setattr(evaluation, "evaluate", evaluating)
    train(1, tmp_path, "train.max_steps=1")
    assert status(tmp_path)["state"] == "finished"
    assert not (tmp_path / "STOP").exists()


@pytest.mark.parametrize("override", ["train.log_every=0", "train.log_every=-3", "train.eval_every=-1"])
def test_an_impossible_interval_is_refused(tmp_path: Path, override: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RanksFailed):
        train(1, tmp_path, "train.max_steps=1", override)
    assert override.replace("=", ": got ") in capfd.readouterr().err


# -- skipped steps


class Overflows(nn.Module):
    """A softmax written as ``exp`` and ``sum``, which overflows in fp16."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 8 * 8, 10)

    def forward(self, images: Tensor) -> Tensor:
        powers = (self.head(images.flatten(1)) + 20).exp()
        return powers / powers.sum(dim=1, keepdim=True)


@pytest.mark.slow
def test_a_message_that_follows_from_skipped_steps_names_them_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = (
        "precision=fp16",
        f"model._target_={__name__}.Overflows",
        "train.max_steps=3",
        "train.global_batch_size=8",
    )
    with pytest.raises(RanksFailed):
        train(2, tmp_path / "evaluated", *options)
    message = capfd.readouterr().err
    assert_refused(
        message, "all 3 steps", "not finite", "dtrain doctor numerics", "output of the model", "evaluation: the loss is"
    )
    train(1, tmp_path / "not", *options, "data.eval=null")
    assert_refused(capfd.readouterr().out, "Nothing was learned", "all 3 steps", "dtrain doctor numerics")


# -- an evaluation that is interrupted


def interrupted(evaluation: int, rank: int = 0) -> Callable[..., Evaluation]:
    """In place of ``evaluate``, of a task that draws: that rank gets a signal in the second micro-batch of that
    evaluation, from 0; -1 for none."""

    def evaluating(model: nn.Module, task: Task, *args: Any, **kwargs: Any) -> Evaluation:
        number = itertools.count()

        def signalled(model: nn.Module, batch: Batch) -> Output:
            if next(number) == 1 and kwargs["epoch"] == evaluation and kwargs["world"].rank == rank:
                os.kill(os.getpid(), signal.SIGUSR1)
            output = task(model, batch)
            return replace(output, metrics={**output.metrics, "drawn": (torch.rand(()), 1)})

        return evaluate(model, signalled, *args, **kwargs)

    return evaluating


def unmeasured_records(run_dir: Path) -> list[dict[str, float]]:
    """The records, but for what a clock or the machine says."""
    measured = ("time", "throughput/", "memory/")
    return [{name: r[name] for name in r if not name.startswith(measured)} for r in records(run_dir)]


def checkpoint_state(run_dir: Path, step: int) -> dict[str, Any]:
    text = (run_dir / "checkpoints" / f"step-{step:09d}" / "state.json").read_text()
    state: dict[str, Any] = json.loads(text)
    return state


# The end of an epoch, the same again in the next start, and the last step, on one rank or the other.
@pytest.mark.slow
@pytest.mark.parametrize(
    "stops",
    [[(0, 1, 3)], [(0, 0, 3), (0, 1, 3), (1, 1, 6)]],
    ids=["once", "three times"],
)
def test_a_run_that_is_stopped_in_its_evaluations_ends_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: list[tuple[int, int, int]]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    # An epoch has three steps, and its end an evaluation of three micro-batches.
    size = ("train.global_batch_size=480", "train.micro_batch_size=40", "train.max_epochs=2")
    common = (*size, "train.ema_decay=0.9", "checkpoint.best=eval/loss", "checkpoint.best_mode=min")
    monkeypatch.setattr(evaluation, "evaluate", interrupted(-1))
    train(2, whole, *common)
    for number, rank, step in stops:
        monkeypatch.setattr(evaluation, "evaluate", interrupted(number, rank))
        train(2, parts, *common)
        assert status(parts)["state"] == "stopped"
        assert status(parts)["reason"] == f"SIGUSR1 (rank {rank})"
        assert saved(parts)[-1] == status(parts)["step"] == step
        assert checkpoint_state(parts, step)["metrics"] == {}
        assert len(metrics(parts, "eval/loss")) == number
    monkeypatch.setattr(evaluation, "evaluate", interrupted(-1))
    train(2, parts, *common)
    assert status(parts)["state"] == "finished"
    assert unmeasured_records(parts) == unmeasured_records(whole)
    assert saved(parts) == saved(whole)
    for step in saved(whole):
        ours, theirs = checkpoint_state(parts, step), checkpoint_state(whole, step)
        for state in (ours, theirs):
            for name in ("seconds", "restarts", "lost_seconds", "down_seconds"):
                del state["progress"][name]
        assert ours == theirs
        for name in ("model", "optimizer", "ema"):
            expected, got = weights(whole, step, name), weights(parts, step, name)
            assert all(torch.equal(got[key], tensor) for key, tensor in expected.items())


@pytest.mark.slow
def test_a_late_evaluation_is_saved_and_recorded_once_even_if_its_first_checkpoint_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("train.max_steps=3", "train.eval_every=2")
    monkeypatch.setattr(evaluation, "evaluate", interrupted(0))
    train(1, tmp_path, *common)
    assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("stopped", 2)
    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", full_disk_at(2, 3))
        with pytest.raises(RanksFailed):
            train(1, tmp_path, *common)
    lost = metrics(tmp_path, "eval/loss")
    assert len(lost) == 2
    assert checkpoint_state(tmp_path, 2)["progress"]["evaluation_due"]
    train(1, tmp_path, *common)
    assert [(record["step"], "eval/loss" in record) for record in records(tmp_path)] == [
        *((1, False), (2, False), (2, True), (3, False), (3, True))
    ]
    assert metrics(tmp_path, "eval/loss") == lost
    assert not checkpoint_state(tmp_path, 2)["progress"]["evaluation_due"]
    assert checkpoint_state(tmp_path, 2)["metrics"]["eval/loss"] == lost[0]


def test_an_evaluation_that_is_due_is_forgotten_by_a_start_without_data_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "evaluate", interrupted(0))
    train(1, tmp_path, "train.max_steps=3", "train.eval_every=2", "train.log_every=9")
    assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("stopped", 2)
    assert [record["step"] for record in records(tmp_path)] == [2]  # what was trained since the last record is in one
    train(1, tmp_path, "train.max_steps=3", "data.eval=null")
    assert status(tmp_path)["state"] == "finished"
    assert not metrics(tmp_path, "eval/loss")
    assert not checkpoint_state(tmp_path, 3)["progress"]["evaluation_due"]


class OwnStatistics(nn.Module):
    """Its buffer depends on the last rows that this rank has trained on."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 8 * 8, 10)
        self.register_buffer("offset", torch.zeros(10))

    def forward(self, images: Tensor) -> Tensor:
        logits = self.head(images.flatten(1))
        if self.training:
            self.offset.copy_(10 * logits.detach().float().mean(dim=0))
        return logits + self.offset


@pytest.mark.slow
def test_all_ranks_evaluate_the_buffers_that_the_checkpoint_has(digits: Path, tmp_path: Path) -> None:
    model = f"model._target_={__name__}.OwnStatistics"
    data_eval = f"data.eval={digits}/test-*.tar"
    train(2, tmp_path, model, "train.max_steps=2", "train.global_batch_size=16", data_eval)
    net = OwnStatistics()
    net.load_state_dict(weights(tmp_path, 2))
    composed = compose("experiment=digits", data_eval).cfg

    def rank(number: int) -> float:
        here = world()
        data = eval_loader(composed, here, Precision("fp32"))
        assert data is not None
        return evaluate(net, Classification(), data, world=here, precision=Precision("fp32"))["loss"]

    (alone,) = run_ranks(1, rank)
    assert metrics(tmp_path, "eval/loss") == pytest.approx([alone], rel=1e-5)


def test_the_time_of_evaluations_is_no_time_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 0.0}

    def slow(*args: Any, **kwargs: Any) -> Evaluation:
        clock["now"] += 1000.0
        return evaluate(*args, **kwargs)

    def monotonic() -> float:
        clock["now"] += 0.001
        return clock["now"]

    monkeypatch.setattr(evaluation, "evaluate", slow)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=monotonic, time=time.time))
    train(1, tmp_path, "train.max_steps=5", "train.eval_every=1")
    seconds = metrics(tmp_path, "time/step_seconds")
    assert max(seconds) < 1.0
    assert seconds[-1] < 2 * seconds[1]  # each step has a time of its own
    assert checkpoint_state(tmp_path, 5)["progress"]["seconds"] < 3.0


def test_a_stop_that_was_agreed_before_an_evaluation_leaves_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_to_be_called(*args: Any, **kwargs: Any) -> Evaluation:
        raise AssertionError("a stop was agreed before")

    (tmp_path / "STOP").touch()
    monkeypatch.setattr(evaluation, "evaluate", not_to_be_called)
    train(1, tmp_path, "train.max_steps=5", "train.eval_every=1")
    assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("stopped", 1)
    assert checkpoint_state(tmp_path, 1)["progress"]["evaluation_due"]


# -- no host sync


CUDA = torch.device("cuda", 0)
RANKS = 4


class Scale(nn.Module):
    """Has a parameter, and a buffer that the forward changes."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, device=CUDA))
        self.register_buffer("calls", torch.zeros((), device=CUDA))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.weight


def task(model: nn.Module, batch: Batch) -> Output:
    with torch.no_grad():  # autograd needs the CUDA library even for fake tensors
        loss, count = model(batch["x"]).float().sum(), batch.valid.sum()
    return Output(loss, count, {"again": (loss, count)})


def vote_on_fake_cuda(device: torch.device, ranks: int, spikes: object) -> Vote:
    """Page-locked memory also needs the CUDA library."""
    with unset_fake_temporarily():
        vote = Vote(torch.device("cpu"), ranks)
    vote._device, vote._host = device, torch.zeros_like(vote._host)
    return vote


def collectives_of_steps(precision: str, **implementation: Any) -> list[list[str]]:
    """The collectives of each of three steps of two micro-batches."""
    model = Scale()

    def backward(loss: Tensor, factor: Tensor) -> None:
        model.weight.grad = torch.ones_like(model.weight) * loss * factor

    settled = [0.0, RANKS, RANKS, 1.0, 1.0, 8.0, 1.0, 8.0, 0.0, 0.0, 8.0, 0.0, 0.0, 0.0]
    seen = []
    with (
        mock.patch.object(Tensor, "backward", backward),
        mock.patch.object(step_module, "make_vote", vote_on_fake_cuda),
        mock.patch.object(step_module, "seed_generators"),
        # The one copy to the host and the one wait for it, which is that of the step before.
        mock.patch.object(vote_module._HostCopy, "start") as copied,
        mock.patch.object(vote_module._HostCopy, "wait", return_value=settled),
    ):
        step = TrainStep(
            model,
            task,
            torch.optim.AdamW(model.parameters(), lr=0.1, **implementation),
            world=World(0, RANKS, 0, RANKS, CUDA, "nccl", launched=True),
            precision=Precision(precision),
            loss_scale=LossScale(CUDA, init=1.0) if precision == "fp16" else None,
            nominal=8,
            schedule=lambda applied_steps: 1.0,
            clip_norm=1.0,
            ema=Ema(model, 0.5),
        )
        step.step = 1  # in the first one the task is tried out, which waits
        for _ in range(3):
            window = [Batch({"x": torch.ones(2, 3, device=CUDA)}, ["a", "b"], valid()) for _ in range(2)]
            with Collectives() as collectives:
                step.accumulate(window, 2)
                step.settle()
                step.apply()
            seen.append(collectives.names)
        assert copied.call_count == 3
    return seen


def valid() -> Any:
    return torch.ones(2, dtype=torch.bool, device=CUDA)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_fused_step_never_waits_and_has_one_all_reduce(precision: str) -> None:
    assert on_fake_cuda(lambda: collectives_of_steps(precision, fused=True)) == [["c10d::allreduce_"]] * 3


def test_a_step_whose_optimizer_is_not_fused_is_caught_waiting() -> None:
    def work() -> bool:
        with pytest.raises(DataDependentOutputException):
            collectives_of_steps("fp16", foreach=True)
        return True

    assert on_fake_cuda(work)


# -- sync guard


def test_the_mode_is_on_inside_and_as_it_was_afterwards_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with warn_on_host_sync(torch.device("cuda", 0)):
        assert modes == [0, "warn"]
    with pytest.raises(ZeroDivisionError), warn_on_host_sync(torch.device("cuda", 0)):
        raise ZeroDivisionError
    assert modes == [0, "warn", 0, "warn", 0]


def test_a_cpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: pytest.fail("touched CUDA"))
    with warn_on_host_sync(torch.device("cpu")):
        pass

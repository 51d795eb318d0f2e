from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dtrain.config.schema import Config
from dtrain.errors import ConfigError
from dtrain.training.checkpoint.state import TrainState
from dtrain.training.hook_calls import HookFailed, Hooks, build_hooks
from dtrain.training.step import StepOutcome
from dtrain.training.task import Evaluation
from tests.ranks import RanksFailed
from tests.refusals import assert_refused, refused
from tests.whole_runs import records, status, train_on

SMALL = ("model.width=4", "data.num_workers=0", "checkpoint.best=null", "checkpoint.keep_last=9")


class Recorder:
    """Writes down every call, with what it sees of the run; all ranks must agree on each of them."""

    def __init__(self, file: str = "calls") -> None:
        self._file = file

    def on_start(self, run: TrainState) -> None:
        self._write(run, "start")

    def on_step(self, run: TrainState, outcome: StepOutcome) -> None:
        assert run.step.step == outcome.step
        assert outcome.stats.count > 0
        self._write(run, "step")

    def on_evaluation(self, run: TrainState, result: Evaluation) -> None:
        assert result["samples"] == 360
        self._write(run, "evaluation")

    def on_save(self, run: TrainState, path: Path) -> None:
        assert path == run.checkpoints.path(run.step.step)
        self._write(run, "save")

    def on_end(self, run: TrainState, state: str) -> None:
        self._write(run, state)

    def _write(self, run: TrainState, call: str) -> None:
        line = f"{run.step.step} {call}"
        lines: list[Any] = [None] * run.world.size
        dist.all_gather_object(lines, line)  # a collective: it would hang if the ranks did not call together
        assert set(lines) == {line}
        with (run.run_dir / f"{self._file}-{run.world.rank}").open("a") as file:
            file.write(f"{line}\n")


class OnlyAtTheEnd:
    """Has one method of the five."""

    def on_end(self, run: TrainState, state: str) -> None:
        (run.run_dir / f"{state}-{run.world.rank}").touch()


class Misspelt:
    def on_steps(self, run: TrainState, outcome: StepOutcome) -> None:
        """Would never be called."""


class Failing:
    """Raises on rank 1 in one method, after a collective in which the other ranks take part."""

    def __init__(self, method: str) -> None:
        setattr(self, method, self._fail)

    def _fail(self, run: TrainState, *result: Any) -> None:
        dist.barrier()
        if run.world.rank == 1:
            raise ZeroDivisionError("of a hook")
        dist.barrier()


class EndsEarly:
    """Ends the run in one of its methods, the first time it is called after step 2."""

    def __init__(self, method: str) -> None:
        setattr(self, method, self._end)

    def _end(self, run: TrainState, *result: Any) -> None:
        if run.step.step >= 2:
            run.end_early("good enough")


def hooks(*names: str) -> str:
    return "train.hooks=[" + ",".join(f"{{_target_: {__name__}.{name}}}" for name in names) + "]"


@pytest.mark.usefixtures("digits")
def test_all_ranks_call_hooks_at_the_same_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    overrides = (*SMALL, hooks("Recorder", "OnlyAtTheEnd"), "checkpoint.every_steps=2", "train.eval_every=3")
    train_on(2, tmp_path, *overrides, "train.max_steps=4")
    assert "Recorder, OnlyAtTheEnd" in capfd.readouterr().out
    expected = ["0 start", "1 step", "2 step", "2 save", "3 step", "3 evaluation"]
    expected += ["4 step", "4 evaluation", "4 save", "4 finished"]
    for rank in (0, 1):
        assert (tmp_path / f"calls-{rank}").read_text().splitlines() == expected
        assert (tmp_path / f"finished-{rank}").exists()


class Reader:
    """Reads a metric of evaluations."""

    reads_metrics = ("eval/acuracy",)

    def on_evaluation(self, run: TrainState, result: Evaluation) -> None:
        raise AssertionError("no evaluation comes so far")


@pytest.mark.usefixtures("digits")
def test_a_metric_that_a_hook_reads_is_looked_for_before_the_first_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RanksFailed):
        train_on(1, tmp_path, *SMALL, hooks("Reader"), "train.max_steps=2")
    assert_refused(
        capfd.readouterr().err, "train.hooks[0]", "Reader", "'eval/acuracy'", "Did you mean 'eval/accuracy'?"
    )
    assert status(tmp_path)["step"] == 0


@pytest.mark.usefixtures("digits")
def test_the_last_checkpoint_of_a_stopped_run_is_announced(tmp_path: Path) -> None:
    (tmp_path / "STOP").touch()
    train_on(1, tmp_path, *SMALL, hooks("Recorder"), "train.max_steps=100")
    step = status(tmp_path)["step"]
    assert (tmp_path / "calls-0").read_text().splitlines()[-2:] == [f"{step} save", f"{step} stopped"]


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
@pytest.mark.parametrize(
    "method",
    [
        "on_start",
        "on_step",
        "on_end",
        "on_evaluation",
        "on_save",
    ],
)
def test_an_exception_of_a_hook_ends_all_ranks_with_its_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], method: str
) -> None:
    hook = f"train.hooks=[{{_target_: {__name__}.Failing, method: {method}}}]"
    with pytest.raises(RanksFailed) as failed:
        train_on(2, tmp_path, *SMALL, hook, "train.max_steps=2")
    assert set(failed.value.reports) == {0, 1}
    assert not failed.value.hung
    why = f"rank 1 failed: HookFailed: train.hooks[0] ({__name__}.Failing).{method} raised ZeroDivisionError: of a hook"
    assert (status(tmp_path)["state"], status(tmp_path)["reason"]) == ("failed", why)
    assert "in _fail" in capfd.readouterr().err  # the traceback of the hook


def test_a_hook_that_exits_has_failed() -> None:
    class Exits:
        def on_step(self, run: Any, outcome: Any) -> None:
            sys.exit(0)

    with refused(HookFailed, "train.hooks[0].on_step", "SystemExit"):
        Hooks({"train.hooks[0]": Exits()}).call("on_step", None, None)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
@pytest.mark.parametrize(("method", "end"), [("on_step", 3), ("on_evaluation", 2), ("on_save", 2)])
def test_a_hook_ends_the_run_early_as_finished_with_evaluation_and_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], method: str, end: int
) -> None:
    hook = f"train.hooks=[{{_target_: {__name__}.EndsEarly, method: {method}}}]"
    every = 0 if method == "on_step" else 2  # an evaluation or a save after step 2 would wait for its outcome
    command = (*SMALL, hook, "train.max_steps=9", f"train.eval_every={every}", f"checkpoint.every_steps={every or 50}")
    train_on(2 if method == "on_step" else 1, tmp_path, *command)
    state = status(tmp_path)
    assert (state["state"], state["step"], state["last_step"], state["reason"]) == ("finished", end, end, "good enough")
    assert records(tmp_path)[-1]["step"] == end
    assert "eval/loss" in records(tmp_path)[-1]
    assert (tmp_path / "checkpoints" / f"step-{end:09d}" / "manifest.json").exists()
    capfd.readouterr()
    train_on(1, tmp_path, *command)
    assert f"finished at step {end} already" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("node", "names"),
    [
        ({"option": 1}, ("train.hooks[0]", "_target_")),
        ("text", ("train.hooks[0]", "_target_")),
        ({"_target_": f"{__name__}.Nothing"}, ("train.hooks[0]", "Nothing", "cannot be imported")),
        ({"_target_": f"{__name__}.Recorder", "path": 1}, ("train.hooks[0]", "path")),
        ({"_target_": "builtins.dict"}, ("train.hooks[0]", "builtins.dict", "on_start, on_step")),
        ({"_target_": f"{__name__}.Misspelt"}, ("train.hooks[0]", "on_steps", "Did you mean on_step?")),
    ],
    ids=["no target", "text", "unknown", "unknown option", "no method", "misspelt method"],
)
def test_impossible_hooks_are_refused_with_key_and_remedy(node: Any, names: tuple[str, ...]) -> None:
    cfg = Config()
    cfg.train.hooks = [node]
    with pytest.raises(ConfigError) as raised:
        build_hooks(cfg)
    assert all(name in str(raised.value) for name in names)

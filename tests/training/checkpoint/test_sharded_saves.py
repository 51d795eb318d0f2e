"""Saves of a sharded run: every rank writes its file, and whatever fails leaves a whole checkpoint or none."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.config.schema import CheckpointConfig, ParallelConfig
from dtrain.distributed import store as store_module
from dtrain.distributed.process_group import process_group
from dtrain.distributed.world import World
from dtrain.errors import ConfigError, PeerLost
from dtrain.training.checkpoint import checkpoints as checkpoints_module
from dtrain.training.checkpoint import manager as module
from dtrain.training.checkpoint.checkpoints import Checkpoint, Checkpoints
from dtrain.training.checkpoint.manager import CheckpointManager
from dtrain.training.checkpoint.tensors import Part
from tests.ranks import RanksFailed, run_ranks

ROWS = 6
FULL = OSError(28, "No space left on device")


def content(value: float, world: World) -> Checkpoint:
    """This rank's rows of a weight and of its momentum, which hold ``value``; rank 0 also has a number of steps."""
    rows = ROWS // world.size
    parts: dict[str, dict[str, Part]] = {
        group: {"weight": Part(torch.full((rows, 2), value), (rows * world.rank, 0), (ROWS, 2))}
        for group in ("model", "optimizer")
    }
    if world.rank == 0:
        parts["optimizer"]["weight/step"] = Part(torch.tensor(value), (), ())
    return Checkpoint(parts, {"value": value, "metrics": {"eval/x": value}})


def manager(folder: Path, world: World, best: str | None = None) -> tuple[CheckpointManager, Any, list[str]]:
    """A manager, its run, whose step can be set, and the warnings."""
    warnings: list[str] = []
    cfg = SimpleNamespace(checkpoint=CheckpointConfig(best=best), parallel=ParallelConfig())
    run: Any = SimpleNamespace(
        cfg=cfg,
        checkpoints=Checkpoints(folder, best=best, best_mode="max"),
        is_sharded=True,
        world=world,
        step=SimpleNamespace(step=0, model=None),
        model=nn.Linear(1, 1),
        checkpoint=lambda metrics: content(float(run.step.step), world),
    )
    listener: Any = SimpleNamespace(warn=warnings.append, saved=lambda path, step, is_best: None)
    return CheckpointManager(run, listener), run, warnings


def on_ranks(ranks: int, function: Callable[[World], Any], timeout: float = 60) -> list[Any]:
    def rank(number: int) -> Any:
        with process_group(timeout=20) as world:
            return function(world)

    return run_ranks(ranks, rank, init=False, timeout=timeout)


def value_in(folder: Path, step: int) -> float:
    """The value that every tensor of a verified checkpoint has."""
    checkpoints = Checkpoints(folder)
    checkpoints.verify(step)
    loaded = checkpoints.load(step)
    assert {group: set(named) for group, named in loaded.tensors.items()} == {
        "model": {"weight"},
        "optimizer": {"weight", "weight/step"},
    }
    assert tuple(loaded.stored("model")["weight"].shape) == (ROWS, 2)
    values = {float(n) for named in loaded.tensors.values() for tensor in named.values() for n in tensor[...].flatten()}
    assert values == {loaded.state["value"]}
    return values.pop()


def save_on_one_rank(folder: Path, step: int) -> None:
    def rank(world: World) -> None:
        saves, run, _ = manager(folder, world)
        run.step.step = step
        saves.save({}, final=True)

    on_ranks(1, rank)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "saved.json")


def test_the_loop_waits_for_no_disk_and_the_last_save_for_those_of_all_ranks(tmp_path: Path) -> None:
    def rank(world: World) -> tuple[list[int], list[int], float | None]:
        saves, run, _ = manager(tmp_path, world)
        may_write = threading.Event()
        write = Checkpoints.write_rank

        def slowly(*arguments: Any) -> Any:
            assert may_write.wait(20)
            return write(*arguments)

        run.checkpoints.write_rank = lambda *arguments: slowly(run.checkpoints, *arguments)
        run.step.step = 10
        saves.save({}, final=False)  # returns although no rank may write
        before = run.checkpoints.steps()
        threading.Timer(0.2 * world.rank, may_write.set).start()
        run.step.step = 20
        saves.save({}, final=True)
        return before, run.checkpoints.steps(), run.checkpoints.recorded()

    for before, after, recorded in on_ranks(3, rank):
        assert (before, after, recorded) == ([], [10, 20], 20)
    assert [value_in(tmp_path, step) for step in (10, 20)] == [10.0, 20.0]
    files = [path.name for path in sorted(Checkpoints(tmp_path).path(20).iterdir())]
    assert files == ["manifest.json", *(f"rank-{rank:05d}-of-00003.safetensors" for rank in range(3)), "state.json"]
    assert left_in(tmp_path) == ["step-000000010", "step-000000020"]


def test_old_checkpoints_go_and_the_best_stays_and_is_compared_with_the_one_under_way(tmp_path: Path) -> None:
    def rank(world: World) -> list[bool]:
        saves, run, _ = manager(tmp_path, world, best="eval/x")
        run.checkpoint = lambda metrics: Checkpoint(content(0.0, world).tensors, {"value": 0.0, "metrics": metrics})
        improved = []
        for step, value in ((10, 0.5), (20, 0.9), (30, 0.1), (40, 0.2)):
            run.step.step = step
            improved.append(saves.is_best({"eval/x": value}))
            saves.save({"eval/x": value}, final=False)
        saves.save_last()
        return improved

    assert on_ranks(2, rank) == [[True, True, False, False]] * 2
    assert Checkpoints(tmp_path).steps() == [20, 30, 40]


@pytest.mark.parametrize("failing", [0, 1], ids=["the first rank", "another rank"])
def test_a_rank_that_cannot_write_is_a_warning_and_the_last_save_is_refused_on_all_ranks(
    tmp_path: Path, failing: int
) -> None:
    def rank(world: World) -> tuple[list[str], str]:
        saves, run, warnings = manager(tmp_path, world)
        run.step.step = 10
        saves.save({}, final=False)
        saves.save_last()
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == failing:
                patch.setattr(checkpoints_module, "write_parts", refuse)
            run.step.step = 20
            saves.save({}, final=False)
            run.step.step = 30
            with pytest.raises(ConfigError) as refused:
                saves.save({}, final=True)
        run.step.step = 40
        saves.save({}, final=True)
        return warnings, str(refused.value)

    def refuse(*arguments: object) -> None:
        raise FULL

    (warnings, message), (of_other, same_message) = on_ranks(2, rank)
    assert [f"rank {failing}" in line and "step 20" in line and "No space" in line for line in warnings] == [True]
    assert of_other == []
    assert message == same_message
    assert all(part in message for part in ("step 30", f"rank {failing}", "No space left", "Free disk space"))
    assert left_in(tmp_path) == ["step-000000010", "step-000000040"]


@pytest.mark.parametrize("place", ["stage", "complete"])
def test_what_the_first_rank_cannot_write_is_a_warning_and_the_step_is_saved_again(tmp_path: Path, place: str) -> None:
    def rank(world: World) -> tuple[bool, list[str]]:
        saves, run, warnings = manager(tmp_path, world)
        run.step.step = 10

        function, refusals = getattr(run.checkpoints, place), [FULL]

        def refuse_once(*arguments: Any) -> Any:
            if refusals:
                raise refusals.pop()
            return function(*arguments)

        setattr(run.checkpoints, place, refuse_once)
        saves.save({}, final=False)
        return saves.save_last(), warnings

    (saved, warnings), (saved_too, _) = on_ranks(2, rank)
    assert (saved, saved_too) == (True, True)
    assert len(warnings) == 1
    assert "No space left" in warnings[0]
    assert value_in(tmp_path, 10) == 10.0
    assert left_in(tmp_path) == ["step-000000010"]


def test_a_rank_that_left_out_a_part_leaves_no_checkpoint(tmp_path: Path) -> None:
    def rank(world: World) -> str:
        saves, run, _ = manager(tmp_path, world)
        run.step.step = 10
        if world.rank == 1:
            run.checkpoint = lambda metrics: Checkpoint({"model": {}, "optimizer": {}}, {})
        with pytest.raises(ConfigError) as refused:
            saves.save({}, final=True)
        return str(refused.value)

    for message in on_ranks(2, rank):
        assert "model.weight" in message
    assert left_in(tmp_path) == []


def test_a_folder_that_another_machine_does_not_see_is_named(tmp_path: Path) -> None:
    def rank(world: World) -> str:
        saves, run, _ = manager(tmp_path, world)
        run.step.step = 10
        if world.rank == 1:
            write = run.checkpoints.write_rank
            run.checkpoints.write_rank = lambda staged, *rest: write(Path("/proc/self") / staged.name, *rest)
        with pytest.raises(ConfigError) as refused:
            saves.save({}, final=True)
        return str(refused.value)

    for message in on_ranks(2, rank):
        assert "rank 1: /proc/self/.step-000000010" in message
        assert "run.dir" in message


# -- a rank that is killed

#: Where in a save a rank can be killed: (function, whether before or after it, rank).
PHASES: dict[str, tuple[Any, str, bool, int]] = {
    "rank 0, before the folder is made": (Checkpoints, "stage", True, 0),
    "rank 0, after the folder was made": (Checkpoints, "stage", False, 0),
    "rank 1, before its file": (checkpoints_module, "write_parts", True, 1),
    "rank 0, before its file": (checkpoints_module, "write_parts", True, 0),
    "rank 1, after its file": (checkpoints_module, "write_parts", False, 1),
    "rank 1, before it reports": (module, "_publish", True, 1),
    "rank 1, after it reported": (module, "_publish", False, 1),
    "rank 0, before all have reported": (module, "_collect", True, 0),
    "rank 0, before the manifest": (checkpoints_module, "_write_state", True, 0),
    "rank 0, after the manifest": (checkpoints_module, "_write_state", False, 0),
    "rank 0, before the rename": (os, "rename", True, 0),
    "rank 0, after the rename": (os, "rename", False, 0),
    "rank 0, before old ones are deleted": (Checkpoints, "_delete_old", True, 0),
}
COMPLETE = ("rank 0, after the rename", "rank 0, before old ones are deleted")
#: Rank 0 may have all reports, and completes the checkpoint, before it notices the death.
MAY_BE_COMPLETE = ("rank 1, after it reported",)

#: Phase, and whether it is the last save, which the loop waits for. The others take two minutes: ``-m soak``.
DRILLS = (
    ("rank 1, before its file", True),
    ("rank 1, before it reports", False),
    ("rank 0, before all have reported", True),
    ("rank 0, after the manifest", False),
    ("rank 0, after the rename", True),
)


def kill_at(patch: pytest.MonkeyPatch, owner: Any, name: str, before: bool) -> None:
    function = getattr(owner, name)

    def killing(*arguments: Any, **options: Any) -> Any:
        if not before:
            function(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    patch.setattr(owner, name, killing)


@pytest.mark.parametrize(
    ("phase", "final"),
    [
        pytest.param(phase, final, marks=pytest.mark.slow if (phase, final) in DRILLS else pytest.mark.soak)
        for phase in PHASES
        for final in (False, True)
    ],
)
def test_wherever_a_rank_is_killed_the_others_end_and_a_whole_checkpoint_is_left(
    tmp_path: Path, phase: str, final: bool
) -> None:
    owner, name, before, victim = PHASES[phase]

    def rank(world: World) -> None:
        saves, run, _ = manager(tmp_path, world)
        run.step.step = 10
        saves.save({}, final=True)
        if world.rank == victim:
            kill_at(pytest.MonkeyPatch(), owner, name, before)
        run.step.step = 20
        saves.save({}, final=final)
        while True:  # the steps that follow
            torch.distributed.all_reduce(torch.zeros(1))

    began = time.monotonic()
    with pytest.raises(RanksFailed) as failed:
        on_ranks(3, rank)
    assert failed.value.hung == {}
    assert f"ended with code {-signal.SIGKILL}" in failed.value.reports[victim]
    for number, report in failed.value.reports.items():
        assert number == victim or PeerLost.__name__ in report or "PeerFailed" in report
    print(f"{phase}: {time.monotonic() - began:.1f} s")

    newest, problems = Checkpoints(tmp_path).newest_good()
    assert problems == []
    assert newest in ((20,) if phase in COMPLETE else (10, 20) if phase in MAY_BE_COMPLETE else (10,))
    assert value_in(tmp_path, newest) == newest
    assert newest == 20 or Checkpoints(tmp_path).steps() == [10]

    save_on_one_rank(tmp_path, 30)
    assert left_in(tmp_path) == [f"step-0000000{step}" for step in (newest, 30)]


@pytest.mark.slow
def test_a_rank_that_fails_while_another_one_writes_ends_all_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    def rank(world: World) -> None:
        saves, run, _ = manager(tmp_path, world)
        run.step.step = 10
        saves.save({}, final=True)
        if world.rank == 2:
            run.checkpoints.write_rank = lambda *arguments: time.sleep(3)
        run.step.step = 20
        saves.save({}, final=False)
        if world.rank == 1:
            raise ZeroDivisionError("a bug")
        torch.distributed.all_reduce(torch.zeros(1))

    with pytest.raises(RanksFailed) as failed:
        on_ranks(3, rank)
    assert failed.value.hung == {}
    assert Checkpoints(tmp_path).steps() == [10]

    save_on_one_rank(tmp_path, 30)  # deletes what rank 0 may have had no time to delete
    assert left_in(tmp_path) == ["step-000000010", "step-000000030"]


def test_a_report_is_sent_again_when_the_store_has_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [store_module.StoreLost(), None]

    def call(function: Any) -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    monkeypatch.setattr(module, "_POLL", 0.0)
    module._publish(SimpleNamespace(is_open=True, call=call), "key", "text")  # type: ignore[arg-type]
    assert answers == []

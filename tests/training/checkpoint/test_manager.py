"""When a run is saved, and what becomes of a write that fails or is slow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from dtrain.config.schema import CheckpointConfig, ParallelConfig
from dtrain.errors import ConfigError
from dtrain.training.checkpoint import manager as module
from dtrain.training.checkpoint.checkpoints import Checkpoint, Checkpoints
from dtrain.training.checkpoint.manager import AsyncWriter, CheckpointManager, NotSaved
from tests.refusals import refused
from tests.training.checkpoints_for_tests import content


class Disk(Checkpoints):
    """Checkpoints on a disk that can be held up, and that can refuse."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, keep_last=9)
        self.error: BaseException | None = None
        self.may_write = threading.Event()
        self.may_write.set()

    def save(self, step: int, checkpoint: Checkpoint) -> Path:
        self.may_write.wait()
        if self.error is not None:
            raise self.error
        return super().save(step, checkpoint)

    def write(self, step: int) -> Callable[[], Path]:
        """What a writer runs for a step."""
        return lambda: self.save(step, content(float(step)))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    disk.may_write.set()  # else a thread of a failed test would keep the interpreter


FULL = OSError(28, "No space left on device")


# -- the writer


def test_a_write_does_not_hold_up_its_caller_and_is_whole_after_the_wait(disk: Disk) -> None:
    writer = AsyncWriter()
    assert not writer.is_writing
    disk.may_write.clear()
    writer.start(10, disk.write(10))
    assert writer.is_writing
    assert disk.steps() == []
    disk.may_write.set()
    writer.wait()
    assert not writer.is_writing
    assert disk.newest_good() == (10, [])
    assert writer.seconds > 0


def test_a_second_write_waits_for_the_first(disk: Disk) -> None:
    writer = AsyncWriter()
    disk.may_write.clear()
    writer.start(10, disk.write(10))
    second = threading.Thread(target=writer.start, args=(20, disk.write(20)))
    second.start()
    disk.may_write.set()
    second.join()
    writer.wait()
    assert disk.steps() == [10, 20]


def test_a_failed_write_is_raised_once_and_then_the_next_one_is_made(disk: Disk) -> None:
    writer = AsyncWriter()
    disk.error = FULL
    writer.start(10, disk.write(10))
    with refused(NotSaved, "step 10", "No space left"):
        writer.start(20, disk.write(20))
    disk.error = None
    writer.wait()
    writer.start(30, disk.write(30))
    writer.wait()
    assert disk.steps() == [30]


def test_a_bug_in_a_write_is_raised_where_it_is_waited_for(disk: Disk) -> None:
    writer = AsyncWriter()
    disk.error = ZeroDivisionError("a bug")
    writer.start(10, disk.write(10))
    with pytest.raises(ZeroDivisionError):
        writer.wait()


# -- the manager


class Clock:
    """Seconds that only the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def manager(
    disk: Disk, *, every_minutes: float | None = None, rank: int = 0
) -> tuple[CheckpointManager, Any, list[str]]:
    """A manager, its run, whose step can be set, and the warnings."""
    warnings: list[str] = []
    cfg = SimpleNamespace(checkpoint=CheckpointConfig(every_minutes=every_minutes), parallel=ParallelConfig())
    run: Any = SimpleNamespace(
        cfg=cfg,
        checkpoints=disk,
        is_sharded=False,
        world=SimpleNamespace(rank=rank),
        step=SimpleNamespace(step=0, model=None),
        model=nn.Linear(1, 1),
        checkpoint=lambda metrics: content(float(run.step.step), metrics),
    )
    listener: Any = SimpleNamespace(warn=warnings.append, saved=lambda path, step, is_best: None)
    return CheckpointManager(run, listener), run, warnings


@pytest.mark.usefixtures("world_of_one")
def test_a_save_is_due_after_the_minutes_since_the_last_one_and_not_again_before(disk: Disk, clock: Clock) -> None:
    saves, run, _ = manager(disk, every_minutes=15)
    due = []
    for minute in range(1, 50):
        clock.now += 60
        if saves.is_due():
            due.append(minute)
            run.step.step = minute
            saves.save({}, final=True)
            assert not saves.is_due()
    assert due == [16, 32, 48]
    assert disk.steps() == due


def test_without_minutes_and_on_other_ranks_no_save_is_ever_due(disk: Disk, clock: Clock) -> None:
    never, other = manager(disk)[0], manager(disk, every_minutes=1, rank=1)[0]
    clock.now += 1e9
    assert not never.is_due()
    assert not other.is_due()


@pytest.mark.usefixtures("world_of_one")
def test_a_failed_write_is_a_warning_and_the_last_step_is_saved_again(disk: Disk) -> None:
    saves, run, warnings = manager(disk)
    run.step.step, disk.error = 10, FULL
    saves.save({}, final=False)
    assert not saves.is_safe()
    assert "No space left" in warnings[0]
    disk.error = None
    saves.save({}, final=False)
    assert saves.is_safe()
    assert not saves.save_last()
    run.step.step = 20
    assert saves.save_last()
    assert disk.steps() == [10, 20]


@pytest.mark.usefixtures("world_of_one")
def test_a_last_step_whose_write_is_known_to_have_failed_is_saved_again(disk: Disk) -> None:
    saves, run, warnings = manager(disk)
    run.step.step, disk.error = 10, FULL
    saves.save({}, final=False)
    saves._writer._thread.join()  # type: ignore[union-attr]
    assert not saves.is_safe(wait=False)  # as the last record of a run asks
    assert len(warnings) == 1
    disk.error = None
    assert saves.save_last()
    assert disk.steps() == [10]
    assert not saves.save_last()


@pytest.mark.usefixtures("world_of_one")
def test_a_final_save_that_fails_is_refused_with_what_to_do(disk: Disk) -> None:
    saves, run, _ = manager(disk)
    run.step.step, disk.error = 10, FULL
    with refused(ConfigError, "step 10", "No space left", "Free disk space", "begins again"):
        saves.save({}, final=True)
    run.step.step, disk.error = 20, None
    saves.save({}, final=True)
    run.step.step, disk.error = 30, FULL
    with refused(ConfigError, "step 30", "No space left", "Free disk space", "step 20"):
        saves.save({}, final=True)


@pytest.mark.usefixtures("world_of_one")
def test_a_save_is_taken_of_buffers_that_all_ranks_have_and_under_the_time_limit_of_the_disk(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves, run, _ = manager(disk)
    done: list[object] = []
    monkeypatch.setattr(module, "broadcast_buffers", lambda model: done.append("buffers"))
    monkeypatch.setattr(module, "set_timeout", done.append)

    def checkpoint(metrics: dict[str, float]) -> Checkpoint:
        done.append(f"waits for the disk: {saves.waits_for_disk}")
        return content(1.0, metrics)

    run.checkpoint = checkpoint
    saves.save({}, final=True)
    limits = [module._DISK_TIMEOUT, run.cfg.parallel.timeout_step]
    assert done == ["buffers", limits[0], "waits for the disk: True", limits[1]]
    assert not saves.waits_for_disk


@pytest.mark.usefixtures("world_of_one")
def test_what_is_best_is_compared_with_the_checkpoint_that_is_still_being_written(disk: Disk) -> None:
    disk._best, disk._sign = "eval/accuracy", 1
    saves, run, _ = manager(disk)
    run.cfg.checkpoint.best = "eval/accuracy"
    disk.may_write.clear()
    run.step.step = 10
    saves.save({"eval/accuracy": 0.9}, final=False)
    assert saves.is_safe(wait=False)
    assert disk.steps() == []
    threading.Timer(0.1, disk.may_write.set).start()
    assert not saves.is_best({"eval/accuracy": 0.8})
    assert saves.is_best({"eval/accuracy": 0.95})


@pytest.mark.usefixtures("world_of_one")
def test_a_failed_write_that_nobody_has_asked_for_is_told_at_the_next_save_and_at_the_end(disk: Disk) -> None:
    saves, run, warnings = manager(disk)
    for step in (10, 20):
        run.step.step, disk.error = step, FULL
        saves.save({}, final=False)
    assert len(warnings) == 1
    saves._writer._thread.join()  # type: ignore[union-attr]
    disk.error = None
    assert saves.save_last()
    assert disk.steps() == [20]
    assert len(warnings) == 2


@pytest.mark.usefixtures("world_of_one")
def test_replicas_that_drifted_apart_are_not_saved(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    saves, run, _ = manager(disk)

    def refuse(model: nn.Module, ignored: object) -> None:
        assert model is run.model
        raise ConfigError("model: weight differs between ranks")

    monkeypatch.setattr(module, "require_equal_replicas", refuse)
    with pytest.raises(ConfigError, match="weight differs"):
        saves.save({}, final=True)
    assert disk.steps() == []

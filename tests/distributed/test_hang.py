from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtrain.config.schema import ParallelConfig
from dtrain.distributed import hang
from dtrain.distributed.hang import HangWatch, Place
from dtrain.distributed.process_group import process_group, published_failure
from dtrain.distributed.world import World
from tests.ranks import RanksFailed, run_ranks

LIMITS = ParallelConfig(timeout_start=0.5, timeout_step=0.2)


def asleep_in_code_of_its_own() -> None:
    time.sleep(30)


def test_every_rank_reports_where_it_waits_even_if_only_one_is_stuck(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def rank(number: int) -> None:
        with process_group(20) as world, watching(tmp_path, world) as watch:
            steps = [0]
            # Rank 1 keeps moving as far as it can tell; only the store says that it has to report.
            watch.follow(lambda: Place(7, [f"s/{number}"], steps[0] if number == 0 else time.monotonic()))
            if number == 0:
                dist.all_reduce(torch.ones(1))
            asleep_in_code_of_its_own()

    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, rank, init=False)
    assert all("ended with code 1" in report for report in failed.value.reports.values())
    message = capfd.readouterr().err
    assert message.count("dtrain: the run hangs (rank 0: nothing has moved for 0.5 s)") == 1
    assert "  rank 0, step 7: in all_reduce (distributed_c10d.py:" in message
    assert "  rank 1, step 7: in asleep_in_code_of_its_own (test_hang.py:" in message
    for number in (0, 1):
        report = (tmp_path / f"hang-rank-{number:05d}.txt").read_text()
        assert f'last samples: ["s/{number}"]' in report
        assert "asleep_in_code_of_its_own" in report or "all_reduce" in report
        reason = json.loads((tmp_path / f"reason-{number}").read_text())
        assert "rank 0, step 7: in all_reduce" in reason
        assert "rank 1, step 7: in asleep" in reason


def test_the_limit_of_a_step_counts_from_the_first_finished_step_on(tmp_path: Path) -> None:
    declared = declarations(tmp_path, lambda clock: Place(1 + (clock > 1), [], clock), until=2.0)
    assert declared == ["nothing has moved for 0.2 s"]
    declared = declarations(tmp_path, lambda clock: Place(1, [], min(clock, 1)), until=2.0)
    assert declared == ["nothing has moved for 0.5 s"]


def test_a_run_that_moves_or_has_ended_or_failed_does_not_hang(tmp_path: Path) -> None:
    assert declarations(tmp_path, lambda clock: Place(1, [], clock)) == []
    assert declarations(tmp_path, lambda clock: Place(1, [], 0), leave=True) == []
    assert declarations(tmp_path, lambda clock: Place(1, [], 0), fail=True) == []


def test_a_hang_that_two_threads_declare_is_reported_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def rank(number: int) -> None:
        with process_group(20) as world, watching(tmp_path, world) as watch:
            for why in ("no move", "asked to stop"):
                threading.Thread(target=watch.declare, args=(why,), daemon=True).start()
            asleep_in_code_of_its_own()

    with pytest.raises(RanksFailed):
        run_ranks(1, rank, init=False)
    assert capfd.readouterr().err.count("dtrain: the run hangs") == 1


def test_a_process_that_was_suspended_has_not_hung(tmp_path: Path) -> None:
    # It moves at each fourth poll, and is suspended for 100 s between two moves.
    assert declarations(tmp_path, lambda clock: Place(1, [], int(clock % 100 / 0.2)), suspended_at=2) == []


def test_a_hang_ends_the_process_even_on_a_write_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def rank(number: int) -> None:
        def failed(text: str) -> None:
            raise OSError(28, "No space left on device")

        with process_group(20) as world:
            watch = HangWatch(tmp_path / "no folder", world, LIMITS, failed)
            threading.Thread(target=watch.declare, args=("no move",), daemon=True).start()
            asleep_in_code_of_its_own()

    with pytest.raises(RanksFailed) as failed:
        run_ranks(1, rank, init=False)
    assert "ended with code 1" in failed.value.reports[0]
    message = capfd.readouterr().err
    assert "dtrain: stacks could not be written: " in message
    assert "dtrain: the run hangs" in message


def declarations(
    tmp_path: Path,
    where: Callable[[float], Place],
    *,
    until: float = float("inf"),
    leave: bool = False,
    fail: bool = False,
    suspended_at: int = 0,
) -> list[str]:
    """What a watch declares within a hundred polls, by a clock that a poll moves by 0.05 s.

    Args:
        where: By that clock.
        until: ``where`` sees the clock stand still from then on.
        suspended_at: The poll before which the clock jumps by 100 s.
    """

    def rank(number: int) -> list[str]:
        clock, looks = [0.0], [0]

        class Left(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                looks[0] += 1
                clock[0] += 0.05 + 100 * (looks[0] == suspended_at)
                return looks[0] > 100 or self.is_set()

        hang.time.monotonic = lambda: clock[0]  # type: ignore[assignment]
        with process_group(20) as world:
            watch = HangWatch(tmp_path, world, LIMITS)
            declared: list[str] = []
            watch._left = Left()
            watch.declare = lambda why: (declared.append(why), watch._left.set())  # type: ignore[assignment,func-returns-value]
            if leave:
                watch.__exit__(None, None, None)
            if fail:
                dist.distributed_c10d._get_default_store().set("dtrain/failed", "rank 3 failed")
                assert published_failure() is not None
            watch._watch(lambda: where(min(clock[0], until)))
            return declared

    return run_ranks(1, rank, init=False)[0]


def watching(folder: Path, world: World) -> HangWatch:
    def failed(text: str) -> None:
        (folder / f"reason-{world.rank}").write_text(json.dumps(text))

    return HangWatch(folder, world, LIMITS, failed)

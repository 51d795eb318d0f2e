from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dtrain.config.errors import PeerFailed
from dtrain.distributed.process_group import process_group, set_timeout
from tests.ranks import RanksFailed, run_ranks


def test_a_process_without_a_launcher_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with process_group(timeout=5) as world:
        assert (world.rank, world.size) == (0, 1)
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_the_group_is_left_after_success_and_after_failure() -> None:
    def rank(number: int) -> list[bool]:
        with process_group(timeout=20) as world:
            dist.all_reduce(torch.ones(1))
        after_success = dist.is_initialized()
        return [after_success, world.size == 2]

    assert run_ranks(2, rank, init=False) == [[False, True]] * 2


def test_the_others_learn_who_failed_first_instead_of_a_broken_connection() -> None:
    def rank(number: int) -> str:
        try:
            with process_group(timeout=20):
                if number == 1:
                    raise ZeroDivisionError("the culprit")
                dist.all_reduce(torch.ones(1))
                time.sleep(1)
        except (PeerFailed, ZeroDivisionError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing raised"

    culprit, *others = sorted(run_ranks(3, rank, init=False), reverse=True)
    assert culprit == "ZeroDivisionError: the culprit"
    assert set(others) == {"PeerFailed: rank 1 failed: ZeroDivisionError: the culprit"}


@pytest.mark.slow
def test_a_rank_that_was_killed_is_named_as_the_reason_instead_of_a_broken_connection() -> None:
    def rank(number: int) -> None:
        with process_group(timeout=20):
            if number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1))

    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, rank, init=False)
    assert "dtrain.config.errors.PeerLost: another rank is gone and has not said why" in failed.value.reports[0]


@pytest.mark.slow
def test_a_collective_ends_after_the_time_out_of_a_step() -> None:
    def rank(number: int) -> bool:
        with process_group(timeout=60):
            set_timeout(1.0)
            if number == 1:
                time.sleep(4)
                return True
            started = time.monotonic()
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(1))
            return time.monotonic() - started < 3.5

    assert all(run_ranks(2, rank, init=False))


@pytest.mark.parametrize("rounds", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_ranks_end_though_they_leave_right_after_a_collective(rounds: int) -> None:
    """Every other time they hung, where DDP was the last to let go of the group."""

    def rank(number: int) -> bool:
        with process_group(timeout=20):
            model = DistributedDataParallel(torch.nn.Linear(3, 1))
            model(torch.ones(2, 3)).sum().backward()
            dist.broadcast(torch.ones(5), src=0)
        return True

    for _ in range(rounds):
        assert run_ranks(2, rank, init=False, timeout=20) == [True, True]


THREADS_AT_EXIT = """
import atexit, time
from contextlib import suppress
from pathlib import Path

import dtrain.train


def threads_of_gloo():
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has just ended
            names.append(path.read_text())
    return " ".join(names).count("gloo")


@atexit.register
def told():
    deadline = time.monotonic() + 5  # the kernel shows a thread a little longer than whoever has joined it
    while threads_of_gloo() and time.monotonic() < deadline:
        time.sleep(0.01)
    print(f"threads of gloo: {threads_of_gloo()}", flush=True)


dtrain.train.main()
"""


@pytest.mark.slow
def test_threads_of_gloo_end_before_the_interpreter_does(digits: Path, tmp_path: Path) -> None:
    # Those that are left when it is torn down abort the process now and then.
    rank = tmp_path / "rank.py"
    rank.write_text(THREADS_AT_EXIT)
    overrides = ["experiment=digits", f"run.dir={tmp_path}", "train.max_steps=3", "tracker=none", "data.num_workers=0"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    for _ in ("trains", "has finished"):
        done = subprocess.run(
            [*command, sys.executable, str(rank), *overrides],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("threads of gloo: 0") == 2

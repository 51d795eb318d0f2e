"""Worker processes that never reach their first line."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

import pytest

from dtrain.data.loading import worker_processes
from tests.data.loading.test_workers import alive, two_workers, worker_numbers
from tests.shards import global_batches, read_epoch, valid_keys

#: So many of the next forks of this process have a child that waits for ever, as if a lock of the interpreter had been
#: held at that moment.
_forks_left = 0


def _in_child() -> None:
    while _forks_left:
        time.sleep(1000)


def _in_parent() -> None:
    global _forks_left
    _forks_left = max(0, _forks_left - 1)


os.register_at_fork(after_in_child=_in_child, after_in_parent=_in_parent)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the interpreter's locks are free in a child since Python 3.12")
@pytest.mark.parametrize("forks", [1, 3])
def test_a_forked_worker_that_never_begins_is_replaced(
    uneven: list[str], monkeypatch: pytest.MonkeyPatch, forks: int
) -> None:
    expected = global_batches([two_workers(uneven, num_workers=0)], epoch=0)
    monkeypatch.setattr(worker_processes, "_BEGIN_SECONDS", (0.3, 0.3))
    monkeypatch.setattr(f"{__name__}._forks_left", forks)
    started: list[int] = []
    monkeypatch.setattr(os, "fork", lambda fork=os.fork: _noted(fork(), started))
    loader = two_workers(uneven, start_method="fork")
    steps = read_epoch(loader)
    assert len(started) == {1: 4, 3: 6}[forks]
    assert worker_numbers(steps) == set(started[-2:])
    assert not any(map(alive, started[:-2]))
    assert [valid_keys(step) for step in steps] == expected
    loader.close()


def _noted(process: int, started: list[int]) -> int:
    if process:
        started.append(process)
    return process


def descriptors(at_most: int | None = None) -> int:
    """Open descriptors of this process; waits up to ten seconds for at most so many: threads of torch's queues end later."""
    for _ in range(200):
        gc.collect()  # the queues are in reference cycles
        number = len(os.listdir("/proc/self/fd"))
        if at_most is None or number <= at_most:
            break
        time.sleep(0.05)
    return number


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_no_descriptor_is_left_open(uneven: list[str]) -> None:
    loader = two_workers(uneven, start_method="fork")
    read_epoch(loader)
    loader.close()
    time.sleep(0.2)
    before = descriptors()
    for _ in range(3):
        loader = two_workers(uneven, start_method="fork")
        read_epoch(loader)
        loader.close()
    assert descriptors(before) <= before

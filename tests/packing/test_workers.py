"""Jobs on other processes: their order, their errors, and that none outlives whoever began them."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from dtrain.packing.workers import run


def square(number, tick):
    tick(number)
    return number * number


def fail(number, tick):
    raise ValueError(f"job {number}")


def end_itself(tick):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("processes", [1, 2])
def test_results_come_in_order_and_every_tick_is_told(processes):
    told = []
    jobs = (partial(square, number) for number in range(20))
    assert list(run(jobs, processes, told.append)) == [number * number for number in range(20)]
    assert sum(told) == sum(range(20))


@pytest.mark.parametrize("processes", [1, 2])
def test_the_first_error_in_order_is_raised(processes):
    jobs = [partial(square, 1), partial(fail, 2), partial(fail, 3), *(partial(square, n) for n in range(9))]
    results = run(jobs, processes, lambda count: None)
    assert next(results) == 1
    with pytest.raises(ValueError, match="job 2"):
        next(results)


def test_a_worker_that_is_killed_is_told_from_a_mistake():
    with pytest.raises(ChildProcessError, match="The same command continues"):
        list(run([end_itself], 2, lambda count: None))


BEGIN = """
import os, time
from functools import partial
from dtrain.packing.workers import run

def job(tick):
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    list(run([job, job], 2, lambda count: None))
"""


def is_running(pid):
    """Not if nobody has asked how it ended, either."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.slow
def test_workers_end_with_the_process_that_began_them(tmp_path):
    script = tmp_path / "begin.py"
    script.write_text(BEGIN)
    begun = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    workers = [int(begun.stdout.readline()) for _ in range(2)]
    begun.kill()
    begun.wait()
    deadline = time.monotonic() + 60
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))

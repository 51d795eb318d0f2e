"""Jobs on several processes: order of results, errors, and workers that exit with their parent."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from dtrain.pack.pool import run_jobs
from tests.refusals import refused


def square(number, on_progress):
    on_progress(number)
    return number * number


def fail(number, on_progress):
    raise ValueError(f"job {number}")


def kill_itself(on_progress):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_results_are_in_order_and_all_progress_is_reported(processes):
    reported = []
    jobs = (partial(square, number) for number in range(20))
    assert list(run_jobs(jobs, processes, reported.append)) == [number * number for number in range(20)]
    assert sum(reported) == sum(range(20))


@pytest.mark.parametrize("processes", [1, 2])
def test_the_first_error_in_order_is_raised(processes):
    jobs = [partial(square, 1), partial(fail, 2), partial(fail, 3), *(partial(square, n) for n in range(9))]
    results = run_jobs(jobs, processes, lambda count: None)
    assert next(results) == 1
    with pytest.raises(ValueError, match="job 2"):
        next(results)


def work_until_cancelled(path, on_progress):
    path.touch()
    for _ in range(1000):  # ten seconds, or until on_progress raises
        on_progress(1)
        time.sleep(0.01)
    path.with_suffix(".finished").touch()


def fail_after(path, on_progress):
    while not path.exists():
        time.sleep(0.01)
    raise ValueError("job 1")


def test_after_an_error_the_other_jobs_are_cancelled(tmp_path):
    jobs = [partial(fail_after, tmp_path / "begun"), partial(work_until_cancelled, tmp_path / "begun")]
    with pytest.raises(ValueError, match="job 1"):
        list(run_jobs(jobs, 2, lambda count: None))
    assert not (tmp_path / "begun.finished").exists()


def test_a_killed_worker_is_an_error_with_a_remedy():
    with refused(ChildProcessError, key="--processes", remedy="Run the same command again"):
        list(run_jobs([kill_itself], 2, lambda count: None))


BEGIN = """
import os, time
from functools import partial
from dtrain.pack.pool import run_jobs

def job(on_progress):
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    list(run_jobs([job, job], 2, lambda count: None))
"""


def is_running(pid):
    """Whether a process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.slow
def test_workers_exit_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "begin.py"
    script.write_text(BEGIN)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    workers = [int(parent.stdout.readline()) for _ in range(2)]
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 250
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))

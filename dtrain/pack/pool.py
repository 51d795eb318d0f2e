"""Jobs on several processes, with results in the order of the jobs.

* A *job* is a picklable callable. It gets ``on_progress`` and calls it with the amount of work done since the last call.
* Worker processes exit when their parent process exits, even if the parent was killed: otherwise an old worker could
  write to the same files as a new one.
* If a job fails, the remaining jobs stop at their next call of ``on_progress``, and ``run_jobs`` raises the exception of
  the first failed job.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, TypeVar

from dtrain.console import OnProgress

_Result = TypeVar("_Result")

_SECONDS_BETWEEN_UPDATES = 0.2
# Two jobs ahead per worker: no worker waits for work, and few job descriptions are in memory.
_JOBS_AHEAD = 2


class _Cancelled(Exception):
    """Another job failed, or the user interrupted the command."""


def run_jobs(
    jobs: Iterable[Callable[[OnProgress], _Result]], processes: int, on_progress: OnProgress
) -> Iterator[_Result]:
    """Runs jobs.

    Args:
        jobs: The jobs; the iterable is consumed as workers become free.
        processes: Number of worker processes; 1 runs the jobs in this process.
        on_progress: Called with the amount of work done since the last call.

    Yields:
        The result of each job, in the order of ``jobs``.

    Raises:
        ChildProcessError: If a worker process was killed.
    """
    if processes == 1:
        for job in jobs:
            yield job(on_progress)
        return
    # Not fork: a fork of a process with a running thread (the progress bar has one) can deadlock. The fork server imports
    # torch once for all workers.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "dtrain.data.writer"])
    done, stop = context.Value("q", 0), context.Event()
    with ProcessPoolExecutor(processes, context, _init_worker, (done, stop)) as pool:
        try:
            yield from _results_in_order(pool, iter(jobs), processes * _JOBS_AHEAD, done, on_progress)
        except BrokenProcessPool as error:
            raise ChildProcessError(
                "a packing process was killed, possibly because the machine ran out of memory. Run the same command again "
                "to continue; fewer --processes use less memory."
            ) from error
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _results_in_order(
    pool: ProcessPoolExecutor,
    jobs: Iterator[Callable[[OnProgress], _Result]],
    ahead: int,
    done: Any,
    on_progress: OnProgress,
) -> Iterator[_Result]:
    reported = 0
    pending: deque[Future[_Result]] = deque()
    while True:
        pending.extend(pool.submit(_call, job) for job in islice(jobs, ahead - len(pending)))
        if not pending:
            return
        finished = wait([pending[0]], timeout=_SECONDS_BETWEEN_UPDATES).done
        count = done.value
        on_progress(count - reported)
        reported = count
        if finished:
            yield pending.popleft().result()


# Set in each worker process by _init_worker.
_done: Any = None
_stop: Any = None


def _init_worker(done: Any, stop: Any) -> None:
    global _done, _stop
    _done, _stop = done, stop
    # Ctrl-C sends SIGINT to every process of the terminal. Only the parent handles it, and then sets `stop`.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, name="parent", daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call(job: Callable[[OnProgress], _Result]) -> _Result:
    return job(_report_progress)


def _report_progress(count: int) -> None:
    if _stop.is_set():
        raise _Cancelled
    with _done.get_lock():
        _done.value += count

"""Jobs on several processes: results in the order of the jobs, whichever is done first.

* A *job* is a callable that can be pickled. It is called with ``tick``, which it calls with what it has done since.
* A worker ends with the process that started it, even if that was killed: it must not write beside its successor.
* The first job that fails, in their order, ends the others at their next tick; its exception is raised here.
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

Tick = Callable[[int], None]
_Result = TypeVar("_Result")

_DRAW_EVERY = 0.2
# Enough that no worker waits for work, few enough that what describes it stays small.
_JOBS_AHEAD = 2


class _Asked(Exception):
    """Another job has failed, or the user has had enough."""


def run(jobs: Iterable[Callable[[Tick], _Result]], processes: int, tick: Tick) -> Iterator[_Result]:
    """Runs jobs.

    Args:
        jobs: Taken as they are needed.
        processes: How many at a time; 1 runs them in this process.
        tick: Told how much was done.

    Yields:
        What each job returned, in their order.

    Raises:
        ChildProcessError: If a worker was killed.
    """
    if processes == 1:
        for job in jobs:
            yield job(tick)
        return
    # Not fork: a child of a process whose thread draws the progress bar may hang. The server imports torch once for all.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "dtrain.data.writer"])
    done, stop = context.Value("q", 0), context.Event()
    with ProcessPoolExecutor(processes, context, _begin, (done, stop)) as pool:
        try:
            yield from _in_order(pool, iter(jobs), processes * _JOBS_AHEAD, done, tick)
        except BrokenProcessPool as error:
            raise ChildProcessError(
                "a packing process was killed, perhaps because memory ran out. The same command continues; with fewer "
                "--processes it needs less."
            ) from error
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, jobs: Iterator[Callable[[Tick], _Result]], ahead: int, done: Any, tick: Tick
) -> Iterator[_Result]:
    told = 0
    pending: deque[Future[_Result]] = deque()
    while True:
        pending.extend(pool.submit(_call, job) for job in islice(jobs, ahead - len(pending)))
        if not pending:
            return
        finished = wait([pending[0]], timeout=_DRAW_EVERY).done
        count = done.value
        tick(count - told)
        told = count
        if finished:
            yield pending.popleft().result()


_done: Any = None
_stop: Any = None


def _begin(done: Any, stop: Any) -> None:
    global _done, _stop
    _done, _stop = done, stop
    # Ctrl-C reaches every process of the terminal; the one that started the others tells them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call(job: Callable[[Tick], _Result]) -> _Result:
    return job(_tick)


def _tick(count: int) -> None:
    if _stop.is_set():
        raise _Asked
    with _done.get_lock():
        _done.value += count

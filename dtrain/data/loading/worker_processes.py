"""Starts, watches and ends the worker processes of a stream.

torch's DataLoader makes the processes and their queues. What it leaves open is closed here:

* Workers ignore the signals of a stop request, which goes to the whole process group: the trainer needs them to finish
  its step.
* They end with the trainer, however it ends.
* A worker that dies ends the wait for a batch at once, even in the middle of a message (``_WatchedQueue``). It may have held a
  lock of the queues, which all workers of a stream share, so the others are then killed, too.
* A process that is forked while a thread of C++ holds a lock of the interpreter never reaches its first line. It is
  replaced before the trainer waits for it.
"""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing
import os
import queue
import select
import signal
import struct
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from dtrain.data.loading.batch import Batch
from dtrain.data.loading.ipc import IpcBatch, LostBatch, ReceivedBatch, Slots, use_slots
from dtrain.distributed.process_exit import exit_with_parent, kill_with_parent

logger = logging.getLogger("dtrain")
# A stop request is sent to the whole process group. Workers ignore it: the trainer still needs them to finish its step.
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_SETTLE_SECONDS = 0.03
# A forked worker begins within milliseconds, on a busy machine within seconds. One that has not is replaced; after the last of
# these limits, workers may take as long as they need.
_BEGIN_SECONDS = (3.0, 10.0, 30.0)
# SIGKILL takes effect within this time, unless the process waits for a disk or a network file system.
_KILL_SECONDS = 1.0
# While a thread page-locks batches, a wait for one looks for dead workers at this interval.
_LOOK_SECONDS = 0.2


def start_workers(
    dataset: IterableDataset[Batch], loading: Mapping[str, Any]
) -> tuple[Iterator[ReceivedBatch | LostBatch], Slots]:
    """Starts the workers of a stream.

    Args:
        dataset: What each worker iterates over.
        loading: Options of torch's DataLoader; ``num_workers`` is at least 1.

    Returns:
        The batches, from the workers in turn, and the shared memory in which they arrive.
    """
    for seconds in (*_BEGIN_SECONDS, None):
        slots = Slots(loading["num_workers"])
        begun = _Begun(loading["num_workers"]) if seconds is not None and _may_get_stuck(loading) else None
        with _more_workers_than_cores():
            loader = DataLoader(
                dataset,
                batch_size=None,
                collate_fn=IpcBatch,  # type: ignore[arg-type]
                worker_init_fn=functools.partial(
                    _begin_worker, os.getpid(), _ends_with_this_thread(loading), slots, begun
                ),
                generator=torch.Generator(),  # else starting workers would draw from the run's global generator
                **loading,
            )
        get_temp_dir()  # for the sockets of all workers: one that is killed cannot remove its own folder
        if _may_get_stuck(loading):
            time.sleep(_SETTLE_SECONDS)
        with _signals_blocked(loading), _more_workers_than_cores():
            iterator: Any = iter(loader)
        _raise_ended_workers_in_take(iterator)
        stuck = begun.missing(seconds) if begun is not None and seconds is not None else set()
        if not stuck:
            break
        logger.warning(
            "%d of %d loader workers have not begun within %g s: all are started again",
            len(stuck),
            len(iterator._workers),
            seconds,
        )
        for worker in stuck:
            iterator._workers[worker].kill()  # it holds no lock of the queues
        end_workers(iterator, slots, os.getpid())
    iterator._data_queue = _WatchedQueue(iterator._data_queue, iterator._workers)
    return iterator, slots


class WorkerDied(BaseException):
    """A worker has ended while the trainer waits for a batch. torch's iterator, which would not survive it, passes it on."""


def next_batch(iterator: Iterator[ReceivedBatch | LostBatch]) -> Batch:
    """The next batch of the workers.

    Raises:
        WorkerDied: If a worker was killed or has exited; the iterator has to be ended then.
    """
    received = next(iterator)
    if isinstance(received, LostBatch):
        deadline = time.monotonic() + _KILL_SECONDS  # its sockets are closed before the process is gone
        while not dead_workers(iterator):
            if time.monotonic() > deadline:
                raise received.error
            time.sleep(0.01)
        raise WorkerDied
    return received.batch


def dead_workers(iterator: Iterator[Any]) -> list[int]:
    """The numbers of the workers that a signal killed, or that ended with an exit code."""
    return [number for number, worker in enumerate(getattr(iterator, "_workers", ())) if worker.exitcode]


def end_workers(iterator: Iterator[Any], slots: Slots | None, owner: int) -> None:
    """Ends the workers of a stream; one that is stuck is killed.

    Args:
        iterator: What ``start_workers`` returned, or an iterator without workers.
        slots: Their shared memory.
        owner: Id of the process that started them. In a copy of it, forked later, nothing is done.
    """
    # ``slots`` is an argument because the thread that page-locks batches needs it until the iterator is shut down.
    # Dropping the iterator does the same, but the traceback of an error may keep it alive.
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is None or os.getpid() != owner:  # a forked copy of the stream does not own the workers
        return
    workers: Sequence[BaseProcess] = iterator._workers  # type: ignore[attr-defined]
    if dead_workers(iterator):
        _kill_workers(iterator)
        return
    for worker in workers:
        if worker.exitcode is None and worker.pid is not None:
            os.kill(worker.pid, signal.SIGCONT)  # one that was stopped would not notice the request to end
    shut_down()
    for worker in workers:
        if worker.exitcode is None:  # stuck; it ignores the SIGTERM that torch has sent
            worker.kill()
            worker.join(_KILL_SECONDS)


def _kill_workers(iterator: Any) -> None:
    """Ends the workers of which one has died, without a lock that it may have held."""
    for worker in iterator._workers:
        worker.kill()
    for worker in iterator._workers:
        worker.join(_KILL_SECONDS)
    thread = getattr(iterator, "_pin_memory_thread", None)
    if thread is not None:
        iterator._pin_memory_thread_done_event.set()
        _end_reading(thread, iterator._worker_result_queue._writer)
    for tasks in iterator._index_queues:
        tasks.cancel_join_thread()
        tasks.close()
    iterator._shutdown = True  # torch would wait for those locks
    if torch.multiprocessing.get_sharing_strategy() == "file_descriptor":
        for worker in iterator._workers:  # memory whose name the worker was about to remove
            for path in Path("/dev/shm").glob(f"torch_{worker.pid}_*"):
                with suppress(OSError):
                    path.unlink()


def _end_reading(thread: threading.Thread, pipe: Any) -> None:
    """Ends a thread that reads messages from a pipe without another writer; the last message may be incomplete."""
    pipe.send_bytes(ForkingPickler.dumps((None, None)))
    thread.join(_LOOK_SECONDS)
    os.set_blocking(pipe.fileno(), False)
    while thread.is_alive():
        with suppress(BlockingIOError):
            os.write(pipe.fileno(), bytes(1 << 16))
        thread.join(_LOOK_SECONDS / 10)


class _WatchedQueue:
    """The queue from which torch's iterator takes batches; ``get`` raises ``WorkerDied`` if a worker has ended.

    Without a thread that page-locks batches, ``get`` reads the pipe itself. ``Queue.get`` would wait for ever for the rest of
    a message of a worker that died while it sent it.
    """

    def __init__(self, batches: Any, workers: Sequence[BaseProcess]) -> None:
        self._queue = batches
        self._workers = {worker.sentinel: worker for worker in workers}
        self._poll = select.poll()
        for sentinel in self._workers:
            self._poll.register(sentinel, select.POLLIN)
        self._pipe: int | None = None
        if not isinstance(batches, queue.Queue):
            self._pipe = batches._reader.fileno()
            self._poll.register(self._pipe, select.POLLIN)

    def get(self, timeout: float) -> Any:
        """The next message; ``queue.Empty`` after ``timeout`` seconds without one."""
        if self._pipe is None:
            return self._from_thread(time.monotonic() + timeout)
        if not self._is_readable(self._pipe, timeout):
            raise queue.Empty
        # The format of multiprocessing.Connection: the length, -1 for one of 64 bits, which follows.
        (size,) = struct.unpack("!i", self._read(self._pipe, 4))
        if size < 0:
            (size,) = struct.unpack("!Q", self._read(self._pipe, 8))
        return ForkingPickler.loads(self._read(self._pipe, size))

    def _from_thread(self, deadline: float) -> Any:
        while True:
            with suppress(queue.Empty):
                return self._queue.get(timeout=_LOOK_SECONDS)
            self._raise_if_dead([ended for ended, _ in self._poll.poll(0)])
            if time.monotonic() > deadline:
                raise queue.Empty

    def _read(self, pipe: int, size: int) -> bytearray:
        message = bytearray(size)
        rest = memoryview(message)
        while rest:
            if self._is_readable(pipe, _LOOK_SECONDS):
                rest = rest[os.readv(pipe, [rest]) :]
        return message

    def _is_readable(self, pipe: int, timeout: float) -> bool:
        """Waits; false at the end of the time. What a dead worker has sent is read first."""
        ready = [descriptor for descriptor, _ in self._poll.poll(1000 * timeout)]
        if pipe in ready:
            return True
        self._raise_if_dead(ready)
        return False

    def _raise_if_dead(self, ended: Sequence[int]) -> None:
        for sentinel in ended:
            worker = self._workers.pop(sentinel)
            self._poll.unregister(sentinel)
            worker.join(_KILL_SECONDS)
            if worker.exitcode:  # else it has built all its batches, or torch explains its end
                raise WorkerDied
        if any(worker.exitcode for worker in self._workers.values()):  # a child of the worker has its sentinel
            raise WorkerDied


def _raise_ended_workers_in_take(iterator: Any) -> None:
    # torch raises an error in the main thread as soon as a worker was killed, wherever that thread is then, such as in the
    # write of a checkpoint. Without its entry in torch's list, ``next`` raises it when it waits for that worker.
    if getattr(iterator, "_worker_pids_set", False):
        torch.utils.data._utils.signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


class _Begun:
    """Which workers have reached their first line: each writes its number into a pipe, which forked workers share."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._read, self._write = os.pipe()

    def say(self, worker: int) -> None:
        """In a worker."""
        os.write(self._write, worker.to_bytes(4, "little"))  # at once, not mixed with others: it is short
        os.close(self._read)
        os.close(self._write)

    def missing(self, seconds: float) -> set[int]:
        """Waits up to ``seconds`` and returns the workers that have not begun. Closes the pipe of the trainer."""
        missing = set(range(self._workers))
        deadline = time.monotonic() + seconds
        with open(self._read, "rb", buffering=0) as pipe:
            while missing and select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                missing.discard(int.from_bytes(pipe.read(4), "little"))
        os.close(self._write)
        return missing


def _may_get_stuck(loading: Mapping[str, Any]) -> bool:
    # A gloo thread that releases a tensor owned by Python creates a thread state, under a lock of the interpreter and
    # without the GIL. Before Python 3.12, a child forked at that moment waits for this lock for ever, before its first
    # line (observed). Such threads exist for microseconds after a collective, as soon as this thread lets them run, and
    # for longer where more threads than cores want to run.
    return _start_method(loading) == "fork" and sys.version_info < (3, 12)


def _start_method(loading: Mapping[str, Any]) -> str:
    return loading["multiprocessing_context"] or multiprocessing.get_start_method()


@contextmanager
def _more_workers_than_cores() -> Iterator[None]:
    # torch warns of them whenever workers start, in the middle of the log; here the banner says it (number_of_workers).
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        yield


@contextmanager
def _signals_blocked(loading: Mapping[str, Any]) -> Iterator[None]:
    # Workers start with these signals blocked, else a signal during their start would end them.
    if _start_method(loading) != "fork":
        resource_tracker.ensure_running()  # starting it later, inside this block, would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ends_with_this_thread(loading: Mapping[str, Any]) -> bool:
    """Whether the kernel may end a worker with the thread that starts it: the main thread, or the fork server's."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main or _start_method(loading) == "forkserver"


def _begin_worker(trainer: int, ends_with_thread: bool, slots: Slots, begun: _Begun | None, worker: int) -> None:
    if begun is not None:
        begun.say(worker)
    use_slots(slots, worker)
    exit_with_parent(trainer)
    if ends_with_thread:
        _let_fork_server_end()
        kill_with_parent()  # a stopped worker cannot end itself
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED_SIGNALS)
    # A spawned worker finalizes its interpreter, while a thread of a library may be in C++. If it returns from there then,
    # the process aborts. Workers of the other start methods exit with os._exit anyway.
    atexit.register(os._exit, 0)


def _let_fork_server_end() -> None:
    # The fork server, the parent of its workers, ends when a pipe is closed that the trainer and all workers hold open.
    server: Any = forkserver._forkserver
    pipe, server._forkserver_alive_fd = getattr(server, "_forkserver_alive_fd", None), None
    if pipe is not None:
        os.close(pipe)

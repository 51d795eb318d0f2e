"""The running workers of a loader, and which micro-batch they hand over next."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch.utils.data import DataLoader

from dtrain.config.errors import Explained
from dtrain.data.batch import Batch
from dtrain.data.dataset import MicroBatches
from dtrain.data.parcel import Parcel
from dtrain.distributed.orphan import end_with

# A stop request reaches the whole process group. The trainer finishes its step with its workers and then ends them.
_LEFT_TO_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

_SETTLED_AFTER = 0.03  # seconds

# Their messages name what is wrong and what to do. From a worker they come inside a traceback, which nobody reads in
# `status.json` or in the one line that other ranks print.
_SAY_IT_ALL = (Explained, ValueError)


class Stream:
    """Workers that build a rank's micro-batches, epoch after epoch. They end when the stream is closed or dropped.

    Args:
        dataset: The micro-batches.
        loading: Options of torch's DataLoader.
        start: Epoch and step of the first micro-batch.
        steps: Steps in the first epoch, and in each one after it.
        micro_batches_per_step: Micro-batches of a step.
    """

    def __init__(
        self,
        dataset: MicroBatches,
        loading: Mapping[str, Any],
        start: tuple[int, int],
        steps: tuple[int, int],
        micro_batches_per_step: int,
    ) -> None:
        hand_over: Callable[[Any], Any] = Parcel if loading["num_workers"] else _as_it_is
        loader = DataLoader(
            dataset,
            batch_size=None,
            collate_fn=hand_over,
            worker_init_fn=functools.partial(_begin_worker, os.getpid()),
            generator=torch.Generator(),  # else starting workers would draw from the run's own
            **loading,
        )
        _let_threads_settle(loading)
        with _signals_held_back(loading):
            self._iterator: Iterator[Batch] | None = iter(loader)
        # It holds torch's iterator: in a reference cycle that would be collected after its queues, through which it tells
        # the workers to end.
        self._end_workers = weakref.finalize(self, _end_workers, self._iterator, os.getpid())
        self._end_workers.atexit = False  # see _close_streams
        self._epoch, self._step = start
        self._micro_batch = 0
        self._num_steps, self._later_steps = steps
        self._micro_batches = micro_batches_per_step
        _open_streams.add(self)

    @property
    def is_open(self) -> bool:
        """False after ``close`` or a failure."""
        return self._iterator is not None

    @property
    def at(self) -> tuple[int, int] | None:
        """Epoch and step of the next micro-batch; None in the middle of a step."""
        return None if self._micro_batch else (self._epoch, self._step)

    def take(self) -> Batch:
        """The next micro-batch; waits for the workers. If that fails, the stream is closed.

        Raises:
            Exception: What went wrong in a worker, there or here.
        """
        if self._iterator is None:
            raise RuntimeError("the stream is closed.")
        batch = None
        try:
            batch = next(self._iterator)
        except _SAY_IT_ALL as error:
            own_words = _own_words(error)
            if own_words is None:
                raise
            raise own_words from error
        finally:
            if batch is None:  # the others go on without what failed, which would be a gap
                self.close()
        self._micro_batch += 1
        if self._micro_batch == self._micro_batches:
            self._micro_batch = 0
            self._step += 1
        if self._step == self._num_steps:
            self._epoch, self._step, self._num_steps = self._epoch + 1, 0, self._later_steps
        return batch

    def close(self) -> None:
        """Ends the workers."""
        self._iterator = None
        self._end_workers()


def worker_options(prefetch: int, start_method: str | None) -> dict[str, Any]:
    """The options of torch's DataLoader that are for its workers.

    Args:
        prefetch: Micro-batches that each builds ahead.
        start_method: ``"fork"``, ``"forkserver"``, ``"spawn"``; None is Python's default.

    Raises:
        ValueError: If one of them is impossible.
    """
    if prefetch < 1:
        raise ValueError(f"data.prefetch: got {prefetch}, want at least 1 micro-batch.")
    known = multiprocessing.get_all_start_methods()
    if start_method not in (None, *known):
        raise ValueError(
            f"data.start_method: got {start_method!r}, want one of {', '.join(known)}, or null for Python's default."
        )
    return {"prefetch_factor": prefetch, "multiprocessing_context": start_method}


_open_streams: weakref.WeakSet[Stream] = weakref.WeakSet()


# Python ends child processes by SIGTERM when it exits, and waits for them; but these leave signals to the trainer.
@atexit.register
def _close_streams() -> None:
    for stream in list(_open_streams):
        stream.close()


def _end_workers(iterator: Iterator[Batch], owner: int) -> None:
    # Dropping the iterator does the same, but the traceback of an error may keep it.
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is not None and os.getpid() == owner:  # a fork's copy of the stream has no workers
        shut_down()


def _as_it_is(batch: Any) -> Any:
    return batch


def _own_words(error: Exception) -> Exception | None:
    """A worker's error as it was raised there; None if it is not from a worker."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    _, of_worker, message = str(error).rpartition(f"\n{name}: ")
    return kind(message.strip()) if of_worker else None


def _let_threads_settle(loading: Mapping[str, Any]) -> None:
    # A thread of gloo that lets go of a tensor of Python's makes itself a thread state, under a lock of the interpreter and
    # without the GIL. Before 3.12 a child that is forked in that moment waits for this lock for ever, before its first line
    # (seen). Such threads live for microseconds after a collective, once this one lets them.
    if loading["num_workers"] and _forks(loading) and sys.version_info < (3, 12):
        time.sleep(_SETTLED_AFTER)


def _forks(loading: Mapping[str, Any]) -> bool:
    return (loading["multiprocessing_context"] or multiprocessing.get_start_method()) == "fork"


@contextmanager
def _signals_held_back(loading: Mapping[str, Any]) -> Iterator[None]:
    # Workers are born with these signals blocked, else one that comes early would end a worker.
    if loading["num_workers"] and not _forks(loading):
        resource_tracker.ensure_running()  # if it were started in here, it would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_TRAINER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker(trainer: int, worker: int) -> None:
    end_with(trainer)
    for number in _LEFT_TO_THE_TRAINER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_THE_TRAINER)
    # A spawned worker takes its interpreter down, which aborts the process if the queue's thread comes back from C++ then: it
    # packs batches that nobody waits for any more. Workers of the other start methods leave in this way anyhow.
    atexit.register(os._exit, 0)

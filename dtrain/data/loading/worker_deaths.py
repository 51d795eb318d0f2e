"""What follows when a loader worker dies: a restart of the workers, or the end of the loader.

* A worker *dies* if a signal ends it: SIGKILL when the memory of the machine is exhausted, SIGSEGV when a decoder crashes.
* Workers are stateless, so all workers of the stream start again at the first micro-batch that was not delivered, and the
  batches are the same bit for bit. Batches that the trainer has received stay valid.
* A sample that was being read at two deaths is *deadly*: from then on it is masked, as a bad sample. Both are in one epoch: a
  sample that could be read after the first one is not suspected any more.
* A loader restarts its workers ``limit`` times at most: a machine without enough memory would kill them for ever.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from dtrain.data.loading.ipc import shared_memory_is_full
from dtrain.data.order.index import Index
from dtrain.errors import Explained, printable, without_secrets_in

logger = logging.getLogger("dtrain")
#: The reason of a deadly sample in the log of bad samples begins so. A resumed run masks samples with this reason.
DEADLY = "a loader worker was killed by "
_MOST_DEATHS = 2


class WorkerEnded(Explained, RuntimeError):
    """A worker process ended without being asked to."""


class WorkerRestarts:
    """The restarts of one loader.

    Args:
        limit: How many restarts are allowed.
        index: The index of the dataset, which names samples; None: samples are not named or masked.

    Attributes:
        count: Restarts so far.
        deadly: Number of each deadly sample to the reason for the log.
    """

    def __init__(self, limit: int, index: Index | None = None) -> None:
        self._limit = limit
        self._index = index
        self._deaths: Counter[tuple[int, int]] = Counter()  # of an epoch and a sample
        self.count = 0
        self.deadly: dict[int, str] = {}
        self._taken = 0

    def begin(self, workers: Sequence[Any], reads: Sequence[tuple[int, int]]) -> None:
        """Counts and reports a restart; called after a worker has ended.

        Args:
            workers: The processes of the stream.
            reads: Epoch and number of the sample that each of them was reading; -1 for none.

        Raises:
            WorkerEnded: If a worker ended with an exit code, or no more restarts are allowed.
        """
        ended = explain_ended(workers)
        dead = [number for number, worker in enumerate(workers) if worker.exitcode and worker.exitcode < 0]
        read = {number: reads[number] for number in dead if reads[number][1] >= 0}
        keys = (
            [] if self._index is None else self._index.keys(np.array([sample for _, sample in read.values()], np.int64))
        )
        said = [ended, *(f"It was reading sample {key}." for key in keys)]
        if not dead or self.count == self._limit:
            if dead and self.count:
                said.append(f"Workers were restarted {self.count} times before (data.max_worker_restarts).")
            raise WorkerEnded(" ".join(said))
        self.count += 1
        for number, (epoch, sample) in read.items():
            self._deaths[epoch, sample] += 1
            if self._deaths[epoch, sample] == _MOST_DEATHS and self._index is not None:
                by = signal.Signals(-workers[number].exitcode).name
                self.deadly[sample] = f"{DEADLY}{by} while reading it, twice"
                said.append(
                    "It is the second one that reads this sample, which is masked from now on, as a bad sample."
                )
        said.append(f"All loader workers start again (restart {self.count} of data.max_worker_restarts={self._limit}).")
        _warn(" ".join(said))

    def renumber(self, index: Index) -> None:
        """Goes on with another index of the dataset, in which samples may have other numbers."""
        if self._index is None or index is self._index:
            return
        reasons = [*self.deadly.values()]
        keys = self._index.keys(np.array([*self.deadly], np.int64))
        self._index, self.deadly = index, {}
        self._deaths.clear()
        removed = tuple(f"{name}/" for name in index.names_of_removed())
        for key, reason in zip(keys, reasons, strict=True):
            if not key.startswith(removed):
                self.deadly |= dict.fromkeys(index.find(key).tolist(), reason)

    def take_new(self) -> int:
        """Restarts since the last call."""
        before, self._taken = self._taken, self.count
        return self.count - before


def _warn(text: str) -> None:
    logger.warning(text)
    if not logger.propagate:  # the log of a run takes its messages
        sys.stderr.write(f"dtrain: WARNING: {printable(without_secrets_in(text))}\n")


def explain_ended(workers: Sequence[Any]) -> str:
    """The message for the first of these processes that ended without being asked to; empty if there is none."""
    for number, worker in enumerate(workers):
        code = worker.exitcode
        if not code:
            continue
        name = f"loader worker {number} (process {worker.pid})"
        if code > 0:
            return f"{name} ended with exit code {code}. Its output is above."
        remedy = shared_memory_is_full() if -code == signal.SIGBUS else _REMEDIES.get(-code, "")
        return f"{name} was killed by {signal.Signals(-code).name}. {remedy}".rstrip()
    return ""


_REMEDIES: dict[int, str] = {
    signal.SIGKILL: "If nobody has killed it, this machine, or the job or container, has run out of memory "
    "(see dmesg). Use fewer data.num_workers, a smaller data.prefetch or train.micro_batch_size, or request more memory.",
    signal.SIGSEGV: "A library that decodes or augments samples crashed: PYTHONFAULTHANDLER=1 prints where.",
}

"""How fast a loader hands over micro-batches to somebody who does nothing else, and whether its workers compute or wait."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtrain.data import Batch, ShardLoader

_LOOK_EVERY = 0.01  # seconds
_MOSTLY = 0.5


@dataclass(frozen=True)
class LoaderRate:
    """Of one rank.

    Attributes:
        seconds: For a sample.
        busy: Share of the time in which a worker computed or wanted a core for it, between 0 and 1; in the rest it waited:
            for storage, or in the data set. None where the system does not tell.
        bad: Samples that could not be read.
    """

    seconds: float
    busy: float | None
    bad: int

    @property
    def waiting(self) -> bool:
        """Whether workers mostly wait."""
        return self.busy is not None and self.busy < _MOSTLY


def endless(loader: ShardLoader) -> Iterator[Batch]:
    """This rank's micro-batches in the order of training, one epoch after the other."""
    while True:
        epoch, _ = loader.position
        batches = iter(loader)
        while loader.position[0] == epoch:
            for _ in range(loader.micro_batches_per_step):
                yield next(batches)
            loader.commit()


def loader_rate(loader: ShardLoader, batches: Iterator[Batch], seconds: float) -> LoaderRate:
    """Takes micro-batches as fast as they come.

    Args:
        loader: The loader.
        batches: ``endless`` of it, with nothing prefetched.
        seconds: How long, at the least: each worker builds two micro-batches in any case.
    """
    workers = max(loader.num_workers, 1)
    for _ in range(workers):  # the first of each worker: it opens files and fills caches
        next(batches)
    count, handed = 0, loader.samples_handed
    builders = [child.pid or 0 for child in multiprocessing.active_children()] if loader.num_workers else [os.getpid()]
    with _Watch(builders) as watch:
        started = time.perf_counter()
        while count < workers or time.perf_counter() - started < seconds:
            next(batches)
            count += 1
        taken = time.perf_counter() - started
    # Not micro-batches: those of an epoch's tail hold fewer samples, and cost less.
    return LoaderRate(taken / max(loader.samples_handed - handed, 1), watch.busy, loader.bad_samples)


class _Watch:
    """Looks at processes from time to time: are they running, or able to, or do they wait for something?

    Their CPU time would not tell: on a crowded machine it is low, too.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._seen = self._working = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def busy(self) -> float | None:
        return self._working / self._seen if self._seen else None

    def _look(self) -> None:
        while not self._over.wait(_LOOK_EVERY):
            for pid in self._pids:
                try:
                    # man 5 proc_pid_stat: the state follows the name, which stands in parentheses and may hold spaces.
                    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                except OSError:  # it has ended; no /proc
                    continue
                self._seen += 1
                self._working += state == "R"

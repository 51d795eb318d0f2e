"""The worker processes of one rank.

* Worker *w* of *n* builds the micro-batches *w*, *w* + *n*, ... of its rank, each as a whole (``MicroBatches``).
  torch's DataLoader takes them from the workers in turn, which restores the sequence.
* Workers are stateless: everything that they need is fixed in the parent before they start, and nothing is read from
  the environment, so the start method does not matter.
* The sequence continues from epoch to epoch, so that workers start once and prefetch across the end of an epoch
  (``WorkerStream``).
* With ``num_workers: auto`` their number follows from the time that a micro-batch takes to build and from the available
  cores. It changes neither batches nor order, so ranks may have different numbers.
"""

from __future__ import annotations

import atexit
import functools
import math
import multiprocessing
import os
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from dtrain.data.augment import Augment
from dtrain.data.loading.batch import Batch, Transfer
from dtrain.data.loading.collate import SPARE, Collator
from dtrain.data.loading.ipc import Slots
from dtrain.data.loading.masked_source import masked
from dtrain.data.loading.mixture_collator import MixtureCollator, collator_of
from dtrain.data.loading.worker_deaths import WorkerRestarts
from dtrain.data.loading.worker_processes import WorkerDied, dead_workers, end_workers, next_batch, start_workers
from dtrain.data.mixing import Mix
from dtrain.data.order.epoch_order import EpochOrder
from dtrain.data.order.mixture_order import MixtureOrder
from dtrain.data.order.mixture_position import MixturePosition
from dtrain.data.order.position import Position
from dtrain.data.sources.source import Source
from dtrain.distributed.world import process_cpu_count
from dtrain.errors import Explained

#: Seconds in which a micro-batch should be ready: the step time of a small model on a GPU.
READY_EVERY = 0.02
_TIMED = 3  # micro-batches, as long as they take less than
_TIMED_SECONDS = 0.5
# Up to this many workers, the banner does not compare them with the cores.
_FEW_WORKERS = 2

# Errors whose message is complete by itself. torch adds a traceback to the message of an error in a worker, which would
# hide it in `status.json` and in the one-line report of other ranks.
_SELF_EXPLANATORY = (Explained, ValueError)
_NOTHING = np.zeros(0, np.int64)
#: Positions that are computed at once: a single one costs as much as a thousand in one call.
LOCATED_TOGETHER = 4096


class WorkerStream:
    """The running workers of a loader. They end when the stream is closed or garbage-collected.

    Args:
        dataset: The micro-batches.
        loading: Options of torch's DataLoader.
        start: Epoch and step of the first micro-batch.
        steps_of: Steps of an epoch, by its number.
        micro_batches_per_step: Micro-batches of a step.
        restarts: Restarts of workers that died. With None, a worker that dies ends the stream.
    """

    def __init__(
        self,
        dataset: MicroBatches,
        loading: Mapping[str, Any],
        start: tuple[int, int],
        steps_of: Callable[[int], int],
        micro_batches_per_step: int,
        restarts: WorkerRestarts | None = None,
    ) -> None:
        self._dataset = dataset
        self._loading = loading
        self._restarts = restarts or WorkerRestarts(0)
        self._epoch, self._step = start
        self._micro_batch = 0
        self._steps_of = steps_of
        self._num_steps = steps_of(self._epoch)
        self._micro_batches = micro_batches_per_step
        self._start(dataset)
        _open_streams.add(self)

    def _start(self, dataset: MicroBatches) -> None:
        self._iterator: Iterator[Any] | None
        self._slots: Slots | None = None
        if self._loading["num_workers"]:
            self._iterator, self._slots = start_workers(dataset, self._loading)
        else:
            self._iterator = _in_this_process(dataset, self._loading["pin_memory"])
        # The finalizer holds torch's iterator. In a reference cycle the iterator would be collected after its queues,
        # through which it sends the workers the request to end.
        self._end_workers = weakref.finalize(self, end_workers, self._iterator, self._slots, os.getpid())
        self._end_workers.atexit = False  # see _close_streams

    @property
    def is_open(self) -> bool:
        """False after ``close`` or a failure."""
        return self._iterator is not None

    @property
    def at(self) -> tuple[int, int] | None:
        """Epoch and step of the next micro-batch; None in the middle of a step."""
        return None if self._micro_batch else (self._epoch, self._step)

    def take(self) -> Batch:
        """The next micro-batch; waits for the workers, and restarts them if one has died. On a failure, the stream is closed.

        Raises:
            WorkerEnded: If a worker process has died, and no restart is left; names the process and the signal.
            Exception: Any error of a worker; the message of a ``ValueError`` or ``Explained`` has no traceback.
        """
        if self._iterator is None:
            raise RuntimeError("the stream is closed.")
        batch = None
        try:
            batch = self._next()
        except _SELF_EXPLANATORY as error:
            original = _without_traceback(error)
            if original is None:
                raise
            raise original from error
        finally:
            if batch is None:  # the other workers would continue, and leave a gap where this one failed
                self.close()
        self._micro_batch += 1
        if self._micro_batch == self._micro_batches:
            self._micro_batch = 0
            self._step += 1
        if self._step == self._num_steps:
            self._epoch, self._step, self._num_steps = self._epoch + 1, 0, self._steps_of(self._epoch + 1)
        return batch

    def _next(self) -> Batch:
        assert self._iterator is not None
        while self._slots is not None:
            try:
                return next_batch(self._iterator)
            except (WorkerDied, RuntimeError):
                if not dead_workers(self._iterator):
                    raise
                workers: Any = self._iterator._workers  # type: ignore[attr-defined]
                self._restarts.begin(workers, [(epoch, sample) for epoch, sample in self._slots.reads.tolist()])
            self._end_workers()
            self._start(
                self._dataset.from_micro_batch(self._epoch, self._step, self._micro_batch, self._restarts.deadly)
            )
        batch: Batch = next(self._iterator)
        return batch

    def close(self) -> None:
        """Ends the workers."""
        self._iterator = self._slots = None
        self._end_workers()


def _in_this_process(dataset: MicroBatches, pin_memory: bool) -> Iterator[Batch]:
    # Without torch's DataLoader, which would take 0.1 ms for each micro-batch.
    pins = pin_memory and torch.cuda.is_available()
    return (batch.pin_memory() if pins else batch for batch in dataset)


@dataclass(frozen=True)
class WorkerOptions:
    """How a loader's worker processes run; ``num_workers`` is a separate argument of the loader.

    Args:
        prefetch: Micro-batches that each worker builds ahead.
        start_method: ``"fork"``, ``"forkserver"``, ``"spawn"``; None: Python's default.
        pin_memory: Return page-locked tensors, whose copies to a GPU can overlap compute.
        max_restarts: How many times a loader restarts its workers when one has died; 0: a worker that dies ends the loader.

    Raises:
        ValueError: If an option is impossible; names key and value.

    Example:
        >>> from dtrain.data import WorkerOptions
        >>> WorkerOptions(prefetch=4, pin_memory=True)  # the argument ``workers`` of ShardLoader
        WorkerOptions(prefetch=4, start_method=None, pin_memory=True, max_restarts=3)
    """

    prefetch: int = 2
    start_method: str | None = None
    pin_memory: bool = False
    max_restarts: int = 3

    def __post_init__(self) -> None:
        if self.prefetch < 1:
            raise ValueError(f"data.prefetch: got {self.prefetch}, want at least 1 micro-batch.")
        if self.max_restarts < 0:
            raise ValueError(f"data.max_worker_restarts: got {self.max_restarts}, want 0 or more.")
        known = multiprocessing.get_all_start_methods()
        if self.start_method not in (None, *known):
            raise ValueError(
                f"data.start_method: got {self.start_method!r}, want one of {', '.join(known)}, or null for Python's default."
            )

    def of_data_loader(self, num_workers: int) -> dict[str, Any]:
        """The arguments of torch's DataLoader."""
        options: dict[str, Any] = {"num_workers": num_workers, "pin_memory": self.pin_memory}
        if num_workers:
            options |= {"prefetch_factor": self.prefetch, "multiprocessing_context": self.start_method}
        return options


_open_streams: weakref.WeakSet[WorkerStream] = weakref.WeakSet()


# At exit Python sends SIGTERM to child processes and waits for them. Workers ignore SIGTERM, so end them before that.
@atexit.register
def _close_streams() -> None:
    for stream in list(_open_streams):
        stream.close()


def _without_traceback(error: Exception) -> Exception | None:
    """A worker's error without the traceback in its message; None if the error is not from a worker."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    _, of_worker, message = str(error).rpartition(f"\n{name}: ")
    return kind(message.strip()) if of_worker else None


@dataclass(frozen=True)
class RankShare:
    """The part of every global batch that one rank builds, in micro-batches of ``micro_batch_size`` rows."""

    global_batch_size: int
    micro_batch_size: int
    rank: int
    world_size: int

    @classmethod
    def from_sizes(cls, global_batch_size: int, micro_batch_size: int | None, rank: int, world_size: int) -> RankShare:
        """The share of ``rank``; without a micro-batch size, one micro-batch holds all of it.

        Raises:
            ValueError: If the sizes do not fit each other; names sizes that do.
        """
        if global_batch_size < 1:
            raise ValueError(f"train.global_batch_size: got {global_batch_size}, want at least one sample.")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank}, world_size {world_size}: want a rank in [0, world_size).")
        rows = -(-global_batch_size // world_size)
        micro = rows if micro_batch_size is None else micro_batch_size
        # If ranks have unequal parts they need masked rows anyway; only then may the last micro-batch be short too.
        if not 1 <= micro <= rows or (rows % micro and global_batch_size % world_size == 0):
            fitting = [size for size in range(1, rows + 1) if rows % size == 0]
            raise ValueError(
                f"train.micro_batch_size: {micro} does not fit: each of {world_size} ranks has {rows} of the "
                f"{global_batch_size} samples of a step. Sizes that fit: {', '.join(map(str, fitting))}. Or leave it "
                "unset for the whole share at once."
            )
        return cls(global_batch_size, micro, rank, world_size)

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches of one step, equal on all ranks."""
        rows = -(-self.global_batch_size // self.world_size)
        return -(-rows // self.micro_batch_size)

    def slots(self, micro_batches: np.ndarray) -> np.ndarray:
        """The slots of the global batch that micro-batches hold: int64, shape ``[n, micro_batch_size]``.

        Args:
            micro_batches: Numbers of micro-batches in their step, int64, shape ``[n]``. Slots past the end of the share are -1.
        """
        start = self.rank * self.global_batch_size // self.world_size
        end = (self.rank + 1) * self.global_batch_size // self.world_size
        slots = start + micro_batches[:, np.newaxis] * self.micro_batch_size + np.arange(self.micro_batch_size)
        return np.where(slots < end, slots, -1)


class MicroBatches(IterableDataset[Batch]):
    """The micro-batches of one rank from a position on, over epochs without end; iterated in each worker."""

    def __init__(
        self,
        source: Source,
        position: Position | MixturePosition,
        share: RankShare,
        transfer: Transfer,
        augment: Augment | None = None,
        mix: Mix | None = None,
        excluded: np.ndarray = _NOTHING,
    ) -> None:
        super().__init__()
        self._all_good = self._source = source
        self._position = copy(position)  # the trainer's changes with every commit
        self._share = share
        self._transfer = transfer
        self._augment = augment
        self._mix = mix
        self._excluded = excluded  # sample numbers, ascending
        self._first = 0  # micro-batch of the first step

    def from_micro_batch(self, epoch: int, step: int, micro_batch: int, bad: Mapping[int, str]) -> MicroBatches:
        """The sequence from a later micro-batch on.

        Args:
            epoch: Number of the epoch, not before that of the position.
            step: Number of the step in the epoch.
            micro_batch: Number of the micro-batch in the step.
            bad: Samples to mask as bad, and the reasons.
        """
        rest = copy(self)
        rest._position = copy(self._position)
        if epoch != self._position.epoch:
            rest._position.begin(epoch)
        rest._position.step, rest._first = step, micro_batch
        rest._source = masked(self._all_good, {None: bad})
        return rest

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        turn, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        source, seed = self._source, self._position.recipe.seed
        collator = collator_of(source, self._transfer, self._augment, seed, self._mix)
        try:
            position, per_step = copy(self._position), self._share.micro_batches_per_step
            built, first = 0, self._first  # by all workers, in earlier epochs
            while True:
                epoch, order = position.epoch, position.order
                numbers = range(position.step * per_step + first, order.num_steps * per_step)
                mine = numbers[(turn - built) % workers :: workers]
                built += len(numbers)
                for step, samples, partners in self._located(epoch, order, mine, collator):
                    yield collator.build(epoch, samples, functools.partial(self._spare, order, step), partners)
                position.begin(epoch + 1)
                first = 0
        finally:
            collator.close()

    def _located(
        self, epoch: int, order: EpochOrder | MixtureOrder, micro_batches: range, collator: Collator | MixtureCollator
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray | None]]:
        """Step, samples and partners of each of these micro-batches; also passes the next shards to the collator."""
        together = max(1, LOCATED_TOGETHER // self._share.micro_batch_size)
        for first in range(0, len(micro_batches), together):
            numbers = np.array(micro_batches[first : first + together])
            steps, in_step = np.divmod(numbers, self._share.micro_batches_per_step)
            slots = self._share.slots(in_step)
            ahead = functools.partial(self._shards_ahead, epoch, order, int(steps[0]))
            collator.expect(ahead, self._shards_at_once(order))
            samples = order.locate(steps[:, np.newaxis], slots)
            partners = None if self._mix is None else order.partners(steps[:, np.newaxis], slots)
            if self._excluded.size:
                if partners is not None:  # a row whose partner is left out is not mixed
                    partners = np.where(self._is_excluded(partners), samples, partners)
                samples = np.where(self._is_excluded(samples), -1, samples)
            of_rows = [None] * len(numbers) if partners is None else partners
            yield from zip(steps.tolist(), samples, of_rows, strict=True)

    def _is_excluded(self, samples: Any) -> np.ndarray:
        # Samples of a mixture are numbered anew in each epoch; -1, a masked row, is the last sample then.
        found: np.ndarray = (samples >= 0) & np.isin(samples % self._source.index.num_samples, self._excluded)
        return found

    def _shards_ahead(self, epoch: int, order: EpochOrder | MixtureOrder, step: int, most: int) -> np.ndarray:
        """The shards that this rank reads from a step on, and in the first shuffle windows of the next epoch."""
        slots = self._share.slots(np.arange(self._share.micro_batches_per_step))
        slots = slots[slots >= 0]
        shards = order.shards_ahead(step, slots, most)
        following = copy(self._position)
        lanes = np.unique(slots * following.layout.lanes // self._share.global_batch_size)
        wanted = min(most - len(shards), len(lanes) * following.recipe.window)
        if not wanted:
            return shards
        following.begin(epoch + 1)
        return np.concatenate([shards, following.order.shards_ahead(0, slots, wanted)])

    def _shards_at_once(self, order: EpochOrder | MixtureOrder) -> int | None:
        """How many shards this rank reads at a time: one shuffle window of each of its lanes; None for any number."""
        recipe, lanes = order.recipe, order.layouts[-1].lanes
        if recipe.shuffle == "full":
            return None
        slots = self._share.slots(np.arange(self._share.micro_batches_per_step))
        slots = slots[slots >= 0]
        if isinstance(order, MixtureOrder):
            return order.shards_at_once(slots)
        own_lanes = np.unique(slots * lanes // self._share.global_batch_size)
        return len(own_lanes) * (recipe.window if recipe.shuffle == "window" else 1)

    def _spare(self, order: EpochOrder | MixtureOrder, step: int) -> list[int]:
        """Samples to take shapes from: the same global batch, then the first samples of the dataset."""
        samples = order.locate(step, np.arange(self._share.global_batch_size))
        spare = np.concatenate([samples[samples >= 0], self._source.index.first_present(SPARE)])
        usable: list[int] = spare[~self._is_excluded(spare)].tolist()
        return usable or spare.tolist()


def number_of_workers(requested: int | str, micro_batches: Iterable[Any]) -> tuple[int, str]:
    """The number of workers, and the reason for the banner; for ``"auto"`` a few micro-batches are built and timed.

    Raises:
        ValueError: If ``requested`` is neither a number nor ``"auto"``.
    """
    cores = cores_per_rank()
    if requested == "auto":
        if cores == 1:  # no measurement is needed
            return 0, "micro-batches are built between the steps: 1 core for each rank"
        return choose_workers(seconds_to_build(micro_batches), cores)
    if not isinstance(requested, int) or requested < 0:
        raise ValueError(f"data.num_workers: got {requested!r}, want a number of at least 0, or auto.")
    return requested, f"more than its {cores} cores" if requested > max(cores, _FEW_WORKERS) else ""


def cores_per_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Cores of this machine for each of its ranks, at least 1.

    Args:
        environment: ``LOCAL_WORLD_SIZE`` is set by torchrun; ``SLURM_CPUS_PER_TASK`` by SLURM for the task that runs
            torchrun.
    """
    cores = process_cpu_count()
    granted = environment.get("SLURM_CPUS_PER_TASK", "")
    if granted.isdigit():
        cores = min(cores, int(granted))
    return max(1, cores // int(environment.get("LOCAL_WORLD_SIZE", "1")))


def seconds_to_build(micro_batches: Iterable[Any]) -> float:
    """Median seconds to build a micro-batch in this process, not counting the first, which opens files.

    Fewer micro-batches are timed if they take long.
    """
    iterator, times = iter(micro_batches), []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        next(iterator)
        for _ in range(_TIMED):
            started = time.perf_counter()
            next(iterator)
            times.append(time.perf_counter() - started)
            if sum(times) > _TIMED_SECONDS:
                break
    finally:
        torch.set_num_threads(threads)
    return statistics.median(times)


def choose_workers(seconds: float, cores: int) -> tuple[int, str]:
    """The number of workers, and the reason for the banner; 0 where there is no core for a worker.

    Args:
        seconds: Seconds to build one micro-batch.
        cores: Cores for this rank, one of which trains.
    """
    needed = max(1, math.ceil(seconds / READY_EVERY))
    number = min(needed, cores - 1)
    built = f"a micro-batch takes {1000 * seconds:.1f} ms to build"
    if number == needed:
        return number, f"{built}: enough for one every {1000 * READY_EVERY:.0f} ms"
    each = f"one every {1000 * seconds / number:.0f} ms" if number else "built between the steps"
    return number, f"{built}: {each}, limited by {cores} core{'s' * (cores > 1)} for each rank"

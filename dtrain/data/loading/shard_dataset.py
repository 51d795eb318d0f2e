"""``ShardDataset``: single samples of tar shards for an ordinary ``torch.utils.data.DataLoader``.

* A *rank* has its own lanes of the epoch's order (see ``order.epoch_order``), so it reads about its share of the shards. The
  lengths of two ranks differ by at most one sample.
* Worker *w* of *n* yields the samples *w*, *w* + *n*, ... of its rank. With ``batch_size=None``, DataLoader takes samples from
  its workers in turn, so their sequence is the same for any number of workers.
* The *state* belongs to one worker of one rank, which is what torchdata's ``StatefulDataLoader`` saves. It resumes with the
  same number of ranks and workers. ``ShardLoader`` has a state that resumes with any number of both, masks bad samples,
  and builds batches in the transfer dtypes of a precision.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from dtrain.data.augment import Augment
from dtrain.data.fields.decode import values_and_mask
from dtrain.data.fields.field import DataError, SampleError
from dtrain.data.fields.parse import parse_fields
from dtrain.data.loading.collate import AUGMENTATION
from dtrain.data.loading.sample import SampleBuilder
from dtrain.data.loading.workers import LOCATED_TOGETHER
from dtrain.data.order.epoch_order import EpochOrder, Layout
from dtrain.data.order.lines import Recipe
from dtrain.data.order.randomness import Randomness, hash64
from dtrain.data.sources.mixture import Mixture
from dtrain.data.sources.shard_source import ShardSource
from dtrain.data.sources.source import Reader

_VERSION = 1
# Several, so that neighbouring samples come from several shuffle windows.
_LANES_PER_RANK = 8


class ShardDataset(IterableDataset[dict[str, Any]]):
    """Samples of one rank from ``.tar`` shards; over all ranks and workers, each sample of an epoch exactly once.

    A sample is a dict: its fields by name, and its ``__key__``, ``<shard>/<key>``. An image is a uint8 array ``[height, width,
    3]``, a label is an int, and an array keeps its dtype; DataLoader converts arrays to tensors.

    Args:
        shards: Paths or URLs; each may be a brace pattern (``train-{00000..00009}.tar``) or a glob.
        fields: Extension to ``{"name": ..., "role": ..., **options}``, as for ``ShardLoader``.
        seed: Seed of the order and of every augmentation.
        shuffle: ``"window"`` (shards permuted, samples permuted within windows of 8 shards), ``"full"`` or ``"none"``.
        rank: This process, in ``[0, world_size)``. None: from ``torch.distributed`` if it is initialised, else 0.
        world_size: Number of processes. None: from ``torch.distributed`` if it is initialised, else 1.
        augment: ``augment(sample, rng) -> sample`` on the dict of fields, called where the sample is read, with a generator
            that depends on (seed, epoch, sample) only.

    Raises:
        ValueError: If a pattern matches nothing, a field, role or shuffle is unknown, or only one of ``rank`` and
            ``world_size`` is given.
        FileNotFoundError: If a named shard does not exist.

    Example:
        >>> import tempfile
        >>> from torch.utils.data import DataLoader
        >>> from dtrain.data import ShardDataset, write_shards
        >>> samples = [{"__key__": str(n), "cls": n} for n in range(10)]
        >>> shards = [str(path) for path in write_shards(samples, tempfile.mkdtemp(), shards=2)]
        >>> dataset = ShardDataset(shards, {"cls": {"name": "label"}}, rank=0, world_size=2)
        >>> [len(batch["label"]) for batch in DataLoader(dataset, batch_size=4)]
        [4, 1]
    """

    def __init__(
        self,
        shards: str | Sequence[str],
        fields: Mapping[str, Any],
        *,
        seed: int = 0,
        shuffle: str = "window",
        rank: int | None = None,
        world_size: int | None = None,
        augment: Augment | None = None,
    ) -> None:
        super().__init__()
        if isinstance(shards, Mixture):
            raise ValueError("ShardDataset: got a Mixture, want shards. ShardLoader mixes sources.")
        self._rank, self._world_size = _rank_and_size(rank, world_size)
        self._recipe = Recipe(seed, shuffle)
        self._source = ShardSource.build(shards, parse_fields(fields), rank=self._rank, world_size=self._world_size)
        # Only a window shuffle has lanes; the other orders are dealt to the ranks one sample at a time.
        self._lanes = _LANES_PER_RANK if shuffle == "window" else 1
        self._builder = SampleBuilder(self._source.fields, augment)
        # Shared memory, because persistent workers keep their copy of this object when the next epoch begins.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._yielded = 0
        self._resume_from = 0
        self._length = self._count()

    def __len__(self) -> int:
        """Samples of this rank in an epoch."""
        return self._length

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next iterator yields."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next iterator yields, from its start; without this call, each one yields the same epoch.

        Raises:
            ValueError: If ``epoch`` is negative.
        """
        if epoch < 0:
            raise ValueError(f"epoch: got {epoch}, want a number of at least 0.")
        self._epoch.fill_(epoch)
        self._yielded = self._resume_from = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The samples of this worker in the current epoch, or the rest of them after ``load_state_dict``.

        Raises:
            DataError: If a sample cannot be read; names the sample and its place.
            ShardChanged: If a shard changed after it was indexed.
        """
        skipped, self._resume_from = self._resume_from, 0
        self._yielded = skipped
        epoch = self.epoch
        reader = self._source.open(self._recipe.seed)
        try:
            for samples in self._samples(epoch, skipped, reader):
                rows = zip(
                    samples.tolist(), self._source.index.keys(samples), self._randoms(epoch, samples), strict=True
                )
                for (number, key, random), raw in zip(rows, _fetched(reader, epoch, samples), strict=True):
                    sample = self._read(reader, epoch, number, key, raw, random)
                    # Before the yield: a state that is saved after this sample was received includes it.
                    self._yielded += 1
                    yield sample
        finally:
            reader.close()

    def state_dict(self) -> dict[str, Any]:
        """The position of this worker: how many of its samples it has yielded. The values can be stored as JSON."""
        worker, workers = _worker()
        return {
            "version": _VERSION,
            "data": self._source.index.describe(),
            "seed": self._recipe.seed,
            "shuffle": self._recipe.shuffle,
            "rank": self._rank,
            "world_size": self._world_size,
            "worker": worker,
            "workers": workers,
            "epoch": self.epoch,
            "yielded": self._yielded,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iterator continues after the samples that ``state`` counts.

        Raises:
            ValueError: If the data, the order, or the number of ranks or workers differs; names the difference.
        """
        own = self.state_dict()
        if missing := sorted(own.keys() - state.keys()):
            raise ValueError(f"not the state of a ShardDataset: missing keys: {', '.join(missing)}.")
        if difference := self._source.index.difference(state["data"]):
            raise ValueError(
                f"the dataset changed since this state was saved: {difference} Resume with the old shards."
            )
        fixed = own.keys() - {"data", "epoch", "yielded"}
        changed = [f"{name} {state[name]} -> {own[name]}" for name in own if name in fixed and state[name] != own[name]]
        if changed:
            raise ValueError(
                f"the state belongs to a different order of samples: {', '.join(changed)}. Resume with the saved values, or "
                "use ShardLoader, whose state fits any number of ranks and workers."
            )
        self.set_epoch(int(state["epoch"]))
        self._yielded = self._resume_from = int(state["yielded"])

    def _order(self, epoch: int) -> EpochOrder:
        slots = self._world_size * self._lanes
        layout = Layout(slots, slots if self._recipe.shuffle == "window" else 1)
        return EpochOrder(self._source.index.counts, self._recipe, epoch, [layout])

    def _slots(self) -> np.ndarray:
        return self._rank * self._lanes + np.arange(self._lanes)

    def _count(self) -> int:
        order = self._order(0)
        if not order.num_steps:
            return 0
        last = order.num_steps - 1  # no slot is empty before the last step: the lengths of lanes differ by at most one
        return last * self._lanes + int(np.count_nonzero(order.locate(last, self._slots()) >= 0))

    def _samples(self, epoch: int, skipped: int, reader: Reader) -> Iterator[np.ndarray]:
        """This worker's sample numbers, without the first ``skipped`` ones, in pieces: int64, shape ``[n]``."""
        worker, workers = _worker()
        order, slots = self._order(epoch), self._slots()
        steps_together = max(1, LOCATED_TOGETHER // self._lanes)
        # Steps that lie before the first wanted sample are not computed.
        first = skipped * workers // self._lanes
        for step in range(first, order.num_steps, steps_together):
            steps = np.arange(step, min(step + steps_together, order.num_steps))
            at_once = self._lanes * self._recipe.window if self._recipe.shuffle == "window" else None
            reader.expect(functools.partial(order.shards_ahead, step, slots), at_once)
            samples = order.locate(steps[:, np.newaxis], slots).reshape(-1)
            number = step * self._lanes + np.arange(len(samples))  # of each sample in the sequence of this rank
            samples, number = samples[samples >= 0], number[: np.count_nonzero(samples >= 0)]
            yield samples[(number % workers == worker) & (number // workers >= skipped)]

    def _randoms(self, epoch: int, samples: np.ndarray) -> Iterator[np.random.Generator | None]:
        """For each sample its generator, valid until the next one is taken; None if nothing is drawn."""
        if not self._builder.draws:
            yield from (None for _ in samples)
            return
        randomness = Randomness()
        for key in hash64(self._recipe.seed, epoch, AUGMENTATION, samples).tolist():
            yield randomness.generator(key)

    def _read(
        self,
        reader: Reader,
        epoch: int,
        number: int,
        key: str,
        raw: Sequence[Any] | None,
        rng: np.random.Generator | None,
    ) -> dict[str, Any]:
        try:
            raw = reader.fetch(epoch, number) if raw is None else raw
            members, fields = raw, self._source.fields
            values = self._builder.values(
                lambda number, crop, at: reader.decode(fields[number], members[number], None, crop, at), rng
            )
        except SampleError as error:
            reader.check(number)
            place = reader.place(number)
            raise DataError(
                f"sample {key!r}, in {place['shard']} at byte {place['offset']}: {error}. Repair or remove it, or use "
                "ShardLoader, which masks bad samples and counts them."
            ) from error
        sample = dict(values)
        for field in self._source.fields:
            if field.columns[1:]:
                sample[field.name], sample[field.columns[1]] = (
                    column.numpy() for column in values_and_mask(field, sample[field.name])
                )
        sample["__key__"] = key
        return sample


def _fetched(reader: Reader, epoch: int, samples: np.ndarray) -> Iterator[Sequence[Any] | None]:
    """The raw fields of each sample; None where ``fetch`` has to be called."""
    done = 0
    for positions, fields in reader.fetch_all(epoch, samples):
        for position, *raw in zip(positions, *fields, strict=True):
            yield from itertools.repeat(None, position - done)
            yield raw
            done = position + 1
    yield from itertools.repeat(None, len(samples) - done)


def _rank_and_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ValueError(
            f"rank={rank}, world_size={world_size}: give both, or neither to take them from torch.distributed."
        )
    if rank is None or world_size is None:
        # Here, not in a worker: a worker process has no process group.
        initialised = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size()) if initialised else (0, 1)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank}, world_size {world_size}: want a rank in [0, world_size).")
    return rank, world_size


def _worker() -> tuple[int, int]:
    """Number of this worker, and of all workers of this rank."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info is not None else (0, 1)

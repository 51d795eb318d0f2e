"""The loader: this rank's micro-batches, as its workers hand them over.

* Workers are stateless: they know where their *stream* starts and compute the rest (``dataset``, ``order``).
* The *position* (``position``) is all that a checkpoint keeps. It moves when ``commit()`` says that the optimizer step is
  done, which the loader believes only if it has handed over the micro-batches of that step.
* One *iterator* at a time takes from the stream. The stream outlives it, so that a new epoch finds its workers running.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dtrain.data.bad_samples import BadSampleBudget
from dtrain.data.batch import Batch
from dtrain.data.builder import Augment
from dtrain.data.cache_policy import CachePolicy
from dtrain.data.dataset import MicroBatches, Share, Start
from dtrain.data.field_options import parse_fields
from dtrain.data.mixing import Mix
from dtrain.data.order import DEFAULT_WINDOW, Layout, Recipe, choose_lanes
from dtrain.data.position import Position
from dtrain.data.sample_source import SampleSource
from dtrain.data.shard_source import ShardSource
from dtrain.data.source import Index, Source
from dtrain.data.stream import Stream, worker_options
from dtrain.data.wire import Wire
from dtrain.data.workers import number_of_workers
from dtrain.precision.policy import Precision


class ShardLoader:
    """Micro-batches of one rank from ``.tar`` shards, each sample of an epoch exactly once over all ranks.

    Args:
        shards: Paths or URLs; each may be a brace pattern (``train-{00000..00009}.tar``) or a glob. Or any ``Source``, which
            has fields of its own.
        fields: Extension to ``{"name": ..., "role": ..., **options}``, for example
            ``{"jpg": {"name": "image", "role": "image", "size": 224}, "cls": {"name": "label", "role": "label"}}``.
        global_batch_size: Samples of one optimizer step over all ranks.
        micro_batch_size: Samples of one forward on this rank; None is the rank's whole share of the global batch.
        rank: This process, in ``[0, world_size)``.
        world_size: Number of processes.
        num_workers: DataLoader workers; 0 decodes in the calling process, ``"auto"`` chooses by building a few micro-batches.
        seed: Key of the order and of every augmentation.
        shuffle: ``"window"`` (shards permuted, samples permuted within windows of shards), ``"full"``, ``"none"``.
        lanes: Contiguous pieces of the epoch that a step draws from; divides ``global_batch_size``. None: its largest
            divisor up to 64.
        window: Shards in a shuffle window. None: 8.
        tail: ``"pad"`` masks the missing rows of the last step; ``"drop"`` leaves out samples that do not fill a step.
        precision: Name or policy; decides the wire dtypes.
        augment: ``augment(sample, rng) -> sample`` on a dict of numpy arrays, called in the worker with a generator
            that depends on (seed, epoch, sample) only.
        mix: Mixup and cutmix, after that; labels become probabilities.
        max_bad: Bad samples after which the loader raises: 0 forgives none, a number below 1 that share of the samples
            handed over (ten are always forgiven), any other that count. None leaves all counting to the caller, who can
            add up all ranks.
        max_bad_consecutive: Bad samples, in micro-batches without a single good one, after which the loader raises; None
            for no such limit.
        wire: ``"auto"`` sends features in the compute dtype, ``"fp32"`` in fp32.
        on_overflow: A feature that fp16 cannot hold: ``"error"``, ``"clamp"``, or ``"fp32"`` for the whole field.
        channels_last: Layout in which images arrive on the device; contiguous if not.
        prefetch: Micro-batches that each worker builds ahead.
        start_method: ``"fork"``, ``"forkserver"``, ``"spawn"``; None is Python's default.
        pin_memory: Hand over page-locked tensors, for copies to a GPU that overlap compute.
        policy: Which shards are read through the cache of the node, and its room. None: URLs and network file systems.

    Attributes:
        source: Where samples come from.
        steps_per_epoch: Global batches of an epoch that is begun at its start.
        micro_batches_per_step: Micro-batches of this rank in a global batch, equal on all ranks.
        num_workers: How many there are.
        workers_reason: Why so many, if that was left to the loader.

    Raises:
        ValueError: If sizes do not fit, a pattern matches nothing, a field or a role is unknown.
        FileNotFoundError: If a named shard does not exist.
    """

    def __init__(
        self,
        shards: str | Sequence[str] | Source,
        fields: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int | str = 2,
        seed: int = 0,
        shuffle: str = "window",
        lanes: int | None = None,
        window: int | None = None,
        tail: str = "pad",
        precision: str | Precision = "fp32",
        augment: Augment | None = None,
        mix: Mix | None = None,
        max_bad: float | None = 0.01,
        max_bad_consecutive: int | None = 100,
        wire: str = "auto",
        on_overflow: str = "error",
        channels_last: bool = True,
        prefetch: int = 2,
        start_method: str | None = None,
        pin_memory: bool = False,
        policy: CachePolicy | None = None,
    ) -> None:
        self._share = Share.of(global_batch_size, micro_batch_size, rank, world_size)
        recipe = Recipe(seed, shuffle, DEFAULT_WINDOW if window is None else window, tail)
        layout = Layout(global_batch_size, choose_lanes(global_batch_size, lanes, shuffle))
        if isinstance(shards, Source):
            self.source: Source = shards
        else:
            parsed = parse_fields(fields or {})
            self.source = ShardSource.build(shards, parsed, rank=rank, world_size=world_size, policy=policy)
        fields_sent = self.source.fields if mix is None else mix.fields(self.source.fields)
        self.wire = Wire(fields_sent, Precision.of(precision), wire, on_overflow, channels_last)
        self._augment = augment
        self._mix = mix
        self._budget = BadSampleBudget(math.inf) if max_bad is None else BadSampleBudget(max_bad, max_bad_consecutive)
        self._position = Position(
            self.index, recipe, layout, default_window=window is None, default_lanes=lanes is None
        )
        self.steps_per_epoch = self.steps_left
        self.micro_batches_per_step = self._share.micro_batches_per_step
        if not self.steps_per_epoch:
            raise ValueError(
                f"{self.index.num_samples} samples do not fill one global batch of {global_batch_size}, and tail is "
                "'drop'. Use a smaller global batch or data.tail=pad."
            )
        of_workers = worker_options(prefetch, start_method)
        self.num_workers, self.workers_reason = number_of_workers(num_workers, self._micro_batches())
        self._loading: dict[str, Any] = {"num_workers": self.num_workers, "pin_memory": pin_memory}
        if self.num_workers:
            self._loading |= of_workers
        self._stream: Stream | None = None
        self._iterator: weakref.ref[_EpochIterator] | None = None
        self._uncommitted = 0  # micro-batches handed over since the last commit

    @classmethod
    def over(
        cls,
        dataset: Any,
        fields: Mapping[Any, Mapping[str, Any]],
        *,
        name: str | None = None,
        shard_size: int | None = None,
        **options: Any,
    ) -> ShardLoader:
        """A loader of samples that are in no shards, in the same order, masks, dtypes and states.

        Args:
            dataset: A map-style data set (``__len__``, ``__getitem__``), a dict or tuple of arrays, or a
                ``dtrain.data.Generated``.
            fields: Key of a sample that is a dict to ``{"name": ..., "role": ...}``; a tuple's values come in this order.
            name: First part of the samples' keys, ``<name>/<number>``; None is the name of the data set's class.
            shard_size: Samples that the window shuffle keeps together; None: one, in a large data set some.
            options: The other arguments of the class.

        Raises:
            ValueError: If it is no such data set, or sizes or fields do not fit.
        """
        return cls(SampleSource.build(dataset, fields, name=name, shard_size=shard_size), **options)

    @property
    def index(self) -> Index:
        """What all ranks know about the samples."""
        return self.source.index

    def epoch(self, n: int) -> Iterator[Batch]:
        """This rank's micro-batches of epoch ``n``: from the committed position if ``n`` is the state's epoch, else
        from its start. There is one iterator at a time: an earlier one raises when it is asked for more."""
        if n < 0:
            raise ValueError(f"epoch: got {n}, want a number from 0 on.")
        position = self._position
        if n != position.epoch:
            position.begin(n)
        if self._stream is None or not self._stream.is_open or self._stream.at != (position.epoch, position.step):
            self._end_stream()
            self._stream = self._open_stream()
        self._uncommitted = 0
        iterator = _EpochIterator(self, self.steps_left * self.micro_batches_per_step)
        self._iterator = weakref.ref(iterator)
        return iterator

    def __iter__(self) -> Iterator[Batch]:
        """``epoch()`` of the state's epoch."""
        return self.epoch(self._position.epoch)

    @property
    def steps_left(self) -> int:
        """Global batches of the state's epoch that are not committed yet."""
        return self._position.steps_left

    @property
    def samples_handed(self) -> int:
        """Samples that this rank was handed so far, bad ones included: moves as long as the loader does."""
        return self._budget.samples

    @property
    def bad_samples(self) -> int:
        """Samples handed to this rank as masked rows because they could not be read."""
        return self._budget.bad

    @property
    def rows_per_micro_batch(self) -> int:
        """Rows of every micro-batch, masked ones included."""
        return self._share.micro_batch_size

    @property
    def position(self) -> tuple[int, int]:
        """Epoch of the state, and how many of its samples are committed."""
        return self._position.epoch, self._position.samples

    def commit(self) -> int:
        """Moves the position by one global batch; after the last one of an epoch the state is ``(n + 1, 0)``.

        Returns:
            How many samples that was, over all ranks; bad ones included.

        Raises:
            RuntimeError: If this rank was not handed all micro-batches of that global batch.
        """
        if self._uncommitted < self.micro_batches_per_step:
            raise RuntimeError(
                f"commit() for step {self._position.step} of epoch {self._position.epoch}, but rank {self._share.rank} "
                f"was handed {self._uncommitted} of its {self.micro_batches_per_step} micro-batches. Commit once after the "
                "optimizer step that used them all."
            )
        self._uncommitted -= self.micro_batches_per_step
        return self._position.advance()

    def state_dict(self) -> dict[str, Any]:
        """A few numbers, equal on all ranks, that continue at any number of ranks, workers or global batch size."""
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state`` was taken.

        The epoch that it is in is finished in the order in which it was begun. If the global batch size differs, what
        remains of it is cut anew; every sample is still used once.

        Raises:
            RuntimeError: If an iterator of this loader is open.
            ValueError: If the data set or the seed changed since, or this is no loader state; names what differs.
        """
        if self._open_iterator() is not None:
            raise RuntimeError("load_state_dict: an iterator of this loader is open. Finish or delete it first.")
        self._position.load_state_dict(state)
        self._end_stream()
        self._uncommitted = 0

    def close(self) -> None:
        """Ends the workers. The loader can be used again."""
        self._iterator = None
        self._end_stream()

    def _micro_batches(self) -> MicroBatches:
        position = self._position
        return MicroBatches(
            self.source,
            recipe=position.recipe,
            first_recipe=position.order.recipe,
            start=Start(position.epoch, position.order.layouts, position.step),
            layout=position.layout,
            share=self._share,
            wire=self.wire,
            augment=self._augment,
            mix=self._mix,
        )

    def _open_stream(self) -> Stream:
        position = self._position
        start, steps = (position.epoch, position.step), (position.order.num_steps, self.steps_per_epoch)
        return Stream(self._micro_batches(), self._loading, start, steps, self.micro_batches_per_step)

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _open_iterator(self) -> _EpochIterator | None:
        iterator = self._iterator() if self._iterator is not None else None
        return iterator if iterator is not None and iterator.left else None

    def _take(self, iterator: _EpochIterator) -> Batch:
        stream = self._stream
        if stream is None or not stream.is_open or iterator is not self._open_iterator():
            raise RuntimeError(
                "this iterator of the loader cannot go on: the loader was closed, another iterator was opened, or an error "
                "ended its workers. Call epoch() again, which continues at the committed position."
            )
        batch = stream.take()
        batch.wire = self.wire
        self._uncommitted += 1
        good = len(batch.sample_keys) - batch.sample_keys.count("")
        bad = batch.bad
        self._budget.count(good, len(bad), bad[-1] if bad else {})
        return batch


class _EpochIterator(Iterator[Batch]):
    """The rest of one epoch; ``left`` micro-batches of it."""

    def __init__(self, loader: ShardLoader, left: int) -> None:
        self._loader = loader
        self.left = left

    def __next__(self) -> Batch:
        if not self.left:
            raise StopIteration
        batch = self._loader._take(self)
        self.left -= 1
        return batch

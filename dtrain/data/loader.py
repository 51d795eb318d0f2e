"""The loader: this rank's micro-batches, and how far the trainer has come.

* Workers are stateless: they know where their stream starts and compute the rest (``dataset``, ``order``).
* The *position* belongs to the trainer: it moves when ``commit()`` says that the optimizer step is done. What workers
  have prefetched by then is nobody's state.
* The *state* is the epoch, how it was cut into steps so far, and the fingerprint of the data: a few numbers, equal on all
  ranks, that continue at another number of ranks, workers or another global batch size.
"""

from __future__ import annotations

import multiprocessing
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

from dtrain.data.bad_samples import BadSampleBudget
from dtrain.data.batch import Batch
from dtrain.data.builder import Augment
from dtrain.data.cache_policy import CachePolicy
from dtrain.data.dataset import MicroBatches, Share, Start
from dtrain.data.fields import parse_fields
from dtrain.data.mixing import Mix
from dtrain.data.order import DEFAULT_WINDOW, EpochOrder, Layout, Recipe, choose_lanes
from dtrain.data.sample_source import SampleSource
from dtrain.data.shard_source import ShardSource
from dtrain.data.source import Index, Source
from dtrain.data.stream import Stream
from dtrain.data.wire import Wire
from dtrain.data.workers import choose_workers, cores_per_rank, seconds_to_build
from dtrain.precision.policy import Precision

_STATE_VERSION = 1


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
        bad_samples: Samples handed to this rank as masked rows because they could not be read.

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
        self._recipe = Recipe(seed, shuffle, DEFAULT_WINDOW if window is None else window, tail)
        self._layout = Layout(global_batch_size, choose_lanes(global_batch_size, lanes, shuffle))
        self._default_lanes, self._default_window = lanes is None, window is None
        if isinstance(shards, Source):
            self.source: Source = shards
        else:
            parsed = parse_fields(fields or {})
            self.source = ShardSource.build(shards, parsed, rank=rank, world_size=world_size, policy=policy)
        fields_sent = self.source.fields if mix is None else mix.fields(self.source.fields)
        self.wire = Wire(fields_sent, Precision.of(precision), wire, on_overflow, channels_last)
        self._augment = augment
        self._mix = mix
        self._budget = None if max_bad is None else BadSampleBudget(max_bad, max_bad_consecutive)
        self._begin(0)
        self.steps_per_epoch = self.steps_left
        self.micro_batches_per_step = self._share.micro_batches_per_step
        self.bad_samples = self._handed = 0
        if not self.steps_per_epoch:
            raise ValueError(
                f"{self.index.num_samples} samples do not fill one global batch of {global_batch_size}, and tail is "
                "'drop'. Use a smaller global batch or data.tail=pad."
            )
        if prefetch < 1:
            raise ValueError(f"data.prefetch: got {prefetch}, want at least 1 micro-batch.")
        if start_method not in (None, *multiprocessing.get_all_start_methods()):
            known = ", ".join(multiprocessing.get_all_start_methods())
            raise ValueError(
                f"data.start_method: got {start_method!r}, want one of {known}, or null for Python's default."
            )
        self.num_workers, self.workers_reason = self._workers(num_workers)
        self._loading: dict[str, Any] = {"num_workers": self.num_workers, "pin_memory": pin_memory}
        if self.num_workers:
            self._loading |= {"prefetch_factor": prefetch, "multiprocessing_context": start_method}
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
        if n != self._epoch:
            self._begin(n)
        if self._stream is None or not self._stream.is_open or self._stream.at != (self._epoch, self._step):
            self._end_stream()
            self._stream = self._open_stream()
        self._uncommitted = 0
        iterator = _EpochIterator(self, self.steps_left * self.micro_batches_per_step)
        self._iterator = weakref.ref(iterator)
        return iterator

    def __iter__(self) -> Iterator[Batch]:
        """``epoch()`` of the state's epoch."""
        return self.epoch(self._epoch)

    @property
    def steps_left(self) -> int:
        """Global batches of the state's epoch that are not committed yet."""
        return self._order.num_steps - self._step

    @property
    def samples_handed(self) -> int:
        """Samples that this rank was handed so far, bad ones included: moves as long as the loader does."""
        return self._handed

    @property
    def rows_per_micro_batch(self) -> int:
        """Rows of every micro-batch, masked ones included."""
        return self._share.micro_batch_size

    @property
    def position(self) -> tuple[int, int]:
        """Epoch of the state, and how many of its samples are committed."""
        return self._epoch, self._order.position(self._step)

    def commit(self) -> int:
        """Moves the position by one global batch; after the last one of an epoch the state is ``(n + 1, 0)``.

        Returns:
            How many samples that was, over all ranks; bad ones included.

        Raises:
            RuntimeError: If this rank was not handed all micro-batches of that global batch.
        """
        if self._uncommitted < self.micro_batches_per_step:
            raise RuntimeError(
                f"commit() for step {self._step} of epoch {self._epoch}, but rank {self._share.rank} was handed "
                f"{self._uncommitted} of its {self.micro_batches_per_step} micro-batches. Commit once after the "
                "optimizer step that used them all."
            )
        self._uncommitted -= self.micro_batches_per_step
        used = self._order.position(self._step + 1) - self._order.position(self._step)
        self._step += 1
        if not self.steps_left:
            self._begin(self._epoch + 1)
        return used

    def state_dict(self) -> dict[str, Any]:
        """A few numbers, equal on all ranks, that continue at any number of ranks, workers or global batch size.

        ``position`` counts the committed samples of ``epoch``; ``layouts`` are (global batch size, lanes, steps) of each
        stretch that the epoch was cut into, the last one with the steps committed so far.
        """
        *earlier, current = self._order.layouts
        layouts = [*earlier, replace(current, steps=self._step - self._order.first_step)]
        recipe = self._order.recipe
        return {
            "version": _STATE_VERSION,
            "data": self.index.describe(),
            "seed": recipe.seed,
            "shuffle": recipe.shuffle,
            "window": recipe.window,
            "tail": recipe.tail,
            "epoch": self._epoch,
            "position": self._order.position(self._step),
            "layouts": [list(astuple(layout)) for layout in layouts],
        }

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
        missing = sorted({"version", "data", "seed", "shuffle", "window", "tail", "epoch", "layouts"} - set(state))
        if missing or state["version"] != _STATE_VERSION:
            raise ValueError(
                f"not a state of this loader: version {state.get('version')!r} (want {_STATE_VERSION}), missing keys: "
                f"{', '.join(missing) or 'none'}."
            )
        if state["data"]["fingerprint"] != self.index.fingerprint:
            raise ValueError(
                f"the data set changed since this state was saved: {self.index.difference(state['data'])} "
                "Continue with the old shards, or start a new run."
            )
        if state["seed"] != self._recipe.seed:
            raise ValueError(
                f"seed: the state was saved with {state['seed']}, this loader has {self._recipe.seed}. Continue with "
                f"seed={state['seed']}, or start a new run."
            )
        layouts = [Layout(*layout) for layout in state["layouts"]]
        begun = Recipe(state["seed"], state["shuffle"], state["window"], state["tail"])
        batch = self._layout.global_batch_size
        if layouts[-1].global_batch_size != batch and layouts[-1].steps == 0 and layouts[1:]:
            del layouts[-1]  # of a run that ended before its first step: it used nothing
        self._keep_defaults(begun, layouts[-1])
        self._end_stream()
        self._uncommitted = 0
        step = sum(layout.steps for layout in layouts)
        if not step:
            self._begin(state["epoch"])
            return
        if layouts[-1].global_batch_size != batch:
            same_shuffle = begun.shuffle == self._recipe.shuffle
            layouts.append(self._layout if same_shuffle else Layout(batch, choose_lanes(batch, None, begun.shuffle)))
        self._epoch, self._step = state["epoch"], step
        self._order = EpochOrder(self.index.counts, begun, self._epoch, layouts)
        if not self.steps_left:  # with tail=drop, less than one of the new global batches may be left
            self._begin(self._epoch + 1)

    def _keep_defaults(self, begun: Recipe, layout: Layout) -> None:
        """What was not asked for stays as it was: another default must not change a run that goes on."""
        if begun.shuffle == self._recipe.shuffle:
            if self._default_window:
                self._recipe = replace(self._recipe, window=begun.window)
            if self._default_lanes and layout.global_batch_size == self._layout.global_batch_size:
                self._layout = replace(layout, steps=0)

    def close(self) -> None:
        """Ends the workers. The loader can be used again."""
        self._iterator = None
        self._end_stream()

    def _begin(self, epoch: int) -> None:
        self._epoch, self._step = epoch, 0
        self._order = EpochOrder(self.index.counts, self._recipe, epoch, [self._layout])

    def _workers(self, asked: int | str) -> tuple[int, str]:
        if asked == "auto":
            return choose_workers(seconds_to_build(self._micro_batches()), cores_per_rank())
        if not isinstance(asked, int) or asked < 0:
            raise ValueError(f"num_workers: got {asked!r}, want a number from 0 on, or auto.")
        return asked, ""

    def _micro_batches(self) -> MicroBatches:
        return MicroBatches(
            self.source,
            recipe=self._recipe,
            first_recipe=self._order.recipe,
            start=Start(self._epoch, self._order.layouts, self._step),
            layout=self._layout,
            share=self._share,
            wire=self.wire,
            augment=self._augment,
            mix=self._mix,
        )

    def _open_stream(self) -> Stream:
        steps = (self._order.num_steps, self.steps_per_epoch)
        return Stream(
            self._micro_batches(), self._loading, (self._epoch, self._step), steps, self.micro_batches_per_step
        )

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
        self._handed += good + len(batch.bad)
        self.bad_samples += len(batch.bad)
        if self._budget is not None:
            self._budget.count(good, len(batch.bad), batch.bad[-1] if batch.bad else {})
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

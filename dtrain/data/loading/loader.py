"""``ShardLoader``: the micro-batches of one rank.

* *Workers* are stateless: they know the position at which they start and compute everything after it from the order
  (``workers``, ``order.epoch_order``).
* The *position* (``position``) is the whole state of the loader in a checkpoint. ``commit()`` advances it after an
  optimizer step, and only if this rank has received all micro-batches of that step.
* One *iterator* at a time takes micro-batches from the workers. The workers outlive it, so that a new epoch does not
  start processes again.

From ``epoch()`` to a batch on the device: workers read samples (``sources.shard_source``), decode, augment and stack them
(``collate``) and send the batch to this process (``batch``); ``_take`` counts bad samples; ``Batch.to`` copies the batch
to the device and normalises images there.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import numpy as np

from dtrain.data.augment import Augment
from dtrain.data.fields.parse import parse_fields
from dtrain.data.loading.batch import Batch, Transfer, TransferOptions
from dtrain.data.loading.sample_log import BadSampleBudget, Limits
from dtrain.data.loading.worker_deaths import WorkerRestarts
from dtrain.data.loading.workers import MicroBatches, RankShare, WorkerOptions, WorkerStream, number_of_workers
from dtrain.data.mixing import Mix
from dtrain.data.order.epoch_order import Layout, choose_lanes
from dtrain.data.order.growth import Growth
from dtrain.data.order.index import Index
from dtrain.data.order.lines import DEFAULT_WINDOW, Recipe
from dtrain.data.order.mixture_position import MixturePosition
from dtrain.data.order.position import Position, Uses
from dtrain.data.shards.bad_shards import BadShards
from dtrain.data.shards.node_cache import CachePolicy
from dtrain.data.sources.datasets import SampleSource
from dtrain.data.sources.known_shards import as_known, can_grow
from dtrain.data.sources.mixture import EvaluationSets, Mixture, MixtureSource
from dtrain.data.sources.shard_source import ShardSource
from dtrain.data.sources.source import Source
from dtrain.precision.policy import Precision
from dtrain.runs.excluded import describe


class ShardLoader:
    """Micro-batches of one rank from ``.tar`` shards; over all ranks, each sample of an epoch exactly once.

    Args:
        shards: Paths or URLs; each may be a brace pattern (``train-{00000..00009}.tar``), a glob, or a list of them in a file
            (``@shards.txt``). Or a ``Mixture`` of several sources. Or any ``Source``, which has its own fields.
        fields: Extension to ``{"name": ..., "role": ..., **options}``, for example
            ``{"jpg": {"name": "image", "role": "image", "size": 224}, "cls": {"name": "label", "role": "label"}}``.
        global_batch_size: Samples of one optimizer step over all ranks.
        micro_batch_size: Samples of one forward on this rank; None: the rank's whole share of the global batch.
        rank: This process, in ``[0, world_size)``.
        world_size: Number of processes.
        num_workers: Worker processes; 0 decodes in the calling process, ``"auto"`` times a few micro-batches to choose.
        seed: Seed of the order and of every augmentation.
        shuffle: ``"window"`` (shards permuted, samples permuted within shuffle windows), ``"full"`` or ``"none"``.
        lanes: Number of contiguous pieces of the epoch that each step draws from; must divide ``global_batch_size``.
            None: the largest divisor up to 64, or up to ``world_size`` if that is larger. With shuffle ``"none"`` the
            default is one lane, which gives the stored order; with several, each rank opens only its share of the shards,
            as in evaluation. With ``"full"`` there is always one lane. In a mixture any number is allowed, and None means
            64, or ``world_size`` if that is larger. With None, a loaded state keeps its number of lanes, unless shuffle or
            global batch size differ.
        window: Shards in a shuffle window. None: 8.
        tail: ``"pad"`` masks the missing rows of the last step; ``"drop"`` leaves out samples that do not fill a step. In a
            mixture every step is full.
        precision: Name or policy; decides the transfer dtypes.
        augment: ``augment(sample, rng) -> sample`` on a dict of numpy arrays, called in the worker with a generator
            that depends on (seed, epoch, sample) only.
        mix: Mixup and cutmix, applied after ``augment``; labels become probabilities.
        limits: How many bad samples this rank may receive before the loader raises; by default 1 %.
        transfer: How values travel to the device: fp16 overflow, memory format, features in fp32.
        workers: How the workers run: prefetching, start method, page-locked memory, restarts.
        policy: Which shards are read through the node cache, and its size. None: URLs and network file systems.
        bad_shards: What happens to damaged shards. None: they are refused.
        growth: What ``load_state_dict`` does if there are more or fewer shards than the state knows. By default it refuses.

    Attributes:
        source: Where samples come from.
        transfer: The transfer dtypes of the fields.
        steps_per_epoch: Global batches of a whole epoch.
        micro_batches_per_step: Micro-batches of this rank in a global batch, equal on all ranks.
        num_workers: Number of worker processes.
        workers_reason: Why this number was chosen, if ``num_workers`` was ``"auto"``; else empty.
        excluded: Description of the samples that ``exclude`` masks; "" without any.
        restarts: Restarts of workers that died.

    Raises:
        ValueError: If sizes do not fit each other, a pattern matches nothing, or a field or role is unknown.
        FileNotFoundError: If a named shard does not exist.

    Example:
        >>> import tempfile
        >>> from dtrain.data import ShardLoader, write_shards
        >>> samples = [{"__key__": str(n), "cls": n} for n in range(10)]
        >>> shards = [str(path) for path in write_shards(samples, tempfile.mkdtemp(), shards=2)]
        >>> loader = ShardLoader(shards, {"cls": {"name": "label"}}, global_batch_size=4, num_workers=0)
        >>> for batch in loader.epoch(0):  # the last one has two masked rows
        ...     print(len(batch["label"]), "rows,", loader.commit(), "samples")
        4 rows, 4 samples
        4 rows, 4 samples
        4 rows, 2 samples
    """

    def __init__(
        self,
        shards: str | Sequence[str] | Source | Mixture | EvaluationSets,
        fields: Mapping[str, Any] | None = None,
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
        limits: Limits = Limits(),  # noqa: B008 - frozen
        transfer: TransferOptions = TransferOptions(),  # noqa: B008
        workers: WorkerOptions = WorkerOptions(),  # noqa: B008
        policy: CachePolicy | None = None,
        bad_shards: BadShards | None = None,
        growth: Growth = Growth(),  # noqa: B008
    ) -> None:
        self._growth = growth
        self._share = RankShare.from_sizes(global_batch_size, micro_batch_size, rank, world_size)
        recipe = Recipe(seed, shuffle, DEFAULT_WINDOW if window is None else window, tail)
        options: dict[str, Any] = {"rank": rank, "world_size": world_size, "policy": policy, "bad_shards": bad_shards}
        if isinstance(shards, Mixture):
            self.source: Source = shards.build(fields or {}, **options, growth=growth)
        elif isinstance(shards, EvaluationSets):
            self.source = shards.build(fields or {}, **options)
        elif isinstance(shards, Source):
            self.source = shards
        else:
            parsed = parse_fields(fields or {})
            self.source = ShardSource.build(shards, parsed, **options, growth=growth)
        fields_sent = self.source.fields if mix is None else mix.fields(self.source.fields)
        self.transfer = Transfer(fields_sent, Precision.parse(precision), transfer)
        self._augment = augment
        self._mix = mix
        self._budget = BadSampleBudget(limits)
        self._excluded_keys: tuple[str, ...] = ()
        self._excluded, self.excluded = np.zeros(0, np.int64), ""
        if growth != Growth() and not can_grow(self.source):
            raise ValueError(
                "data.grow: only shards for training can change, not a dataset that is not in shards, or sets for evaluation. "
                "Set data.grow=null and data.grow_allow_removed=false."
            )
        if isinstance(self.source, MixtureSource) and mix is not None:
            self.source.check_mix(mix)
        self._new_position = partial(
            _position,
            recipe=recipe,
            batch=global_batch_size,
            lanes=lanes,
            window=window,
            ranks=world_size,
            growth=growth,
        )
        self._position = self._new_position(self.source)
        self.steps_per_epoch = self._position.steps_per_epoch
        self.micro_batches_per_step = self._share.micro_batches_per_step
        self._names = tuple(self.samples_by_source())
        if not self.steps_per_epoch:
            raise ValueError(
                f"{self.index.num_samples} samples do not fill one global batch of {global_batch_size}, and tail is "
                "'drop'. Use a smaller global batch or data.tail=pad."
            )
        self.num_workers, self.workers_reason = number_of_workers(num_workers, self._micro_batches())
        self._loading = workers.of_data_loader(self.num_workers)
        self.restarts = WorkerRestarts(workers.max_restarts, self.index)
        self._stream: WorkerStream | None = None
        # A weak reference, so that an iterator that the caller dropped no longer counts as open.
        self._iterator: weakref.ref[_EpochIterator] | None = None
        self._uncommitted = 0  # micro-batches received since the last commit
        self._before: dict[str, Any] | None = None  # the attributes of the position before it

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
        """A loader of samples that are not in shards, with the same order, masks, dtypes and state.

        Args:
            dataset: A map-style dataset (``__len__``, ``__getitem__``), a dict or tuple of arrays, or a
                ``dtrain.data.Generated``.
            fields: Key of a sample that is a dict to ``{"name": ..., "role": ...}``; the values of a tuple in this
                order.
            name: First part of the sample keys, ``<name>/<number>``; None: the name of the dataset's class.
            shard_size: Samples that the window shuffle keeps together; None: one, in a large dataset a few.
            options: The other arguments of the class.

        Raises:
            ValueError: If ``dataset`` is not such a dataset, or sizes or fields do not fit.
        """
        return cls(SampleSource.build(dataset, fields, name=name, shard_size=shard_size), **options)

    def __len__(self) -> int:
        """This rank's micro-batches in a whole epoch."""
        return self.steps_per_epoch * self.micro_batches_per_step

    @property
    def index(self) -> Index:
        """The index of the source, equal on all ranks."""
        return self.source.index

    def epoch(self, n: int) -> Iterator[Batch]:
        """This rank's micro-batches of epoch ``n``.

        Starts at the committed position if ``n`` is the current epoch, else at the start of epoch ``n``. Only the newest
        iterator is valid: ``next`` of an earlier one raises ``RuntimeError``.

        Raises:
            ValueError: If ``n`` is negative.
        """
        if n < 0:
            raise ValueError(f"epoch: got {n}, want a number of at least 0.")
        position = self._position
        if n != position.epoch:
            position.begin(n)
        # Workers that have already reached this position, usually at an epoch boundary, are kept.
        if self._stream is None or not self._stream.is_open or self._stream.at != (position.epoch, position.step):
            self._end_stream()
            self._stream = self._open_stream()
        self._uncommitted = 0
        iterator = _EpochIterator(self, self.steps_left * self.micro_batches_per_step)
        self._iterator = weakref.ref(iterator)
        return iterator

    def __iter__(self) -> Iterator[Batch]:
        """``epoch()`` of the current epoch."""
        return self.epoch(self._position.epoch)

    @property
    def bad_shards(self) -> dict[str, dict[str, str]]:
        """The damaged shards that are left out: by source of a mixture, "" without one, name to reason."""
        sources = {"": self.source}
        if isinstance(self.source, MixtureSource):
            sources = dict(zip(self.source.names, self.source.sources, strict=True))
        return {name: dict(left_out) for name, one in sources.items() if (left_out := one.index.left_out)}

    @property
    def steps_left(self) -> int:
        """Global batches of the current epoch that are not committed yet."""
        return self._position.steps_left

    @property
    def samples_received(self) -> int:
        """Samples that this rank has received so far, including bad ones and batches that are not committed."""
        return self._budget.samples

    @property
    def bad_samples(self) -> int:
        """Samples that this rank received as masked rows because they could not be read."""
        return self._budget.bad

    @property
    def rows_per_micro_batch(self) -> int:
        """Rows of every micro-batch, including masked ones."""
        return self._share.micro_batch_size

    @property
    def position(self) -> tuple[int, int]:
        """The current epoch, and how many of its samples are committed."""
        return self._position.epoch, self._position.samples

    @property
    def epochs(self) -> float:
        """Committed epochs, including the fraction of the current one."""
        return self._position.epochs

    def steps_in(self, epochs: int) -> int:
        """Global batches of the first ``epochs`` epochs of a run with these settings."""
        return self._position.steps_in(epochs)

    def steps_until(self, epoch: int) -> int:
        """Global batches from the committed position to the start of an epoch; below 0 if the position is past it."""
        return self._position.steps_until(epoch)

    def epochs_by_source(self, steps_ahead: int = 0) -> dict[str, float]:
        """Epochs of each source of a mixture, ``steps_ahead`` steps from now, as fractions; {} without a mixture."""
        return self._position.source_epochs(steps_ahead) if isinstance(self._position, MixturePosition) else {}

    def samples_by_source(self, steps_ahead: int = 0) -> dict[str, int]:
        """Samples of each source of a mixture, over all its epochs, ``steps_ahead`` steps from now; {} without a mixture."""
        return self._position.drawn(steps_ahead) if isinstance(self._position, MixturePosition) else {}

    def commit(self) -> int:
        """Advances the position by one global batch; after the last one of epoch *n*, to the start of epoch *n* + 1.

        Returns:
            Samples of that global batch over all ranks, including bad ones.

        Raises:
            RuntimeError: If this rank has not received all micro-batches of that global batch.
        """
        if self._uncommitted < self.micro_batches_per_step:
            raise RuntimeError(
                f"commit() for step {self._position.step} of epoch {self._position.epoch}, but rank {self._share.rank} "
                f"has received {self._uncommitted} of its {self.micro_batches_per_step} micro-batches. Commit once after the "
                "optimizer step that used all of them."
            )
        self._uncommitted -= self.micro_batches_per_step
        self._before = vars(self._position).copy()  # in every step; copy() takes ten times as long
        return self._position.advance()

    def step_back(self, micro_batch_size: int) -> None:
        """Undoes the last ``commit``, and divides this rank's rows of a step into micro-batches of a different size.

        Call it at most once after a commit, on every rank. Existing iterators become invalid; ``epoch()`` and ``iter()``
        continue at the position.

        Args:
            micro_batch_size: Rows of a micro-batch from now on.

        Raises:
            RuntimeError: If there was no commit since the last call.
            ValueError: If the size does not divide this rank's rows of a step.
        """
        if self._before is None:
            raise RuntimeError("step_back(): there was no commit since the last call.")
        self.divide(micro_batch_size)
        vars(self._position).update(self._before)
        self._before = None

    def divide(self, micro_batch_size: int) -> None:
        """Divides this rank's rows of a step into micro-batches of a different size, from the committed position on.

        Call it on every rank. Existing iterators become invalid; ``epoch()`` and ``iter()`` continue at the position.

        Args:
            micro_batch_size: Rows of a micro-batch.

        Raises:
            ValueError: If the size does not divide this rank's rows of a step.
        """
        share = self._share
        self._share = RankShare.from_sizes(share.global_batch_size, micro_batch_size, share.rank, share.world_size)
        self.micro_batches_per_step = self._share.micro_batches_per_step
        self._iterator, self._uncommitted = None, 0
        self._end_stream()

    def peek(self) -> Batch:
        """The first micro-batch after the committed position, which does not count as received; closes the loader."""
        budget, self._budget = self._budget, copy(self._budget)
        try:
            return next(iter(self))
        finally:
            self.close()
            self._budget, self._uncommitted = budget, 0

    def state_dict(self) -> dict[str, Any]:
        """The committed position, equal on all ranks; valid for any number of ranks and workers and any batch size."""
        return self._position.state_dict()

    def exclude(self, keys: Sequence[str]) -> None:
        """Masks these samples wherever they occur from now on; the order of all others stays as it is.

        Args:
            keys: ``<shard>/<key>`` of each sample, as ``dtrain.runs.excluded.read_excluded`` returns them.

        Raises:
            ValueError: If the data have no sample of one of these keys; names the first such key.
        """
        removed = tuple(f"{name}/" for name in self.index.names_of_removed())
        if self._growth.allow_removed and (gone := [key for key in keys if not self.index.find(key).size]):
            removed = (*removed, *gone)
            if not self.index.removed:  # else it was said before the state was loaded
                warnings.warn(f"{len(gone)} excluded keys such as {gone[0]} are in no shard.", stacklevel=2)
        try:
            found = self.index.find_all(sorted(key for key in keys if not key.startswith(removed)))  # by shard
        except KeyError as error:
            example = self.index.keys(np.zeros(1, np.int64))[0]
            raise ValueError(
                f"{error.args[0]!r} is not a sample of the training data. Keys look like {example}."
            ) from None
        self._excluded_keys = tuple(keys)
        self._excluded, self.excluded = found, describe(keys)
        self._end_stream()

    def mask(self, reasons: Mapping[str, str]) -> None:
        """Masks samples as bad from now on, such as those that killed workers before the run was resumed.

        Args:
            reasons: Key of each sample to the reason for the log of bad samples. Keys that the data do not have are ignored.
        """
        for key, reason in reasons.items():
            self.restarts.deadly |= dict.fromkeys(self.index.find(key).tolist(), reason)
        self._end_stream()

    def segment(self) -> dict[str, Any]:
        """What is needed, besides the data, to compute the order of all samples after the committed position; JSON values.

        ``settings`` are those of later epochs; ``state`` is ``state_dict()``. {} for a stream, whose dataset decides the order.
        """
        return {"settings": self._position.settings(), "state": self._position.state_dict()}

    def uses(self, segment: Mapping[str, Any], samples: np.ndarray, steps: int) -> Uses:
        """Where the first ``steps`` steps of a segment of a run use the given samples; see ``segment``.

        Args:
            segment: What ``segment()`` returned at its beginning.
            samples: Sample numbers, int64, shape ``[n]``.
            steps: Steps of the segment.

        Raises:
            ValueError: If the data have changed; names the difference.
        """
        return self._position.at_segment(segment).find(samples, steps)

    def samples_of(self, segment: Mapping[str, Any], step: int) -> tuple[np.ndarray, np.ndarray]:
        """The samples of one global batch of a segment.

        Args:
            segment: What ``segment()`` returned at its beginning.
            step: Number of steps after that.

        Returns:
            Epoch and sample of each slot, int64, shape ``[global_batch_size]`` each; the sample is -1 where the slot is masked.

        Raises:
            ValueError: If the data have changed; names the difference.
        """
        return self._position.at_segment(segment).samples_of(step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to the position that ``state`` describes.

        The current epoch is finished in the order in which it began. If the global batch size differs, the rest of it is
        divided again; every sample is still used once. ``growth`` decides what happens to shards that the state does not know
        and to shards of the state that are missing; ``data_changes`` names them.

        Raises:
            RuntimeError: If an iterator of this loader is open.
            ValueError: If the dataset or the seed changed, or ``state`` is not a loader's state; names the difference.
        """
        if self._open_iterator() is not None:
            raise RuntimeError("load_state_dict: an iterator of this loader is open. Finish or delete it first.")
        source = as_known(self.source, state, self._growth)
        position = self._position if source is self.source else self._new_position(source)
        position.load_state_dict(state)
        self._use(source, position)

    def read_as(self, state: Mapping[str, Any]) -> None:
        """Reads exactly the shards that a state knows, in the order of their numbers there, and begins at epoch 0.

        For computations on the records of a run whose set of shards may have grown since. Of missing shards only the names
        are known.

        Raises:
            ValueError: If these cannot be the data of the state.
        """
        source = as_known(self.source, state, Growth("next_epoch", allow_removed=True), exactly=True)
        if source is not self.source:
            self._use(source, self._new_position(source))

    @property
    def has_changed(self) -> bool:
        """Whether shards that decide the length of an epoch have joined or left since the run's first start.

        ``steps_in`` counts the shards of the first start.
        """
        return self._position.has_changed

    @property
    def data_changes(self) -> Sequence[str]:
        """Sentences about the shards that joined or left when the state was loaded."""
        return self._position.changes

    def _use(self, source: Source, position: Position | MixturePosition) -> None:
        self.source, self._position = source, position
        self.steps_per_epoch = position.steps_per_epoch
        self._uncommitted, self._before = 0, None
        self.restarts.renumber(source.index)
        if self._excluded_keys:  # their numbers may have changed
            self.exclude(self._excluded_keys)
        self._end_stream()

    def close(self) -> None:
        """Ends the workers. The loader can be used again."""
        self._iterator = None
        self._end_stream()

    def _micro_batches(self) -> MicroBatches:
        return MicroBatches(
            self.source, self._position, self._share, self.transfer, self._augment, self._mix, self._excluded
        )

    def _open_stream(self) -> WorkerStream:
        position = self._position
        start, counted = (position.epoch, position.step), copy(position)  # the position of the loader advances
        dataset = self._micro_batches().from_micro_batch(*start, 0, self.restarts.deadly)
        steps = self.micro_batches_per_step
        return WorkerStream(dataset, self._loading, start, counted.steps_of, steps, self.restarts)

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
                "this iterator of the loader is invalid: the loader was closed, a newer iterator was opened, or a worker "
                "failed. Call epoch() again, which continues at the committed position."
            )
        batch = stream.take()
        # Not sent with every batch: they are the same for all of them.
        batch.transfer, batch.rows.index, batch.sources = self.transfer, self.index, self._names
        self._uncommitted += 1
        bad = batch.bad
        self._budget.count(batch.num_valid, len(bad), bad[-1] if bad else {})
        return batch


class _EpochIterator(Iterator[Batch]):
    """The rest of one epoch: ``left`` micro-batches."""

    def __init__(self, loader: ShardLoader, left: int) -> None:
        self._loader = loader
        self.left = left

    def __next__(self) -> Batch:
        if not self.left:
            raise StopIteration
        batch = self._loader._take(self)
        self.left -= 1
        return batch


def _position(
    source: Source, *, recipe: Recipe, batch: int, lanes: int | None, window: int | None, ranks: int, growth: Growth
) -> Position | MixturePosition:
    """The position at the start of a source."""
    if isinstance(source, MixtureSource):
        return source.position(recipe, batch, lanes, default_window=window is None, ranks=ranks, growth=growth)
    layout = Layout(batch, choose_lanes(batch, lanes, recipe.shuffle, ranks))
    defaults = {"default_window": window is None, "default_lanes": lanes is None}
    return Position(source.index, recipe, layout, **defaults, growth=growth)

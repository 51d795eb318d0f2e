"""Training on an iterable dataset: any ``IterableDataset``, webdataset pipeline or streaming Hugging Face dataset.

* A ``Stream`` is an iterable with a declared length, which fixes the number of steps of an epoch on all ranks.
* The stream is *divided* among ranks and workers by ``Stream``, or by the dataset itself. Each worker builds micro-batches
  from its part (``_WorkerPart``); the incomplete ones at the ends of the parts are joined (``_RankPart``).
* Transfer dtypes, masked rows, augmentation and the commit of a step work as in ``ShardLoader``. The order is the
  dataset's own: samples cannot be read by index, so a run resumes in the middle of an epoch by reading and dropping the
  samples before, and only with the same numbers of ranks, workers, rows and micro-batches. Shards have none of these limits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from dtrain.data.augment import Augment
from dtrain.data.fields.field import DataError
from dtrain.data.loading.batch import Batch, Transfer
from dtrain.data.loading.collate import Collator
from dtrain.data.loading.loader import ShardLoader
from dtrain.data.loading.workers import RankShare, WorkerStream
from dtrain.data.order.index import Index
from dtrain.data.sources.datasets import SampleIndex, SampleSource, value_fields


class Stream:
    """An iterable dataset with a declared length.

    Args:
        dataset: ``iter(dataset)`` yields the samples of an epoch, each a dict, or a tuple in the order of the fields. If it
            has a method ``set_epoch(n)``, it is called first.
        length: Samples of an epoch, over all ranks.
        divided: True if the dataset divides itself: each worker of each rank then gets its part, as from a webdataset
            pipeline with ``split_by_node`` and ``split_by_worker``, or from a Hugging Face dataset after
            ``split_dataset_by_node``. Otherwise each worker reads all samples and drops the samples of the others.
        endless: True if the dataset never ends; each worker stops after its share of ``length``.

    Raises:
        ValueError: If ``dataset`` is not iterable, or ``length`` is below 1.

    Example:
        >>> from dtrain.data.loading.stream import Stream, StreamLoader
        >>> stream = Stream([{"n": n} for n in range(5)], length=5)
        >>> fields = {"n": {"name": "number", "role": "id"}}
        >>> loader = StreamLoader(stream, fields, global_batch_size=2, num_workers=0, shuffle="none")
        >>> [batch["number"][batch.valid].tolist() for batch in loader]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(self, dataset: Any, length: int, divided: bool = False, endless: bool = False) -> None:
        if not isinstance(dataset, Iterable):
            raise ValueError(f"dataset: got a {type(dataset).__name__}, want an iterable, such as an IterableDataset.")
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(f"length: got {length!r}, want the number of samples of an epoch, at least 1.")
        self.dataset = dataset
        self.length = length
        self.divided = divided
        self.endless = endless

    def part(self, rank: int, world_size: int, worker: int, workers: int, epoch: int) -> Iterator[tuple[int, Any]]:
        """The samples of one worker in an epoch, with their numbers."""
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)
        own = rank + worker * world_size  # number of this part; rank r has the samples r, r + world_size, ...
        parts = world_size * workers
        samples = iter(self.dataset)
        if not self.divided:
            samples = itertools.islice(samples, own, None, parts)
        numbered = zip(itertools.count(own, parts), samples, strict=False)
        return itertools.islice(numbered, len(range(own, self.length, parts))) if self.endless else numbered

    def share(self, rank: int, world_size: int) -> tuple[int, int]:
        """The fewest and the most samples that a rank may get in an epoch: they differ by at most one."""
        exact = len(range(rank, self.length, world_size))
        return (self.length // world_size, -(-self.length // world_size)) if self.divided else (exact, exact)


class StreamLoader(ShardLoader):
    """The micro-batches of one rank from a ``Stream``; see there for an example.

    Args:
        stream: The dataset.
        fields: Key of a sample that is a dict to ``{"name": ..., "role": ...}``; the values of a tuple in this order.
        options: The other arguments of ``ShardLoader``.

    Raises:
        ValueError: If an option needs samples by index, or sizes or fields do not fit; names the option.
    """

    def __init__(self, stream: Stream, fields: Mapping[Any, Mapping[str, Any]], **options: Any) -> None:
        _refuse_options(options)
        name = type(stream.dataset).__name__
        index = SampleIndex(name, stream.length, shard_size=stream.length)
        # Each worker puts the samples of a micro-batch into this dict, and builds the micro-batch as from a map-style dataset.
        source = _StreamSource({}, index, value_fields(fields), tuple(fields))
        self._stream_of_samples = stream
        super().__init__(source, **options)

    def state_dict(self) -> dict[str, Any]:
        """The committed position, and the division of the stream that it needs in the middle of an epoch."""
        return super().state_dict() | {"stream": self._division()}

    def exclude(self, keys: Sequence[str]) -> None:
        """Refused: samples of a stream have no keys before they are read."""
        raise ValueError("samples of a stream cannot be excluded. Filter the stream itself, or write it to shards.")

    def segment(self) -> dict[str, Any]:
        """{}: the order is the dataset's own."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As ``ShardLoader.load_state_dict``; in the middle of an epoch, also refuses a different division of the stream."""
        saved = state.get("stream", {})
        changed = [
            f"{name} {saved.get(name)} -> {now}" for name, now in self._division().items() if saved.get(name) != now
        ]
        if changed and state.get("position"):
            raise ValueError(
                f"a stream resumes within an epoch only with the same values: {', '.join(changed)}. Resume with the saved "
                "values, or write the samples to shards, which resume with any number of ranks and workers."
            )
        super().load_state_dict(state)

    def _division(self) -> dict[str, int]:
        share = self._share
        division = {"ranks": share.world_size, "workers": self.num_workers, "rows": share.micro_batch_size}
        return division | {"micro-batches": share.micro_batches_per_step}

    def _micro_batches(self) -> _WorkerPart:  # type: ignore[override]
        return self._part(self._position.epoch)

    def _part(self, epoch: int) -> _WorkerPart:
        assert isinstance(self.source, SampleSource)
        seed = self._position.recipe.seed
        return _WorkerPart(self._stream_of_samples, self.source, self._share, self.transfer, self._augment, seed, epoch)

    def _open_stream(self) -> WorkerStream:
        position, share = self._position, self._share
        steps = (position.order.num_steps, self.steps_per_epoch)

        def start_workers(epoch: int) -> WorkerStream:
            # An epoch of one worker stream ends with the workers, so its steps are not counted.
            return WorkerStream(self._part(epoch), self._loading, (0, 0), lambda epoch: -1, 1)  # type: ignore[arg-type]

        return _RankPart(  # type: ignore[return-value]
            start_workers, self._stream_of_samples, self.index, share, (position.epoch, position.step), steps
        )


class _StreamSource(SampleSource):
    def summary(self) -> str:
        return f"{self.index.num_samples:,} samples of {self.index.name}, in its own order; resumes by reading the epoch again"


class _WorkerPart(IterableDataset[Batch]):
    """The micro-batches of one worker in one epoch. The last one may be incomplete: the rest of its rows are masked."""

    def __init__(
        self,
        stream: Stream,
        source: SampleSource,
        share: RankShare,
        transfer: Transfer,
        augment: Augment | None,
        seed: int,
        epoch: int,
    ) -> None:
        super().__init__()
        self._stream = stream
        self._source = source
        self._share = share
        self._transfer = transfer
        self._augment = augment
        self._seed = seed
        self._epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        info, share = get_worker_info(), self._share
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        part = self._stream.part(share.rank, share.world_size, worker, workers, self._epoch)
        collator = Collator(self._source, self._transfer, self._augment, self._seed)
        rows = share.micro_batch_size
        while samples := list(itertools.islice(part, rows)):
            self._source.dataset.clear()
            self._source.dataset.update(samples)
            numbers = np.full(rows, -1, np.int64)
            numbers[: len(samples)] = [number for number, _ in samples]
            yield collator.build(self._epoch, numbers, tuple)


class _RankPart:
    """The micro-batches of a rank over all epochs; it has the methods of ``WorkerStream`` that the loader calls.

    Workers start anew with every epoch, because their parts do not end together.
    """

    def __init__(
        self,
        start_workers: Callable[[int], WorkerStream],
        stream: Stream,
        index: Index,
        share: RankShare,
        start: tuple[int, int],
        steps: tuple[int, int],
    ) -> None:
        self._start_workers = start_workers
        self._stream = stream
        self._index = index
        self._share = share
        self._allowed = stream.share(share.rank, share.world_size)
        self._epoch, self._step = start
        self._num_steps, self._later_steps = steps
        self._micro_batch = 0
        self._workers: WorkerStream | None = None
        self._batches: Iterator[Batch] | None = None
        self.is_open = True

    @property
    def at(self) -> tuple[int, int] | None:
        """Epoch and step of the next micro-batch; None in the middle of a step."""
        return None if self._micro_batch else (self._epoch, self._step)

    def take(self) -> Batch:
        """The next micro-batch.

        Raises:
            DataError: If the stream ended before its declared length, or after it.
        """
        try:
            if self._batches is None:
                self._batches = self._rest_of_epoch()
            batch = next(self._batches)
            self._micro_batch += 1
            if self._micro_batch == self._share.micro_batches_per_step:
                self._step, self._micro_batch = self._step + 1, 0
            if self._step == self._num_steps:
                self._check_end()
                self._epoch, self._step, self._num_steps = self._epoch + 1, 0, self._later_steps
        except BaseException:
            self.close()
            raise
        return batch

    def close(self) -> None:
        """Ends the workers."""
        self.is_open = False
        self._end_epoch()

    def _end_epoch(self) -> None:
        if self._workers is not None:
            self._workers.close()
        self._workers = self._batches = None

    def _rest_of_epoch(self) -> Iterator[Batch]:
        batches = self._joined()
        # Drops the micro-batches that were used before the run was resumed.
        for _ in range(self._step * self._share.micro_batches_per_step):
            next(batches)
        return batches

    def _joined(self) -> Iterator[Batch]:
        """Complete micro-batches as they arrive, then those joined from incomplete ones, then masked ones without end."""
        share, self._received = self._share, 0
        self._workers = self._start_workers(self._epoch)
        incomplete: list[Batch] = []
        last: Batch | None = None
        while (batch := self._receive()) is not None:
            if "" not in batch.sample_keys:
                last = batch
                yield batch
                continue
            incomplete.append(batch)
            if sum(int(part.valid.sum()) for part in incomplete) >= share.micro_batch_size:
                last, incomplete = _join(incomplete, share.micro_batch_size)
                yield last
        if self._received < (fewest := self._allowed[0]):
            self._refuse("ended", fewest)
        while incomplete:
            last, incomplete = _join(incomplete, share.micro_batch_size)
            yield last
        while last is not None:
            yield Batch(last, [""] * len(last.sample_keys), torch.zeros_like(last.valid))
        self._refuse("has no samples for this rank", 1)

    def _receive(self) -> Batch | None:
        assert self._workers is not None
        try:
            batch = self._workers.take()
        except StopIteration:
            return None
        batch.rows.index = self._index
        self._received += int(batch.valid.sum()) + len(batch.bad)
        if self._received > (most := self._allowed[1]):
            self._refuse("continues", most)
        return batch

    def _check_end(self) -> None:
        if self._workers is not None and self._workers.is_open and not self._stream.endless:
            while self._receive() is not None:
                pass
        self._end_epoch()

    def _refuse(self, what: str, want: int) -> NoReturn:
        stream, share = self._stream, self._share
        raise DataError(
            f"the stream {type(stream.dataset).__name__} {what} after {self._received:,} samples in epoch {self._epoch} on "
            f"rank {share.rank}, want {want:,}. Its length is declared as {stream.length:,}, divided equally over "
            f"{share.world_size} ranks (divided={stream.divided}). Correct length or divided, or limit the samples of each "
            "rank, as webdataset's with_epoch does; endless=true is for streams without end."
        )


def _refuse_options(options: Mapping[str, Any]) -> None:
    for name, wanted in (("shuffle", "none"), ("tail", "pad"), ("mix", None)):
        got = options.get(name, "window" if name == "shuffle" else wanted)
        if got != wanted:
            wish = "null" if wanted is None else wanted
            raise ValueError(
                f"data.{name}: got {got!r}, but the samples of a stream cannot be read by number. Set "
                f"data.{name}={wish}, and let the dataset do it, or write the samples to shards."
            )
    if options.get("num_workers") == "auto":
        raise ValueError(
            "data.num_workers: got 'auto', but a stream resumes only with the same number of workers, and is not read to "
            "measure. Set a number, such as data.num_workers=2."
        )
    if options["global_batch_size"] % options.get("world_size", 1):
        raise ValueError(
            f"train.global_batch_size: {options['global_batch_size']} is not divisible by {options['world_size']} ranks, "
            "which a stream needs."
        )


def _join(parts: list[Batch], rows: int) -> tuple[Batch, list[Batch]]:
    """One micro-batch of up to ``rows`` valid rows, filled up with masked ones, and the batch that is left, if any."""
    keep = [part.valid.nonzero()[:, 0] for part in parts]
    keys = [part.sample_keys[row] for part, chosen in zip(parts, keep, strict=True) for row in chosen.tolist()]

    def select(name: str, chosen: list[int]) -> Tensor | list[Any]:
        columns = [part[name] for part in parts]
        if isinstance(columns[0], Tensor):
            return torch.cat([column[rows_of] for column, rows_of in zip(columns, keep, strict=True)])[chosen]
        flat = [column[row] for column, rows_of in zip(columns, keep, strict=True) for row in rows_of.tolist()]
        return [flat[number] for number in chosen]

    def batch(first: int, end: int, bad: Sequence[dict[str, Any]] = ()) -> Batch:
        masked = rows - (end - first)
        chosen = [*range(first, end), *[first] * masked]  # masked rows repeat a valid one
        columns = {name: select(name, chosen) for name in parts[0]}
        return Batch(columns, [*keys[first:end], *[""] * masked], torch.arange(rows) < end - first, bad)

    bad = [record for part in parts for record in part.bad]
    left = [batch(rows, len(keys))] if len(keys) > rows else []
    return batch(0, min(rows, len(keys)), bad), left

"""One split of a config's data: its loader as training builds it, its rows, and the stored values of its samples.

* A *source* is a set of shards or a dataset; a mixture and named evaluation sets have several. A sample has a number over all
  sources, and its own number in its source.
* A *row* is a sample as a rank gets it: decoded, cropped, augmented, mixed, and in the transfer dtypes.
* *Stored* is the same sample before that: the bytes of its members, or what the dataset returns.

Samples are read in this process. Shards that are not on this machine are read in place, without a copy in the node cache.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtrain.config.schema import Config
from dtrain.data import Batch, ShardLoader
from dtrain.data.fields.field import Field, SampleError
from dtrain.data.loading.stream import StreamLoader
from dtrain.data.shards.dataset_index import DatasetIndex
from dtrain.data.sources.mixture import MixtureSource
from dtrain.data.sources.random_offset import RandomOffsetSource
from dtrain.data.sources.shard_source import ShardSource
from dtrain.data.sources.source import Reader, Source
from dtrain.distributed.world import World
from dtrain.errors import ConfigError, nearest
from dtrain.precision import Precision
from dtrain.training.setup.loaders import are_sets, eval_loader, train_loader
from dtrain.urls import is_url

#: Names of the splits that every config may have.
SPLITS = ("train", "eval")


@dataclass(frozen=True)
class OneSource:
    """A source of a split.

    Attributes:
        name: Its name in the mixture or among the sets; "" if it is the only one.
        source: The source.
        first: Number of its first sample over all sources.
        seed: Its seed.
    """

    name: str
    source: Source
    first: int
    seed: int

    @property
    def index(self) -> DatasetIndex | None:
        """Where the members of its samples are; None if it is not in shards."""
        return self.source.index if isinstance(self.source.index, DatasetIndex) else None

    @property
    def is_remote(self) -> bool:
        """Whether its samples come over a network."""
        return self.index is not None and any(map(is_url, self.index.shards[:1]))


@dataclass(frozen=True)
class Row:
    """A sample as the model gets it.

    Attributes:
        key: ``<shard>/<key>``.
        source: Its source; None in a stream.
        number: Its number in its source.
        epoch: Epoch of its source.
        values: Field to value: an array, or an object; {} if it is bad.
        problem: Why it is bad; "" if it is not.
    """

    key: str
    source: OneSource | None
    number: int
    epoch: int
    values: dict[str, Any]
    problem: str = ""


class Split:
    """A split.

    Args:
        name: ``train``, or what ``data.eval`` names.
        loader: Its loader.
        ranks: Ranks of the run.
        seed: Seed of the run.

    Attributes:
        name: The argument.
        loader: The argument.
        ranks: The argument.
        sources: Its sources; [] of a stream, whose samples cannot be read by number.
        batches: The micro-batches that ``rows`` has read.
    """

    def __init__(self, name: str, loader: ShardLoader, ranks: int, seed: int) -> None:
        self.name, self.loader, self.ranks = name, loader, ranks
        self.sources = _sources(loader, seed)
        self.batches: list[Batch] = []
        self._readers: dict[str, Reader] = {}
        self._raw: dict[tuple[str, int, int], Sequence[Any]] = {}

    @classmethod
    def build(cls, cfg: Config, name: str, precision: Precision, ranks: int, most: int) -> Split:
        """Builds a split.

        Args:
            cfg: The composed config.
            name: ``train``, ``eval`` if that is one set, or the name of a set.
            precision: Decides the transfer dtypes.
            ranks: Ranks of the run; the loader is that of rank 0.
            most: Rows that will be read; the micro-batches are not larger.

        Raises:
            ConfigError: If there is no such split, or its data cannot be loaded.
        """
        cfg = copy.deepcopy(cfg)
        data, train = cfg.data, cfg.train
        if name == "train" and data.train is None and not data.mixture:
            raise ConfigError(
                "data.train is not set. Choose an experiment, such as experiment=digits, or name your shards: "
                "data=shards 'data.train=\"/data/train-{000000..000099}.tar\"'."
            )
        if name != "train":
            _choose_set(cfg, name)
        given = copy.deepcopy(cfg)
        data.num_workers = 0
        rows = train.micro_batch_size if isinstance(train.micro_batch_size, int) else None
        train.micro_batch_size = _micro_batch(train.global_batch_size, rows, ranks, most)
        loader = _loader(cfg, name, precision, ranks)
        if isinstance(loader, StreamLoader):  # which is divided among its workers, one micro-batch each in turn
            loader = _loader(given, name, precision, ranks)
        return cls(name, loader, ranks, cfg.run.seed)

    @property
    def num_samples(self) -> int:
        """Its samples."""
        return self.loader.index.num_samples

    @property
    def is_remote(self) -> bool:
        """Whether samples of it come over a network."""
        return any(source.is_remote for source in self.sources)

    def rows(self, epoch: int, most: int) -> Iterator[Row]:
        """The first rows of rank 0 in an epoch, without the rows of excluded samples.

        Args:
            epoch: Number of the epoch.
            most: How many.

        Raises:
            DataError: As a training would raise it.
        """
        loader, given = self.loader, 0
        batches = iter(loader.epoch(epoch))
        segment = loader.segment()
        try:
            for step in range(loader.steps_per_epoch):
                places = self._places(segment, step) if segment else None
                for number in range(loader.micro_batches_per_step):
                    batch = next(batches)
                    self.batches.append(batch)
                    for row in self._rows_of(batch, number * len(batch.valid), places, epoch):
                        yield row
                        given += 1
                        if given == most:
                            return
        finally:
            loader.close()

    def source_of(self, sample: int) -> OneSource:
        """The source of a sample, by its number over all sources."""
        return next(each for each in reversed(self.sources) if each.first <= sample)

    def share(self, epoch: int) -> np.ndarray:
        """The samples of rank 0 in an epoch, int64, shape ``[n]``; a mixture may use one several times."""
        self.loader.epoch(epoch)
        segment = self.loader.segment()
        if not segment:
            return np.zeros(0, np.int64)
        uses = self.loader.uses(segment, np.arange(self.num_samples), self.loader.steps_per_epoch)
        return uses.sample[uses.slot < self._slots(segment)]

    def stored(self, source: OneSource, epoch: int, number: int, *, keep: bool = False) -> Sequence[Any]:
        """The stored fields of a sample, in the order of the source's fields: bytes, or what the dataset returns.

        Args:
            source: The source.
            epoch: Epoch, of which generated samples depend.
            number: Number of the sample in its source.
            keep: Keep them, so that a further call does not read them again.

        Raises:
            SampleError: If a member is missing.
        """
        place = (source.name, epoch, number)
        if place in self._raw:
            return self._raw[place]
        raw = self.reader(source).fetch(epoch, number)
        if keep:
            self._raw[place] = raw
        return raw

    def reader(self, source: OneSource) -> Reader:
        """The open reader of the stored samples of a source."""
        if source.name not in self._readers:
            stored = source.source
            if isinstance(stored, RandomOffsetSource):  # which draws where a row begins
                stored = ShardSource(stored.index, stored.fields)
            self._readers[source.name] = stored.open(source.seed)
        return self._readers[source.name]

    def stored_values(self, row: Row) -> dict[str, Any]:
        """Field to value as it is stored: images and recordings are whole; fields that cannot be decoded are left out."""
        if row.source is None:
            return {}
        values = {}
        try:
            raw = self.stored(row.source, row.epoch, row.number, keep=True)
        except SampleError:
            return {}
        for field, one in zip(row.source.source.fields, raw, strict=True):
            try:
                values[field.name] = self.reader(row.source).decode(_whole(field), one)
            except SampleError:
                continue
        return values

    def close(self) -> None:
        """Closes files."""
        for reader in self._readers.values():
            reader.close()

    def _places(self, segment: Any, step: int) -> tuple[np.ndarray, np.ndarray]:
        epochs, samples = self.loader.samples_of(segment, step)
        end = self._slots(segment)
        return epochs[:end], samples[:end]

    def _slots(self, segment: Any) -> int:
        """Slots of a global batch that are rank 0's, the first ones."""
        settings = segment["settings"]
        return int(settings.get("plan", settings)["global_batch_size"]) // self.ranks

    def _rows_of(
        self, batch: Batch, first: int, places: tuple[np.ndarray, np.ndarray] | None, epoch: int
    ) -> Iterator[Row]:
        problems = {record["key"]: record["reason"] for record in batch.bad}
        keys = batch.sample_keys
        for row, is_valid in enumerate(batch.valid.tolist()):
            values = {name: _value(column, row) for name, column in batch.items()} if is_valid else {}
            if places is None:
                if is_valid:
                    yield Row(keys[row], None, -1, epoch, values)
                continue
            epochs, samples = places
            if first + row >= len(samples) or samples[first + row] < 0:
                continue
            sample = int(samples[first + row])
            key = keys[row] or self.loader.index.keys(np.array([sample]))[0]
            if is_valid or key in problems:
                source = self.source_of(sample)
                epoch_of = int(epochs[first + row])
                yield Row(key, source, sample - source.first, epoch_of, values, problems.get(key, ""))
        if places is None:
            yield from (Row(key, None, -1, epoch, {}, problem) for key, problem in problems.items())


def other_splits(cfg: Config, name: str) -> list[str]:
    """Names of the splits that a split is compared with: the training data, or what it is evaluated on."""
    if name != "train":
        return ["train"] if cfg.data.train is not None or cfg.data.mixture else []
    if are_sets(cfg.data.eval):
        return [str(each) for each in cfg.data.eval]
    return ["eval"] if cfg.data.eval else []


def _choose_set(cfg: Config, name: str) -> None:
    """Leaves one evaluation set.

    Raises:
        ConfigError: If there is none of this name.
    """
    data = cfg.data
    sets = {str(each): named for each, named in data.eval.items()} if are_sets(data.eval) else {}
    if name in sets:
        data.eval = {name: sets[name]}
    elif name != "eval" or not data.eval:
        known = ["train", *(sets or (["eval"] if data.eval else []))]
        raise ConfigError(f"--split {name}: the config has no such split. {nearest(name, known)}")
    elif len(sets) > 1:
        raise ConfigError(f"--split eval: data.eval has several sets. Name one: --split {' or '.join(sets)}.")


def _loader(cfg: Config, name: str, precision: Precision, ranks: int) -> ShardLoader:
    """The loader of rank 0."""
    world = World(0, ranks, 0, 1, torch.device("cpu"), "gloo", False)
    if name == "train":
        return train_loader(cfg, world, precision, fills_cache=False)
    loader = eval_loader(cfg, world, precision, fills_cache=False)
    assert loader is not None  # data.eval is set
    return loader


def _micro_batch(global_batch_size: int, micro: int | None, ranks: int, most: int) -> int | None:
    """The largest part of the run's micro-batch with at most ``most`` rows: rows do not depend on it."""
    rows = micro or -(-global_batch_size // ranks)
    return next((size for size in range(min(rows, most), 0, -1) if rows % size == 0), None)


def _sources(loader: ShardLoader, seed: int) -> list[OneSource]:
    if isinstance(loader, StreamLoader):
        return []
    source = loader.source
    if not isinstance(source, MixtureSource):
        return [OneSource("", source, 0, seed)]
    firsts = source.index.first_samples.tolist()
    each = zip(source.names, source.sources, firsts, source.seeds(seed), strict=False)
    return [OneSource(*one) for one in each]


def _whole(field: Field) -> Field:
    """The field without what cuts or resizes its value; an image is turned as a viewer of pictures turns it."""
    if field.role == "image":
        return replace(field, size=None, shorter_side=None, exif=True)
    return replace(field, length=None, clip="middle") if field.role == "audio" else field


def _value(column: Any, row: int) -> Any:
    if not isinstance(column, Tensor):
        return column[row]
    value = column[row]
    return value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()

"""What whole splits contain: labels, sizes, extensions, bad samples, duplicates, and classes that a split lacks.

* Sizes, and samples without a member, come from the index: nothing is read.
* Labels of shards on this machine are read by themselves, of up to ``MOST_LABELS`` samples.
* Other facts need the samples themselves. They are read and decoded for up to ``MOST_EXAMINED`` samples and ``MOST_BYTES`` of a
  split, spread evenly over it, and with ``--all`` for all. Of shards behind a URL only the shown samples are examined.
* Two samples are *duplicates* if the bytes of what the model gets as input are equal: labels and targets may differ.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from dtrain.console import OnProgress
from dtrain.data.fields.decode import decode
from dtrain.data.fields.field import Field, SampleError
from dtrain.data.shards.shard_index import load_or_build
from dtrain.data.sources.shard_reader import ShardReader
from dtrain.show.split import OneSource, Row, Split

#: Limits without ``--all``, for each split.
MOST_LABELS, MOST_EXAMINED, MOST_BYTES, MOST_SHARDS = 200_000, 10_000, 256 << 20, 1_000
#: Of larger indexes the sizes of every so many samples are used.
MOST_SIZES = 5_000_000
_MOST_EXTREMES = 5
_NO_INPUT = ("label", "target", "weight", "coord")

#: Source, epoch, and number in the source.
Place = tuple[OneSource, int, int]


@dataclass
class Labels:
    """Labels of one field.

    Attributes:
        samples: Numbers of the samples over all sources.
        values: Their labels.
    """

    samples: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)

    def counts(self, only: np.ndarray | None = None) -> dict[int, int]:
        """Label to number of samples, ascending.

        Args:
            only: Count these samples, int64, shape ``[n]``, as often as they are named; None: all.
        """
        if only is None:
            return dict(sorted(Counter(self.values).items()))
        by_sample = dict(zip(self.samples, self.values, strict=True))
        return dict(sorted(Counter(by_sample[each] for each in only.tolist() if each in by_sample).items()))


@dataclass
class Examined:
    """What reading samples of a split has found.

    Attributes:
        split: Name of the split.
        samples: How many were read.
        of: Samples of the split.
        labels: By field.
        bad: Key and reason of each bad sample.
        inputs: Digest of the input of each good sample, with key and labels of all that have it.
    """

    split: str
    samples: int
    of: int
    labels: dict[str, Labels] = field(default_factory=lambda: defaultdict(Labels))
    bad: list[tuple[str, str]] = field(default_factory=list)
    inputs: dict[bytes, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def is_all(self) -> bool:
        """Whether all samples were read."""
        return self.samples >= self.of


@dataclass(frozen=True)
class Sizes:
    """Bytes of the members of a split.

    Attributes:
        every: 1, or k in a large split: then only every k-th sample counts.
        fields: Extension to smallest, median and largest size, their sum, and how many samples lack the member.
        largest: Keys and sizes of the largest samples.
        smallest: Keys and sizes of the smallest ones.
    """

    every: int
    fields: Mapping[str, tuple[int, int, int, int, int]]
    largest: Sequence[tuple[str, int]]
    smallest: Sequence[tuple[str, int]]


@dataclass(frozen=True)
class Duplicates:
    """Samples with equal input.

    Attributes:
        within: Split to the groups of its samples.
        between: Groups of samples that are in several splits.
        conflicts: How many groups have different labels.
    """

    within: Mapping[str, Sequence[Sequence[str]]]
    between: Sequence[Sequence[str]]
    conflicts: int


def places(split: Split, rows: Sequence[Row], epoch: int, *, everything: bool) -> tuple[Iterator[Place], int]:
    """The samples of a split that are examined, in stored order, and how many they are.

    Args:
        split: The split.
        rows: The rows that are shown.
        epoch: Epoch of generated samples.
        everything: Whether ``--all`` was given.
    """
    if split.is_remote and not everything:
        shown = [(row.source, row.epoch, row.number) for row in rows if row.source is not None]
        return iter(shown), len(shown)
    most = MOST_EXAMINED
    if each := _bytes_per_sample(split):
        most = min(most, max(1, int(MOST_BYTES / each)))
    chosen = {}
    for source in split.sources:  # of a small source relatively more
        number = source.source.index.num_samples
        share = max(most * number // split.num_samples, most // len(split.sources) // 4, 1)
        chosen[source.name] = _spread(number, number if everything else share)
    found = ((source, epoch, sample) for source in split.sources for sample in chosen[source.name])
    return found, sum(map(len, chosen.values()))


def examine(
    split: Split, chosen: Iterable[Place], number: int, on_progress: OnProgress, class_name: Callable[[int], str]
) -> Examined:
    """Reads and decodes samples.

    Args:
        split: The split.
        chosen: The samples.
        number: How many they are.
        on_progress: Called with 1 for each sample.
        class_name: Name of a label.
    """
    found = Examined(split.name, number, split.num_samples)
    for source, epoch, sample in chosen:
        on_progress(1)
        [key] = split.loader.index.keys(np.array([source.first + sample]))
        fields = source.source.fields
        try:
            raw = split.stored(source, epoch, sample)
            values = [split.reader(source).decode(one, value) for one, value in zip(fields, raw, strict=True)]
        except SampleError as error:
            found.bad.append((key, str(error)))
            continue
        labels = []
        for one, value in zip(fields, values, strict=True):
            if (label := _label(one, value)) is not None:
                found.labels[one.name].samples.append(source.first + sample)
                found.labels[one.name].values.append(label)
                labels.append(f"{one.name} {class_name(label)}")
        found.inputs[_digest(fields, raw)].append((key, ", ".join(labels)))
    return found


def examine_rows(split: Split, rows: Sequence[Row]) -> Examined:
    """What the rows of a stream show, whose samples cannot be read by number."""
    found = Examined(split.name, len(rows), split.num_samples)
    fields = {one.name: one for one in split.loader.source.fields}
    for number, row in enumerate(rows):
        if row.problem:
            found.bad.append((row.key, row.problem))
        for name, value in row.values.items():
            if name in fields and (label := _label(fields[name], value)) is not None:
                found.labels[name].samples.append(number)
                found.labels[name].values.append(label)
    return found


def all_labels(split: Split, examined: Examined, on_progress: OnProgress, *, everything: bool) -> dict[str, Labels]:
    """The labels of a split by field: of shards on this machine, which are read alone, and those that were examined of others.

    Args:
        split: The split.
        examined: What reading its samples has found.
        on_progress: Called with 1 for each sample.
        everything: Whether ``--all`` was given.
    """
    found: dict[str, Labels] = defaultdict(Labels)
    apart = [source for source in split.sources if source.index is not None and not source.is_remote]
    for name, labels in examined.labels.items():
        for sample, label in zip(labels.samples, labels.values, strict=True):
            if not split.sources or split.source_of(sample) not in apart:
                found[name].samples.append(sample)
                found[name].values.append(label)
    share = 1.0 if everything else min(1.0, MOST_LABELS / split.num_samples)
    for source in apart:
        index = source.index
        columns = [(place, one) for place, one in enumerate(source.source.fields) if one.role == "label"]
        if index is None or not columns:
            continue
        reader = ShardReader(index.shards, stamp=index.stamp)
        numbers = _spread(index.num_samples, max(1, int(share * index.num_samples)))
        for number, shard in zip(numbers, index.shards_of(np.asarray(numbers)).tolist(), strict=True):
            on_progress(1)
            for place, one in columns:
                offset, size = int(index.offsets[number, place]), int(index.sizes[number, place])
                if offset < 0:
                    continue
                with suppress(SampleError):  # of which examine says why
                    if (value := _label(one, decode(one, reader.read(shard, offset, size)))) is not None:
                        found[one.name].samples.append(source.first + number)
                        found[one.name].values.append(value)
        reader.close()
    return found


def sizes(split: Split) -> Sizes | None:
    """The sizes of all members that the fields read, from the index; None if the split has no shards."""
    of_fields: dict[str, tuple[int, int, int, int, int]] = {}
    extremes: list[tuple[int, int]] = []  # size and number
    every = -(-split.num_samples // MOST_SIZES)
    for source in split.sources:
        if (index := source.index) is None:
            continue
        read: dict[str, int] = {}  # several fields may read one member
        for column, one in enumerate(source.source.fields):
            read.setdefault(one.ext, column)
        for ext, column in read.items():
            of_each = index.sizes[::every, column]
            there = of_each[of_each >= 0]
            three = np.percentile(there, (0, 50, 100)).astype(np.int64).tolist() if len(there) else [0, 0, 0]
            name = f"{source.name}/{ext}" if source.name else ext
            of_fields[name] = (*three, int(there.sum()), len(of_each) - len(there))
        total = np.clip(index.sizes[::every, np.array([*read.values()])], 0, None).sum(axis=1)
        order = np.argsort(total, kind="stable")
        for number in {*order[:_MOST_EXTREMES].tolist(), *order[-_MOST_EXTREMES:].tolist()}:
            extremes.append((int(total[number]), source.first + every * number))
    if not of_fields:
        return None
    extremes.sort()
    keys = dict(zip(extremes, split.loader.index.keys(np.array([number for _, number in extremes])), strict=True))
    named = [(keys[each], each[0]) for each in extremes]
    return Sizes(every, of_fields, named[::-1][:_MOST_EXTREMES], named[:_MOST_EXTREMES])


def extensions(split: Split, on_progress: OnProgress, *, everything: bool) -> tuple[dict[str, int], int, int]:
    """How many members of each extension the shards have, also of those that no field reads.

    Returns:
        The counts, the largest first; how many shards were counted, and of how many.
    """
    found: Counter[str] = Counter()
    shards = [(source, shard) for source in split.sources if source.index for shard in range(len(source.index.shards))]
    chosen = _spread(len(shards), len(shards) if everything else MOST_SHARDS)
    for place in chosen:
        source, shard = shards[place]
        assert source.index is not None
        index = load_or_build(source.index.shards[shard], source.index.stamp(shard), source.index.policy)
        counts = np.bincount(index.member_extension, minlength=len(index.extensions)).tolist()
        found.update(dict(zip(index.extensions, counts, strict=True)))
        on_progress(1)
    return dict(found.most_common()), len(chosen), len(shards)


def duplicates(examined: Sequence[Examined]) -> Duplicates:
    """Duplicates within and between splits, among the samples that were examined."""
    within = {each.split: [_keys(group) for group in each.inputs.values() if len(group) > 1] for each in examined}
    conflicts, between = 0, []
    everything: dict[bytes, list[tuple[str, str]]] = defaultdict(list)
    splits: Counter[bytes] = Counter()
    for each in examined:
        for digest, group in each.inputs.items():
            everything[digest] += [(f"{each.split}: {key}", labels) for key, labels in group]
            splits[digest] += 1
    for digest, group in everything.items():
        conflicts += len({labels for _, labels in group}) > 1
        if splits[digest] > 1:
            between.append(_keys(group))
    return Duplicates(within, between, conflicts)


def lacking(labels: Mapping[str, Mapping[str, Labels]], classes: int | None) -> dict[str, dict[str, list[int]]]:
    """Classes that a split lacks, although a different split or the list of classes has them.

    Args:
        labels: Split to field to labels.
        classes: Number of classes in ``classes.json``; None without it.

    Returns:
        Split to field to classes, without empty entries.
    """
    found: dict[str, dict[str, list[int]]] = {}
    names = {name for of_split in labels.values() for name in of_split}
    for name in sorted(names):
        having = {split: set(of[name].values) for split, of in labels.items() if name in of}
        known = set().union(*having.values(), range(classes or 0))
        for split, those in having.items():
            if missing := sorted(known - those):
                found.setdefault(split, {})[name] = missing
    return found


def _bytes_per_sample(split: Split) -> float:
    """Mean bytes that reading a sample takes; 0 if that is unknown."""
    every = -(-split.num_samples // MOST_SIZES)
    of_each = [np.clip(source.index.sizes[::every], 0, None) for source in split.sources if source.index is not None]
    return sum(int(sizes.sum()) for sizes in of_each) / max(1, sum(map(len, of_each)))


def _spread(number: int, most: int) -> list[int]:
    """Up to ``most`` of the numbers below ``number``, evenly spread."""
    if most >= number:
        return list(range(number))
    found: list[int] = (np.arange(most, dtype=np.int64) * number // most).tolist()
    return found


def _label(one: Field, value: Any) -> int | None:
    """The class number of a field with the role label; None if it is something else."""
    if one.role != "label":
        return None
    if isinstance(value, (np.ndarray, Tensor)) and not value.ndim:
        value = value.item()
    return int(value) if isinstance(value, (int, np.integer)) else None


def _digest(fields: Sequence[Field], raw: Sequence[Any]) -> bytes:
    """Hash of what the model gets as input; of everything if no field is one."""
    read = {one.ext: value for one, value in zip(fields, raw, strict=True) if one.role not in _NO_INPUT}
    read = read or {one.ext: value for one, value in zip(fields, raw, strict=True)}
    digest = hashlib.blake2b(digest_size=16)
    for ext, value in read.items():
        content = _content(value)
        digest.update(f"{ext} {len(content)} ".encode())
        digest.update(content)
    return digest.digest()


def _content(value: Any) -> bytes | memoryview:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return value if isinstance(value, memoryview) else bytes(value)
    if isinstance(value, Tensor):
        value = value.detach().cpu().float() if value.is_floating_point() else value.detach().cpu()
        return bytes(value.numpy().tobytes())
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tobytes()
    if hasattr(value, "tobytes"):  # a PIL image
        return bytes(value.tobytes())
    return repr(value).encode(errors="surrogatepass")


def _keys(group: Sequence[tuple[str, str]]) -> list[str]:
    """``key (label 3)``; the labels only where they differ."""
    differ = len({labels for _, labels in group}) > 1
    return [f"{key} ({labels})" if differ and labels else key for key, labels in group]

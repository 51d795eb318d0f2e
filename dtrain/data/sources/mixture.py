"""Several sources in one loader: ``Mixture`` for training, ``EvaluationSets`` for evaluation.

* A *source* has shards (or a dataset), a weight, and, if it needs them, its own fields and augmentation. Which samples
  of it come when is decided in ``mixture_order``.
* A ``MixtureSource`` has the fields of all its sources. A field that some of them lack is refused, or masked.
* Workers build the rows of a batch as in ``mixture_collator``.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, ClassVar

import numpy as np

from dtrain.data.augment import Augment
from dtrain.data.fields.field import Field
from dtrain.data.fields.parse import parse_fields
from dtrain.data.mixing import Mix
from dtrain.data.order.epoch_order import EpochOrder, Layout, choose_lanes
from dtrain.data.order.growth import Growth
from dtrain.data.order.index import Index
from dtrain.data.order.lines import Recipe
from dtrain.data.order.mixture_order import Schedule, weights_at
from dtrain.data.order.mixture_position import MixturePosition, Plan
from dtrain.data.order.position import Position
from dtrain.data.order.randomness import hash64
from dtrain.data.shards.bad_shards import BadShards
from dtrain.data.shards.node_cache import CachePolicy
from dtrain.data.sources.datasets import SampleSource
from dtrain.data.sources.shard_source import ShardSource
from dtrain.data.sources.source import Reader, Source
from dtrain.errors import nearest

#: Field of a batch with the number of each row's source.
SOURCE = "source"
MISSING = ("refuse", "mask")
# What two sources must agree on in a field of the same name, because a batch holds it once.
_COMMON = ("role", "size", "mean", "std", "dtype", "length", "tokenizer", "ignore")


class _Sources:
    """Named sources; the arguments are the same as for ``Mixture``."""

    _key = "data.mixture"

    def __init__(
        self,
        sources: Mapping[str, Any],
        *,
        fields: Mapping[str, Mapping[str, Any]] | None = None,
        missing: str = "refuse",
        shard_size: int | None = None,
    ) -> None:
        if not isinstance(sources, Mapping) or not sources:
            raise ValueError(f"{self._key}: got {sources!r}, want at least one source: {{'web': 'web/*.tar'}}.")
        for name in sources:
            if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(
                    f"{self._key}: the source {name!r} cannot be part of the name of a metric. Use letters, digits, _, - and ."
                )
        if missing not in MISSING:
            raise ValueError(f"data.missing: got {missing!r}, want one of {', '.join(MISSING)}.")
        self.names = tuple(sources)
        self.missing = missing
        self._sources = dict(sources)
        self._shard_size = shard_size
        self._augment: dict[str, Augment | None] = {}
        self._deal: tuple[tuple[Schedule, ...], int] | None = None
        self._fields = self._known("fields", fields)

    def _known(self, option: str, values: Mapping[str, Any] | None) -> dict[str, Any]:
        for name in values or {}:
            if name not in self._sources:
                raise ValueError(
                    f"{self._key}: {option} names {name!r}, which is not a source. {nearest(name, self.names)}"
                )
        return dict(values or {})

    def build(
        self,
        fields: Mapping[str, Any],
        *,
        rank: int = 0,
        world_size: int = 1,
        policy: CachePolicy | None = None,
        bad_shards: BadShards | None = None,
        growth: Growth = Growth(),  # noqa: B008 - frozen
    ) -> MixtureSource:
        """Finds and indexes all sources; the arguments are the same as for ``ShardSource.build``.

        Raises:
            ValueError: If a source has no samples, or the fields of two sources do not fit each other; names them.
        """
        opened = []
        for name, data in self._sources.items():
            own = self._fields.get(name, fields)
            options = {
                "rank": rank,
                "world_size": world_size,
                "policy": policy,
                "bad_shards": None if bad_shards is None else bad_shards.of_source(name),
                "growth": growth,
            }
            try:
                opened.append(_open(name, data, own, self._shard_size, options))
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{self._key}.{name}: {error}") from error
            except ValueError as error:
                raise ValueError(f"{self._key}.{name}: {error}") from error
        return MixtureSource(self, opened, self._augment, self._deal)


def _open(
    name: str, data: Any, fields: Mapping[str, Any], shard_size: int | None, options: Mapping[str, Any]
) -> Source:
    if isinstance(data, str) or (isinstance(data, Sequence) and all(isinstance(pattern, str) for pattern in data)):
        data = ShardSource.build(data, parse_fields(fields), **options)
    source = data if isinstance(data, Source) else SampleSource.build(data, fields, name=name, shard_size=shard_size)
    if not source.index.num_samples:
        raise ValueError("it has no samples. Remove it, or correct its shards.")
    return source


class Mixture(_Sources):
    """Sources that are mixed by their weights, for ``ShardLoader``.

    Each global batch has its share of each source. Each source goes through its own epochs, each sample once per epoch.

    Args:
        sources: Name to shards (paths or URLs, each may be a brace pattern or a glob), a map-style dataset, a dict or tuple of
            arrays, a ``dtrain.data.Generated``, or a ``Source``.
        weights: Name to weight; the share of a source is its weight divided by the sum of all. A list of ``[step, weight]``
            is a schedule over the steps of the run: shares change linearly from step to step, and jump where a step is given
            twice. None: all are equal.
        epoch_of: The source whose epochs count as the mixture's; None: the first. If it has fewer samples than its share of a
            global batch, an epoch of the mixture consists of as many of its epochs as fill one global batch.
        fields: Name to the fields of a source, where they differ from the loader's.
        augment: Name to the augmentation of a source, where it differs from the loader's; None for no augmentation.
        missing: What happens if a source lacks fields that a different source has: ``"refuse"`` raises an error; ``"mask"``
            fills them with zeros and adds ``has_<field>``, bool ``[rows]``, to the batch.
        tokens_per_sample: Average number of tokens of a sample, for all sources or none: weights then are shares of the
            tokens instead of the samples.
        shard_size: For sources that are datasets: see ``ShardLoader.over``.

    Raises:
        ValueError: If a weight, a name or an option is invalid; names it.

    Example:
        >>> import numpy as np
        >>> from dtrain.data import Mixture, ShardLoader
        >>> mixture = Mixture({"web": {"x": np.zeros(90)}, "books": {"x": np.ones(30)}}, {"web": 3, "books": 1})
        >>> fields = {"x": {"name": "x", "role": "feature"}}
        >>> loader = ShardLoader(mixture, fields, global_batch_size=8, num_workers=0)
        >>> next(loader.epoch(0))["source"].bincount().tolist()  # rows of each source
        [6, 2]
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Mapping[str, float | Sequence[Sequence[float]]] | None = None,
        *,
        epoch_of: str | None = None,
        fields: Mapping[str, Mapping[str, Any]] | None = None,
        augment: Mapping[str, Augment | None] | None = None,
        missing: str = "refuse",
        tokens_per_sample: Mapping[str, float] | None = None,
        shard_size: int | None = None,
    ) -> None:
        super().__init__(sources, fields=fields, missing=missing, shard_size=shard_size)
        self._augment = self._known("augment", augment)
        epoch_of = self.names[0] if epoch_of is None else epoch_of
        if epoch_of not in self.names:
            raise ValueError(
                f"data.epoch_of: {epoch_of!r} is not a source of the mixture. {nearest(epoch_of, self.names)}"
            )
        given = self._all_or_none("weights", weights)
        tokens = self._all_or_none("tokens_per_sample", tokens_per_sample)
        schedules = []
        for name in self.names:
            divisor = tokens.get(name, 1)
            if not _is_number(divisor) or divisor <= 0:
                raise ValueError(f"data.mixture.{name}.tokens_per_sample: got {divisor!r}, want a number above 0.")
            points = _schedule(name, given.get(name, 1))
            schedules.append(tuple((step, weight / divisor) for step, weight in points))
        for step in sorted({0, *(step for points in schedules for step, _ in points)}):
            _check_sum(schedules, step)
        first = self.names.index(epoch_of)
        self._deal = tuple(schedules), first
        if schedules[first][-1][1] == 0:
            raise ValueError(
                f"data.epoch_of: the weight of {epoch_of!r} is 0 in the end, so its epoch never ends. Name a different source."
            )

    def _all_or_none(self, option: str, values: Mapping[str, Any] | None) -> dict[str, Any]:
        known = self._known(option, values)
        if known and (without := [name for name in self.names if name not in known]):
            raise ValueError(
                f"data.mixture: {option} lacks {', '.join(without)}. Give it for all sources, or for none."
            )
        return known


class EvaluationSets(_Sources):
    """Sources that are evaluated one after the other, each in stored order and with its own metrics, for ``ShardLoader``.

    Args:
        sources: Name to shards or dataset, as for ``Mixture``.
        fields: Name to the fields of a source, where they differ from the loader's.
        missing: As for ``Mixture``.
        shard_size: As for ``Mixture``.
    """

    _key = "data.eval"


def _schedule(name: str, weight: Any) -> Schedule:
    """The points of a weight.

    Raises:
        ValueError: If it is impossible.
    """
    points = ((0, weight),) if _is_number(weight) else weight
    try:
        found = tuple((step, value) for step, value in points)
    except (TypeError, ValueError):
        found = ()
    steps = [step for step, _ in found]
    if (
        not found
        or not all(isinstance(step, int) and step >= 0 for step in steps)
        or steps != sorted(steps)
        or not all(_is_number(value) and 0 <= value < math.inf for _, value in found)
    ):
        raise ValueError(
            f"data.mixture.{name}.weight: got {weight!r}, want a number of at least 0, or points [step, weight] in ascending "
            "order of the steps, such as [[0, 1], [1000, 0.2]]."
        )
    return found


def _check_sum(schedules: Sequence[Schedule], step: int) -> None:
    for before in (True, False):
        if not sum(weights_at(schedules, step, before=before)) > 0:
            raise ValueError(
                f"data.mixture: all weights are 0{f' at step {step}' if step else ''}. Give one source a weight above 0."
            )


def _weight_text(points: Schedule) -> str:
    if len(points) == 1:
        return f"{points[0][1]:.4g}"
    return ", ".join(f"{weight:.4g} at step {step:,}" for step, weight in points)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class MixtureIndex(Index):
    """The indexes of all sources; samples and shards are counted over all of them.

    Args:
        names: Names of the sources.
        indexes: Their indexes.
    """

    labels: ClassVar = {"num_samples": "samples"}
    other_difference = "the same number of samples, but other sources."

    def __init__(self, names: Sequence[str], indexes: Sequence[Index]) -> None:
        self.names, self.indexes = tuple(names), tuple(indexes)
        self.counts = np.concatenate([index.counts for index in indexes])
        self.first_samples = np.cumsum([0, *(index.num_samples for index in indexes)])
        self.num_samples = int(self.first_samples[-1])
        firsts = np.cumsum([0, *(len(index.counts) for index in indexes)]).tolist()
        self.removed = [first + shard for first, index in zip(firsts, indexes, strict=False) for shard in index.removed]
        identity = json.dumps([[name, index.fingerprint] for name, index in zip(names, indexes, strict=True)])
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]

    def keys(self, samples: np.ndarray) -> list[str]:
        """``<source>/<shard>/<key>`` of each of these samples."""
        source, own = self.split(samples)
        of_each = zip(source.tolist(), own, strict=True)
        return [
            f"{self.names[number]}/{self.indexes[number].keys(np.array([sample]))[0]}" for number, sample in of_each
        ]

    def find(self, key: str) -> np.ndarray:
        """The samples of ``<source>/<shard>/<key>``; without the name of a source, those of all sources."""
        return self._of_sources(key, lambda index, rest: index.find(rest))

    def find_shard(self, name: str) -> np.ndarray:
        """The samples of ``<source>/<shard>``; without the name of a source, those of all sources."""
        return self._of_sources(name, lambda index, rest: index.find_shard(rest))

    def _of_sources(self, name: str, find: Callable[[Index, str], np.ndarray]) -> np.ndarray:
        found = [np.zeros(0, np.int64)]
        for source, index, first in zip(self.names, self.indexes, self.first_samples.tolist(), strict=False):
            found.append(first + find(index, name.removeprefix(f"{source}/")))
        return np.concatenate(found)

    def names_of_removed(self) -> list[str]:
        """``<source>/<shard>`` of the shards that were removed."""
        each = zip(self.names, self.indexes, strict=True)
        return [f"{name}/{shard}" for name, index in each for shard in index.names_of_removed()]

    def describe(self) -> dict[str, Any]:
        """The identity of all sources."""
        sources = {name: index.describe() for name, index in zip(self.names, self.indexes, strict=True)}
        return {"num_samples": self.num_samples, "fingerprint": self.fingerprint, "sources": sources}

    def split(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each sample, and its number there."""
        source = np.searchsorted(self.first_samples, samples, side="right") - 1
        return source, samples - self.first_samples[source]


class MixtureSource(Source):
    """Sources with the fields of all of them.

    Args:
        description: What the user asked for.
        sources: The sources, in the order of its names.
        augment: Name to the augmentation of a source that has its own.
        deal: Weights, and number of the source of ``epoch_of``; None: the sources come one after the other.

    Attributes:
        names: Names of the sources.
        sources: The argument.
        augment: The argument.
        optional: Names of the fields that some sources lack.
        mixed: False if the sources come one after the other.

    Raises:
        ValueError: If fields of the same name do not fit each other, or a source lacks fields; names them.
    """

    def __init__(
        self,
        description: _Sources,
        sources: Sequence[Source],
        augment: Mapping[str, Augment | None],
        deal: tuple[tuple[Schedule, ...], int] | None,
    ) -> None:
        self.names = description.names
        self.sources = tuple(sources)
        self.mixed = deal is not None
        self._deal = deal
        self.augment = dict(augment)
        self.fields = self._all_fields()
        given = [{field.name for field in source.fields} for source in sources]
        self.optional = tuple(field.name for field in self.fields if not all(field.name in fields for fields in given))
        if self.optional and description.missing == "refuse":
            lacking = [
                f"{name} lacks {', '.join(lack)}"
                for name, fields in zip(self.names, given, strict=True)
                if (lack := [field for field in self.optional if field not in fields])
            ]
            raise ValueError(
                f"data.missing: the sources have different fields: {'; '.join(lacking)}. Give them the same fields, or set "
                "data.missing=mask to get zeros and a mask, has_<field>, for the task."
            )
        columns = {column for field in self.fields for column in field.columns}
        if taken := sorted(columns & {SOURCE, *(f"has_{name}" for name in self.optional)}):
            raise ValueError(
                f"data.fields: the name {taken[0]!r} is taken in a mixture. Give the field a different name."
            )
        self.index: MixtureIndex = MixtureIndex(self.names, [source.index for source in sources])

    def _all_fields(self) -> tuple[Field, ...]:
        found: dict[str, tuple[str, Field]] = {}
        for name, source in zip(self.names, self.sources, strict=True):
            for field in source.fields:
                first, other = found.setdefault(field.name, (name, field))
                for option in _COMMON:
                    one, two = getattr(other, option), getattr(field, option)
                    if one != two:
                        raise ValueError(
                            f"data.fields: field {field.name!r} has {option} {one} in {first} and {two} in {name}, and a batch "
                            "holds both. Declare it alike for both sources, or under different names."
                        )
        return tuple(field for _, field in found.values())

    def open(self, seed: int) -> Reader:
        """Not supported: ``MixtureCollator`` opens each source."""
        raise TypeError("a mixture has no reader of its own: open its sources.")

    def summary(self) -> str:
        """``1,000 samples of 2 sources``, and a line for each source."""
        lines = [f"{self.index.num_present:,} samples of {len(self.sources)} {'sources' if self.mixed else 'sets'}"]
        for number, (name, source) in enumerate(zip(self.names, self.sources, strict=True)):
            lines.append(f"{name}: {source.summary()}")
            if self._deal is not None:
                lines[-1] += f", weight {_weight_text(self._deal[0][number])}"
        return "\n".join(lines)

    def with_sources(self, sources: Sequence[Source]) -> MixtureSource:
        """The same with other sources, which have the same fields."""
        result = copy(self)
        result.sources = tuple(sources)
        result.index = MixtureIndex(self.names, [source.index for source in sources])
        return result

    def position(
        self,
        recipe: Recipe,
        global_batch_size: int,
        lanes: int | None,
        *,
        default_window: bool,
        ranks: int,
        growth: Growth = Growth(),  # noqa: B008 - frozen
    ) -> MixturePosition | Position:
        """The position at the start."""
        if self._deal is None:
            lanes = choose_lanes(global_batch_size, lanes, recipe.shuffle, ranks)
            return _SetsPosition(self, recipe, Layout(global_batch_size, lanes))
        weights, epoch_of = self._deal
        return MixturePosition(
            self.names,
            self.index.indexes,
            Plan(global_batch_size, weights, epoch_of),
            recipe,
            self.seeds(recipe.seed),
            lanes=1 if recipe.shuffle == "full" or (recipe.shuffle == "none" and lanes is None) else lanes,
            default_window=default_window,
            ranks=ranks,
            growth=growth,
        )

    def check_mix(self, mix: Mix) -> None:
        """Refuses mixup and cutmix where a source has no image or label.

        Raises:
            ValueError: Names the source.
        """
        for name, source in zip(self.names, self.sources, strict=True):
            try:
                mix.fields(source.fields)
            except ValueError as error:
                raise ValueError(f"data.mixture.{name}: {error}") from error

    def seeds(self, seed: int) -> list[int]:
        """The seed of each source: by its name, so that two sources of one size have different orders."""
        if not self.mixed:
            return [seed] * len(self.names)
        digests = (hashlib.sha256(name.encode()).digest()[:8] for name in self.names)
        return [int(hash64(seed, int.from_bytes(digest, "little"))) for digest in digests]


class _SetsOrder:
    """The order of ``EvaluationSets``: all steps of the first set, then all steps of the second one, and so on.

    It has the methods of ``MixtureOrder``; the last step of each set is filled up with masked rows.
    """

    first_step = 0

    def __init__(self, source: MixtureSource, recipe: Recipe, epoch: int, layout: Layout) -> None:
        index = source.index
        self._orders = [EpochOrder(one.counts, recipe, epoch, [layout]) for one in index.indexes]
        self._firsts = epoch * index.num_samples + index.first_samples
        self._shards = np.cumsum([0, *(len(one.counts) for one in index.indexes)])
        self._begins = np.cumsum([0, *(order.num_steps for order in self._orders)])
        self.recipe, self.layouts = recipe, (layout,)
        self.num_steps = int(self._begins[-1])

    def position(self, step: int) -> int:
        return sum(
            order.position(min(max(step - begin, 0), order.num_steps))
            for order, begin in zip(self._orders, self._begins.tolist(), strict=False)
        )

    def locate(self, steps: np.ndarray | int, slots: np.ndarray) -> np.ndarray:
        steps, slots = np.broadcast_arrays(np.asarray(steps, np.int64), slots)
        which = np.searchsorted(self._begins, steps, side="right") - 1
        located = np.full(slots.shape, -1, np.int64)
        for number in np.unique(which).tolist():
            here = which == number
            samples = self._orders[number].locate(steps[here] - self._begins[number], slots[here])
            located[here] = np.where(samples >= 0, samples + self._firsts[number], -1)
        return located

    def shards_ahead(self, step: int, slots: np.ndarray, most: int) -> np.ndarray:
        number = int(np.searchsorted(self._begins, step, side="right")) - 1
        ahead = self._orders[number].shards_ahead(step - int(self._begins[number]), slots, most)
        shards: np.ndarray = ahead + self._shards[number]
        return shards


class _SetsPosition(Position):
    """The position in ``EvaluationSets``, whose states are never saved."""

    def __init__(self, source: MixtureSource, recipe: Recipe, layout: Layout) -> None:
        self._source = source
        super().__init__(source.index, recipe, layout)

    def begin(self, epoch: int) -> None:
        self.epoch, self.step = epoch, 0
        self.order = _SetsOrder(self._source, self.recipe, epoch, self.layout)  # type: ignore[assignment]

"""Data that change between two starts of a run: shards that are new or were removed.

* A *shard list* has the name, the samples and a check of every shard that a run has known, in the order of their numbers. It is
  a part of the state. Names that count up, such as ``train-000.tar``, ``train-001.tar``, are stored as one range.
* *Known shards keep their numbers*, and new ones are appended, however their names sort. So samples keep their numbers, and
  with them their augmentation and their places in the epoch. A shard that was removed also keeps its number.
* ``data.grow`` decides when new shards join: ``next_epoch``, or ``now``: the rest of the current epoch then consists of the
  samples that were not used yet and of all new ones, each once.
"""

from __future__ import annotations

import base64
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

GROW = ("next_epoch", "now")


@dataclass(frozen=True)
class ShardList:
    """The shards that a run knows, by their numbers.

    Attributes:
        names: Names.
        counts: Samples of each, int64, shape ``[shards]``.
        checks: 32 bits of a hash of each shard's size, samples, keys and member sizes, uint32, shape ``[shards]``.
    """

    names: tuple[str, ...]
    counts: np.ndarray
    checks: np.ndarray

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ShardList:
        """The inverse of ``state_dict``."""
        counts = [count for count, times in state["counts"] for _ in range(times)]
        checks = np.frombuffer(base64.b64decode(state["checks"]), "<u4")
        return cls(tuple(_unpacked(state["names"])), np.array(counts, np.int64), checks)

    def take(self, numbers: np.ndarray) -> ShardList:
        """These shards alone."""
        return ShardList(
            tuple(self.names[number] for number in numbers.tolist()), self.counts[numbers], self.checks[numbers]
        )

    def followed_by(self, other: ShardList) -> ShardList:
        """These shards and then those of another list."""
        counts, checks = (self.counts, other.counts), (self.checks, other.checks)
        return ShardList((*self.names, *other.names), np.concatenate(counts), np.concatenate(checks))

    def state_dict(self) -> dict[str, Any]:
        """Values that JSON can hold, about six bytes per shard if the names count up."""
        return dict(self._packed)

    @functools.cached_property
    def _packed(self) -> dict[str, Any]:  # once, because each save asks for it
        runs = [[count, len(list(run))] for count, run in itertools.groupby(self.counts.tolist())]
        checks = base64.b64encode(self.checks.astype("<u4").tobytes()).decode()
        return {"names": _packed(self.names), "counts": runs, "checks": checks}


@dataclass(frozen=True)
class Growth:
    """What a resumed run does if shards are new or missing.

    Args:
        when: When new shards join, ``"next_epoch"`` or ``"now"``; None: they are refused.
        allow_removed: Whether shards may be missing; their unused samples are then left out.

    Raises:
        ValueError: If ``when`` is none of these.

    Example:
        >>> import tempfile
        >>> from dtrain.data import Growth, ShardLoader, write_shards
        >>> fields, options = {"cls": {"name": "label"}}, {"global_batch_size": 2, "num_workers": 0}
        >>> samples = [{"__key__": str(n), "cls": n} for n in range(8)]
        >>> old, new = map(str, write_shards(samples, tempfile.mkdtemp(), shards=2))
        >>> loader = ShardLoader([old, new], fields, growth=Growth("now"), **options)
        >>> loader.load_state_dict(ShardLoader([old], fields, **options).state_dict())
        >>> loader.steps_left  # of the current epoch: the new shard has joined
        4
    """

    when: str | None = None
    allow_removed: bool = False

    def __post_init__(self) -> None:
        if self.when is not None and self.when not in GROW:
            raise ValueError(
                f"data.grow: got {self.when!r}, want {' or '.join(GROW)}, or null to refuse data that have changed."
            )

    def numbering(self, known: ShardList, present: ShardList, removed: Sequence[int] = ()) -> np.ndarray | None:
        """The index in ``present`` of the shard of each number, -1 for one that was removed: int64, shape ``[numbers]``.

        Args:
            known: The list of a state.
            present: The shards that there are, in any order.
            removed: Numbers of the shards that were removed at an earlier start.

        Returns:
            None if the shards differ in a way that is not allowed.

        Raises:
            ValueError: If a new shard and a missing one cannot be told apart by their names.
        """
        index = {name: number for number, name in enumerate(present.names)}
        numbers = np.array([index.get(name, -1) for name in known.names], np.int64)
        new = np.setdiff1d(np.arange(len(present.names)), numbers)
        missing = np.flatnonzero(numbers < 0)
        if (new.size and self.when is None) or (np.setdiff1d(missing, removed).size and not self.allow_removed):
            return None
        # A name is the shortest end of a path that no other shard has, so it may change with the other shards.
        ends = {known.names[number].rpartition("/")[2]: known.names[number] for number in missing.tolist()}
        for name in (present.names[number] for number in new.tolist()):
            if (end := name.rpartition("/")[2]) in ends:
                raise ValueError(
                    f"the new shard {name} may be {ends[end]}, which this state knows and which is missing: shards of "
                    "different folders have the same file name. Give new shards file names of their own."
                )
        return np.concatenate([numbers, new])

    def remedy(self, known: ShardList, present: ShardList) -> str:
        """How the user can allow shards that are new or missing; ``""`` if no config key does."""
        new, missing = set(present.names) - set(known.names), set(known.names) - set(present.names)
        index = {name: number for number, name in enumerate(present.names)}
        kept = [(number, index[name]) for number, name in enumerate(known.names) if name in index]
        if any(known.checks[number] != present.checks[mine] for number, mine in kept) or not kept:
            return ""
        texts = []
        if missing and not self.allow_removed:
            texts.append(
                f"{_named(missing, 'is', 'are')} missing: data.grow_allow_removed=true leaves out the samples of such shards."
            )
        if new and self.when is None:
            texts.append(
                f"{_named(new, 'is', 'are')} new: with data.grow=next_epoch new shards join at the next epoch, with "
                "data.grow=now in the rest of this one."
            )
        return " ".join(texts)


def _named(names: set[str], one: str, many: str) -> str:
    first = min(names)
    return f"{first} {one}" if len(names) == 1 else f"{len(names)} shards such as {first} {many}"


def _packed(names: Sequence[str]) -> list[Any]:
    """Names; those that count up as ``[before, first number, last number, after]``, with numbers of equal width as text."""
    packed: list[Any] = []
    for name in names:
        parts = re.split(r"([0-9]+)", name)
        if packed and (run := _continued(packed[-1], parts)) is not None:
            packed[-1] = run
        else:
            packed.append(parts)
    return ["".join(entry) if not isinstance(entry, tuple) else list(entry) for entry in packed]


def _continued(before: Any, parts: list[str]) -> tuple[str, str, str, str] | None:
    """The run of names that ``before``, a run or the parts of a name, forms with the next name; None if it forms none."""
    if isinstance(before, tuple):
        head, first, last, tail = before
        following = str(int(last) + 1).zfill(len(last))
        is_next = len(following) == len(last) and "".join(parts) == f"{head}{following}{tail}"
        return (head, first, following, tail) if is_next else None
    different = [at for at, (one, other) in enumerate(zip(before, parts, strict=False)) if one != other]
    if len(before) != len(parts) or len(different) != 1 or different[0] % 2 == 0:
        return None
    at = different[0]
    if len(parts[at]) != len(before[at]) or int(parts[at]) != int(before[at]) + 1:
        return None
    return "".join(before[:at]), before[at], parts[at], "".join(before[at + 1 :])


def _unpacked(packed: Sequence[Any]) -> Iterator[str]:
    for entry in packed:
        if isinstance(entry, str):
            yield entry
        else:
            before, first, last, after = entry
            yield from (f"{before}{str(n).zfill(len(first))}{after}" for n in range(int(first), int(last) + 1))

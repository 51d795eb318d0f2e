"""From many shards to the columns of one data set.

* A survey *runs* over all shards once: how many samples each has, which extensions there are, which shards are damaged.
* Only then are the *columns* put together, shard by shard: their size is known, so they need never be in memory twice, and
  large ones need never be in memory at all.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from dtrain.config.cache_dir import cache_dir
from dtrain.data import mapped_arrays
from dtrain.data.cache_policy import CachePolicy
from dtrain.data.index_store import load_or_build
from dtrain.data.shard_error import ShardError
from dtrain.data.shard_file import stamp_of
from dtrain.data.tar_index import ShardIndex
from dtrain.data.urls import absolute, is_url, shown

_VERSION = 2
#: Columns of more bytes than this are kept in the cache and mapped.
MAPPED_ABOVE = 64 << 20

#: Arrays by name, and the folder that they are mapped from, None if they are in memory. ``offsets`` and ``sizes``, int64
#: ``[samples, columns]``; ``counts``, ``shard_sizes`` and ``shard_versions``, int64 ``[shards]``; ``key_bytes``, uint8
#: ``[bytes]``, with ``key_starts``, int64 ``[samples + 1]``; ``doubts``, a list of sentences as JSON, uint8 ``[bytes]``.
Columns = tuple[dict[str, np.ndarray], Path | None]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Survey:
    """What is to be known about all shards before their columns can be put together.

    Args:
        paths: The shards.
        extensions: The columns; alternatives in one column have semicolons between them.
        workers: Threads that look at shards.
        policy: Of the cache that shards may have to be copied into.

    Raises:
        ValueError: If there are no shards or no threads.
        OSError: If a shard cannot be read.
    """

    def __init__(self, paths: Sequence[str], extensions: Sequence[str], workers: int, policy: CachePolicy) -> None:
        if not paths or workers < 1:
            raise ValueError(f"an index of {len(paths)} shards with {workers} workers: want at least one of each.")
        self._paths = paths
        self._columns = list(extensions)
        self._workers = workers
        self._policy = policy
        self._stamps = list(_each(stamp_of, paths, workers))
        identity = json.dumps([_VERSION, self._columns, [absolute(path) for path in paths], self._stamps])
        self._folder = cache_dir() / "columns" / hashlib.sha256(identity.encode()).hexdigest()[:32]
        self._counts = np.zeros(len(paths), np.int64)
        self._key_bytes = 0
        self._members: Counter[str] = Counter()
        self._doubts: dict[int, str] = {}
        self._damaged: dict[int, ShardError] = {}
        self._at_hand: dict[int, ShardIndex] = {}
        self._room = MAPPED_ABOVE

    def run(self, first: int, progress: Callable[[int, int], None] | None) -> None:
        """Looks at all shards, from ``first`` on and round.

        Raises:
            ShardError: If shards are damaged; names all of them.
            ValueError: If no shard has a sample, or no sample has a column.
        """
        order = [*range(first, len(self._paths)), *range(first)]
        results = _each(self._index_or_error, order, self._workers)
        for done, (place, result) in enumerate(zip(order, results, strict=True), start=1):
            if isinstance(result, ShardError):
                self._damaged[place] = result
            else:
                self._add(place, result)
            if progress is not None:
                progress(done, len(order))
        if self._damaged:
            raise self._damage()
        if not self._counts.any():
            raise ValueError(
                f"{len(self._paths)} shards such as {shown(self._paths[0])!r} have no sample. A sample's files are named "
                "<key>.<extension>, such as 000123.jpg and 000123.cls. Links in a tar hold no data: pack with tar's -h."
            )
        for column in self._columns:
            if not any(extension in self._members for extension in column.split(";")):
                raise ValueError(f"no sample has a member {column!r}. {self._extensions_there_are()}")

    def known(self) -> Columns | None:
        """The columns of exactly these files, if large ones are kept from another time."""
        arrays = mapped_arrays.load(self._folder)
        return None if arrays is None else (arrays, self._folder)

    def columns(self) -> Columns:
        """The columns of all shards, after ``run``."""
        doubts = np.frombuffer(json.dumps([self._doubts[place] for place in sorted(self._doubts)]).encode(), np.uint8)
        small: dict[str, np.ndarray] = {
            "counts": self._counts,
            "shard_sizes": np.array([stamp.size for stamp in self._stamps], np.int64),
            "shard_versions": np.array([stamp.version for stamp in self._stamps], np.int64),
            "doubts": doubts,
            "key_starts": np.zeros(1, np.int64),
        }
        samples, columns = int(self._counts.sum()), len(self._columns)
        shapes = {name: array.shape for name, array in small.items()} | {
            "offsets": (samples, columns),
            "sizes": (samples, columns),
            "key_bytes": (self._key_bytes,),
            "key_starts": (samples + 1,),
        }
        if 8 * samples * (2 * columns + 1) + self._key_bytes > MAPPED_ABOVE:
            try:
                mapped_arrays.write(self._folder, shapes, self._pieces(small))
            except OSError as error:
                warnings.warn(
                    f"the index of {samples} samples cannot be kept in {self._folder} ({error.strerror}): every process holds "
                    "its own in memory. Set DTRAIN_CACHE to a folder with room.",
                    stacklevel=3,
                )
            mapped = self.known()
            if mapped is not None:
                return mapped
        gathered: dict[str, list[np.ndarray]] = {name: [] for name in shapes}
        for piece in self._pieces(small):
            for name, rows in piece.items():
                gathered[name].append(rows)
        return {name: np.concatenate(rows) for name, rows in gathered.items()}, None

    def _add(self, place: int, shard: ShardIndex) -> None:
        self._check_unchanged(place, shard)
        self._counts[place] = shard.num_samples
        self._key_bytes += len(shard.key_bytes)
        times = np.bincount(shard.member_extension, minlength=len(shard.extensions)).tolist()
        self._members.update(dict(zip(shard.extensions, times, strict=True)))
        if shard.doubts:
            self._doubts[place] = f"shard {shown(shard.path)!r}: {' '.join(shard.doubts)}"
        # Those of a small data set stay in memory; those of a large one are read again when they are needed.
        size = len(shard.key_bytes) + 8 * len(shard.key_starts) + 24 * len(shard.member_offset)
        if size <= self._room:
            self._room -= size
            self._at_hand[place] = shard

    def _pieces(self, first: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        yield first
        key_start = 0
        for place in range(len(self._paths)):
            shard = self._at_hand.get(place) or self._index(place)
            self._check_unchanged(place, shard)
            offsets, sizes = shard.columns(self._columns)
            key_starts = shard.key_starts[1:] + key_start
            key_start += len(shard.key_bytes)
            yield {"offsets": offsets, "sizes": sizes, "key_bytes": shard.key_bytes, "key_starts": key_starts}

    def _check_unchanged(self, place: int, shard: ShardIndex) -> None:
        if shard.stamp != self._stamps[place]:
            raise ShardError(
                shard.path, 0, "it changed while the data set was indexed", "Start again when it is written."
            )

    def _index(self, place: int) -> ShardIndex:
        path = self._paths[place]
        # A server is asked once; a file is looked at again, because it may be one that is still being written.
        return load_or_build(path, self._stamps[place] if is_url(path) else None, self._policy)

    def _index_or_error(self, place: int) -> ShardIndex | ShardError:
        try:
            return self._index(place)
        except ShardError as error:
            return error

    def _damage(self) -> ShardError:
        first, *others = (self._damaged[place] for place in sorted(self._damaged))
        more = f" {len(others)} more shards are damaged: {_some([error.path for error in others])}." if others else ""
        return ShardError(first.path, first.offset, first.what, f"{first.remedy}{more}")

    def _extensions_there_are(self) -> str:
        there_are = [f"{extension} ({times})" for extension, times in self._members.most_common()]
        return (
            f"{len(self._paths)} shards such as {shown(self._paths[0])!r} have {_some(there_are)}. Use one of these in "
            "data.fields."
        )


def _some(items: Sequence[str]) -> str:
    return ", ".join(items[:10]) + (f" and {len(items) - 10} more" if items[10:] else "")


def _each(function: Callable[[_Item], _Result], items: Iterable[_Item], workers: int) -> Iterator[_Result]:
    """``map`` with threads, no further ahead than a few items for each."""
    if workers == 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(workers) as pool:
        ahead: deque[Future[_Result]] = deque()
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) == 4 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

"""Builds the columns of a dataset's index in two passes, and stores large ones.

The first pass indexes all shards and counts samples and extensions; the second fills the columns shard by shard, so that they
are never in memory twice, and large ones never in memory at all.
"""

from __future__ import annotations

import errno
import hashlib
import json
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dtrain.data.shards.node_cache import CachePolicy
from dtrain.data.shards.shard_file import Stamp, stamp_of
from dtrain.data.shards.shard_index import ShardIndex, load_or_build
from dtrain.data.shards.tar import ShardError
from dtrain.files import cache_dir, create_folder
from dtrain.urls import absolute, is_url, redacted, without_url_secrets

_VERSION = 3
_OF_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_REMEDIES = (
    "`dtrain pack repair` copies the whole samples of a cut shard; data.bad_shards=skip leaves out damaged shards."
)
#: Columns of more bytes than this are stored in the cache directory and mapped.
MAPPED_ABOVE = 64 << 20
#: So are the columns of more shards than this.
MAPPED_ABOVE_SHARDS = 2_000

#: Arrays by name, and the folder that they are mapped from, None if they are in memory. ``offsets`` and ``sizes``, int64
#: ``[samples, columns]``; ``counts``, ``shard_sizes`` and ``shard_versions``, int64 ``[shards]``; ``shard_digests``, uint64
#: ``[shards]``; ``key_bytes``, uint8 ``[bytes]``, with ``key_starts``, int64 ``[samples + 1]``; ``doubts``, a list of
#: sentences as JSON, uint8 ``[bytes]``.
IndexArrays = tuple[dict[str, np.ndarray], Path | None]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class DamagedShards(ShardError):
    """Damaged shards; the message describes the first.

    Attributes:
        reasons: Path of each to what is wrong with it.
        more: A sentence that names the others; "" if there are none.
    """

    def __init__(self, found: Mapping[str, ShardError | OSError], remedy: str) -> None:
        path, first = next(iter(found.items()))
        others = [redacted(other) for other in found][1:]
        self.more = f"{len(others)} more shards are damaged: {some_of(others)}. " if others else ""
        self.reasons = {path: _reason(error) for path, error in found.items()}
        if isinstance(first, ShardError):
            super().__init__(path, first.offset, first.problem, f"{first.remedy} {self.more}{remedy}")
        else:
            super().__init__(path, 0, _reason(first), f"{self.more}{remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardError, self.args


def _reason(error: ShardError | OSError) -> str:
    if isinstance(error, ShardError):
        return f"byte {error.offset}: {error.problem}"
    return without_url_secrets((error.strerror or str(error)).rstrip("."))


class IndexBuilder:
    """Indexes all shards of a dataset and builds its columns.

    Args:
        paths: The shards.
        extensions: The columns.
        workers: Threads.
        policy: Which shards are read through the node cache.
        lenient: Whether shards that cannot be read count as damaged.
    """

    def __init__(
        self,
        paths: Sequence[str],
        extensions: Sequence[str],
        workers: int,
        policy: CachePolicy,
        *,
        lenient: bool = False,
    ) -> None:
        if not paths or workers < 1:
            raise ValueError(f"index: got {len(paths)} shards and {workers} workers, want at least one of each.")
        self._paths = paths
        self._columns = list(extensions)
        self._workers = workers
        self._policy = policy
        self._lenient = lenient
        self._damaged: dict[int, ShardError | OSError] = {}
        self._stamps: list[Stamp] = []
        for place, stamp in enumerate(_each(self._stamp_or_error, paths, workers)):
            if isinstance(stamp, OSError):
                self._damaged[place], stamp = stamp, Stamp(0, 0)
            self._stamps.append(stamp)
        identity = json.dumps([_VERSION, self._columns, [absolute(path) for path in paths], self._stamps])
        self._folder = cache_dir() / "columns" / hashlib.sha256(identity.encode()).hexdigest()[:32]
        self._counts = np.zeros(len(paths), np.int64)
        self._digests = np.zeros(len(paths), np.uint64)
        self._key_bytes = 0
        self._members: Counter[str] = Counter()
        self._doubts: dict[int, str] = {}
        self._in_memory: dict[int, ShardIndex] = {}
        self._room = MAPPED_ABOVE

    def index_shards(self, first: int) -> None:
        """Indexes all shards, starting at ``first`` and wrapping round.

        Raises:
            DamagedShards: If shards are damaged; names all of them.
            ValueError: If no shard has a sample, or no sample has a column.
        """
        order = [place for place in (*range(first, len(self._paths)), *range(first)) if place not in self._damaged]
        results = _each(self._index_or_error, order, self._workers)
        for place, result in zip(order, results, strict=True):
            error = self._add_or_error(place, result) if isinstance(result, ShardIndex) else result
            if error is not None:
                self._damaged[place] = error
        if self._damaged:
            raise DamagedShards(
                {self._paths[place]: self._damaged[place] for place in sorted(self._damaged)}, _REMEDIES
            )
        if not self._counts.any():
            raise ValueError(
                f"{len(self._paths)} shards such as {redacted(self._paths[0])!r} have no sample. The files of a sample are "
                "named <key>.<extension>, such as 000123.jpg and 000123.cls. Links in a tar hold no data: pack with tar's -h."
            )
        for column in self._columns:
            if not any(extension in self._members for extension in column.split(";")):
                raise ValueError(f"no sample has a member {column!r}. {self._known_extensions()}")

    def stored(self) -> IndexArrays | None:
        """The stored columns of exactly these files; None if there are none."""
        arrays = None if self._damaged else load_memmaps(self._folder)
        return None if arrays is None else (arrays, self._folder)

    def columns(self) -> IndexArrays:
        """The columns of all shards, after ``index_shards``."""
        doubts = np.frombuffer(json.dumps([self._doubts[place] for place in sorted(self._doubts)]).encode(), np.uint8)
        small: dict[str, np.ndarray] = {
            "counts": self._counts,
            "shard_sizes": np.array([stamp.size for stamp in self._stamps], np.int64),
            "shard_versions": np.array([stamp.version for stamp in self._stamps], np.int64),
            "shard_digests": self._digests,
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
        # Of many shards, the stored columns are also loaded in less time than the indexes of all shards.
        if 8 * samples * (2 * columns + 1) + self._key_bytes > MAPPED_ABOVE or len(self._paths) > MAPPED_ABOVE_SHARDS:
            try:
                write_memmaps(self._folder, shapes, self._pieces(small))
            except OSError as error:
                warnings.warn(
                    f"the index of {samples} samples cannot be stored in {self._folder} ({error.strerror}): every process "
                    "holds a copy in memory. Set DTRAIN_CACHE to a folder with enough room.",
                    stacklevel=3,
                )
            mapped = self.stored()
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
        self._digests[place] = shard.digest
        self._key_bytes += len(shard.key_bytes)
        times = np.bincount(shard.member_extension, minlength=len(shard.extensions)).tolist()
        self._members.update(dict(zip(shard.extensions, times, strict=True)))
        if shard.doubts:
            self._doubts[place] = f"shard {redacted(shard.path)!r}: {' '.join(shard.doubts)}"
        # Keeps the indexes of a small dataset in memory; a large dataset's are loaded again in the second pass.
        size = len(shard.key_bytes) + 8 * len(shard.key_starts) + 24 * len(shard.member_offset)
        if size <= self._room:
            self._room -= size
            self._in_memory[place] = shard

    def _pieces(self, first: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        yield first
        key_start = 0
        for place in range(len(self._paths)):
            shard = self._in_memory.get(place) or self._index(place)
            self._check_unchanged(place, shard)
            offsets, sizes = shard.columns(self._columns)
            key_starts = shard.key_starts[1:] + key_start
            key_start += len(shard.key_bytes)
            yield {"offsets": offsets, "sizes": sizes, "key_bytes": shard.key_bytes, "key_starts": key_starts}

    def _check_unchanged(self, place: int, shard: ShardIndex) -> None:
        if shard.stamp != self._stamps[place]:
            raise ShardError(
                shard.path, 0, "it changed while the dataset was indexed", "Start again when it is completely written."
            )

    def _index(self, place: int) -> ShardIndex:
        path = self._paths[place]
        # A file is checked again, because another process may still be writing it; a server would need another request.
        return load_or_build(path, self._stamps[place] if is_url(path) else None, self._policy)

    def _index_or_error(self, place: int) -> ShardIndex | ShardError | OSError:
        try:
            return self._index(place)
        except ShardError as error:
            return error
        except OSError as error:
            return self._unreadable(error)

    def _add_or_error(self, place: int, shard: ShardIndex) -> ShardError | None:
        try:
            self._add(place, shard)
        except ShardError as error:
            return error
        return None

    def _stamp_or_error(self, path: str) -> Stamp | OSError:
        try:
            return stamp_of(path)
        except OSError as error:
            return self._unreadable(error)

    def _unreadable(self, error: OSError) -> OSError:
        """The error of a shard that counts as damaged; raises all others, such as too many open files."""
        if not self._lenient or error.errno in _OF_THE_PROCESS:
            raise error
        return error

    def _known_extensions(self) -> str:
        extensions = [f"{extension} ({times})" for extension, times in self._members.most_common()]
        return (
            f"{len(self._paths)} shards such as {redacted(self._paths[0])!r} have {some_of(extensions)}. Use one of these in "
            "data.fields."
        )


def write_memmaps(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], pieces: Iterable[Mapping[str, np.ndarray]]
) -> None:
    """Writes one ``.npy`` file for each array, piece by piece, so that they need not fit into memory.

    An existing folder is not changed: its name identifies its content.

    Args:
        folder: Where the files are written.
        shapes: Final shape of each array.
        pieces: Rows to append to the arrays. An array gets the dtype of its first piece.

    Raises:
        OSError: On a write failure.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with create_folder(folder) as staged, ExitStack() as stack:
        files = {name: stack.enter_context(open(staged / f"{name}.npy", "wb")) for name in shapes}
        for piece in pieces:
            for name, rows in piece.items():
                if not files[name].tell():
                    header = {"descr": rows.dtype.str, "fortran_order": False, "shape": shapes[name]}
                    np.lib.format.write_array_header_1_0(files[name], header)
                files[name].write(np.ascontiguousarray(rows).data)


def load_memmaps(folder: Path) -> dict[str, np.ndarray] | None:
    """The arrays of a folder by name, memory-mapped and read-only; None if the folder does not exist."""
    if not folder.is_dir():
        return None
    # As plain arrays: slices of np.memmap take several times as long.
    return {file.stem: np.asarray(np.load(file, mmap_mode="r", allow_pickle=False)) for file in folder.glob("*.npy")}


def some_of(items: Sequence[str]) -> str:
    """The first ten, and how many more there are."""
    return ", ".join(items[:10]) + (f" and {len(items) - 10} more" if items[10:] else "")


def _each(function: Callable[[_Item], _Result], items: Iterable[_Item], workers: int) -> Iterator[_Result]:
    """``map`` in threads, at most a few items ahead of the caller."""
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

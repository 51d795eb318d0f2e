"""The index of a dataset: where the fields of every sample are.

* A sample's *number* counts the samples of all shards, in the order in which the shards were named.
* A *column* is one requested field: an extension, or alternatives in order of preference.
* The *fingerprint* is a hash of everything that the meaning of a sample number depends on: the shards' names, sizes and
  sample counts (their own hash is the *shards' fingerprint*), and the keys, extensions and member sizes of the samples. The
  content of members is not read.
* ``index_builder`` builds the columns.

Everything that grows with the number of samples is in arrays. Small arrays are sent to the workers; large ones are
written to the cache directory once and memory-mapped by all processes of a host, however they were started.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dtrain.data.order.growth import ShardList
from dtrain.data.order.index import Index
from dtrain.data.order.randomness import hash64
from dtrain.data.shards.bad_shards import SKIP, BadShards, some_reasons
from dtrain.data.shards.index_builder import (
    DamagedShards,
    IndexArrays,
    IndexBuilder,
    load_memmaps,
    some_of,
    write_memmaps,
)
from dtrain.data.shards.node_cache import CachePolicy
from dtrain.data.shards.patterns import names
from dtrain.data.shards.shard_file import Stamp
from dtrain.data.shards.shard_index import decode_name, load_or_build
from dtrain.data.shards.tar import ShardError

_THREADS = 16  # for slow storage; on fast disks they do not help, because parsing headers holds the GIL


class DatasetIndex(Index):
    """Where the fields of every sample are; made by ``build``.

    Attributes:
        shards: Paths; of a shard that was removed its name.
        names: Names of the shards, the first part of a sample's key.
        counts: Samples of each shard, int64, shape ``[shards]``.
        starts: First sample of each shard, and the end, int64, shape ``[shards + 1]``.
        num_samples: Samples of all shards.
        offsets: First byte of each field in its shard, int64, shape ``[samples, columns]``; -1 where a sample lacks it.
        sizes: Bytes of each field, int64, shape ``[samples, columns]``; -1 where a sample lacks it.
        policy: Which shards are read through the node cache.
        far: Whether there are any such shards.
        shards_fingerprint: Hash of the shards' names, sizes and sample counts, in their order; 16 hexadecimal digits.
        fingerprint: Hash of the same and of the shards' digests (``ShardIndex.digest``); 16 hexadecimal digits.
        left_out: Name to reason of the damaged shards that are no part of it; {} in workers.
    """

    labels: ClassVar = {"num_shards": "shards", "num_samples": "samples", "bytes": "bytes"}
    other_difference = (
        "as many shards, samples and bytes, but different shard names or order, or samples in different shards."
    )

    def __init__(
        self,
        shards: Sequence[str],
        arrays: Mapping[str, np.ndarray],
        folder: Path | None = None,
        policy: CachePolicy | None = None,
        known: ShardList | None = None,
        removed: Sequence[int] = (),
    ) -> None:
        self.shards = list(shards)
        self.names = names(self.shards) if known is None else list(known.names)
        self.removed = tuple(removed)
        self.counts = arrays["counts"]
        self.starts = np.concatenate(([0], np.cumsum(self.counts)))
        self.num_samples = int(self.starts[-1])
        self.offsets = arrays["offsets"]
        self.sizes = arrays["sizes"]
        self.policy = policy or CachePolicy()
        # One shard of each folder is enough: the policy depends on the folder only.
        gone = set(self.removed)
        folders = {os.path.dirname(path): path for at, path in enumerate(self.shards) if at not in gone}
        self.far = any(map(self.policy.applies_to, folders.values()))
        self.left_out: Mapping[str, str] = {}
        self._arrays = arrays
        self._folder = folder
        self._known = known
        self._keys = arrays["key_bytes"].data
        self._by_key: tuple[tuple[int, int], dict[bytes, list[int]]] = (-1, -1), {}
        digest = hashlib.sha256()
        for name, size, count in zip(self.names, arrays["shard_sizes"].tolist(), self.counts.tolist(), strict=True):
            digest.update(json.dumps([name, size, count]).encode())
        self.shards_fingerprint = digest.hexdigest()[:16]
        digest.update(arrays["shard_digests"].astype("<u8").data)
        self.fingerprint = digest.hexdigest()[:16]

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = None if self._folder else dict(self._arrays)
        return _restore, (self.shards, arrays, self._folder, self.policy, self._known, self.removed)

    @classmethod
    def build(
        cls,
        paths: Sequence[str],
        extensions: Sequence[str],
        *,
        workers: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        policy: CachePolicy | None = None,
        bad_shards: BadShards | None = None,
    ) -> DatasetIndex:
        """Indexes shards, or loads their stored indexes.

        Warns of the shards that are left out, on rank 0.

        Args:
            paths: The shards, each once.
            extensions: One column each: ``jpg`` is the member of exactly that extension, ``jpg;jpeg;png`` the first one of
                these.
            workers: Threads, which read several shards of a slow disk at once. None: 16, or 1 for a few shards.
            rank: Ranks start at different shards and load indexes that other ranks have stored; each gets the whole index.
            world_size: Number of ranks.
            policy: Which shards are read through the node cache. None: the default ``CachePolicy``.
            bad_shards: What happens to damaged shards. None: they are refused.

        Raises:
            ShardError: If shards are damaged; reports all of them.
            ValueError: If there is no sample, or no sample that has a requested field, or too many shards are damaged.
            OSError: If a shard cannot be read.
        """
        paths, bad_shards, policy = list(paths), bad_shards or BadShards(), policy or CachePolicy()
        if workers is None:
            workers = _THREADS if len(paths) >= _THREADS else 1

        def arrays_of(kept: Sequence[str]) -> IndexArrays:
            builder = IndexBuilder(kept, extensions, workers, policy, lenient=bad_shards.action == SKIP)
            if (stored := builder.stored()) is not None:
                return stored
            builder.index_shards(rank * len(kept) // world_size)
            return builder.columns()

        kept, (arrays, folder), names_of, left_out = _without_damaged(paths, bad_shards, arrays_of)
        if left_out and rank == 0:
            _warn_of(left_out, names_of, len(paths), bad_shards, policy)
        doubts = json.loads(arrays["doubts"].tobytes())
        if doubts:
            more = f" ({len(doubts) - 1} more shards have such names)" if doubts[1:] else ""
            warnings.warn(f"{doubts[0]}{more}", stacklevel=2)
        index = cls(kept, arrays, folder, policy)
        index.left_out = left_out
        return index

    @functools.cached_property
    def shard_list(self) -> ShardList:  # type: ignore[override]
        """The shards with what identifies each."""
        if self._known is not None:
            return self._known
        arrays = self._arrays
        checks = hash64(arrays["shard_sizes"], self.counts, arrays["shard_digests"]) >> np.uint64(32)
        return ShardList(tuple(self.names), self.counts, checks.astype(np.uint32))

    def head(self, shards: int) -> DatasetIndex:
        """The index of the first shards alone."""
        samples, arrays = int(self.starts[shards]), dict(self._arrays)
        ends = {"offsets": samples, "sizes": samples, "key_starts": samples + 1}
        for name in ("offsets", "sizes", "key_starts", "counts", "shard_sizes", "shard_versions", "shard_digests"):
            arrays[name] = arrays[name][: ends.get(name, shards)]
        first = self.shard_list.take(np.arange(shards)) if self.removed else None
        removed = [shard for shard in self.removed if shard < shards]
        return DatasetIndex(self.shards[:shards], arrays, None, self.policy, first, removed)

    def with_removed(self, known: ShardList, numbers: np.ndarray) -> DatasetIndex:
        """This index with shards that were removed in between: their samples keep their numbers, and cannot be read.

        Args:
            known: The list of all shards.
            numbers: For each of them the index of the shard here, ascending, or -1; int64, shape ``[shards]``.
        """
        removed = np.flatnonzero(numbers < 0).tolist()
        paths = [known.names[at] if number < 0 else self.shards[number] for at, number in enumerate(numbers.tolist())]
        here = np.flatnonzero(numbers >= 0)
        arrays = {name: self._arrays[name] for name in ("key_bytes", "doubts")}
        for name in ("shard_sizes", "shard_versions", "shard_digests"):
            arrays[name] = np.zeros(len(numbers), self._arrays[name].dtype)
            arrays[name][here] = self._arrays[name]
        arrays["counts"] = known.counts
        rows = np.repeat(numbers >= 0, known.counts)
        for name in ("offsets", "sizes"):
            arrays[name] = np.full((len(rows), self._arrays[name].shape[1]), -1, np.int64)
            arrays[name][rows] = self._arrays[name]
        # The key of a sample that was removed is empty: it begins and ends where the next one begins.
        lengths = np.zeros(len(rows), np.int64)
        lengths[rows] = np.diff(self._arrays["key_starts"])
        arrays["key_starts"] = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        folder = None
        if self._folder is not None:  # large: mapped by all processes, as before
            identity = hashlib.sha256(json.dumps([self._folder.name, numbers.tolist(), known.state_dict()]).encode())
            folder = self._folder.with_name(identity.hexdigest()[:32])
            with suppress(OSError):  # such as a full disk: every process holds a copy in memory
                write_memmaps(folder, {name: array.shape for name, array in arrays.items()}, [arrays])
            mapped = load_memmaps(folder)
            arrays, folder = (arrays, None) if mapped is None else (mapped, folder)
        return DatasetIndex(paths, arrays, folder, self.policy, known, removed)

    def stamp(self, shard: int) -> Stamp:
        """A shard's stamp when it was indexed."""
        return Stamp(int(self._arrays["shard_sizes"][shard]), int(self._arrays["shard_versions"][shard]))

    def shards_of(self, samples: np.ndarray | int) -> np.ndarray:
        """The shard of each of these samples, as an index into ``shards``: int64, shape ``[n]``."""
        return np.searchsorted(self.starts, samples, side="right") - 1

    def keys(self, samples: Iterable[int] | np.ndarray) -> list[str]:
        """``<shard>/<key>`` of each of these samples."""
        numbers = np.asarray(samples, dtype=np.int64)
        shards = self.shards_of(numbers)
        starts = self._arrays["key_starts"]
        spans = zip(shards.tolist(), starts[numbers].tolist(), starts[numbers + 1].tolist(), strict=True)
        names, raw = self.names, self._keys
        return [f"{names[shard]}/{decode_name(raw[start:end])}" for shard, start, end in spans]

    def find(self, key: str) -> np.ndarray:
        """The sample of ``<shard>/<key>``; without the name of a shard, the samples of all shards that have this key."""
        parts = key.split("/")
        for end in range(1, len(parts)):  # both names may have slashes
            samples = self.find_shard("/".join(parts[:end]))
            if samples.size:
                return self._with_key(int(samples[0]), len(samples), "/".join(parts[end:]))
        return self._with_key(0, self.num_samples, key)

    def find_shard(self, name: str) -> np.ndarray:
        """The samples of the shard with this name or path."""
        if (number := self._numbers.get(name)) is None:
            return np.zeros(0, np.int64)
        return np.arange(self.starts[number], self.starts[number + 1])

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        """Path and name of each shard to its number."""
        return {name: number for names in (self.shards, self.names) for number, name in enumerate(names)}

    def _with_key(self, first: int, number: int, key: str) -> np.ndarray:
        """Those of ``number`` samples from ``first`` on whose own key this is."""
        if self._by_key[0] != (first, number):  # made once for many keys of one shard, or of all
            starts = self._arrays["key_starts"][first : first + number + 1].tolist()
            raw, by_key = self._keys, defaultdict[bytes, list[int]](list)
            for sample, (start, end) in enumerate(itertools.pairwise(starts), first):
                by_key[bytes(raw[start:end])].append(sample)
            self._by_key = (first, number), by_key
        return np.array(self._by_key[1].get(key.encode("utf-8", "surrogateescape"), []), np.int64)

    def describe(self) -> dict[str, Any]:
        """The identity of the dataset for a checkpoint: a few numbers and the fingerprints."""
        return {
            "num_shards": len(self.shards),
            "num_samples": self.num_samples,
            "bytes": int(self._arrays["shard_sizes"].sum()),
            "shards_fingerprint": self.shards_fingerprint,
            "fingerprint": self.fingerprint,
        }

    def difference(self, other: Mapping[str, Any]) -> str:
        """As ``Index.difference``; says so if only the samples in the shards differ."""
        if other.get("shards_fingerprint") == self.shards_fingerprint and other["fingerprint"] != self.fingerprint:
            return (
                "shards of the same names, sizes and sample counts, but other keys or member sizes in them: they were packed "
                "again, with different samples or in a different order."
            )
        return super().difference(other)


def _without_damaged(
    paths: Sequence[str], bad_shards: BadShards, arrays_of: Callable[[Sequence[str]], IndexArrays]
) -> tuple[list[str], IndexArrays, dict[str, str], dict[str, str]]:
    """The shards that are used and their arrays; of the others, path to name, and name to reason."""
    names_of = bad_shards.named_in(paths)
    left_out = {name: bad_shards.left_out[""][name] for name in names_of.values()}
    while True:
        kept = list(paths)
        if left_out:
            bad_shards.check(left_out, len(paths))
            kept = [path for path in paths if path not in names_of]
        try:
            return kept, arrays_of(kept), names_of, left_out
        except DamagedShards as error:
            if bad_shards.decided:
                remedy = (
                    "data.bad_shards=skip leaves out only shards that were damaged when the run began, also with data.grow. "
                    "Restore it, take it out of data.train, or start a new run."
                    if bad_shards.grows
                    else "Earlier starts of the run used it, so it cannot be left out now. Restore it, or start a new run."
                )
                raise ShardError(error.path, error.offset, error.problem, f"{error.more}{remedy}") from None
            if not bad_shards.skips:
                raise
            # Once more without them. The indexes of the others are stored, so this takes little time.
            known = dict(zip(paths, names(paths), strict=True))
            names_of |= {path: known[path] for path in error.reasons}
            left_out |= {known[path]: why for path, why in error.reasons.items()}


def _warn_of(
    left_out: Mapping[str, str], names_of: Mapping[str, str], shards: int, bad_shards: BadShards, policy: CachePolicy
) -> None:
    """Warns of the shards that are left out, also of those that could be read by now."""
    text = f"{len(left_out)} of {shards} shards left out, because they are damaged: {some_reasons(left_out)}."
    if bad_shards.decided:
        intact = []
        for path, name in names_of.items():
            with suppress(ShardError, OSError):
                load_or_build(path, policy=policy)
                intact.append(name)
        text = f"damaged shards are left out, as by the earlier starts of the run: {some_reasons(left_out)}."
        if intact:
            text += (
                f" Intact by now: {some_of(intact)}. Only a new run uses them: they change the order of all samples."
            )
    warnings.warn(text, stacklevel=3)


def _restore(
    shards: Sequence[str],
    arrays: Mapping[str, np.ndarray] | None,
    folder: Path | None,
    policy: CachePolicy,
    known: ShardList | None,
    removed: Sequence[int],
) -> DatasetIndex:
    if folder is not None:
        arrays = load_memmaps(folder)
    if arrays is None:
        raise FileNotFoundError(
            f"the index of the dataset was removed from {folder} while the run needs it. Start the run again."
        )
    return DatasetIndex(shards, arrays, folder, policy, known, removed)

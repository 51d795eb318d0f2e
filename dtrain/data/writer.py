"""Shards, written: all of a set or none, the same bytes on every run.

* A *set* is the shards of one prefix in one folder, ``train-000000.tar`` and on.
* It is written into a hidden folder beside them and moved out at the end, so that an exception leaves nothing that a
  pattern would match. A process that is killed leaves that hidden folder, which can be deleted.
* Writing is webdataset's ``TarWriter``, with fixed owner and time, and the encoders of ``encode``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import webdataset

from dtrain.data.encode import check_key, encode
from dtrain.data.index_store import load_or_build

Sample = Mapping[str, Any]


def write_shards(
    samples: Iterable[Sample],
    directory: str | os.PathLike[str],
    *,
    prefix: str = "train",
    shards: int | None = None,
    per_shard: int | None = None,
    total: int | None = None,
) -> list[Path]:
    """Writes samples as balanced shards: their sizes differ by one sample at most.

    Args:
        samples: Dicts with ``__key__`` and, by extension, bytes or one of: ``cls`` an int, ``txt`` a str, ``json`` what
            JSON knows, ``npy`` an array of numbers, ``png`` uint8 pixels ``[height, width]`` or ``[height, width, 3]``.
            Other entries that start with an underscore are left out.
        directory: Folder of the set; made if missing.
        prefix: First part of the shards' names.
        shards: How many shards.
        per_shard: Samples in a shard at most; give this or ``shards``.
        total: Number of samples; needed for ``shards`` if ``samples`` has no length. Without it, ``per_shard`` fills
            one shard after the other and leaves the last one short.

    Returns:
        The shards, in order.

    Raises:
        ValueError: If sizes do not fit, or a sample cannot be stored; names its key.
        FileExistsError: If the folder has shards of that prefix.
    """
    if total is None and isinstance(samples, Sized):
        total = len(samples)
    if total is None and shards is not None:
        raise ValueError("shards= needs the number of samples: pass total= as well, or per_shard= instead.")
    sizes = balanced_sizes(total or 0, shards=shards, per_shard=per_shard)
    with shard_set(directory, prefix) as writer:
        if total is None and per_shard is not None:
            _fill(writer, iter(samples), per_shard)
        else:
            _fill_planned(writer, iter(samples), sizes)
    return writer.paths


def balanced_sizes(total: int, *, shards: int | None = None, per_shard: int | None = None) -> list[int]:
    """How many samples go into each shard; they differ by one at most.

    Raises:
        ValueError: If not exactly one of ``shards`` and ``per_shard`` is given, or there are too few samples for it.
    """
    if (shards is None) == (per_shard is None) or (shards or per_shard or 0) < 1:
        raise ValueError(f"got shards={shards} and per_shard={per_shard}, want one of them, at least 1.")
    if per_shard is not None:
        shards = max(-(-total // per_shard), 1)
    number_of = shards or 1
    if number_of > max(total, 1):
        raise ValueError(f"{total} samples do not fill {number_of} shards. Ask for {max(total, 1)} or fewer.")
    return [total * (number + 1) // number_of - total * number // number_of for number in range(number_of)]


class ShardSet:
    """The shards of one prefix while they are written; made by ``shard_set``.

    Attributes:
        paths: Where the shards will be once they are published, in order of writing.
    """

    def __init__(self, directory: Path, prefix: str, staging: Path) -> None:
        self.paths: list[Path] = []
        self._directory = directory
        self._prefix = prefix
        self._staging = staging

    def write(self, number: int, samples: Iterable[Sample]) -> int:
        """Writes one shard.

        Args:
            number: Of the shard, from 0.
            samples: As ``write_shards`` takes them.

        Returns:
            How many samples there were.

        Raises:
            ValueError: If a sample cannot be stored; names its key.
        """
        name = shard_name(self._prefix, number)
        written = write_shard(self._staging / name, samples)
        self.paths.append(self._directory / name)
        return written


def shard_name(prefix: str, number: int) -> str:
    """``train-000000.tar``."""
    return f"{prefix}-{number:06d}.tar"


def write_shard(path: Path, samples: Iterable[Sample]) -> int:
    """Writes one shard: aside, synced, then renamed, so that ``path`` is whole or absent.

    Args:
        path: Where to; its folder exists. What is there is replaced.
        samples: As ``write_shards`` takes them.

    Returns:
        How many samples there were.

    Raises:
        ValueError: If a sample cannot be stored; names its key.
        OSError: If the disk refuses.
    """
    keys: set[str] = set()
    aside = path.with_name(f".{path.name}.aside")
    try:
        with open(aside, "wb") as file:
            # mtime=0: the bytes must not depend on when they were written.
            with webdataset.TarWriter(file, mtime=0, encoder=encode) as tar:
                for sample in samples:
                    check_key(sample.get("__key__"), keys)
                    tar.write(dict(sample))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return len(keys)


@contextmanager
def shard_set(directory: str | os.PathLike[str], prefix: str) -> Iterator[ShardSet]:
    """Shards that are published together, then indexed, when the ``with`` block ends well; thrown away when it does not.

    Args:
        directory: Folder of the set; made if missing.
        prefix: First part of the shards' names.

    Raises:
        ValueError: If ``prefix`` is no part of a file name.
        FileExistsError: If the folder has shards of that prefix, at the start or at the end.
    """
    check_prefix(prefix)
    folder = Path(directory)
    refuse_mixing(folder, prefix)
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{prefix}-", suffix=".partial", dir=folder))
    try:
        writer = ShardSet(folder, prefix, staging)
        yield writer
        refuse_mixing(folder, prefix)
        for path in writer.paths:
            os.replace(staging / path.name, path)
        sync_folder(folder)
        for path in writer.paths:
            load_or_build(str(path))
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Makes sure that names in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_prefix(prefix: str) -> None:
    """Refuses what is no part of a file name.

    Raises:
        ValueError: If it is none.
    """
    if not prefix or prefix.startswith(".") or set(prefix) & set("/\\\0*?[]{}"):
        raise ValueError(f"prefix {prefix!r}: want a plain name such as train.")


def refuse_mixing(folder: Path, prefix: str) -> None:
    """Refuses a folder that has shards of that name.

    Raises:
        FileExistsError: If it has.
    """
    # A smaller new set would leave the last shards of an older one in place, and patterns would match both.
    old = sorted(folder.glob(f"{prefix}-*.tar"))
    if old:
        raise FileExistsError(
            f"{folder} has {len(old)} shards of that name already, such as {old[0].name}. Delete them or choose "
            "another folder."
        )


def _fill(writer: ShardSet, samples: Iterator[Sample], per_shard: int) -> None:
    for number in count():
        first = list(islice(samples, 1))
        if number and not first:
            return
        writer.write(number, chain(first, islice(samples, per_shard - 1)))


def _fill_planned(writer: ShardSet, samples: Iterator[Sample], sizes: Sequence[int]) -> None:
    for number, size in enumerate(sizes):
        written = writer.write(number, islice(samples, size))
        if written != size:
            raise ValueError(
                f"shard {number} got {written} of {size} samples: there are fewer than total={sum(sizes)}."
            )
    if next(samples, None) is not None:
        raise ValueError(f"there are more samples than total={sum(sizes)}.")

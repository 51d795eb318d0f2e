"""Copies of shards on a disk of the node, shared by all its processes.

* A copy's *name* is a hash of the shard's whole path or URL and of its stamp, so that another version is another copy.
* It is *fetched* into a ``.part`` file, checked, synced and renamed. Who fetches it holds a lock on that file: others
  wait or do something else. The system takes the lock from a process that dies, and the next one goes on where it stopped.
* When room is needed, the copies that were *used* longest ago go. A copy that somebody has open stays readable to him.
  The time of use is the file's modification time, because many file systems do not keep the time of access.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import hashlib
import json
import mmap
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from dtrain.config.errors import Explained
from dtrain.data.remote import NoRanges
from dtrain.data.shard_file import (
    RemoteShard,
    ShardChanged,
    ShardFile,
    Stamp,
    changed,
    check_unchanged,
    open_shard,
    stamp_of,
)
from dtrain.data.urls import absolute, shown

# Network file systems and object stores are as fast as they get from a few MiB on.
_PIECE = 8 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# A user may point the cache at a folder that has tars of his own.
_is_ours = re.compile(r"[0-9a-f]{32}\.(tar|part)").fullmatch


class CacheFull(Explained, RuntimeError):
    """The cache has no room for a copy, or cannot be used at all."""


class Copy:
    """A copy of a shard, mapped. The cache never changes one, so that mapping it is safe."""

    def __init__(self, descriptor: int, stamp: Stamp) -> None:
        self._stamp = stamp
        self._bytes = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))

    def stamp(self) -> Stamp:
        """That of the shard."""
        return self._stamp

    def read(self, offset: int, size: int) -> memoryview:
        """``size`` bytes from ``offset`` on; fewer only where the shard ends."""
        return self._bytes[offset : offset + size]

    def close(self) -> None:
        """Ends its use; what was read stays readable."""
        self._bytes = memoryview(b"")


class NodeCache:
    """The copies in one folder.

    Args:
        folder: Where they are; made when the first one is fetched.
        max_bytes: Room for them. None: half of what the disk has free, counting them as free.
    """

    def __init__(self, folder: Path, max_bytes: int | None) -> None:
        self.folder = folder
        self._max_bytes = max_bytes

    @property
    def max_bytes(self) -> int:
        """Room for all copies.

        Raises:
            CacheFull: If it is half of the disk, and the folder cannot be made.
        """
        if self._max_bytes is None:
            self._make_folder()
            self._max_bytes = (shutil.disk_usage(self.folder).free + sum(size for _, size, _ in self._files())) // 2
        return self._max_bytes

    def use(self, path: str, stamp: Stamp) -> Copy | None:
        """The copy of a shard, marked as used just now; None if there is none.

        Raises:
            CacheFull: If the folder, or the copy of another user, cannot be read.
        """
        try:
            descriptor = os.open(self._place(path, stamp), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unusable(error) from error
        try:
            _mark_used(descriptor)
            return Copy(descriptor, stamp)
        finally:
            os.close(descriptor)

    def keep(self, path: str, stamp: Stamp) -> bool:
        """Marks the copy of a shard as used just now; False if there is none."""
        try:
            _mark_used(self._place(path, stamp))
        except FileNotFoundError:
            return False
        return True

    def fetch(self, path: str, stamp: Stamp, *, wait: bool = True) -> bool:
        """Makes the copy of a shard, unless it is there.

        Args:
            path: The shard, a path or a URL.
            stamp: What it was when it was indexed.
            wait: While another process fetches it.

        Returns:
            True if the copy is there now; False if another process is fetching it.

        Raises:
            CacheFull: If there is no room for it, even without the other copies, or the cache cannot be written.
            ShardChanged: If the shard is not what was indexed.
            OSError: If it cannot be read.
        """
        place = self._place(path, stamp)
        part = place.with_suffix(".part")
        self._make_folder()
        while not place.exists():
            with self._opened(part) as file, _locked(file, wait) as locked:
                if not locked:
                    return False
                # Published, or given up, by whom we waited for.
                if not _is_at(file, part):
                    continue
                if place.exists():  # published since we looked: this is a new file
                    part.unlink()
                    break
                try:
                    self._fill(file, path, stamp)
                except (CacheFull, ShardChanged):
                    part.unlink()
                    raise
                os.replace(part, place)
        return True

    def fetched(self, path: str, stamp: Stamp) -> Path:
        """``fetch``, and where the copy is. Others may remove it; who opens it at once has it."""
        self.fetch(path, stamp)
        return self._place(path, stamp)

    def _fill(self, file: BinaryIO, path: str, stamp: Stamp) -> None:
        source = open_shard(path)
        try:
            check_unchanged(path, stamp, source)
            # Without a version, what an earlier attempt left may be of another file.
            start = min(os.fstat(file.fileno()).st_size, stamp.size) if stamp.version else 0
            self._make_room(path, stamp.size - start)
            try:
                _copy(source, file, start, stamp.size)
                os.fsync(file.fileno())
            except OSError as error:
                if error.errno in _FULL:
                    raise self._full(path, stamp.size) from error
                raise
            if stamp_of(path) != stamp:
                raise changed(path, "has been written again")
            _check_content(path, file, stamp, getattr(source, "md5", None))
        finally:
            source.close()

    def _make_room(self, path: str, size: int) -> None:
        if size > self.max_bytes:
            raise self._full(path, size)
        files = sorted(self._files())
        total = sum(used for _, used, _ in files)
        free = shutil.disk_usage(self.folder).free
        for _, used, file in files:
            if total + size <= self.max_bytes and size <= free:
                return
            if _removed(file):
                total -= used
                free += used
        if size > free:
            raise self._full(path, size)

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error

    def _opened(self, part: Path) -> BinaryIO:
        try:
            return open(part, "r+b", buffering=0, opener=_open_or_create)
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> CacheFull:
        return CacheFull(
            f"the cache {str(self.folder)!r} cannot be used: {error}. Set data.cache.dir to a folder of your own on a disk of "
            "this node."
        )

    def _full(self, path: str, size: int) -> CacheFull:
        free = shutil.disk_usage(self.folder).free
        return CacheFull(
            f"the cache {str(self.folder)!r} has no room for {shown(path)!r}, {size / 1e9:.3f} GB: its disk has "
            f"{free / 1e9:.3f} GB free, and data.cache.max_gb is {self.max_bytes / 1e9:g}. Set data.cache.dir to a disk with "
            "room, or raise data.cache.max_gb."
        )

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Time of last use, bytes, and place of each file of the cache."""
        for file in self.folder.iterdir():
            if _is_ours(file.name):
                with suppress(FileNotFoundError):  # another process may make room too
                    status = file.stat()
                    yield status.st_mtime_ns, status.st_size, file

    def _place(self, path: str, stamp: Stamp) -> Path:
        name = hashlib.sha256(os.fsencode(json.dumps([absolute(path), *stamp]))).hexdigest()[:32]
        return self.folder / f"{name}.tar"


def _copy(source: ShardFile, file: BinaryIO, start: int, size: int) -> None:
    try:
        _write(file, start, (source.read(at, min(_PIECE, size - at)) for at in range(start, size, _PIECE)))
    except NoRanges:
        assert isinstance(source, RemoteShard)
        source.read_whole(lambda pieces: _write(file, 0, pieces))


def _write(file: BinaryIO, start: int, pieces: Iterable[bytes | memoryview]) -> None:
    file.truncate(start)
    file.seek(start)
    for piece in pieces:
        rest = memoryview(piece)
        while rest:  # a disk that fills up takes less than it was given, before it says so
            rest = rest[file.write(rest) :]


def _check_content(path: str, file: BinaryIO, stamp: Stamp, md5: str | None) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != stamp.size:
        raise changed(path, f"came with {size} bytes, its index says {stamp.size}")
    if md5 is not None:
        digest = hashlib.md5(usedforsecurity=False)
        file.seek(0)
        while piece := file.read(_PIECE):
            digest.update(piece)
        if base64.b64encode(digest.digest()).decode() != md5:
            raise changed(path, f"came with bytes that do not have the MD5 {md5}, which its server tells")


def _open_or_create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o666)


@contextmanager
def _locked(file: BinaryIO, wait: bool) -> Iterator[bool]:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        yield False
        return
    try:
        yield True
    finally:
        # Not left to closing: a process forked meanwhile has the same lock.
        fcntl.flock(file, fcntl.LOCK_UN)


def _is_at(file: BinaryIO, place: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), place.stat())
    return False


def _removed(place: Path) -> bool:
    """Removes a file, unless it is being fetched or somebody else's."""
    with suppress(FileNotFoundError, PermissionError):
        if place.suffix == ".tar":
            place.unlink()
            return True
        with open(place, "r+b", buffering=0) as file, _locked(file, wait=False) as free:
            if free:
                place.unlink()
            return free
    return not place.exists()


def _mark_used(file: int | Path) -> None:
    # Another user's copy cannot be marked, and is as good.
    with suppress(PermissionError):
        os.utime(file)

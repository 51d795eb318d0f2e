"""Copies of shards on a local disk, shared by all processes of the node.

* ``CachePolicy`` decides which shards are read through the cache: URLs, and files on network file systems.
* The *name* of a copy is a hash of the shard's absolute path or URL and of its stamp, so that another version is
  another copy.
* A copy is *fetched* into a ``.part`` file, checked, synced and renamed. The fetching process holds a lock on that
  file; others wait or read in place. If it dies, the operating system releases the lock and the next process continues
  the file.
* To make room, the least recently used copies are removed; a process that has one open can still read it. The time of
  use is the file's modification time, because many file systems do not record the access time.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import functools
import hashlib
import json
import mmap
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from dtrain.config.cache_dir import cache_dir
from dtrain.config.errors import Explained
from dtrain.data.shard_file import (
    NoRanges,
    RemoteFile,
    ShardChanged,
    ShardFile,
    Stamp,
    absolute,
    check_unchanged,
    is_url,
    open_shard,
    redacted,
    shard_changed,
    stamp_of,
)

# Larger reads are no faster on network file systems and object stores.
_PIECE = 8 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Only files with such names are removed: the folder may contain other tars.
_is_ours = re.compile(r"[0-9a-f]{32}\.(tar|part)").fullmatch
STORAGE = ("auto", "fast", "slow")
# fmt: off
_NETWORK = frozenset((
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "glusterfs", "gpfs", "ibrix", "lustre", "ncpfs", "nfs", "nfs4",
    "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs",
))
# fmt: on
_MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class CachePolicy:
    """Which shards are read through the cache: every URL, and files on slow storage.

    Args:
        storage: For paths: ``"fast"`` never uses the cache, ``"slow"`` always does, ``"auto"`` does for files on a
            network file system if the cache itself is not on one.
        folder: Folder of the cache. None: ``shards`` in dtrain's cache directory.
        max_gb: Size limit in units of 1e9 bytes. None: half of the free space of its disk.
        sharers: Processes of this node that prefetch into it at the same time.

    Raises:
        ValueError: If ``storage`` or ``max_gb`` is invalid.
    """

    storage: str = "auto"
    folder: str | None = None
    max_gb: float | None = None
    sharers: int = 1

    def __post_init__(self) -> None:
        if self.storage not in STORAGE:
            raise ValueError(f"data.storage: got {self.storage!r}, want one of {', '.join(STORAGE)}.")
        if self.max_gb is not None and not self.max_gb > 0:
            raise ValueError(
                f"data.cache.max_gb: got {self.max_gb}, want a number above 0, or null for half of the disk."
            )

    @classmethod
    def of(cls, storage: str, folder: str | None, max_gb: float | None) -> CachePolicy:
        """The policy with all of this node's processes, as started by ``torchrun``, as sharers."""
        return cls(storage, folder, max_gb, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    @cached_property
    def cache(self) -> NodeCache:
        """The cache; nothing is created before a shard is fetched."""
        folder = Path(self.folder).expanduser() if self.folder else cache_dir() / "shards"
        return NodeCache(folder, None if self.max_gb is None else int(self.max_gb * 1e9))

    def applies_to(self, path: str) -> bool:
        """True if a shard is read through the cache; the same for all shards of a folder."""
        if is_url(path):
            return True
        if self.storage != "auto":
            return self.storage == "slow"
        folder = self.cache.folder
        existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        return is_network(os.path.dirname(os.path.abspath(path))) and not is_network(existing)


class NodeCache:
    """The copies in one folder, which is created when the first shard is fetched.

    Without a size limit ``max_bytes`` for all copies, it is half of the disk's free space, where copies count as free.
    """

    def __init__(self, folder: Path, max_bytes: int | None) -> None:
        self.folder = folder
        self._max_bytes = max_bytes

    @property
    def max_bytes(self) -> int:
        """Size limit of all copies."""
        if self._max_bytes is None:
            self._make_folder()
            self._max_bytes = (shutil.disk_usage(self.folder).free + sum(size for _, size, _ in self._files())) // 2
        return self._max_bytes

    def use(self, path: str, stamp: Stamp) -> CachedShard | None:
        """Opens the copy of a shard and marks it as used; None if there is none.

        Raises:
            CacheFull: If the folder, or a copy of another user, cannot be read.
        """
        try:
            descriptor = os.open(self._place(path, stamp), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unusable(error) from error
        try:
            _mark_used(descriptor)
            return CachedShard(descriptor, stamp)
        finally:
            os.close(descriptor)

    def touch(self, path: str, stamp: Stamp) -> bool:
        """Marks the copy of a shard as used; False if there is none."""
        try:
            _mark_used(self._place(path, stamp))
        except FileNotFoundError:
            return False
        return True

    def fetch(self, path: str, stamp: Stamp, *, wait: bool = True) -> bool:
        """Copies a shard into the cache, unless its copy exists.

        Args:
            path: The shard, a path or a URL.
            stamp: Its stamp when it was indexed.
            wait: Wait while another process fetches it.

        Returns:
            True if the copy exists now; False if another process is fetching it.

        Raises:
            CacheFull: If there is no room for it even without the other copies, or the cache cannot be written.
            ShardChanged: If the shard changed after it was indexed.
            OSError: If it cannot be read.
        """
        place = self._place(path, stamp)
        part = place.with_suffix(".part")
        self._make_folder()
        while not place.exists():
            with self._opened(part) as file, _locked(file, wait) as locked:
                if not locked:
                    return False
                # While this process waited for the lock, another one may have renamed or removed the file.
                if not _is_at(file, part):
                    continue
                if place.exists():  # published between the two checks, so this .part file is a new one
                    part.unlink()
                    break
                try:
                    self._fill(file, path, stamp)
                except (CacheFull, ShardChanged):
                    part.unlink()
                    raise
                os.replace(part, place)
        return True

    def fetch_path(self, path: str, stamp: Stamp) -> Path:
        """Fetches a shard and returns the path of its copy. Open it at once: another process may remove it."""
        self.fetch(path, stamp)
        return self._place(path, stamp)

    def _fill(self, file: BinaryIO, path: str, stamp: Stamp) -> None:
        source = open_shard(path)
        try:
            check_unchanged(path, stamp, source)
            # Without a version, the part from an earlier attempt may be of another file with the same path and size.
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
                raise shard_changed(path, "was replaced")
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
            f"the cache {str(self.folder)!r} cannot be used: {error}. Set data.cache.dir to a folder that you can write, on a "
            "local disk."
        )

    def _full(self, path: str, size: int) -> CacheFull:
        free = shutil.disk_usage(self.folder).free
        return CacheFull(
            f"the cache {str(self.folder)!r} has no room for {redacted(path)!r}, {size / 1e9:.3f} GB: its disk has "
            f"{free / 1e9:.3f} GB free, and data.cache.max_gb is {self.max_bytes / 1e9:g}. Set data.cache.dir to a disk with "
            "room, or raise data.cache.max_gb."
        )

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Time of last use, bytes, and path of each file of the cache."""
        for file in self.folder.iterdir():
            if _is_ours(file.name):
                with suppress(FileNotFoundError):  # another process may remove files at the same time
                    status = file.stat()
                    yield status.st_mtime_ns, status.st_size, file

    def _place(self, path: str, stamp: Stamp) -> Path:
        name = hashlib.sha256(os.fsencode(json.dumps([absolute(path), *stamp]))).hexdigest()[:32]
        return self.folder / f"{name}.tar"


class CachedShard:
    """A copy of a shard, memory-mapped. The cache never changes a copy, so mapping it is safe."""

    def __init__(self, descriptor: int, stamp: Stamp) -> None:
        self._stamp = stamp
        self._bytes = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))

    def stamp(self) -> Stamp:
        """The stamp of the original shard."""
        return self._stamp

    def read(self, offset: int, size: int) -> memoryview:
        """``size`` bytes at ``offset``; fewer only at the end of the shard."""
        return self._bytes[offset : offset + size]

    def close(self) -> None:
        """Closes the copy; bytes that were read stay valid."""
        self._bytes = memoryview(b"")


class CacheFull(Explained, RuntimeError):
    """The cache has no room for a copy, or cannot be used at all."""


@functools.lru_cache(maxsize=4096)
def is_network(folder: str | os.PathLike[str]) -> bool:
    """True if a folder is on a network file system or on FUSE, as mounted buckets are; False if that is unknown."""
    try:
        kind = _file_system(os.stat(folder).st_dev)
    except OSError:
        return False
    return kind in _NETWORK or kind == "fuse" or kind.startswith("fuse.")


def file_system_type(folder: str | os.PathLike[str]) -> str:
    """The type of the file system of a folder, such as ``nfs4``; empty if unknown."""
    return _file_system(os.stat(folder).st_dev)


def _copy(source: ShardFile, file: BinaryIO, start: int, size: int) -> None:
    try:
        _write(file, start, (source.read(at, min(_PIECE, size - at)) for at in range(start, size, _PIECE)))
    except NoRanges:
        assert isinstance(source, RemoteFile)
        source.read_whole(lambda pieces: _write(file, 0, pieces))


def _write(file: BinaryIO, start: int, pieces: Iterable[bytes | memoryview]) -> None:
    file.truncate(start)
    file.seek(start)
    for piece in pieces:
        rest = memoryview(piece)
        while rest:  # an almost full disk writes only a part before it raises an error
            rest = rest[file.write(rest) :]


def _check_content(path: str, file: BinaryIO, stamp: Stamp, md5: str | None) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != stamp.size:
        raise shard_changed(path, f"was received with {size} bytes, its index says {stamp.size}")
    if md5 is not None:
        digest = hashlib.md5(usedforsecurity=False)
        file.seek(0)
        while piece := file.read(_PIECE):
            digest.update(piece)
        if base64.b64encode(digest.digest()).decode() != md5:
            raise shard_changed(path, f"was received with an MD5 other than {md5}, which the server reports")


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
        # Closing is not enough: a process that was forked meanwhile holds the same lock.
        fcntl.flock(file, fcntl.LOCK_UN)


def _is_at(file: BinaryIO, place: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), place.stat())
    return False


def _removed(place: Path) -> bool:
    """Removes a file, unless it is being fetched or belongs to another user."""
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
    # Copies of other users cannot be marked, but can be used.
    with suppress(PermissionError):
        os.utime(file)


def _file_system(device: int) -> str:
    """The type of the file system with this device number; empty if it is not listed."""
    try:
        lines = _MOUNTS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        # man 5 proc_pid_mountinfo: "36 35 98:0 /root /mount/point options [optional fields] - type source options"
        mount, _, mounted = line.partition(" - ")
        if mount.split(" ", 3)[2] == number:
            return mounted.split(" ", 1)[0]
    return ""

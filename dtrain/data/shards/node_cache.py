"""Copies of shards on a local disk, shared by all processes of the node.

* ``CachePolicy`` decides which shards are read through the cache: URLs, and files on network file systems.
* The *name* of a copy is a hash of the shard's absolute path or URL and of its stamp, so that a different version is a
  different copy.
* A copy is *fetched* into a ``.part`` file, checked, synced and renamed. The fetching process holds a lock on that
  file; others wait or read in place. If it dies, the operating system releases the lock and the next process continues
  the file.
* The *size limit* holds at every moment. A ``.part`` file counts with the size of its shard, which is part of its name,
  from its creation on. Room is made, and the file created, under a lock of the folder.
* To make room, the least recently used copies are removed. The time of use is the file's modification time, because
  many file systems do not record the access time. A copy that a process has open is not removed, because its bytes
  would stay on the disk: readers hold a shared lock on it.
* Other users of the machine can neither read, lock nor plant copies: the folder and its files are this user's alone. In a
  folder that others may write, the cache is a *subfolder* named by the user. What is not a regular file of this user, such
  as a link, is removed and never opened.
* No process waits for room. If everything in the cache is in use, ``CacheInUse`` is raised and the shard is read in place.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import json
import mmap
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, NamedTuple

from dtrain.data.shards.http_ranges import NoRanges
from dtrain.data.shards.shard_file import (
    RemoteFile,
    ShardChanged,
    Stamp,
    check_unchanged,
    open_shard,
    shard_changed,
    stamp_of,
)
from dtrain.errors import Explained
from dtrain.files import cache_dir, is_own, is_own_file, own_folder
from dtrain.urls import absolute, is_url, redacted

# Larger reads are no faster on network file systems and object stores.
_PIECE = 8 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Only files with such names are removed: the folder may contain other tars. The number is the size of the whole shard.
_is_ours = re.compile(r"[0-9a-f]{32}\.(?:tar|(?:([0-9]+)\.)?part)").fullmatch
# Space on a disk is allocated in blocks, nearly always of this size.
_BLOCK = 4096
_POLL_SECONDS = 0.05
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
        fills: Whether reading samples makes copies. False: a shard without a copy is read in place, for commands that read a
            few samples only.

    Raises:
        ValueError: If ``storage`` or ``max_gb`` is invalid.
    """

    storage: str = "auto"
    folder: str | None = None
    max_gb: float | None = None
    sharers: int = 1
    fills: bool = True

    def __post_init__(self) -> None:
        if self.storage not in STORAGE:
            raise ValueError(f"data.storage: got {self.storage!r}, want one of {', '.join(STORAGE)}.")
        if self.max_gb is not None and not self.max_gb > 0:
            raise ValueError(
                f"data.cache.max_gb: got {self.max_gb}, want a number above 0, or null for half of the disk."
            )

    @classmethod
    def from_config(cls, storage: str, folder: str | None, max_gb: float | None, *, fills: bool = True) -> CachePolicy:
        """The policy with all of this node's processes, as started by ``torchrun``, as sharers."""
        return cls(storage, folder, max_gb, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), fills)

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
        self.folder = own_folder(folder)
        self._follow = 0 if self.folder == folder else os.O_NOFOLLOW  # a link that others may have made
        self._max_bytes = max_bytes

    @property
    def max_bytes(self) -> int:
        """Size limit of all copies."""
        if self._max_bytes is None:
            self._make_folder()
            used = sum(entry.written for entry in self._entries())
            self._max_bytes = (shutil.disk_usage(self.folder).free + used) // 2
        return self._max_bytes

    def use(self, path: str, stamp: Stamp) -> CachedShard | None:
        """Opens the copy of a shard and marks it as used; None if there is none. An open copy is not removed.

        Raises:
            CacheFull: If the folder cannot be read, or others may write it.
        """
        file = self._open_copy(path, stamp)
        if file is None:
            return None
        with file:
            return CachedShard(file.fileno(), stamp)

    def touch(self, path: str, stamp: Stamp) -> bool:
        """Marks the copy of a shard as used; False if there is none."""
        try:
            with suppress(PermissionError):  # of root
                os.utime(self._place(path, stamp), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def fetch(self, path: str, stamp: Stamp, *, wait: bool = True, evict: bool = True) -> bool:
        """Copies a shard into the cache, unless its copy exists.

        Args:
            path: The shard, a path or a URL.
            stamp: Its stamp when it was indexed.
            wait: Wait while another process fetches it.
            evict: Remove other copies to make room.

        Returns:
            True if the copy exists now; False if another process is fetching it.

        Raises:
            CacheInUse: If there is no room for it besides the copies that may not be removed.
            CacheFull: If there is no room for it even without the other copies, or the cache cannot be written.
            ShardChanged: If the shard changed after it was indexed.
            OSError: If it cannot be read.
        """
        place = self._place(path, stamp)
        part = place.with_suffix(f".{stamp.size}.part")
        self._make_folder()
        while not place.exists():
            with self._folder_locked(fcntl.LOCK_EX):
                if place.exists():
                    break
                file = self._reserve(part, path, stamp.size, evict)
            if file is not None:
                with file:
                    self._publish(file, part, place, path, stamp)
            elif not wait:
                return False
            else:
                # Not in a queue for its lock: the file would have to be open, and stay on the disk if it is removed.
                time.sleep(_POLL_SECONDS)
        return True

    def fetch_open(self, path: str, stamp: Stamp, *, evict: bool = True) -> BinaryIO:
        """The copy of a shard, fetched if there is none, as an open file. It is not removed until it is closed."""
        while (file := self._open_copy(path, stamp)) is None:  # another process may remove the copy before it is opened
            self.fetch(path, stamp, evict=evict)
        return file

    def _open_copy(self, path: str, stamp: Stamp) -> BinaryIO | None:
        place = self._place(path, stamp)
        try:
            os.stat(place)  # usually there is none
            # Nobody removes it between the opening and the lock: its bytes would stay on the disk for that time.
            with self._folder_locked(fcntl.LOCK_SH):
                file = _open(place, os.O_RDONLY)
                # Not released: it is held for as long as the file, or a mapping of it, is open.
                if _try_lock(file, fcntl.LOCK_SH):
                    with suppress(PermissionError):
                        os.utime(file.fileno())
                    return file
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unusable(error) from error
        file.close()  # it is just being published
        return None

    def _reserve(self, part: Path, path: str, size: int, evict: bool) -> BinaryIO | None:
        """Opens or creates a ``.part`` file, locks it, and makes room for ``size`` bytes; None if another has locked it."""
        file = self._opened(part)
        try:
            if _try_lock(file, fcntl.LOCK_EX):
                self._make_room(path, size, part, evict)
                return file
        except BaseException:
            file.close()
            raise
        file.close()
        return None

    def _publish(self, file: BinaryIO, part: Path, place: Path, path: str, stamp: Stamp) -> None:
        target: Path | None = None
        try:
            self._fill(file, path, stamp)
            target = place
        except (CacheFull, ShardChanged):
            raise
        except OSError:
            # The next attempt continues the file. Without a version, it could be the start of a different shard.
            if stamp.version and os.fstat(file.fileno()).st_size:
                target = part
            raise
        finally:
            # Under the lock of the folder: nobody takes the published file for a .part file, or removes it while it is open.
            with self._folder_locked(fcntl.LOCK_EX):
                if target is not None:
                    os.replace(part, target)
                else:
                    part.unlink(missing_ok=True)
                fcntl.flock(file, fcntl.LOCK_UN)
                file.close()

    def _fill(self, file: BinaryIO, path: str, stamp: Stamp) -> None:
        source = open_shard(path)
        try:
            check_unchanged(path, stamp, source)
            # Without a version, the part from an earlier attempt may belong to a different file with the same path and size.
            start = min(os.fstat(file.fileno()).st_size, stamp.size) if stamp.version else 0
            pieces = (source.read(at, min(_PIECE, stamp.size - at)) for at in range(start, stamp.size, _PIECE))
            try:
                self._write(file, start, pieces, path, stamp)
            except NoRanges:
                assert isinstance(source, RemoteFile)
                source.read_whole(lambda pieces: self._write(file, 0, pieces, path, stamp))
            if stamp_of(path) != stamp:
                raise shard_changed(path, "was replaced")
            _check_content(path, file, stamp, getattr(source, "digest", None))
        finally:
            source.close()

    def _write(self, file: BinaryIO, start: int, pieces: Iterable[bytes | memoryview], path: str, stamp: Stamp) -> None:
        file.truncate(start)
        file.seek(start)
        for piece in pieces:
            if file.tell() + len(piece) > stamp.size:  # no more than what is reserved
                raise shard_changed(path, f"was received with more bytes than the {stamp.size} that its index says")
            with self._write_errors(path, stamp.size):
                rest = memoryview(piece)
                while rest:  # an almost full disk writes only a part before it raises an error
                    rest = rest[file.write(rest) :]
        with self._write_errors(path, stamp.size):
            os.fsync(file.fileno())

    @contextmanager
    def _write_errors(self, path: str, size: int) -> Iterator[None]:
        """Distinguishes failures of the cache's disk from failures of the shard's storage."""
        try:
            yield
        except OSError as error:
            raise (self._full(path, size) if error.errno in _FULL else self._unusable(error)) from error

    def _make_room(self, path: str, size: int, part: Path, evict: bool) -> None:
        """Removes copies until a ``.part`` file can grow to the shard's size; removes that file if it cannot."""
        need = _on_disk(size)
        others = sorted(entry for entry in self._entries() if entry.place != part)
        total = sum(entry.reserved for entry in others)
        # Running fetches will still write bytes, and an earlier attempt at this one has written some already.
        free = shutil.disk_usage(self.folder).free - sum(entry.reserved - entry.written for entry in others)
        free += _on_disk(part.stat().st_size)

        def fits() -> bool:
            return total + need <= self.max_bytes and need <= free

        for entry in others:
            is_empty_part = not entry.written  # a process died before it wrote anything
            if (is_empty_part or (evict and need <= self.max_bytes and not fits())) and _removed(entry.place):
                total -= entry.reserved
                free += entry.reserved
        if fits():
            return
        part.unlink()
        if need <= self.max_bytes < total + need:
            raise CacheInUse(
                f"the cache {str(self.folder)!r} has no room for {redacted(path)!r}, {size / 1e9:.3f} GB: "
                f"{total / 1e9:.3f} GB are in use at the same time, and data.cache.max_gb is {self.max_bytes / 1e9:g}. Raise "
                "data.cache.max_gb, or lower data.window or data.lanes."
            )
        raise self._full(path, size)

    @contextmanager
    def _folder_locked(self, operation: int) -> Iterator[None]:
        with ExitStack() as stack:
            try:
                folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | self._follow)
                stack.callback(os.close, folder)
                if not is_own(os.fstat(folder)):
                    raise PermissionError(errno.EPERM, "others may write it, so its copies may be theirs")
                stack.enter_context(_locked(folder, operation))
            except OSError as error:  # some network file systems have no locks
                raise self._unusable(error) from error
            yield

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error

    def _opened(self, part: Path) -> BinaryIO:
        try:
            return _open(part, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> CacheFull:
        return CacheFull(
            f"the cache {str(self.folder)!r} cannot be used: {error}. Set data.cache.dir to a folder that you, and nobody "
            "else, can write, on a local disk."
        )

    def _full(self, path: str, size: int) -> CacheFull:
        free = shutil.disk_usage(self.folder).free
        return CacheFull(
            f"the cache {str(self.folder)!r} has no room for {redacted(path)!r}, {size / 1e9:.3f} GB: its disk has "
            f"{free / 1e9:.3f} GB free, and data.cache.max_gb is {self.max_bytes / 1e9:g}. Set data.cache.dir to a disk with "
            "room, or raise data.cache.max_gb."
        )

    def _entries(self) -> Iterator[_Entry]:
        """The files of the cache."""
        for file in self.folder.iterdir():
            if ours := _is_ours(file.name):
                with suppress(FileNotFoundError):  # another process may remove files at the same time
                    status = file.lstat()
                    written = _on_disk(status.st_size)
                    yield _Entry(status.st_mtime_ns, max(written, _on_disk(int(ours[1] or 0))), written, file)

    def _place(self, path: str, stamp: Stamp) -> Path:
        name = hashlib.sha256(os.fsencode(json.dumps([absolute(path), *stamp]))).hexdigest()[:32]
        return self.folder / f"{name}.tar"


class _Entry(NamedTuple):
    """A file of the cache: time of last use, bytes on the disk when it is complete, and now."""

    used: int
    reserved: int
    written: int
    place: Path


class CachedShard:
    """A copy of a shard, memory-mapped. The cache never changes a copy, so mapping it is safe."""

    def __init__(self, descriptor: int, stamp: Stamp) -> None:
        self._stamp = stamp
        # A mapping has a duplicate of the descriptor, and with it the lock, for as long as any of its bytes are in use.
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


class CacheInUse(CacheFull):
    """The cache has no room for a copy as long as others are in use."""


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


def _check_content(path: str, file: BinaryIO, stamp: Stamp, digest: tuple[str, bytes] | None) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != stamp.size:
        raise shard_changed(path, f"was received with {size} bytes, its index says {stamp.size}")
    if digest is not None:
        name, expected = digest
        computed = hashlib.new(name, usedforsecurity=False)
        file.seek(0)
        while piece := file.read(_PIECE):
            computed.update(piece)
        if computed.digest() != expected:
            raise shard_changed(
                path, f"was received with a {name} other than {expected.hex()}, which the server reports"
            )


def _on_disk(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _open(path: Path, flags: int) -> BinaryIO:
    """Opens a file of the cache. Anything else in its place is removed, and neither followed, waited for nor written.

    Raises:
        FileNotFoundError: If there is none, and ``flags`` do not create it.
        OSError: If it cannot be opened, or what is in its place cannot be removed.
    """
    # A link raises an error, and a pipe does not wait for its other end.
    safe = flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError):
        if not is_own_file(os.lstat(path)):
            path.unlink()
    descriptor = os.open(path, safe, 0o600)
    if not is_own_file(os.fstat(descriptor)):
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "it is not a regular file of this user", str(path))
    return open(descriptor, "rb" if flags == os.O_RDONLY else "r+b", buffering=0)


@contextmanager
def _locked(file: int | BinaryIO, operation: int) -> Iterator[None]:
    fcntl.flock(file, operation)
    try:
        yield
    finally:
        # Closing is not enough: a process that was forked meanwhile holds the same lock.
        fcntl.flock(file, fcntl.LOCK_UN)


def _try_lock(file: BinaryIO, operation: int) -> bool:
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _removed(place: Path) -> bool:
    """Removes a file, unless it is in use."""
    try:
        with _open(place, os.O_RDONLY) as file:
            if not _try_lock(file, fcntl.LOCK_EX):
                return False
            try:
                place.unlink()
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


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

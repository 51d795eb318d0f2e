"""A shard where it lies: a file, or what a URL names.

* A *stamp* is what a shard is recognised by: its size and its *version*, which stands for its content (modification time,
  etag).
* A *shard file* is an open shard; it gives ranges of bytes. Each is used by one thread.
"""

from __future__ import annotations

import os
from typing import NamedTuple, Protocol

from dtrain.config.errors import Explained
from dtrain.data.remote import RemoteFile
from dtrain.data.urls import is_url, shown


class ShardChanged(Explained, RuntimeError):
    """A shard is not what was indexed; the run cannot go on with it."""


class Stamp(NamedTuple):
    """What a shard is recognised by.

    Attributes:
        size: Bytes.
        version: Of a file its modification time in nanoseconds, of a URL a number made of its etag, or else of the time
            that the server tells; 0 if it tells neither.
    """

    size: int
    version: int


class ShardFile(Protocol):
    """An open shard."""

    def stamp(self) -> Stamp:
        """Of what was opened."""

    def read(self, offset: int, size: int) -> bytes | memoryview:
        """``size`` bytes from ``offset`` on; fewer only where the shard ends."""

    def close(self) -> None:
        """Ends its use."""


class LocalFile:
    """A shard that is a file.

    Raises:
        OSError: If it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def stamp(self) -> Stamp:
        """Size and modification time."""
        status = os.fstat(self._descriptor)
        return Stamp(status.st_size, status.st_mtime_ns)

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset`` on; fewer only where the file ends."""
        data = os.pread(self._descriptor, size, offset)
        while len(data) < size:  # one call gives 2 GiB at most, and some file systems give less than was asked
            more = os.pread(self._descriptor, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)


class RemoteShard(RemoteFile):
    """A shard that is named by URL."""

    def stamp(self) -> Stamp:
        """Size and version that the server told when it was opened."""
        return Stamp(self.size, self.version)


def open_shard(path: str) -> LocalFile | RemoteShard:
    """Opens a shard.

    Raises:
        OSError: If it cannot be read.
        ModuleNotFoundError: If a package is missing for this kind of URL; names the command that installs it.
    """
    return RemoteShard(path) if is_url(path) else LocalFile(path)


def stamp_of(path: str) -> Stamp:
    """The stamp of a shard as it is now.

    Raises:
        OSError: If it cannot be found.
        ModuleNotFoundError: If a package is missing for this kind of URL; names the command that installs it.
    """
    if is_url(path):
        shard = RemoteShard(path)
        shard.close()
        return shard.stamp()
    status = os.stat(path)
    return Stamp(status.st_size, status.st_mtime_ns)


def check_unchanged(path: str, indexed: Stamp, file: ShardFile) -> None:
    """Compares a shard with the stamp in its index.

    Raises:
        ShardChanged: If it is another one.
        OSError: If it cannot be read.
    """
    now = file.stamp()
    if now.size != indexed.size:
        begins = bytes(file.read(0, min(40, now.size)))
        raise changed(path, f"has {now.size} bytes and begins with {begins!r}, its index says {indexed.size} bytes")
    if now != indexed:
        raise changed(path, "has been written again")


def changed(path: str, what: str) -> ShardChanged:
    """The error that says so, and what to do."""
    return ShardChanged(
        f"shard {shown(path)!r} {what}. It changed after it was indexed. Put the old one back and start the run again, or "
        "start a new run on the new data."
    )

"""Opens a shard, a local file or a URL, and reads byte ranges.

* A *stamp* identifies a shard's content: its size and a *version* (modification time, or a hash of the etag).
* A *shard file* is an open shard. It reads byte ranges and is used by one thread.
* URLs are read through fsspec, and transient network errors are retried (``dtrain.urls``).
* A URL of the Hugging Face hub names a branch or tag. A process resolves it once, and reads from that commit.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import re
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, NamedTuple, Protocol, TypeVar

from dtrain.data.shards.http_ranges import FileReplaced, HttpRanges, NoRanges
from dtrain.errors import Explained
from dtrain.urls import fsspec_file_system, hub_url, is_url, redacted, scheme, with_retries

_STREAM_PIECE = 1 << 20
# Seconds between checks that an open file is still the same, where not every answer says it: each is a request.
_SECONDS_BETWEEN_COMPARISONS = 30.0
_CONTENT_KEYS = ("ETag", "etag", "md5Hash", "crc32c", "blob_id")
_TIME_KEYS = ("LastModified", "last_modified", "Last-Modified", "updated", "mtime", "modified")
_Result = TypeVar("_Result")
_is_commit = re.compile(r"[0-9a-f]{40}").fullmatch
# An open connection transfers about 2 MiB in the time of one request. After a larger gap only a header is wanted.
_MAX_GAP = 2 << 20
_PIECE, _HEADERS = 8 << 20, 64 << 10


def open_shard(path: str) -> LocalFile | RemoteFile:
    """Opens a shard.

    Raises:
        OSError: If it cannot be read.
        ModuleNotFoundError: If a package is missing for this kind of URL; names the command that installs it.
    """
    return RemoteFile(path) if is_url(path) else LocalFile(path)


def stamp_of(path: str) -> Stamp:
    """The current stamp of a shard; raises as ``open_shard``."""
    if is_url(path):
        shard = RemoteFile(path)
        shard.close()
        return shard.stamp()
    status = os.stat(path)
    return Stamp(status.st_size, status.st_mtime_ns)


def check_unchanged(path: str, indexed: Stamp, file: ShardFile) -> None:
    """Raises ``ShardChanged`` if an open shard does not have the stamp in its index."""
    now = file.stamp()
    if now.size != indexed.size:
        begins = bytes(file.read(0, min(40, now.size)))
        raise shard_changed(
            path, f"has {now.size} bytes and starts with {begins!r}, its index says {indexed.size} bytes"
        )
    if now != indexed:
        raise shard_changed(path, "was replaced")


def shard_changed(path: str, change: str) -> ShardChanged:
    """The error for a shard that changed after it was indexed; ``change`` is a predicate such as "has 10 bytes"."""
    remedy = "Restore the old one and start the run again, or start a new run on the new data."
    if scheme(path) in ("http", "https"):
        remedy += " If nobody changed it, several servers share this URL and differ: use the URL of one of them."
    return ShardChanged(f"shard {redacted(path)!r} {change}. It changed after it was indexed. {remedy}")


class ShardFile(Protocol):
    """An open shard."""

    def stamp(self) -> Stamp:
        """The stamp of the open file."""

    def read(self, offset: int, size: int) -> bytes | memoryview:
        """``size`` bytes at ``offset``; fewer only at the end of the shard."""

    def close(self) -> None:
        """Closes the file."""


class Stamp(NamedTuple):
    """Identifies the content of a shard.

    Attributes:
        size: Bytes.
        version: For a file, its modification time in nanoseconds; for a URL, a number derived from its etag, else from
            the time that the server reports; 0 if it reports neither.
    """

    size: int
    version: int


class ShardChanged(Explained, RuntimeError):
    """A shard changed after it was indexed; the run cannot continue with it."""


class LocalFile:
    """A shard that is a local file.

    Attributes:
        descriptor: Of the open file.
    """

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def stamp(self) -> Stamp:
        """Size and modification time."""
        status = os.fstat(self.descriptor)
        return Stamp(status.st_size, status.st_mtime_ns)

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes at ``offset``; fewer only at the end of the file."""
        data = os.pread(self.descriptor, size, offset)
        while len(data) < size:  # one call reads at most 2 GiB, and some file systems return less
            more = os.pread(self.descriptor, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def close(self) -> None:
        """Closes the file."""
        os.close(self.descriptor)


class RemoteFile:
    """One file behind a URL, open for reading ranges. Used by one thread.

    Args:
        url: A URL of any kind that fsspec knows.

    Attributes:
        size: Bytes.
        version: A number derived from the file's etag, else from its time; 0 if the server reports neither.
        digest: Name and value of a hash of its content, if the server reports one.

    Raises:
        OSError: If it cannot be found, or not be reached after several attempts.
        ModuleNotFoundError: If a package is missing; names the command that installs it.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._files = fsspec_file_system(url)
        self._file: Any = None
        self._compared = 0.0
        self._at_commit = self._with_retries(lambda: at_commit(url))
        info = self._with_retries(lambda: self._files.info(self._at_commit))
        if info.get("type") == "directory" or info.get("size") is None:
            reason = "it is a folder" if info.get("type") == "directory" else "the server does not report its size"
            raise OSError(f"{redacted(url)} cannot be used as a shard: {reason}")
        self.size = int(info["size"])
        self.version = _version(info)
        self.digest = _digest(info)
        is_http = scheme(url) in ("http", "https")
        self._http = HttpRanges(self._files, url, info) if is_http else None

    def stamp(self) -> Stamp:
        """Size and version as the server reported them when the file was opened."""
        return Stamp(self.size, self.version)

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes at ``offset``; fewer only at the end of the file.

        Raises:
            NoRanges: If the server does not support range requests.
            ShardChanged: If the server reports that the file was replaced since it was opened.
            OSError: If it fails after several attempts.
        """
        size = max(0, min(size, self.size - offset))
        return self._with_retries(lambda: self._range(offset, size)) if size else b""

    def read_whole(self, take: Callable[[Iterator[bytes]], None]) -> None:
        """Reads the whole file in one request, for servers without range requests.

        Args:
            take: Called with an iterator over the file's pieces; called again from the start after a failure.
        """
        self._with_retries(lambda: take(self._pieces()))

    def close(self) -> None:
        """Closes the connection."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _range(self, offset: int, size: int) -> bytes:
        if self._http is not None:
            answer = self._http.read(offset, size)
            if self._http.unmarked and time.monotonic() > self._compared + _SECONDS_BETWEEN_COMPARISONS:
                self._compare(self._files.info(self._at_commit))
            return answer
        if self._file is None:
            self._file = self._files.open(self._at_commit, "rb", cache_type="none")
            # S3 later reads only the version that is in the details.
            self._compare(getattr(self._file, "details", None) or self._files.info(self._at_commit))
        elif time.monotonic() > self._compared + _SECONDS_BETWEEN_COMPARISONS:
            self._compare(self._files.info(self._at_commit))
        try:
            self._file.seek(offset)
            data: bytes = self._file.read(size)
        except BaseException:
            self.close()  # a broken connection cannot be used again
            raise
        if len(data) > size:
            raise NoRanges("the server does not support range requests")
        if len(data) < size:
            raise ConnectionError(f"got {len(data)} bytes instead of {size}")
        return data

    def _compare(self, info: dict[str, Any]) -> None:
        self._compared = time.monotonic()
        if self._http is not None:
            self._http.compare(info, info.get("size"))
        elif _version(info) not in (0, self.version) or info.get("size") not in (None, self.size):
            raise FileReplaced("was replaced since it was first read")

    def _pieces(self) -> Iterator[bytes]:
        received = 0
        for piece in self._http.pieces() if self._http is not None else self._streamed():
            received += len(piece)
            yield piece
        if received < self.size:
            raise ConnectionError(f"got {received} bytes instead of {self.size}")
        if self._http is not None and self._http.unmarked:
            self._compare(self._files.info(self._at_commit))

    def _streamed(self) -> Iterator[bytes]:
        with self._files.open(self._at_commit, "rb", block_size=0) as file:
            while piece := file.read(_STREAM_PIECE):
                yield piece

    def _with_retries(self, call: Callable[[], _Result]) -> _Result:
        return _with_retries(self._url, call)


class ReadAhead:
    """A remote file for a walk over its headers: few requests, each of many bytes."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._at = 0
        self._start, self._piece = 0, b""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Moves to a byte, counted from the start or, with ``os.SEEK_END``, from the end."""
        self._at = offset + (self._file.size if whence == os.SEEK_END else 0)
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """The next ``size`` bytes; fewer only at the end of the file."""
        end = self._file.size if size < 0 else min(self._at + size, self._file.size)
        if self._at < self._start or end > self._start + len(self._piece):
            gap = self._at - (self._start + len(self._piece))
            ahead = _PIECE if gap <= _MAX_GAP else _HEADERS
            self._start, self._piece = self._at, self._file.read(self._at, max(end - self._at, ahead))
        data = self._piece[self._at - self._start : end - self._start]
        self._at += len(data)
        return data


def walk_reads_all(url: str, size: int) -> bool:
    """Whether a walk over the headers of a tar of ``size`` bytes reads nearly all of it, because its members are small."""
    if size <= _PIECE:
        return True
    with closing(RemoteFile(url)) as file:
        try:
            start = file.read(0, _HEADERS)
            offset = headers = 0
            while offset + tarfile.BLOCKSIZE <= len(start):
                header = start[offset : offset + tarfile.BLOCKSIZE]
                payload = max(0, tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").size)
                offset += tarfile.BLOCKSIZE + -(-payload // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                headers += 1
        except (tarfile.HeaderError, NoRanges):
            return False
    return offset <= headers * _MAX_GAP


def list_urls(pattern: str) -> list[str]:
    """The URLs that match a glob, sorted; raises as ``open_shard``."""
    files = fsspec_file_system(pattern)
    return sorted(files.unstrip_protocol(path) for path in _with_retries(pattern, lambda: files.glob(pattern)))


def at_commit(url: str) -> str:
    """A URL of the Hugging Face hub with the commit that its branch or tag was at first; other URLs unchanged."""
    parts = hub_url(url)
    if parts is None:
        return url
    kind, repository, revision, path = parts.groups()
    folder = f"{kind}s/" if kind else ""
    return f"hf://{folder}{repository}@{_commit(kind or 'model', repository, revision)}/{path}"


@functools.cache
def _commit(kind: str, repository: str, revision: str | None) -> str:
    if revision is not None and _is_commit(revision):
        return revision
    from huggingface_hub import HfApi  # an optional dependency

    commit = HfApi().repo_info(repository, repo_type=kind, revision=revision).sha
    assert commit is not None
    return commit


def _with_retries(url: str, call: Callable[[], _Result]) -> _Result:
    try:
        return with_retries(url, call, (NoRanges, FileReplaced))
    except NoRanges as error:
        raise NoRanges(f"{redacted(url)}: {error}") from None
    except FileReplaced as error:
        raise shard_changed(url, str(error)) from None


def _digest(info: dict[str, Any]) -> tuple[str, bytes] | None:
    if md5 := info.get("Content-MD5"):
        return "md5", base64.b64decode(md5)
    if lfs := info.get("lfs"):  # of the Hugging Face hub
        return "sha256", bytes.fromhex(lfs["sha256"])
    return None


def _version(info: dict[str, Any]) -> int:
    values = (info.get(name) for name in (*_CONTENT_KEYS, *_TIME_KEYS))
    mark = next((value for value in values if value), None)
    if mark is None:
        return 0
    return int.from_bytes(hashlib.sha256(str(mark).encode()).digest()[:8], "big") >> 1

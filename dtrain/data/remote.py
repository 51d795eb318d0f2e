"""Bytes of what a URL names, through fsspec.

Networks fail for moments: what may pass is tried again, with growing pauses of random length, so that a thousand workers
do not come back all at once. What other libraries say is told without their URLs' passwords and signatures.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import fsspec
from fsspec.registry import known_implementations

from dtrain.data.urls import scheme, shown, without_secrets

_ATTEMPTS = 8
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 20.0  # seconds
_STREAMED = 1 << 20
# Workers that were forked have equal generators; the system's differ.
_random = random.SystemRandom()

_EXTRAS = {"s3": "dtrain[s3]", "s3a": "dtrain[s3]", "http": "dtrain[http]", "https": "dtrain[http]"}
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_PASSING_STATUS = frozenset((408, 425, 429))
_MADE_BY_CONTENT = ("ETag", "etag", "md5Hash", "crc32c")
_MODIFIED = ("LastModified", "last_modified", "Last-Modified", "updated", "mtime", "modified")

# Kept for ever: a forked worker that let go of its copy would close the connections in it, and that takes them from the one
# epoll that it has in common with its parent, who would wait for answers that have long come.
_kept: set[Any] = set()

_Result = TypeVar("_Result")


class NoRanges(OSError):
    """The server hands out files as a whole only."""


class WrittenAgain(OSError):
    """The file is another one than when it was opened."""


class RemoteFile:
    """One file that a URL names, open for reading ranges. Used by one thread.

    Args:
        url: Of any kind that fsspec knows.

    Attributes:
        size: Bytes.
        version: A number made of the file's etag, else of its time; 0 if the server tells neither.
        md5: Base64 of its MD5, where the server tells it.

    Raises:
        OSError: If it cannot be found, or not be reached after several attempts.
        ModuleNotFoundError: If a package is missing; names the command that installs it.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._files = file_system(url)
        self._file: Any = None
        info = self._retried(lambda: self._files.info(url))
        if info.get("type") == "directory" or info.get("size") is None:
            what = "is a folder" if info.get("type") == "directory" else "has no size that the server tells"
            raise OSError(f"{shown(url)} {what}, so it cannot be used as a shard")
        self.size = int(info["size"])
        self.version = _version(info)
        self.md5: str | None = info.get("Content-MD5")

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset`` on; fewer only where the file ends.

        Raises:
            NoRanges: If the server cannot start in the middle of a file.
            WrittenAgain: If the server tells that the file was replaced.
            OSError: If that fails several times.
        """
        size = max(0, min(size, self.size - offset))
        return self._retried(lambda: self._range(offset, size)) if size else b""

    def read_whole(self, take: Callable[[Iterator[bytes]], None]) -> None:
        """The whole file in one request, for servers without ranges.

        Args:
            take: Called with the pieces of the file; again with all of them if something was missing.

        Raises:
            OSError: If that fails several times.
        """
        self._retried(lambda: take(self._pieces()))

    def close(self) -> None:
        """Ends its use."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _range(self, offset: int, size: int) -> bytes:
        if self._file is None:
            self._file = self._files.open(self._url, "rb", cache_type="none", **self._known())
            if _version(self._file.details) not in (0, self.version):
                raise WrittenAgain(f"{shown(self._url)} was written again since it was first read")
        try:
            self._file.seek(offset)
            data = self._file.read(size)
        except ValueError as error:  # fsspec's word for a server that ignores the range
            raise NoRanges(f"{shown(self._url)}: the server hands out whole files only") from error
        except BaseException:
            self.close()  # what is left of a broken connection is of no use
            raise
        if len(data) < size:
            raise ConnectionError(f"{len(data)} bytes came instead of {size}")
        return data

    def _pieces(self) -> Iterator[bytes]:
        come = 0
        with self._files.open(self._url, "rb", block_size=0) as file:
            while piece := file.read(_STREAMED):
                come += len(piece)
                yield piece
        if come < self.size:
            raise ConnectionError(f"{come} bytes came instead of {self.size}")

    def _known(self) -> dict[str, int]:
        # Spares HTTP a request. S3 asks for the etag, and from then on for the file with that etag only.
        return {"size": self.size} if scheme(self._url) in ("http", "https") else {}

    def _retried(self, call: Callable[[], _Result]) -> _Result:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return call()
            except (NoRanges, WrittenAgain):
                raise
            except _errors() as error:
                if attempt == _ATTEMPTS or not _may_pass(error):
                    # Without its cause, whose message has the whole URL.
                    raise _told(self._url, error) from None
            time.sleep(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (attempt - 1)) * _random.uniform(0.5, 1.0))
        raise AssertionError("the last attempt returns or raises")


def file_system(url: str) -> Any:
    """fsspec's file system for a URL; what it lists is never remembered.

    Raises:
        ValueError: If there is none for this kind of URL.
        ModuleNotFoundError: If a package is missing; names the command that installs it.
    """
    check_known(url)
    kind = scheme(url)
    try:
        files = fsspec.core.url_to_fs(url, use_listings_cache=False)[0]
    except ImportError as error:
        # fsspec's own advice for what dtrain has no extra for, such as "Please install gcsfs to access ...".
        remedy = (
            f"pip install '{_EXTRAS[kind]}'" if kind in _EXTRAS else known_implementations[kind].get("err", str(error))
        )
        raise ModuleNotFoundError(f"{kind}:// needs a package that is not installed ({error}): {remedy}") from error
    _kept.add(files)
    return files


def check_known(url: str) -> None:
    """Refuses a URL of a kind that fsspec does not know.

    Raises:
        ValueError: If it is one.
    """
    if scheme(url) not in fsspec.available_protocols():
        raise ValueError(
            f"{shown(url)!r}: nothing is known about {scheme(url)}:// URLs. Use https://, s3:// or a path."
        )


def listed(pattern: str) -> list[str]:
    """The URLs that a glob stands for, sorted.

    Raises:
        OSError: If they cannot be listed.
        ModuleNotFoundError: If a package is missing; names the command that installs it.
    """
    files = file_system(pattern)
    try:
        return sorted(files.unstrip_protocol(path) for path in files.glob(pattern))
    except _errors() as error:
        raise _told(pattern, error) from None


def _errors() -> tuple[type[BaseException], ...]:
    """What reading may raise; of libraries that were not imported, nothing can come."""
    found: list[type[BaseException]] = [OSError, asyncio.TimeoutError]
    if "aiohttp" in sys.modules:
        found.append(sys.modules["aiohttp"].ClientError)
    if "botocore.exceptions" in sys.modules:
        found.append(sys.modules["botocore.exceptions"].BotoCoreError)
    return tuple(found)


def _cause(error: BaseException) -> BaseException:
    # fsspec's HTTP calls whatever goes wrong with a HEAD request "not found"; the truth is behind that.
    return error.__cause__ if isinstance(error.__cause__, _errors()) else error


def _may_pass(error: BaseException) -> bool:
    error = _cause(error)
    status = getattr(error, "status", None)
    if isinstance(status, int):
        return status >= 500 or status in _PASSING_STATUS
    botocore = sys.modules.get("botocore.exceptions")
    if botocore is not None and isinstance(error, botocore.BotoCoreError):  # which has no credentials among its kinds
        return isinstance(error, (botocore.ConnectionError, botocore.HTTPClientError))
    return not isinstance(error, (*_FINAL, ValueError))


def _told(url: str, error: BaseException) -> OSError:
    error = _cause(error)
    status = getattr(error, "status", None)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return FileNotFoundError(f"{shown(url)} does not exist")
    if isinstance(error, PermissionError) or status in (401, 403):
        return PermissionError(f"{shown(url)} may not be read with the credentials that there are")
    what = f"HTTP {status}" if isinstance(status, int) else without_secrets(f"{type(error).__name__}: {error}")
    return OSError(f"{shown(url)} cannot be read: {what}")


def _version(info: dict[str, Any]) -> int:
    values = (info.get(name) for name in (*_MADE_BY_CONTENT, *_MODIFIED))
    mark = next((value for value in values if value), None)
    if mark is None:
        return 0
    return int.from_bytes(hashlib.sha256(str(mark).encode()).digest()[:8], "big") >> 1

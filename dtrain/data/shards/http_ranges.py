"""Byte ranges of a file over HTTP; every answer is compared with the file that was opened.

* fsspec accepts every answer with a good status. A file that is replaced between two requests, or a proxy that answers a
  different range, would then give the bytes of other samples.
* The *mark* of a file is its ETag, or the time of its last change from servers without ETags. Marks, the total size and
  the start of a range are compared in each answer. From a server that reports no mark, only the sizes are known.
* A request has ``If-Range`` with the ETag, so a server that does not repeat the ETag in its answers sends no range of a
  different file. A *weak* ETag (``W/"..."``) may not be sent this way, but is compared.
* Some servers report a mark for a HEAD request only. Their answers are ``unmarked``, and the caller asks for it again.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fsspec.asyn import sync

_MARKS = ("ETag", "Last-Modified")  # the first one that is known before and after decides
_PIECE = 1 << 20
_content_range = re.compile(r"bytes (?:(\d{1,18})-\d+|\*)/(?:(\d{1,18})|\*)").fullmatch


class NoRanges(OSError):
    """The server does not support range requests."""


class FileReplaced(Exception):
    """The file was replaced after it was opened; the message is a predicate, such as "has 10 bytes"."""


class HttpRanges:
    """Reads one file over HTTP.

    Args:
        files: fsspec's file system for HTTP.
        url: The file.
        info: Its size and marks, as ``files`` reported them when it was opened.

    Attributes:
        unmarked: Whether a mark of the file is known and the last answer had none to compare with it.
    """

    def __init__(self, files: Any, url: str, info: Mapping[str, Any]) -> None:
        self._files = files
        self._url = url
        self._size = int(info["size"])
        self._marks = {name: str(info[name]) for name in _MARKS if info.get(name)}
        self.unmarked = False

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes at ``offset``, which the file had when it was opened.

        Raises:
            NoRanges: If the server sends the whole file, a different range, or compressed bytes.
            FileReplaced: If the answer comes from a different file.
            OSError, aiohttp.ClientError, asyncio.TimeoutError: If the request fails.
        """
        data: bytes = sync(self._files.loop, self._read, offset, size)
        return data

    def pieces(self) -> Iterator[bytes]:
        """The whole file in one request; raises as ``read``."""
        loop = self._files.loop
        answer = sync(loop, self._ask, {})
        try:
            while piece := sync(loop, answer.content.read, _PIECE):
                yield piece
        finally:
            sync(loop, _close, answer)

    async def _read(self, offset: int, size: int) -> bytes:
        headers = {"Range": f"bytes={offset}-{offset + size - 1}"}
        etag = self._marks.get("ETag", "")
        if etag.startswith('"'):
            headers["If-Range"] = etag
        answer = await self._ask(headers)
        async with answer:
            start = _start_and_total(answer)[0]
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise NoRanges("the server compresses ranges")
            if answer.status != 206 and "If-Range" in headers and "ETag" not in answer.headers:
                raise NoRanges("the server sends the whole file, or a different one, and does not say which")
            if start != offset:
                sent = "bytes without their position" if start is None else f"bytes from {start} on"
                raise NoRanges(
                    f"the server does not support range requests: asked from byte {offset} on, it sent {sent}"
                )
            try:
                data: bytes = await answer.content.readexactly(size)
            except asyncio.IncompleteReadError as error:
                raise ConnectionError(f"got {len(error.partial)} bytes instead of {size}") from None
            return data

    async def _ask(self, headers: dict[str, str]) -> Any:
        """The answer to a request, which the caller closes; its body has not been read."""
        session = await self._files.set_session()
        options = dict(self._files.kwargs)
        # Compressed bytes have different positions and a different size.
        headers = {**options.pop("headers", {}), "Accept-Encoding": "identity", **headers}
        answer = await session.get(self._files.encode_url(self._url), headers=headers, **options)
        try:
            if answer.status != 416:  # the range begins past the end of the file: its size says that it changed
                answer.raise_for_status()
            self.compare(answer.headers, _start_and_total(answer)[1])
            if answer.status == 416:
                raise FileReplaced(f"had {self._size} bytes and is shorter now (HTTP 416)")
        except BaseException:
            answer.close()
            raise
        return answer

    def compare(self, found: Mapping[str, Any], size: int | None) -> None:
        """Compares size and marks, in headers or in details from ``files``, with the file that was opened.

        Raises:
            FileReplaced: If they belong to a different file.
        """
        self.unmarked = bool(self._marks)
        for name in _MARKS:
            before, now = self._marks.get(name), found.get(name)
            if before and now:
                if before.removeprefix("W/") != now.removeprefix("W/"):
                    raise FileReplaced(f"was replaced: it had {name} {before[:99]!r} and now has {now[:99]!r}")
                self.unmarked = False
                break
        if size not in (None, self._size):
            raise FileReplaced(f"was replaced: it had {self._size} bytes and now has {size}")
        # Some servers report more for the content than for a HEAD request. An unmarked answer may come from a different file.
        for name in _MARKS:
            if not self.unmarked and (now := found.get(name)):
                self._marks.setdefault(name, now)


def _start_and_total(answer: Any) -> tuple[int | None, int | None]:
    """First byte of the body in the file, and the size of the file; None where the answer does not say it."""
    if answer.status in (206, 416):
        found = _content_range(answer.headers.get("Content-Range", ""))
        start, total = found.groups() if found else (None, None)
        return (None if start is None else int(start)), (None if total is None else int(total))
    encoded = answer.headers.get("Content-Encoding", "identity") != "identity"
    return 0, (None if encoded else answer.content_length)


async def _close(answer: Any) -> None:
    answer.close()

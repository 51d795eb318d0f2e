"""An HTTP server on loopback that hands out a folder, with ranges, and fails on purpose."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class FileServer(ThreadingHTTPServer):
    """Serves a folder.

    Attributes:
        failures: Answers that are taken from the front, one for each GET: a status, ``"short"`` (half of the body, then the
            connection ends), ``"slow"`` or ``"good"``.
        failure_headers: Headers of the answers with a status.
        ranges: Whether it knows ranges.
        page: Sent instead of every file, as HTML.
        modified: ``Last-Modified`` of every file, if set.
        shift: Added to the first byte of every range.
        alter: Changes the headers of every answer with a file; its first argument is the method.
        requests: GETs by path.
        sent: Bytes of bodies.
    """

    daemon_threads = True

    def __init__(self, folder: Path, handler: type[BaseHTTPRequestHandler] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler or Handler)
        self.folder = folder
        self.failures: list[int | str] = []
        self.failure_headers: dict[str, str] = {}
        self.ranges = True
        self.page: bytes | None = None
        self.modified = ""
        self.shift = 0
        self.alter: Callable[[str, dict[str, str]], object] = lambda method, headers: None
        self.requests: Counter[str] = Counter()
        self.sent = 0
        self.lock = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """Shows no errors: clients may close a connection at any time."""

    def url(self, name: str) -> str:
        """The URL of a file in the folder."""
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(BaseHTTPRequestHandler):
    """Answers with a file, or a range of it."""

    server: FileServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, body: bool) -> None:
        name = self.path.partition("?")[0].lstrip("/")
        failure: int | str = "good"
        with self.server.lock:
            if body:
                self.server.requests[name] += 1
                if self.server.failures:
                    failure = self.server.failures.pop(0)
        if isinstance(failure, int):
            self.send_response(failure)
            self.send_header("Content-Length", "0")
            for header in self.server.failure_headers.items():
                self.send_header(*header)
            self.end_headers()
            return
        file = self.server.folder / name
        if self.server.page is None and not file.is_file():
            self.send_error(404)
            return
        content = file.read_bytes() if self.server.page is None else self.server.page
        mark = f'"{len(content)}-{file.stat().st_mtime_ns}"' if self.server.page is None else '"page"'
        start, end = 0, len(content)
        asked = self.headers.get("Range")
        headers = {"Content-Type": "text/html" if self.server.page is not None else "application/x-tar", "ETag": mark}
        if self.server.modified:
            headers["Last-Modified"] = self.server.modified
        partial = asked and self.server.ranges and self.server.page is None
        if partial and self.headers.get("If-Range", mark) == mark:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1, len(content)) if last else len(content)
            start, end = (min(place + self.server.shift, len(content)) for place in (start, end))
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
            if start >= end:
                headers["Content-Range"] = f"bytes */{len(content)}"
        self.send_response((206 if start < end else 416) if "Content-Range" in headers else 200)
        headers["Content-Length"] = str(end - start)
        self.server.alter(self.command, headers)
        for header in headers.items():
            self.send_header(*header)
        self.end_headers()
        if not body:
            return
        part = content[start:end]
        if failure == "short":
            self.wfile.write(part[: len(part) // 2])
            self.close_connection = True
            return
        if failure == "slow":
            time.sleep(0.3)
        with self.server.lock:
            self.server.sent += len(part)
        self.wfile.write(part)


@contextmanager
def serving(folder: Path) -> Iterator[FileServer]:
    """A server of this folder on a free port."""
    server = FileServer(folder)
    with running(server):
        yield server


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[None]:
    """Serves in a thread."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

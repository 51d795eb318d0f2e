"""A bucket of a real S3 server (moto's) on loopback, and a proxy in front of it that fails on purpose."""

from __future__ import annotations

import http.client
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.http_server import running

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def s3_server() -> Iterator[str]:
    """The URL of a server for the block, which is in the environment, with credentials."""
    # Not at the top: every process of the default tests would load them.
    s3fs = pytest.importorskip("s3fs", reason="s3 needs s3fs: pip install 'dtrain[s3]'")
    moto_server = pytest.importorskip("moto.server", reason="needs moto: pip install -e . --group dev")
    s3fs.S3FileSystem.clear_instance_cache()  # of earlier tests, without these credentials
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in CREDENTIALS.items():
                patch.setenv(name, value)
            patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
            # All servers of a process have the same buckets.
            urllib.request.urlopen(
                urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
            ).close()
            yield f"http://{host}:{port}"
    finally:
        server.stop()


class FaultyProxy(ThreadingHTTPServer):
    """Passes requests on to a server, or does not.

    Args:
        url: The server.

    Attributes:
        fault: Called with method and path of each request. ``None`` passes it on; ``503`` is the answer; ``cut`` closes the
            connection after half of the body, and passes nothing on; ``lost`` passes it on and closes the connection without
            the answer.
        requests: Method and path of each request.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, url: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.server_at = url.removeprefix("http://")
        self.fault: Callable[[str, str], int | str | None] = lambda method, path: None
        self.requests: list[tuple[str, str]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """The URL of the proxy."""
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Shows no errors: clients may close a connection at any time."""


class _Handler(BaseHTTPRequestHandler):
    server: FaultyProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: object) -> None:
        pass

    def _pass_on(self) -> None:
        with self.server.lock:
            self.server.requests.append((self.command, self.path))
            fault = self.server.fault(self.command, self.path)
        size = int(self.headers.get("Content-Length", 0))
        if fault == "cut":
            self.rfile.read(size // 2)
            self.close_connection = True
            return
        body = self.rfile.read(size)
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            body = b"".join(self._chunks())
        if isinstance(fault, int):
            self.send_response(fault)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        passed = {
            k: v for k, v in self.headers.items() if k.lower() not in ("transfer-encoding", "expect", "connection")
        }
        passed["Content-Length"] = str(len(body))
        connection = http.client.HTTPConnection(self.server.server_at, timeout=60)
        try:
            connection.request(self.command, self.path, body, passed)
            answer = connection.getresponse()
            content = answer.read()
        except OSError:
            self.close_connection = True
            return
        finally:
            connection.close()
        if fault == "lost":
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(content)

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on


@contextmanager
def faulty_bucket(name: str) -> Iterator[tuple[FaultyProxy, Any]]:
    """A proxy that the environment names, and a client that reaches the server directly; the bucket exists."""
    with s3_server() as url:
        import boto3

        client = boto3.client("s3")
        client.create_bucket(Bucket=name)
        proxy = FaultyProxy(url)
        with running(proxy), pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", proxy.url)
            yield proxy, client

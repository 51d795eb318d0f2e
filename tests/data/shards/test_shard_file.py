"""Shards as files and URLs: right bytes or a clear error, whatever the server does; secrets are never shown."""

from __future__ import annotations

import gc
import io
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import fsspec
import pytest

from dtrain import urls
from dtrain.data.shards.http_ranges import NoRanges
from dtrain.data.shards.shard_file import ReadAhead, RemoteFile, ShardChanged
from dtrain.data.shards.tar import walk
from dtrain.urls import absolute, components, is_url, local_path, redacted, scheme, without_url_secrets
from tests.http_server import FileServer, serving
from tests.refusals import refused
from tests.shards import tar_bytes, tarfile_files

CONTENT = bytes(place % 251 for place in range(100_000))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    pytest.importorskip("aiohttp", reason="http needs aiohttp: pip install 'dtrain[http]'")
    monkeypatch.setattr(urls, "_FIRST_PAUSE", 0.01)
    (tmp_path / "x.tar").write_bytes(CONTENT)
    with serving(tmp_path) as server:
        yield server


@pytest.mark.parametrize(("offset", "size"), [(0, 10), (17, 1000), (0, 100_000), (99_990, 50), (5, 0), (100_000, 5)])
def test_a_range_is_what_the_file_holds_there(server: FileServer, offset: int, size: int) -> None:
    file = RemoteFile(server.url("x.tar"))
    assert file.size == len(CONTENT)
    assert file.read(offset, size) == CONTENT[offset : offset + size]
    file.close()
    assert server.sent == len(CONTENT[offset : offset + size])


def test_what_passes_is_tried_again(server: FileServer) -> None:
    file = RemoteFile(server.url("x.tar"))
    server.failures = [503, "short", 500, 429, "good"]
    assert file.read(10, 5000) == CONTENT[10:5010]
    assert server.requests["x.tar"] == 5
    file.close()


def test_what_does_not_pass_is_told_without_secrets(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "_MAX_ATTEMPTS", 3)
    url = server.url("x.tar").replace("//", "//me:secret@") + "?token=secret"
    file = RemoteFile(url)
    server.failures = [503] * 3
    with pytest.raises(OSError, match=r"http://127.0.0.1:\d+/x.tar cannot be read: HTTP 503") as caught:
        file.read(0, 10)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    file.close()


@pytest.mark.parametrize(
    ("status", "error", "parts"),
    [
        (403, PermissionError, ["access denied", "HTTP 403", "a URL that is still valid", "USER:PASSWORD"]),
        (401, PermissionError, ["access denied", "HTTP 401", "a URL that is still valid", "USER:PASSWORD"]),
        (410, FileNotFoundError, ["does not exist", "HTTP 410", "Correct"]),
        (429, OSError, ["HTTP 429", "after 8 attempts", "requests"]),
        (500, OSError, ["HTTP 500", "after 8 attempts", "Start again"]),
    ],
)
def test_a_refusal_names_url_status_attempts_and_remedy(
    server: FileServer, monkeypatch: pytest.MonkeyPatch, status: int, error: type[OSError], parts: list[str]
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    file = RemoteFile(server.url("x.tar"))
    server.failures = [status] * 100
    with refused(error, server.url("x.tar"), *parts):
        file.read(0, 10)
    assert len(server.failures) == 100 - (8 if status in (429, 500) else 1)


@pytest.mark.parametrize(("asked", "waited"), [("7", 7), ("100000", 300), ("tomorrow", 0)])
def test_a_server_says_how_long_to_wait(
    server: FileServer, monkeypatch: pytest.MonkeyPatch, asked: str, waited: float
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    file = RemoteFile(server.url("x.tar"))
    server.failures, server.failure_headers = [429], {"Retry-After": asked}
    assert file.read(0, 10) == CONTENT[:10]
    assert pauses == [pytest.approx(waited, abs=0.5)]


def test_a_missing_file_is_asked_for_once(server: FileServer) -> None:
    with refused(FileNotFoundError, "/y.tar", "does not exist"):
        RemoteFile(server.url("y.tar"))
    assert server.requests["y.tar"] == 1


def test_a_server_that_is_away_for_a_moment_is_waited_for(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    # Both its HEAD and the GET that fsspec tries then: it calls that "not found", which it is not.
    monkeypatch.setattr(FileServer, "finish_request", _refusing(2, FileServer.finish_request))
    assert RemoteFile(server.url("x.tar")).size == len(CONTENT)


def _refusing(times: int, answer):  # type: ignore[no-untyped-def]
    left = [times]

    def finish_request(self, request, address):  # type: ignore[no-untyped-def]
        if left[0]:
            left[0] -= 1
            request.close()
        else:
            answer(self, request, address)

    return finish_request


def test_a_server_without_ranges_is_found_out_and_read_as_a_whole(server: FileServer) -> None:
    server.ranges = False
    file = RemoteFile(server.url("x.tar"))
    with pytest.raises(NoRanges, match="range requests"):
        file.read(50, 10)
    taken = io.BytesIO()

    def take(pieces: Iterator[bytes]) -> None:
        taken.seek(0)
        taken.truncate()
        taken.writelines(pieces)

    server.failures = ["short", 503]
    file.read_whole(take)
    assert taken.getvalue() == CONTENT
    file.close()


def test_a_version_stands_for_the_content(server: FileServer, tmp_path: Path) -> None:
    first = RemoteFile(server.url("x.tar")).version
    assert first == RemoteFile(server.url("x.tar")).version != 0
    (tmp_path / "x.tar").write_bytes(bytes(len(CONTENT)))
    assert RemoteFile(server.url("x.tar")).version != first


@pytest.mark.parametrize("when", ["before the first read", "before a new connection", "while it is open"])
def test_a_file_of_other_storage_that_is_replaced_is_noticed(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    # Memory in place of gs:// and the like, whose answers do not say which version they are from.
    storage, now = fsspec.filesystem("memory"), 1000.0
    info = type(storage).info
    monkeypatch.setattr(
        type(storage), "info", lambda self, path: info(self, path) | {"etag": hash(storage.cat_file(path))}
    )
    monkeypatch.setattr(time, "monotonic", lambda: now)
    storage.pipe_file("/x.tar", CONTENT)
    file = RemoteFile("memory://x.tar")
    if when != "before the first read":
        assert file.read(0, 100) == CONTENT[:100]
    if when == "before a new connection":
        file.close()
    storage.pipe_file("/x.tar", bytes(len(CONTENT)))
    now += 60
    with refused(ShardChanged, "memory://x.tar", "was replaced", "Restore the old one"):
        file.read(100, 100)


def test_a_package_that_is_missing_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)  # if it was used before
    with refused(ModuleNotFoundError, "s3://", "", "pip install 'dtrain[s3]'"):
        RemoteFile("s3://bucket/x.tar")


def test_an_unknown_kind_of_url_is_refused() -> None:
    with pytest.raises(ValueError, match="tape://"):
        urls.check_known("tape://robot/x.tar")


@pytest.mark.slow
def test_a_forked_worker_that_reads_leaves_its_parent_its_connections(server: FileServer) -> None:
    # It closed them once, and the parent waited for minutes for an answer to the next request.
    def read() -> bytes:
        data = RemoteFile(server.url("x.tar")).read(0, 10)
        gc.collect()
        return data

    assert read() == CONTENT[:10]
    worker = multiprocessing.get_context("fork").Process(target=read)
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    assert read() == CONTENT[:10]


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/data/x.tar", "/data/x.tar"),
        ("a?b@c.tar", "a?b@c.tar"),
        ("https://me:secret@host/a/x.tar?X-Amz-Signature=secret#secret", "https://host/a/x.tar"),
        ("https://secret@host/x.tar", "https://host/x.tar"),
        ("s3://bucket/what?.tar", "s3://bucket/what?.tar"),
        ("s3://key:secret@bucket/x.tar", "s3://key@bucket/x.tar"),
        ("abfs://container@account/x.tar", "abfs://container@account/x.tar"),
        ("https://host/mail@x.tar", "https://host/mail@x.tar"),
    ],
)
def test_what_is_shown_has_no_secret(path: str, told: str) -> None:
    assert redacted(path) == told


def test_paths_and_urls_are_told_apart() -> None:
    assert [is_url(name) for name in ("s3://b/x", "HTTP://h/x", "/a/x", "a:b/x", "C:/x", "//h/x")] == [True] * 2 + [
        False
    ] * 4
    assert [scheme(name) for name in ("S3://b/x", "/a/x")] == ["s3", ""]
    assert local_path("file:///a/x.tar") == "/a/x.tar"
    assert absolute("https://h/a/../x.tar") == "https://h/a/../x.tar"


def test_a_url_has_components_as_a_path_does() -> None:
    assert components("https://me:secret@host/a/x.tar?token=1") == ["host", "a", "x.tar"]
    assert components("/a/../b/x.tar") == ["", "b", "x.tar"]


def test_messages_of_others_lose_their_secrets() -> None:
    text = "503, message='no', url='https://me:secret@host/x.tar?token=secret' (https://secret@h/y)"
    assert without_url_secrets(text) == "503, message='no', url='https://host/x.tar' (https://h/y)"


class Bytes:
    """Stands for a remote file: its size, and reads that are counted."""

    def __init__(self, content: bytes) -> None:
        self.content, self.size, self.reads = content, len(content), 0

    def read(self, offset: int, size: int) -> bytes:
        self.reads += 1
        return self.content[offset : offset + size]


@pytest.mark.parametrize(
    ("sizes", "most"), [([10] * 9_000, 3), ([100_000] * 200, 5), ([6_000_000, 10, 6_000_000], 5), ([], 1)]
)
def test_small_members_are_read_through_and_large_ones_passed_over(sizes: list[int], most: int) -> None:
    content = tar_bytes((f"{number:06d}.bin", bytes(size)) for number, size in enumerate(sizes))
    remote = Bytes(content)
    found = [(name.decode(), offset, size) for name, offset, size in walk("x", ReadAhead(cast(RemoteFile, remote)))]
    assert found == tarfile_files(content)
    assert remote.reads <= most

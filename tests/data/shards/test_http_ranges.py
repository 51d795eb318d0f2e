"""Ranges over HTTP: the bytes that the opened file has there or an error, whatever a server or a proxy answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtrain import urls
from dtrain.data.shards import shard_file
from dtrain.data.shards.http_ranges import NoRanges
from dtrain.data.shards.shard_file import RemoteFile, ShardChanged
from tests.http_server import FileServer, serving
from tests.refusals import refused

CONTENT = bytes(place % 251 for place in range(10_000))
NEW = bytes(250 - place % 251 for place in range(10_000))
ETAG, REMEDY = "ETag", "Restore the old one"
Alter = Callable[[str, dict[str, str]], object]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "x.tar"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def server(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    pytest.importorskip("aiohttp", reason="http needs aiohttp: pip install 'dtrain[http]'")
    monkeypatch.setattr(urls, "_FIRST_PAUSE", 0.01)
    with serving(path.parent) as server:
        yield server


def opened(server: FileServer) -> RemoteFile:
    """The file, of which a range was read before."""
    file = RemoteFile(server.url("x.tar"))
    assert file.read(10, 100) == CONTENT[10:110]
    return file


def without(*names: str) -> Alter:
    return lambda method, headers: [headers.pop(name, None) for name in names]


def weak(method: str, headers: dict[str, str]) -> None:
    headers["ETag"] = f"W/{headers['ETag']}"


def etag_of_get_only(method: str, headers: dict[str, str]) -> None:
    if method == "HEAD":
        del headers["ETag"]


@pytest.mark.parametrize("offset", [0, 5000])
@pytest.mark.parametrize("new", [NEW, NEW[:9000], NEW + NEW], ids=["equal size", "smaller", "larger"])
@pytest.mark.parametrize("alter", [without(), weak, etag_of_get_only], ids=["strong", "weak", "only with content"])
def test_a_replaced_file_is_named_with_what_differs_and_the_remedy(
    server: FileServer, path: Path, alter: Alter, new: bytes, offset: int
) -> None:
    server.alter = alter
    file = opened(server)
    before = f'"{len(CONTENT)}-{path.stat().st_mtime_ns}"'
    path.write_bytes(new)
    server.failures = [503, "good"]
    with refused(ShardChanged, server.url("x.tar"), before, REMEDY, f'"{len(new)}-{path.stat().st_mtime_ns}"'):
        file.read(offset, 100)


def test_a_server_without_etags_is_compared_by_time_and_without_both_by_size(server: FileServer, path: Path) -> None:
    server.alter, server.modified = without(ETAG), "Sat, 01 Nov 2025 00:00:00 GMT"
    file = opened(server)
    server.modified = "Sun, 02 Nov 2025 00:00:00 GMT"
    with refused(ShardChanged, "x.tar", "Sat, 01 Nov 2025", REMEDY, "Sun, 02 Nov 2025"):
        file.read(200, 10)
    server.modified = ""
    file = opened(server)
    path.write_bytes(CONTENT + CONTENT)
    with refused(ShardChanged, "x.tar", "10000 bytes", REMEDY, "20000"):
        file.read(200, 10)


@pytest.mark.parametrize("alter", [without(ETAG), without(ETAG, "Content-Range")])
def test_a_range_behind_the_end_of_a_file_that_was_cut_says_so(server: FileServer, path: Path, alter: Alter) -> None:
    server.alter = without(ETAG)
    file = opened(server)
    server.alter = alter
    path.write_bytes(CONTENT[:500])
    with refused(ShardChanged, "x.tar", "10000 bytes", REMEDY):
        file.read(5000, 10)


@pytest.mark.parametrize("offset", [0, 5000])
def test_the_etag_is_sent_for_servers_that_do_not_repeat_it(server: FileServer, path: Path, offset: int) -> None:
    server.alter = lambda method, headers: headers.pop("ETag") if method == "GET" else None
    file = opened(server)
    path.write_bytes(NEW)
    with pytest.raises(NoRanges, match=r"x\.tar"):  # then the whole file is copied and compared
        file.read(offset, 100)


def ranges(file: RemoteFile) -> bytes:
    return file.read(0, 5000) + file.read(5000, 5000)


def whole(file: RemoteFile) -> bytes:
    taken: list[bytes] = []
    file.read_whole(lambda pieces: taken.append(b"".join(pieces)))
    return taken[-1]


@pytest.mark.parametrize("read", [ranges, whole])
@pytest.mark.parametrize(("of_head", "of_get"), [(ETAG, None), ("Last-Modified", None), ("Last-Modified", ETAG)])
def test_a_mark_that_only_head_requests_have_is_asked_for_again(
    server: FileServer,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read: Callable[[RemoteFile], bytes],
    of_head: str,
    of_get: str | None,
) -> None:
    def alter(method: str, headers: dict[str, str]) -> None:
        mark, name = headers.pop(ETAG), of_head if method == "HEAD" else of_get
        if name is not None:
            headers[name] = mark.replace('"', 'W/"', 1)  # weak: no server compares it for us

    server.alter = alter
    early, late = RemoteFile(server.url("x.tar")), RemoteFile(server.url("x.tar"))
    assert read(early) == CONTENT
    path.write_bytes(NEW)
    monkeypatch.setattr(shard_file, "_SECONDS_BETWEEN_COMPARISONS", -1.0)  # that time has passed
    for file in (early, late):
        with refused(ShardChanged, server.url("x.tar"), of_head, REMEDY):
            read(file)


def test_a_mark_that_only_head_requests_have_costs_one_more_request_per_half_minute(
    server: FileServer,
) -> None:
    asked = []
    server.alter = lambda method, headers: asked.append(method) if method == "HEAD" else headers.pop(ETAG)
    file = opened(server)
    before = len(asked)
    assert [file.read(place, 100) for place in range(9)] == [CONTENT[place : place + 100] for place in range(9)]
    assert (before, len(asked)) == (2, 2)


def test_servers_that_share_a_url_and_differ_are_named_as_a_possible_reason(server: FileServer) -> None:
    file = opened(server)
    server.alter = lambda method, headers: headers.update(ETag='"mirror"')
    with refused(ShardChanged, server.url("x.tar"), '"mirror"', "the URL of one of them"):
        file.read(0, 10)


def test_an_etag_that_a_proxy_made_weak_is_the_same(server: FileServer) -> None:
    file = opened(server)
    server.alter = weak
    assert file.read(200, 100) == CONTENT[200:300]


@pytest.mark.parametrize(
    "alter",
    [
        without("Content-Range"),
        lambda method, headers: headers.update({"Content-Range": "bytes 0-0"}),
        lambda method, headers: headers.update({"Content-Range": "bytes " + "9" * 5000 + "-0/*"}),
        lambda method, headers: headers.update({"Content-Encoding": "gzip"}),
    ],
    ids=["several parts, or no place", "no total", "too many digits", "compressed"],
)
def test_what_does_not_say_which_bytes_it_is_counts_as_no_range(server: FileServer, alter: Alter) -> None:
    file = opened(server)
    server.alter = alter
    with pytest.raises(NoRanges, match=r"x\.tar"):
        file.read(200, 100)


@pytest.mark.parametrize("shift", [-1, 512])
def test_another_range_than_was_asked_for_is_never_taken(server: FileServer, shift: int) -> None:
    file = opened(server)
    server.shift = shift
    with pytest.raises(NoRanges, match="asked from byte 600"):
        file.read(600, 100)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_whole_file_is_that_which_was_opened(server: FileServer, path: Path, ranges: bool) -> None:
    server.ranges = ranges
    file = RemoteFile(server.url("x.tar"))
    taken: list[bytes] = []
    file.read_whole(lambda pieces: taken.append(b"".join(pieces)))
    assert taken == [CONTENT]
    path.write_bytes(NEW)
    os.utime(path, (1, 1))
    with refused(ShardChanged, server.url("x.tar"), ETAG, REMEDY):
        file.read_whole(lambda pieces: taken.append(b"".join(pieces)))

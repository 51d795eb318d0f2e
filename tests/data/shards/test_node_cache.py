"""Cached copies are whole or absent, fetched once, within the size limit, readable while open; and what is cached."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain import urls
from dtrain.data.shards import node_cache
from dtrain.data.shards.node_cache import CacheFull, CacheInUse, CachePolicy, NodeCache
from dtrain.data.shards.shard_file import LocalFile, ShardChanged, Stamp, stamp_of
from tests.http_server import FileServer, serving
from tests.refusals import refused
from tests.shards import write_patterns

SIZE = 13 * 4096  # whole blocks of a disk


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    return write_patterns(tmp_path / "data", 5, SIZE)


@pytest.fixture
def cache(tmp_path: Path) -> NodeCache:
    return NodeCache(tmp_path / "cache", 3 * SIZE)


@pytest.fixture
def server(tmp_path: Path, shards: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    pytest.importorskip("aiohttp", reason="http needs aiohttp: pip install 'dtrain[http]'")
    monkeypatch.setattr(urls, "_FIRST_PAUSE", 0.01)
    with serving(tmp_path / "data") as server:
        yield server


def content(cache: NodeCache, path: str) -> bytes | None:
    copy = cache.use(path, stamp_of(path))
    return None if copy is None else bytes(copy.read(0, SIZE + 1))


def in_folder(cache: NodeCache) -> list[str]:
    return sorted(file.suffix for file in cache.folder.iterdir())


def test_a_copy_has_the_bytes_of_the_shard_and_a_name_that_says_nothing(cache: NodeCache, shards: list[str]) -> None:
    assert content(cache, shards[0]) is None
    assert cache.fetch(shards[0], stamp_of(shards[0]))
    assert content(cache, shards[0]) == Path(shards[0]).read_bytes()
    (file,) = cache.folder.iterdir()
    assert len(file.stem) == 32
    assert file.suffix == ".tar"
    assert not set("0.tar") >= set(file.stem)


def test_shards_of_one_name_in_different_folders_are_never_mixed_up(cache: NodeCache, tmp_path: Path) -> None:
    for number, folder in enumerate(("a", "b")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "000.tar").write_bytes(bytes([number]) * 1000)
        os.utime(tmp_path / folder / "000.tar", ns=(1, 1))
        cache.fetch(str(tmp_path / folder / "000.tar"), Stamp(1000, 1))
    for number, folder in enumerate(("a", "b")):
        assert content(cache, str(tmp_path / folder / "000.tar")) == bytes([number]) * 1000


def test_another_version_is_another_copy(cache: NodeCache, shards: list[str]) -> None:
    cache.fetch(shards[0], stamp_of(shards[0]))
    Path(shards[0]).write_bytes(b"new" * 1000)
    assert content(cache, shards[0]) is None
    cache.fetch(shards[0], stamp_of(shards[0]))
    assert content(cache, shards[0]) == b"new" * 1000


def test_the_copies_used_longest_ago_make_room(cache: NodeCache, shards: list[str]) -> None:
    for number, path in enumerate(shards[:3]):
        cache.fetch(path, stamp_of(path))
        os.utime(cache._place(path, stamp_of(path)), ns=(number, number))
    assert cache.touch(shards[0], stamp_of(shards[0]))
    cache.fetch(shards[3], stamp_of(shards[3]))
    assert [content(cache, path) is not None for path in shards] == [True, False, True, True, False]


def test_opening_a_copy_renews_it(cache: NodeCache, shards: list[str]) -> None:
    for number, path in enumerate(shards[:3]):
        cache.fetch(path, stamp_of(path))
        os.utime(cache._place(path, stamp_of(path)), ns=(number, number))
    assert content(cache, shards[0]) is not None
    cache.fetch(shards[3], stamp_of(shards[3]))
    assert [content(cache, path) is not None for path in shards] == [True, False, True, True, False]


def test_a_users_own_tars_in_the_folder_of_the_cache_are_left_alone(cache: NodeCache, shards: list[str]) -> None:
    cache.folder.mkdir()
    own = [cache.folder / name for name in ("train-000000.tar", "download.part")]
    for file in own:
        file.write_bytes(bytes(2 * SIZE))
        os.utime(file, (1, 1))
    for path in shards:
        cache.fetch(path, stamp_of(path))
    assert [file.stat().st_size for file in own] == [2 * SIZE, 2 * SIZE]
    assert len(in_folder(cache)) == 2 + 3


@pytest.mark.parametrize("max_bytes", [None, 3 * SIZE])
def test_a_cache_that_cannot_be_used_is_named_with_the_key_to_set(
    tmp_path: Path, shards: list[str], max_bytes: int | None
) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache, stamp = NodeCache(tmp_path / "file" / "cache", max_bytes), stamp_of(shards[0])
    calls = [lambda: cache.use(shards[0], stamp), lambda: cache.fetch(shards[0], stamp)]
    for call in calls if max_bytes else [*calls, lambda: cache.max_bytes]:
        with refused(CacheFull, "file/cache'", "Not a directory", "data.cache.dir"):
            call()


def test_a_copy_that_is_removed_stays_readable_to_whoever_has_it(cache: NodeCache, shards: list[str]) -> None:
    cache.fetch(shards[0], stamp_of(shards[0]))
    copy = cache.use(shards[0], stamp_of(shards[0]))
    assert copy is not None
    shutil.rmtree(cache.folder)
    part = copy.read(100, 50)
    copy.close()
    assert bytes(part) == Path(shards[0]).read_bytes()[100:150]
    cache.fetch(shards[0], stamp_of(shards[0]))
    assert content(cache, shards[0]) == Path(shards[0]).read_bytes()


def test_a_shard_larger_than_the_cache_is_refused_with_the_keys_to_set(tmp_path: Path, shards: list[str]) -> None:
    cache = NodeCache(tmp_path / "cache", SIZE - 1)
    with refused(CacheFull, "no room for", "0.tar", "data.cache.dir", "data.cache.max_gb"):
        cache.fetch(shards[0], stamp_of(shards[0]))
    assert in_folder(cache) == []


def test_room_is_half_of_what_the_disk_has_free(
    tmp_path: Path, shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10 * SIZE, 6 * SIZE, 4 * SIZE))
    assert NodeCache(tmp_path / "cache", None).max_bytes == 2 * SIZE


def test_an_open_copy_is_not_removed_and_what_needs_its_room_is_told(cache: NodeCache, shards: list[str]) -> None:
    copies = []
    for path in shards[:3]:
        cache.fetch(path, stamp_of(path))
        copies.append(cache.use(path, stamp_of(path)))
    with refused(CacheInUse, "3.tar'", "in use", "data.cache.max_gb", "data.window"):
        cache.fetch(shards[3], stamp_of(shards[3]))
    assert in_folder(cache) == [".tar"] * 3
    # Bytes that a caller still holds keep the copy, too: they are a mapping of the file.
    assert copies[1] is not None
    held = copies[1].read(0, 10)
    for copy in copies[:2]:
        assert copy is not None
        copy.close()
    cache.fetch(shards[3], stamp_of(shards[3]))
    assert [content(cache, path) is not None for path in shards[:4]] == [False, True, True, True]
    assert bytes(held) == Path(shards[1]).read_bytes()[:10]


def test_a_running_fetch_counts_with_the_size_of_its_shard(
    cache: NodeCache, shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    read = LocalFile.read

    def fetch_another(self: LocalFile, offset: int, size: int) -> bytes:
        if len(used) < 4:
            used.append(sum(file.stat().st_blocks * 512 for file in cache.folder.iterdir()))
            NodeCache(cache.folder, 3 * SIZE).fetch(shards[len(used)], stamp_of(shards[len(used)]))
        return read(self, offset, size)

    monkeypatch.setattr(LocalFile, "read", fetch_another)
    with refused(CacheInUse, "3.tar'", "in use"):  # three running fetches have not written anything yet
        cache.fetch(shards[0], stamp_of(shards[0]))
    assert in_folder(cache) == []


def test_room_is_not_made_where_it_is_not_to_be(cache: NodeCache, shards: list[str]) -> None:
    for path in shards[:3]:
        assert cache.fetch(path, stamp_of(path), evict=False)
    with pytest.raises(CacheFull):
        cache.fetch(shards[3], stamp_of(shards[3]), evict=False)
    assert in_folder(cache) == [".tar"] * 3


def test_a_disk_with_little_room_is_relieved_of_old_copies(
    cache: NodeCache, shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    cache.fetch(shards[0], stamp_of(shards[0]))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(9, 9, SIZE // 2))
    cache.fetch(shards[1], stamp_of(shards[1]))
    assert content(cache, shards[0]) is None


def test_what_running_fetches_have_still_to_write_is_no_free_space(
    tmp_path: Path, shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(0, 0, SIZE + SIZE // 2))
    cache = NodeCache(tmp_path / "cache", 100 * SIZE)
    cache.folder.mkdir()
    running = cache.folder / f"{0:032x}.{SIZE}.part"
    with open(running, "wb") as part:
        fcntl.flock(part, fcntl.LOCK_EX)
        with refused(CacheFull, "0.tar'", "no room for", "data.cache.dir"):
            cache.fetch(shards[0], stamp_of(shards[0]))
    cache.fetch(shards[0], stamp_of(shards[0]))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_that_fills_up_is_one_clear_error_and_leaves_nothing(
    cache: NodeCache, shards: list[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with refused(CacheFull, "no room for", "0.tar"):
        cache.fetch(shards[0], stamp_of(shards[0]))
    assert in_folder(cache) == []


def test_a_shard_that_changed_is_never_copied(cache: NodeCache, shards: list[str]) -> None:
    indexed = stamp_of(shards[0])
    os.utime(shards[0], ns=(1, 1))
    with refused(ShardChanged, "0.tar'", "was replaced"):
        cache.fetch(shards[0], indexed)
    Path(shards[0]).write_bytes(b"<html>gone</html>")
    with refused(ShardChanged, "17 bytes", "b'<html>gone</html>'"):
        cache.fetch(shards[0], indexed)
    assert in_folder(cache) == []


def test_a_shard_that_changes_while_it_is_copied_is_never_published(
    cache: NodeCache, shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = LocalFile.read
    monkeypatch.setattr(LocalFile, "read", lambda self, *at: (os.utime(shards[0], ns=(1, 1)), read(self, *at))[1])
    with pytest.raises(ShardChanged, match="was replaced"):
        cache.fetch(shards[0], stamp_of(shards[0]))
    assert in_folder(cache) == []


def _fetch_with_others(folder: Path, path: str, barrier: Any, requests: Any) -> None:
    cache = NodeCache(folder, 3 * SIZE)
    read = LocalFile.read

    def counted(self: LocalFile, offset: int, size: int) -> bytes:
        with requests.get_lock():
            requests.value += 1
        return read(self, offset, size)

    LocalFile.read = counted  # type: ignore[method-assign]
    barrier.wait()
    cache.fetch(path, stamp_of(path))
    assert content(cache, path) == Path(path).read_bytes()


def test_what_many_processes_want_is_fetched_once(cache: NodeCache, shards: list[str]) -> None:
    context = multiprocessing.get_context("fork")
    barrier, requests = context.Barrier(4), context.Value("i", 0)
    arguments = (cache.folder, shards[0], barrier, requests)
    processes = [context.Process(target=_fetch_with_others, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert requests.value == 1
    assert in_folder(cache) == [".tar"]


def _stop_half_way(folder: Path, path: str, half_way: Any) -> None:
    def read(self: LocalFile, offset: int, size: int) -> bytes:
        if offset:
            half_way.set()
            signal.pause()
        return os.pread(self.descriptor, size, offset)

    node_cache._PIECE = SIZE // 2
    LocalFile.read = read  # type: ignore[method-assign]
    NodeCache(folder, 3 * SIZE).fetch(path, stamp_of(path))


def test_whoever_comes_after_one_that_was_killed_goes_on_where_it_stopped(
    cache: NodeCache, shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = multiprocessing.get_context("fork")
    half_way = context.Event()
    process = context.Process(target=_stop_half_way, args=(cache.folder, shards[0], half_way))
    process.start()
    assert half_way.wait(60)
    assert not cache.fetch(shards[0], stamp_of(shards[0]), wait=False)  # while it lives
    process.kill()
    process.join()
    assert in_folder(cache) == [".part"]

    read, offsets = LocalFile.read, []
    monkeypatch.setattr(LocalFile, "read", lambda self, *at: (offsets.append(at[0]), read(self, *at))[1])
    assert cache.fetch(shards[0], stamp_of(shards[0]))
    assert offsets == [SIZE // 2]
    assert content(cache, shards[0]) == Path(shards[0]).read_bytes()


def test_what_is_being_fetched_is_not_removed_for_room(cache: NodeCache, shards: list[str]) -> None:
    cache.folder.mkdir()
    busy, given_up = (cache.folder / f"{number:032x}.part" for number in range(2))
    for part in (busy, given_up):
        part.write_bytes(bytes(2 * SIZE))
    with open(busy, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        cache.fetch(shards[0], stamp_of(shards[0]))
    assert busy.exists()
    assert not given_up.exists()


def test_who_waits_for_another_gets_what_that_one_published(cache: NodeCache, shards: list[str]) -> None:
    stamp = stamp_of(shards[0])
    place = cache._place(shards[0], stamp)
    cache.folder.mkdir()
    part = place.with_suffix(f".{stamp.size}.part")
    with open(part, "w+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting = threading.Thread(target=cache.fetch, args=(shards[0], stamp))
        waiting.start()
        file.write(b"published")
        os.replace(part, place)
    waiting.join(60)
    assert place.read_bytes() == b"published"


@pytest.mark.parametrize("during", [(LocalFile, "read"), (shutil, "disk_usage")], ids=["fetch", "search for room"])
def test_a_process_that_was_forked_meanwhile_does_not_keep_the_locks(
    cache: NodeCache, shards: list[str], monkeypatch: pytest.MonkeyPatch, during: tuple[Any, str]
) -> None:
    children = []
    original = getattr(*during)

    def call_and_fork(*arguments: Any) -> Any:
        if not children:
            children.append(multiprocessing.get_context("fork").Process(target=signal.pause))
            children[0].start()
        return original(*arguments)

    monkeypatch.setattr(*during, call_and_fork)
    try:
        cache.fetch(shards[0], stamp_of(shards[0]))
        with open(cache.folder / next(cache.folder.iterdir())) as copy:  # neither of the copy nor of the folder
            fcntl.flock(copy, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder = os.open(cache.folder, os.O_RDONLY)
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(folder)
    finally:
        children[0].kill()
        children[0].join()


def test_half_a_copy_is_not_continued_without_a_version(
    cache: NodeCache, shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp = Stamp(SIZE, 0)  # of a server that reports neither an etag nor a time
    monkeypatch.setattr(node_cache, "stamp_of", lambda path: stamp)
    monkeypatch.setattr(LocalFile, "stamp", lambda self: stamp)
    cache.folder.mkdir()
    part = cache._place(shards[0], stamp).with_suffix(f".{SIZE}.part")
    part.write_bytes(b"of another version")
    cache.fetch(shards[0], stamp)
    copy = cache.use(shards[0], stamp)
    assert copy is not None
    assert bytes(copy.read(0, SIZE)) == Path(shards[0]).read_bytes()


def test_a_fetch_that_fails_before_its_first_byte_leaves_nothing(
    cache: NodeCache, shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: LocalFile, offset: int, size: int) -> bytes:
        raise ConnectionError("away")

    monkeypatch.setattr(LocalFile, "read", fail)
    with pytest.raises(ConnectionError, match="away"):
        cache.fetch(shards[0], stamp_of(shards[0]))
    assert in_folder(cache) == []


def test_an_empty_part_of_a_process_that_was_killed_does_not_stay(cache: NodeCache, shards: list[str]) -> None:
    cache.folder.mkdir()
    (cache.folder / f"{0:032x}.{SIZE}.part").touch()
    cache.fetch(shards[0], stamp_of(shards[0]))
    assert in_folder(cache) == [".tar"]


def test_a_cache_on_a_disk_that_cannot_be_written_is_named(
    cache: NodeCache, shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with refused(CacheFull, str(cache.folder), "Input/output error", "data.cache.dir"):
        cache.fetch(shards[0], stamp_of(shards[0]))
    assert in_folder(cache) == []


def _as_another_user(path: Path) -> None:
    path.write_bytes(b"planted")
    if os.geteuid():
        pytest.skip("only root can give a file to another user")
    os.chown(path, 12345, 12345)


def _for_everybody(path: Path) -> None:
    path.write_bytes(b"planted")
    path.chmod(0o666)


PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda path, precious: path.symlink_to(precious),
    "dangling link": lambda path, precious: path.symlink_to(precious.with_name("new")),
    "second name of a file": lambda path, precious: path.hardlink_to(precious),
    "pipe": lambda path, precious: os.mkfifo(path),
    "socket": lambda path, precious: socket.socket(socket.AF_UNIX).bind(f"/proc/self/fd/{_folder(path)}/{path.name}"),
    "file of another user": lambda path, precious: _as_another_user(path),
    "file that others may write": lambda path, precious: _for_everybody(path),
}


def _folder(path: Path) -> int:
    return os.open(path.parent, os.O_PATH)  # the address of a socket is short


@pytest.mark.parametrize("suffix", [".tar", f".{SIZE}.part"])
@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("after", ["fetch", "touch", "search for room"])
def test_what_is_planted_in_place_of_a_copy_is_replaced_and_what_it_leads_to_is_left_alone(
    cache: NodeCache, shards: list[str], tmp_path: Path, kind: str, suffix: str, after: str
) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"not a shard")
    os.utime(precious, ns=(1, 1))
    cache.folder.mkdir()
    path, stamp = shards[0], stamp_of(shards[0])
    PLANTED[kind](cache._place(path, stamp).with_suffix(suffix), precious)
    if after == "touch":
        cache.touch(path, stamp)
    elif after == "search for room":
        for other in shards[1:4]:
            cache.fetch(other, stamp_of(other))
    with cache.fetch_open(path, stamp) as copy:
        assert copy.read() == Path(path).read_bytes()
        assert os.fstat(copy.fileno()).st_mode & 0o7777 == 0o600
    assert precious.read_bytes() == b"not a shard"
    assert precious.stat().st_mtime_ns == 1 or kind == "second name of a file"
    assert not precious.with_name("new").exists()
    assert len(in_folder(cache)) == (3 if after == "search for room" else 1)


@pytest.mark.parametrize("suffix", [".tar", f".{SIZE}.part"])
def test_a_folder_in_place_of_a_copy_is_named(cache: NodeCache, shards: list[str], suffix: str) -> None:
    place = cache._place(shards[0], stamp_of(shards[0])).with_suffix(suffix)
    place.mkdir(parents=True)
    with refused(CacheFull, str(place), "", "data.cache.dir"):
        cache.fetch_open(shards[0], stamp_of(shards[0]))


def test_a_huge_planted_link_or_folder_makes_no_copy_go(cache: NodeCache, shards: list[str], tmp_path: Path) -> None:
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 40)
    os.utime(tmp_path / "huge", (2**31, 2**31))
    cache.fetch(shards[0], stamp_of(shards[0]))
    (cache.folder / f"{1:032x}.tar").symlink_to(tmp_path / "huge")
    cache.fetch(shards[1], stamp_of(shards[1]))
    assert content(cache, shards[0]) is not None
    assert (tmp_path / "huge").exists()


@pytest.mark.parametrize("mode", [0o1777, 0o775, 0o777])
def test_in_a_folder_that_others_may_write_the_cache_is_a_folder_of_this_user(
    tmp_path: Path, shards: list[str], mode: int
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    planted = NodeCache(tmp_path / "none", SIZE)._place(shards[0], stamp_of(shards[0]))
    (shared / planted.name).write_bytes(b"planted")
    cache = NodeCache(shared, 3 * SIZE)
    cache.fetch(shards[0], stamp_of(shards[0]))
    assert content(cache, shards[0]) == Path(shards[0]).read_bytes()
    assert cache.folder == shared / f"dtrain-{os.geteuid()}"
    assert cache.folder.stat().st_mode & 0o7777 == 0o700
    assert NodeCache(cache.folder, None).folder == cache.folder  # as a worker finds it
    cache.folder.chmod(0o777)
    with refused(CacheFull, str(cache.folder), "others may write", "data.cache.dir"):
        cache.fetch(shards[1], stamp_of(shards[1]))
    with refused(CacheFull, str(cache.folder), "others may write", "data.cache.dir"):
        cache.use(shards[0], stamp_of(shards[0]))


def _use_as(user: int, folder: Path, path: str, results: Any) -> None:
    os.setgid(user)
    os.setuid(user)
    cache = NodeCache(folder, 3 * SIZE)
    with cache.fetch_open(path, stamp_of(path)) as copy:
        results.put((copy.read() == Path(path).read_bytes(), cache.folder.name))


def _folder_of_another_user(place: Path, own: Path) -> None:
    place.mkdir()
    if os.geteuid():
        pytest.skip("only root can give a folder to another user")
    os.chown(place, 12345, 12345)


@pytest.mark.parametrize(
    "plant",
    [Path.symlink_to, lambda place, own: os.mkfifo(place), lambda place, own: place.touch(), _folder_of_another_user],
    ids=["link to a folder of this user", "pipe", "file", "folder of another user"],
)
def test_what_is_planted_in_place_of_the_users_folder_is_refused(
    tmp_path: Path, shards: list[str], plant: Callable[[Path, Path], object]
) -> None:
    own, shared = tmp_path / "own", tmp_path / "shared"
    own.mkdir()
    shared.mkdir()
    shared.chmod(0o1777)
    plant(shared / f"dtrain-{os.geteuid()}", own)
    with refused(CacheFull, str(shared), "", "data.cache.dir"):
        NodeCache(shared, 3 * SIZE).fetch(shards[0], stamp_of(shards[0]))
    assert not list(own.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become several users")
def test_several_users_of_a_node_have_a_cache_each_in_one_folder(shards: list[str]) -> None:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:  # others may not enter the folders of pytest
        folder = Path(name)
        folder.chmod(0o1777)
        path = str(shutil.copy(shards[0], folder / "x.tar"))
        results = context.SimpleQueue()
        for user in (12345, 12346, 12345):
            process = context.Process(target=_use_as, args=(user, folder, path, results))
            process.start()
            process.join(60)
            assert process.exitcode == 0
            assert results.get() == (True, f"dtrain-{user}")


@pytest.mark.slow
def test_a_small_disk_holds_the_cache_with_open_readers_concurrent_fetches_and_kills(tmp_path: Path) -> None:
    isolated = ["unshare", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*isolated, "mount", "-t", "tmpfs", "none", tmp_path]).returncode:
        pytest.skip("needs a user namespace in which it may mount a tmpfs")
    program = [*isolated, sys.executable, "-m", "tests.data.shards.small_disk", tmp_path, "4"]
    result = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    counts = json.loads(result.stdout)
    assert counts["limit"] / 2 < counts["most"] <= counts["limit"]
    assert min(counts["kills"], counts["fetched"], counts["read"], counts["in_use"]) > 0, counts


def test_a_copy_of_a_url_survives_failures_of_the_server(
    cache: NodeCache, server: FileServer, shards: list[str]
) -> None:
    url = server.url("0.tar") + "?token=secret"
    server.failures = [503, "short", 500]
    cache.fetch(url, stamp_of(url))
    assert content(cache, url) == Path(shards[0]).read_bytes()


def test_a_server_without_ranges_is_copied_as_a_whole(cache: NodeCache, server: FileServer, shards: list[str]) -> None:
    server.ranges = False
    cache.fetch(server.url("1.tar"), stamp_of(server.url("1.tar")))
    assert content(cache, server.url("1.tar")) == Path(shards[1]).read_bytes()


def test_a_page_in_place_of_a_shard_is_refused_with_what_it_says(cache: NodeCache, server: FileServer) -> None:
    stamp = stamp_of(server.url("0.tar"))
    server.page = b"<html>Sign in to the portal</html>"
    with refused(ShardChanged, key="", got="b'<html>Sign in to the portal</html>'"):
        cache.fetch(server.url("0.tar"), stamp)


def test_bytes_are_compared_with_the_md5_that_a_server_tells(
    cache: NodeCache, shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = "md5", hashlib.md5(Path(shards[0]).read_bytes()).digest()
    monkeypatch.setattr(LocalFile, "digest", right, raising=False)
    assert cache.fetch(shards[0], stamp_of(shards[0]))
    with refused(ShardChanged, "1.tar'", right[1].hex(), "md5"):
        cache.fetch(shards[1], stamp_of(shards[1]))


@pytest.mark.parametrize(
    ("storage", "network", "far"),
    [
        ("auto", {"data"}, True),
        ("auto", set(), False),
        ("auto", {"data", "cache"}, False),  # nothing would be gained
        ("fast", {"data"}, False),
        ("slow", set(), True),
        ("slow", {"data", "cache"}, True),
    ],
)
def test_files_are_copied_where_that_helps(
    storage: str, network: set[str], far: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("data", "cache"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(node_cache, "is_network", lambda folder: Path(folder).name in network)
    policy = CachePolicy(storage, str(tmp_path / "cache"))
    assert policy.applies_to(str(tmp_path / "data" / "x.tar")) is far
    assert policy.applies_to("s3://bucket/x.tar")


def test_a_cache_that_is_not_there_yet_lies_where_it_will_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(node_cache, "is_network", lambda folder: asked.append(Path(folder)) or len(asked) == 1)
    assert CachePolicy(folder=str(tmp_path / "not" / "there")).applies_to("/data/x.tar")
    assert asked == [Path("/data"), tmp_path]


def test_the_cache_is_in_the_users_own_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path))
    monkeypatch.setenv("HOME", "/home/me")
    assert CachePolicy().cache.folder == tmp_path / "shards"
    assert CachePolicy(folder="~/scratch").cache.folder == Path("/home/me/scratch")
    assert not list(tmp_path.iterdir())


def test_a_policy_travels_to_workers(tmp_path: Path) -> None:
    policy = CachePolicy("slow", str(tmp_path), 1.5, 2)
    assert policy.cache.max_bytes == 1_500_000_000
    assert pickle.loads(pickle.dumps(policy)) == policy


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"storage": "nfs"}, ["data.storage", "got 'nfs'", "auto, fast, slow"]),
        ({"max_gb": 0.0}, ["data.cache.max_gb", "got 0.0", "number above 0"]),
    ],
)
def test_an_impossible_policy_is_refused_with_what_is_possible(options: dict[str, object], names: list[str]) -> None:
    with refused(ValueError, *names):
        CachePolicy(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "network"),
    [("nfs4", True), ("lustre", True), ("fuse.gcsfuse", True), ("ext4", False), ("overlay", False), ("fuseblk", False)],
)
def test_the_type_of_the_mount_decides(
    kind: str, network: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    listing = tmp_path / "mountinfo"
    listing.write_text(
        "22 27 0:999 / /proc rw,relatime - proc proc rw\n"
        f"36 35 {number} / /with\\040space rw,noatime master:1 shared:2 - {kind} host:/export rw,vers=4.2\n"
    )
    monkeypatch.setattr(node_cache, "_MOUNTS", listing)
    node_cache.is_network.cache_clear()
    assert node_cache.is_network(tmp_path) is network
    node_cache.is_network.cache_clear()


def test_what_cannot_be_known_is_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_cache, "_MOUNTS", tmp_path / "none")
    node_cache.is_network.cache_clear()
    assert not node_cache.is_network(tmp_path)
    assert not node_cache.is_network(tmp_path / "not" / "there")
    node_cache.is_network.cache_clear()

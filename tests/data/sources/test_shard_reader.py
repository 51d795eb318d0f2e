"""Ranges of shards, joint reads, and copies in the node cache."""

from __future__ import annotations

import os
import resource
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtrain.data import Mixture, ShardDataset, ShardLoader, WorkerOptions
from dtrain.data.fields.parse import parse_fields
from dtrain.data.shards.node_cache import CachePolicy
from dtrain.data.shards.shard_file import LocalFile, ShardChanged, Stamp, stamp_of
from dtrain.data.sources import prefetcher, shard_reader
from dtrain.data.sources.random_offset import RandomOffsetSource
from dtrain.data.sources.shard_reader import ShardReader, joint_reads
from dtrain.data.sources.shard_source import ShardSource
from tests.refusals import refused
from tests.shards import LABEL, make_loader, write_numbered, write_patterns, write_tar

SIZE = 50_000


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    return write_patterns(tmp_path, 3, SIZE)


def stored(path: str, offset: int, size: int) -> bytes:
    return Path(path).read_bytes()[offset : offset + size]


@pytest.mark.parametrize(("offset", "size"), [(0, 10), (17, 1000), (0, SIZE), (SIZE - 1, 1), (5, 0)])
def test_a_range_is_what_the_file_holds_there(shards: list[str], offset: int, size: int) -> None:
    reader = ShardReader(shards)
    for shard, path in enumerate(shards):
        assert reader.read(shard, offset, size) == stored(path, offset, size)
    reader.close()


@pytest.mark.parametrize(
    ("offsets", "sizes", "reads"),
    [
        pytest.param([512, 2048], [1000, 1], 1, id="side by side"),
        pytest.param([2048, 512], [1, 1000], 1, id="in another order than stored"),
        pytest.param([512], [3], 1, id="one"),
        pytest.param([512, 1024], [0, 5], 1, id="an empty one"),
        pytest.param([0, 40_000], [100, 100], 2, id="far apart"),
    ],
)
def test_members_that_lie_close_are_one_read(
    shards: list[str], monkeypatch: pytest.MonkeyPatch, offsets: list[int], sizes: list[int], reads: int
) -> None:
    calls = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *arguments: calls.append(arguments) or pread(*arguments))
    ((start,), (length,)) = joint_reads(np.array([offsets]), np.array([sizes]))
    payloads = ShardReader(shards).members(1, offsets, sizes, start, length)
    assert [bytes(payload) for payload in payloads] == [
        stored(shards[1], offset, size) for offset, size in zip(offsets, sizes, strict=True)
    ]
    assert len(calls) == reads


def test_a_file_system_that_gives_less_than_was_asked_is_asked_again(
    shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, offset: pread(descriptor, min(size, 100), offset))
    assert ShardReader(shards).read(0, 30, 1234) == stored(shards[0], 30, 1234)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to see which files are open")
def test_no_more_files_stay_open_than_allowed_and_none_after_close(shards: list[str]) -> None:
    def open_files() -> list[str]:
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sorted(os.readlink(link) for link in links if os.path.islink(link) and os.readlink(link) in shards)

    reader = ShardReader(shards, max_open=2)
    for shard in (0, 1, 0, 2):
        reader.read(shard, 0, 1)
    assert open_files() == [shards[0], shards[2]]  # the one used longest ago was closed
    reader.close()
    assert open_files() == []
    assert reader.read(1, 3, 2) == stored(shards[1], 3, 2)
    reader.close()


def test_readers_leave_room_for_other_files(shards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, most in ((1_000_000, 512), (resource.RLIM_INFINITY, 512), (256, 128), (1, 1)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: (limit, limit))
        assert ShardReader(shards)._max_open == most


def test_a_shard_that_vanished_is_named_with_the_remedy(shards: list[str]) -> None:
    os.unlink(shards[2])
    with refused(ShardChanged, "/2.tar'", "offset 512", "start the run again", "No such file"):
        ShardReader(shards).read(2, 512, 10)


def test_a_shard_that_shrank_while_open_is_named_with_its_size(shards: list[str]) -> None:
    reader = ShardReader(shards)
    reader.read(0, 0, 10)
    os.truncate(shards[0], 600)
    assert reader.read(0, 590, 10) == bytes((590 + place) % 251 for place in range(10))
    for offset in (595, 5000):
        with refused(ShardChanged, "/0.tar'", "600 bytes", "", offset + 10):
            reader.read(0, offset, 10)


def make_reader(shards: list[str], folder: Path, kind: str = "slow", max_gb: float = 1.0) -> ShardReader:
    stamps = [stamp_of(path) for path in shards]
    return ShardReader(shards, stamp=stamps.__getitem__, policy=CachePolicy(kind, str(folder), max_gb))


def test_a_shard_that_was_replaced_by_one_of_the_same_size_is_noticed(shards: list[str], tmp_path: Path) -> None:
    for turn, kind in enumerate(("fast", "slow"), start=1):
        reader = make_reader(shards, tmp_path / kind, kind)
        Path(shards[1]).write_bytes(bytes(SIZE))
        os.utime(shards[1], ns=(turn, turn))
        with refused(ShardChanged, "/1.tar'", "was replaced"):
            reader.read(1, 0, 10)
        assert reader.read(0, 7, 10) == stored(shards[0], 7, 10)
        reader.close()


def test_bytes_that_were_written_into_an_open_shard_are_noticed(shards: list[str], tmp_path: Path) -> None:
    reader = make_reader(shards, tmp_path / "cache", "fast")
    reader.read(0, 0, 10)
    reader.read(1, 0, 10)
    with open(shards[1], "r+b") as file:
        file.write(bytes(SIZE))
    os.utime(shards[1], ns=(1, 1))
    reader.check(0)
    with refused(ShardChanged, "/1.tar'", "was replaced"):
        reader.check(1)
    with refused(ShardChanged, "/1.tar'", "was replaced"):
        reader.expect(lambda most: np.arange(2))


def write_tokens(path: Path, token: int) -> None:
    """120 rows of 2,048 equal tokens, written into the same file if there is one."""
    rows = [(f"{n:03d}", {"tok": np.full(2048, token, np.uint16).tobytes()}) for n in range(120)]
    other = write_tar(path.with_name("other"), rows)
    path.touch()
    path.write_bytes(Path(other).read_bytes())
    os.utime(path, ns=(token, token))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("loader", 0),
        ("loader", 512),
        ("loader", -512),
        ("loader with a worker", 0),
        ("loader for evaluation", 0),
        ("mixture", 0),
        ("dataset", 0),
        ("random_offset", 0),
    ],
)
def test_a_shard_that_is_overwritten_while_it_is_open_ends_the_run_although_all_samples_are_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, change: int
) -> None:
    for name in ("_SECONDS_BETWEEN_CHECKS", "_DURATIONS_BETWEEN_CHECKS"):
        monkeypatch.setattr(shard_reader, name, 0)
    path = tmp_path / "x.tar"
    write_tokens(path, 1000)
    fields = {"tok": {"name": "tokens", "role": "id", "dtype": "uint16", "length": 2048}}
    options: dict[str, Any] = {"num_workers": int("worker" in kind)}
    if "evaluation" in kind:
        options |= {"shuffle": "none", "lanes": 2}
    batches: Iterator[Any]
    if kind == "dataset":
        batches = iter(ShardDataset(str(path), fields))
    else:
        source: Any = Mixture({"a": [str(path)]}, {"a": 1}) if kind == "mixture" else str(path)
        if kind == "random_offset":
            source = RandomOffsetSource.from_shards(ShardSource.build(source, parse_fields(fields)))
        batches = iter(make_loader(source, fields, workers=WorkerOptions(prefetch=1), **options))
    for _ in range(3):
        assert (np.array(next(batches)["tokens"]) == 1000).all()
    write_tokens(path, 2)
    if change:
        os.truncate(path, path.stat().st_size + change)
        os.utime(path, ns=(1000, 1000))
    with refused(ShardChanged, "x.tar", "", "Restore the old one"):
        deque(batches, maxlen=0)


def test_open_shards_are_compared_every_two_seconds_and_less_often_where_that_takes_long(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looks = 100.0, 0

    def stamp(self: LocalFile) -> Stamp:
        nonlocal now, looks
        looks, now = looks + 1, now + cost
        return real(self)

    def seconds_until_the_next_look() -> int:
        nonlocal now
        before, begin = looks, now
        while looks == before:
            now += 1
            reader.read(0, 0, 1)
        return int(now - begin)

    real, cost = LocalFile.stamp, 0.0
    monkeypatch.setattr(LocalFile, "stamp", stamp)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    reader = make_reader(shards, tmp_path / "cache", "fast")
    reader.read(0, 0, 1)
    assert seconds_until_the_next_look() == 2
    assert seconds_until_the_next_look() == 2
    cost = 0.5
    seconds_until_the_next_look()
    assert 98 <= seconds_until_the_next_look() <= 102


def test_slow_storage_is_read_once_in_large_pieces(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *arguments: reads.append(arguments) or pread(*arguments))
    reader, second = (make_reader(shards, tmp_path / "cache") for _ in range(2))
    for offset in (0, 40_000, 17):
        assert reader.read(1, offset, 1000) == second.read(1, offset, 1000) == stored(shards[1], offset, 1000)
    assert [arguments[1:] for arguments in reads] == [(SIZE, 0)]
    reader.close()
    second.close()


def test_samples_of_a_large_shard_do_not_wait_for_its_copy(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_reader, "_SMALL_SHARD", SIZE - 1)
    reader = make_reader(shards, tmp_path / "cache")
    assert reader.read(0, 100, 10) == stored(shards[0], 100, 10)
    assert not list((tmp_path / "cache").glob("*"))
    CachePolicy("slow", str(tmp_path / "cache")).cache.fetch(shards[0], stamp_of(shards[0]))
    monkeypatch.setattr(os, "pread", None)
    assert reader.read(0, 200, 10) == stored(shards[0], 200, 10)
    reader.close()


def test_a_full_cache_disk_is_told_once_and_samples_are_read_where_they_lie(shards: list[str], tmp_path: Path) -> None:
    reader = make_reader(shards, tmp_path / "cache", max_gb=1e-9)
    with pytest.warns(UserWarning, match=r"no room for .* Until then, samples are read one by one"):
        assert reader.read(0, 100, 10) == stored(shards[0], 100, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reader.read(1, 200, 10) == stored(shards[1], 200, 10)
    reader.close()


@pytest.mark.parametrize("large", [False, True])
def test_a_cache_that_others_may_write_is_told_once_and_samples_are_read_where_they_lie(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    monkeypatch.setattr(shard_reader, "_SMALL_SHARD", SIZE - 1 if large else SIZE)
    planted = make_reader(shards, tmp_path / "cache")
    cache = planted._policy.cache  # type: ignore[union-attr]
    cache.fetch(shards[0], stamp_of(shards[0]))
    cache._place(shards[0], stamp_of(shards[0])).write_bytes(bytes(SIZE))
    reader = make_reader(shards, tmp_path / "cache")
    assert reader._policy.cache.folder == cache.folder  # type: ignore[union-attr]
    cache.folder.chmod(0o777)
    with pytest.warns(UserWarning, match=r"others may write.*data\.cache\.dir") as caught:
        read = [reader.read(shard, 7, 10) for shard in range(3)]
    assert len(caught) == 1
    assert read == [stored(path, 7, 10) for path in shards]
    reader.close()


def test_what_is_expected_is_copied_before_it_is_read(shards: list[str], tmp_path: Path) -> None:
    reader = make_reader(shards, tmp_path / "cache")
    reader.expect(lambda most: np.array([2, 0])[:most])
    cache = CachePolicy("slow", str(tmp_path / "cache")).cache
    wait_until(lambda: all(cache.touch(shards[number], stamp_of(shards[number])) for number in (2, 0)))
    assert not cache.touch(shards[1], stamp_of(shards[1]))
    reader.close()


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # the time limit of the test is the only one
        time.sleep(0.005)


def test_sources_of_a_mixture_share_threads_and_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shard_reader, "_MAX_OPEN", 24)
    sources = {f"s{number}": write_numbered(tmp_path / str(number), (4,) * 6) for number in range(12)}
    counts = {}
    opened = []
    for storage in ("fast", "slow"):
        policy = CachePolicy(storage, str(tmp_path / "copies"), max_gb=0.1)
        loader = ShardLoader(Mixture(sources), LABEL, global_batch_size=48, num_workers=0, policy=policy)
        batches = loader.epoch(0)
        for _ in range(6):
            next(batches)
            loader.commit()
            if storage == "fast":  # else the prefetcher has files open, too
                opened.append(sum(path.startswith(str(tmp_path)) for path in _open_files()))
        counts[storage] = sum(each.name == "prefetch" for each in threading.enumerate())
        loader.close()
    assert 0 < max(opened) <= 24
    assert counts["slow"] - counts["fast"] <= prefetcher._THREADS


def _open_files() -> list[str]:
    """Paths of the files that this process has open."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


def test_room_is_shared_by_the_processes_of_the_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert CachePolicy.from_config("auto", str(tmp_path), 2.0) == CachePolicy("auto", str(tmp_path), 2.0, sharers=4)
    assert CachePolicy.from_config("auto", str(tmp_path), 2.0).cache.max_bytes == 2e9

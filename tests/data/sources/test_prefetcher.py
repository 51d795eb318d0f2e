"""Shards that are fetched ahead: in which order, how many, and what happens if that fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from dtrain.data.shards.node_cache import CacheFull, CachePolicy
from dtrain.data.shards.shard_file import Stamp
from dtrain.data.sources import prefetcher as module
from dtrain.data.sources.prefetcher import Prefetcher, Wanted


class Cache:
    """Stands for a cache: notes what is fetched; some shards are there, one cannot be had, one finds no room."""

    max_bytes = 100

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.done = threading.Semaphore(0)

    def touch(self, path: str, stamp: Stamp) -> bool:
        if path == "there":
            self.done.release()
        return path == "there"

    def fetch(self, path: str, stamp: Stamp, wait: bool) -> bool:
        assert not wait
        self.fetched.append(path)
        self.done.release()
        if path == "gone":
            raise FileNotFoundError(path)
        if path == "full":
            raise CacheFull("no room.")
        return True

    def wait_for(self, number: int) -> None:
        for _ in range(number):
            self.done.acquire()


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setattr(module, "_THREADS", 1)
    return Cache()


@pytest.fixture
def prefetcher(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prefetcher]:
    policy = CachePolicy("slow", sharers=2)
    object.__setattr__(policy, "cache", cache)
    prefetcher = Prefetcher(policy)
    yield prefetcher
    prefetcher.close()


def wanted(*paths: str, size: int = 10) -> list[Wanted]:
    return [(path, Stamp(size, 0)) for path in paths]


def test_the_nearest_come_first_and_what_fails_is_passed_over(cache: Cache, prefetcher: Prefetcher) -> None:
    prefetcher.want(wanted("a", "there", "gone", "b"))
    cache.wait_for(4)
    assert cache.fetched == ["a", "gone", "b"]


def test_no_more_than_this_processes_part_of_the_room_is_fetched(cache: Cache, prefetcher: Prefetcher) -> None:
    prefetcher.want(wanted(*"abcdefgh"))  # 50 of 100 bytes
    cache.wait_for(5)
    prefetcher.want(wanted("last"))
    cache.wait_for(1)
    assert cache.fetched == [*"abcde", "last"]


def test_a_full_disk_is_told_and_nothing_more_is_fetched_until_the_next_request(
    cache: Cache, prefetcher: Prefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(module.warnings, "warn", lambda text, stacklevel: told.append(text))
    prefetcher.want(wanted("full", "a", "b"))
    cache.wait_for(1)
    while not told:
        pass
    prefetcher.want(wanted("c"))
    cache.wait_for(1)
    assert cache.fetched == ["full", "c"]
    assert told == ["no room. Until then, samples are read one by one."]


def test_readers_of_one_process_are_served_in_turn_and_share_its_part(cache: Cache) -> None:
    policy = CachePolicy("slow", sharers=2)
    object.__setattr__(policy, "cache", cache)
    both = Prefetcher(policy, readers=2)  # 25 of 100 bytes for each
    with both._changed:  # nothing is fetched before both have asked
        assert both.want(wanted("a1", "a2", "a3"), 1) == 2
        assert both.want(wanted("b1", "b2", "b3"), 2) == 2
    cache.wait_for(4)
    assert cache.fetched == ["a1", "b1", "a2", "b2"]
    both.close(1)
    assert not both.is_closed
    both.want(wanted("c"), 2)
    cache.wait_for(1)
    assert cache.fetched[4:] == ["c"]
    both.close(2)
    assert both.is_closed

"""The same batches from a server as from a folder, whatever the server does meanwhile; slow storage hardly slower."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from multiprocessing import Value
from pathlib import Path

import numpy as np
import pytest

from dtrain import urls
from dtrain.data import BadShards, ShardLoader
from dtrain.data.loading import workers
from dtrain.data.shards import shard_file
from dtrain.data.shards.node_cache import CacheFull, CachePolicy
from dtrain.data.shards.shard_file import ShardChanged
from dtrain.data.sources import prefetcher, shard_reader
from tests.http_server import FileServer, serving
from tests.refusals import refused
from tests.shards import UNEVEN, make_loader, read_epoch, write_numbered, write_tar

aiohttp = pytest.importorskip("aiohttp", reason="http needs aiohttp: pip install 'dtrain[http]'")
URLS = "shard-{000..005}.tar"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(urls, "_FIRST_PAUSE", 0.01)
    return tmp_path / "cache"


@pytest.fixture
def server(cache: Path, shards: list[str]) -> Iterator[FileServer]:
    with serving(Path(shards[0]).parent) as server:
        yield server


def keys(loader: ShardLoader) -> list[list[str]]:
    try:
        return [batch.sample_keys for step in read_epoch(loader) for batch in step]
    finally:
        loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_behind_a_server_give_the_batches_of_local_ones(
    server: FileServer, shards: list[str], workers: int
) -> None:
    server.failures = [503, "short", "good", 500] * 3
    far, near = make_loader(server.url(URLS), num_workers=workers), make_loader(shards)
    assert far.index.fingerprint == near.index.fingerprint
    assert keys(far) == keys(near)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_list_behind_a_server_names_shards_in_its_folder(
    cache: Path, shards: list[str], tmp_path: Path, ranges: bool
) -> None:
    folder = Path(shutil.copytree(Path(shards[0]).parent, tmp_path / "some"))
    (folder / "shards.txt").write_text("# all\nshard-{000..004}.tar\nshard-005.tar\n")
    with serving(folder) as server:
        server.ranges = ranges
        assert keys(make_loader(f"@{server.url('shards.txt')}")) == keys(make_loader(shards))
        with refused(FileNotFoundError, "gone.txt", "does not exist"):
            make_loader(f"@{server.url('gone.txt')}")


def test_shards_that_a_server_does_not_have_or_that_are_cut_are_left_out(
    cache: Path, shards: list[str], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(Path(shards[0]).parent, tmp_path / "some"))
    os.unlink(folder / "shard-004.tar")
    os.truncate(folder / "shard-002.tar", 3_000)
    with serving(folder) as some:
        with pytest.warns(UserWarning, match=r"2 of 6 shards left out"):
            loader = make_loader(some.url(URLS), bad_shards=BadShards("skip", 2))
        assert list(loader.bad_shards[""]) == ["shard-002.tar", "shard-004.tar"]
        assert "does not exist (HTTP 404)" in loader.bad_shards[""]["shard-004.tar"]
        kept = [shard for shard in shards if not shard.endswith(("2.tar", "4.tar"))]
        assert keys(loader) == keys(make_loader(kept))


def test_a_server_without_ranges_is_good_enough(server: FileServer, shards: list[str]) -> None:
    server.ranges = False
    assert keys(make_loader(server.url(URLS))) == keys(make_loader(shards))


@pytest.mark.filterwarnings("ignore:the cache")
def test_a_server_without_ranges_needs_a_cache_with_room(server: FileServer, cache: Path) -> None:
    server.ranges = False
    with refused(CacheFull, "/shard-00", "no room for", "data.cache.max_gb", "data.cache.dir"):
        keys(make_loader(server.url(URLS), policy=CachePolicy(folder=str(cache / "small"), max_gb=1e-9)))


def test_samples_come_one_by_one_where_there_is_no_room_for_copies(
    server: FileServer, shards: list[str], cache: Path
) -> None:
    policy = CachePolicy(folder=str(cache / "small"), max_gb=1e-9)
    with pytest.warns(UserWarning, match="no room for"):
        assert keys(make_loader(server.url(URLS), policy=policy)) == keys(make_loader(shards))
    assert not list((cache / "small").glob("*"))


@pytest.mark.filterwarnings("ignore:the cache")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("is_longer", [False, True])
def test_a_shard_that_is_replaced_while_it_is_read_in_place_ends_the_run(
    server: FileServer, tmp_path: Path, cache: Path, workers: int, is_longer: bool
) -> None:
    """Values of one type and shape fit the old index, so none of them would be a bad sample."""

    def write(values: range) -> None:
        samples = [(f"{number:03d}", {"cls": str(value).encode()}) for number, value in enumerate(values)]
        write_tar(tmp_path / "data" / "long.tar", samples)

    write(range(100, 400))
    policy = CachePolicy(folder=str(cache / "small"), max_gb=1e-9)
    loader = make_loader(server.url("long.tar"), policy=policy, num_workers=workers, shuffle="none")
    read: list[int] = []
    with refused(ShardChanged, server.url("long.tar"), "ETag", "Restore the old one"):
        for batch in loader:
            if not read:
                write(range(500, 900 if is_longer else 800))
            read += batch["label"].tolist()
    loader.close()
    assert read == list(range(100, 100 + len(read)))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_start_reads_the_shards_once(server: FileServer, shards: list[str], workers: int) -> None:
    keys(make_loader(server.url(URLS), num_workers=workers))
    assert server.sent == sum(os.path.getsize(path) for path in shards)


def test_a_cache_without_room_for_all_shards_keeps_what_fits_and_copies_of_others(
    server: FileServer, shards: list[str], cache: Path
) -> None:
    size = 12288  # of a shard, in blocks of 4096
    assert {os.path.getsize(path) for path in shards} <= {10240, 20480}
    policy = CachePolicy(folder=str(cache / "small"), max_gb=3 * size / 1e9)
    make_loader(server.url("shard-003.tar"), policy=policy)
    (of_another,) = (cache / "small").iterdir()
    make_loader(server.url(URLS), policy=policy)
    assert of_another.exists()
    assert sum(file.stat().st_blocks * 512 for file in (cache / "small").iterdir()) <= 3 * size


def test_of_large_members_only_the_headers_are_read(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_file, "_MAX_GAP", 8 << 10)
    monkeypatch.setattr(shard_file, "_PIECE", 32 << 10)
    monkeypatch.setattr(shard_file, "_HEADERS", 1 << 10)
    path = write_tar(tmp_path / "data" / "large.tar", [(f"{n:03d}", {"bin": bytes(400_000)}) for n in range(10)])
    make_loader(server.url("large.tar"), {"bin": {"name": "x", "role": "bytes"}})
    assert server.sent < 0.2 * os.path.getsize(path)


def test_a_disk_that_fills_up_does_not_end_the_run(
    server: FileServer, shards: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".part"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(
        UserWarning, match=r"no room for .* GB free, .*data\.cache\.max_gb .*data\.cache\.dir .*one by one"
    ):
        assert keys(make_loader(server.url(URLS))) == keys(make_loader(shards))
    assert not list((cache / "shards").iterdir())


def test_ranks_of_a_node_fetch_each_shard_once(server: FileServer) -> None:
    ranks = [make_loader(server.url(URLS), rank=rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        keys(rank)
    assert [server.requests[f"shard-{number:03d}.tar"] for number in range(6)] == [1] * 6


def test_a_shard_that_vanishes_or_is_replaced_is_named_without_secrets(
    server: FileServer, shards: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetcher.Prefetcher, "want", lambda self, *_: 0)
    for change, message in (
        (lambda path: os.unlink(path), r"shard-004\.tar does not exist"),
        (lambda path: path.write_bytes(b"<html>"), r"has 6 bytes and starts with b'<html>'"),
    ):
        loader = make_loader(f"{server.url('shard-004.tar')}?token=secret", shuffle="none")
        shutil.rmtree(cache / "shards")
        change(Path(shards[4]))
        with pytest.raises(ShardChanged, match=message) as caught:
            keys(loader)
        assert "secret" not in str(caught.value)
        write_numbered(Path(shards[0]).parent, UNEVEN)


def test_pack_index_knows_urls(server: FileServer, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dtrain.pack import __main__ as pack

    assert pack.main(["index", server.url(URLS)]) == 0
    assert "shards: 6, samples: 47" in capsys.readouterr().out
    assert not (cache / "shards").exists()
    before = server.requests.total()
    make_loader(server.url(URLS))
    assert server.requests.total() == before


def test_slow_storage_needs_few_reads_and_no_sample_waits_for_its_own(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_numbered(tmp_path / "slow", [100] * 12)
    near = keys(make_loader(paths, global_batch_size=64, policy=CachePolicy("fast")))
    reads = Value("i", 0)
    slow: set[int] = set()
    real_open, real_pread = os.open, os.pread

    def delay() -> None:
        time.sleep(0.005)
        with reads.get_lock():
            reads.value += 1

    def slow_open(path: str, *arguments: int) -> int:
        descriptor = real_open(path, *arguments)
        slow.discard(descriptor)
        if str(path).startswith(str(tmp_path / "slow")):
            delay()
            slow.add(descriptor)
        return descriptor

    def slow_pread(descriptor: int, size: int, offset: int) -> bytes:
        if descriptor in slow:
            delay()
        return real_pread(descriptor, size, offset)

    monkeypatch.setattr(os, "open", slow_open)
    monkeypatch.setattr(os, "pread", slow_pread)
    far = make_loader(paths, global_batch_size=64, num_workers=2, policy=CachePolicy("slow"))
    reads.value = 0
    assert keys(far) == near
    assert reads.value <= 0.05 * 1200


def test_workers_are_told_the_shards_of_their_rank_up_to_the_next_epochs_first(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[set[int]] = []

    def expect(self: shard_reader.ShardReader, ahead: Callable[[int], np.ndarray], at_once: int | None) -> None:
        told.append(set(ahead(1000).tolist()))
        assert at_once == 2 * 2  # half of the lanes, with a shuffle window each

    monkeypatch.setattr(shard_reader.ShardReader, "expect", expect)
    monkeypatch.setattr(workers, "LOCATED_TOGETHER", 12)
    paths = write_numbered(tmp_path / "data", [10] * 40)
    loader = make_loader(paths, global_batch_size=12, lanes=4, window=2, rank=1, world_size=2)
    read: list[set[int]] = []
    for epoch in range(2):
        for batch in itertools.islice(loader.epoch(epoch), None if epoch == 0 else 4):
            loader.commit()
            read.append({int(key[6:9]) for key in batch.sample_keys if key})
            assert read[-1] <= told[-1]
    loader.close()
    steps = len(read) - 4
    assert len(set().union(*read[:steps])) < 30  # a rank's share of 40, and the edges of its lanes
    assert set().union(*read[:steps]) <= told[0]
    assert set().union(*read[steps:]) <= told[steps // 2 - 1]

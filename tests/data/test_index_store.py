"""Indexes are kept where that is allowed, built again when the shard changed, and never believed when damaged."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import safetensors.numpy

from dtrain.data import index_store, read_ahead
from dtrain.data.index_store import load_or_build, write
from dtrain.data.shard_error import ShardError
from dtrain.data.tar_index import ShardIndex, index_tar
from tests.data.http_for_tests import FileServer, serving
from tests.data.tars import tar_bytes, write_shard

ARRAYS = ("key_bytes", "key_starts", "member_sample", "member_extension", "member_offset", "member_size")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return write_shard(tmp_path / "data" / "x.tar", 5)


@pytest.fixture
def read_only(shard: Path) -> Iterator[Path]:
    shard.parent.chmod(0o555)
    yield shard
    shard.parent.chmod(0o755)


def no_walk(path: str, *others: object) -> NoReturn:
    raise AssertionError(f"{path} was indexed again")


def assert_equal(index: ShardIndex, other: ShardIndex) -> None:
    for name, value in vars(other).items():
        if name in ARRAYS:
            assert getattr(index, name).dtype == value.dtype
            np.testing.assert_array_equal(getattr(index, name), value)
        else:
            assert getattr(index, name) == value


def test_second_look_reads_the_index_beside_the_shard(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = load_or_build(str(shard))
    assert sorted(os.listdir(shard.parent)) == ["x.tar", "x.tar.idx"]
    monkeypatch.setattr(index_store, "index_tar", no_walk)
    assert_equal(load_or_build(str(shard)), built)


def test_index_goes_to_the_cache_where_the_folder_is_read_only(
    read_only: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = load_or_build(str(read_only))
    assert os.listdir(read_only.parent) == ["x.tar"]
    assert len(list(cache.glob("index/*.idx"))) == 1
    monkeypatch.setattr(index_store, "index_tar", no_walk)
    assert_equal(load_or_build(str(read_only)), built)


def test_index_goes_to_the_cache_where_the_system_refuses(
    shard: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *args: Any) -> int:
        if Path(path).parent == shard.parent:
            raise OSError(30, "Read-only file system")
        return real_open(path, *args)

    real_open = os.open
    monkeypatch.setattr(os, "open", refuse)
    assert write(index_tar(str(shard))).parent == cache / "index"


def test_shards_of_one_name_in_two_folders_have_two_indexes_in_the_cache(tmp_path: Path, cache: Path) -> None:
    shards = [write_shard(tmp_path / folder / "000.tar", 3, first=first) for folder, first in (("a", 0), ("b", 100))]
    for path in shards:
        path.parent.chmod(0o555)
    assert [load_or_build(str(path)).key(0) for path in shards * 2] == ["000000", "000100"] * 2
    assert len(list(cache.glob("index/*.idx"))) == 2


def test_nowhere_to_write_is_told_and_works(read_only: Path, cache: Path) -> None:
    cache.touch()
    with pytest.warns(UserWarning, match="indexes cannot be kept in .*cache.*Set DTRAIN_CACHE"):
        assert load_or_build(str(read_only)).num_samples == 5


def test_shard_of_another_size_is_indexed_again(shard: Path) -> None:
    load_or_build(str(shard))
    status = shard.stat()
    write_shard(shard, 40)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert load_or_build(str(shard)).num_samples == 40
    assert load_or_build(str(shard)).num_samples == 40


def test_shard_of_another_time_is_indexed_again(shard: Path) -> None:
    load_or_build(str(shard))
    status = shard.stat()
    write_shard(shard, 5, first=100)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert shard.stat().st_size == status.st_size
    assert load_or_build(str(shard)).key(0) == "000100"


def test_index_of_another_format_version_is_built_again(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = load_or_build(str(shard))
    monkeypatch.setattr(index_store, "_VERSION", index_store._VERSION + 1)
    kept = Path(f"{shard}.idx").read_bytes()
    assert_equal(load_or_build(str(shard)), built)
    assert Path(f"{shard}.idx").read_bytes() != kept


def test_index_damaged_at_any_byte_is_never_believed(tmp_path: Path, cache: Path) -> None:
    shard = write_shard(tmp_path / "x.tar", 2)
    built = load_or_build(str(shard))
    kept = Path(f"{shard}.idx")
    content = kept.read_bytes()
    flipped = [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in range(len(content))]
    cut = [content[:length] for length in range(len(content))]
    for damaged in flipped + cut[::7]:
        shutil.rmtree(cache, ignore_errors=True)
        kept.write_bytes(damaged)
        assert_equal(load_or_build(str(shard)), built)


def test_damaged_index_is_replaced(shard: Path) -> None:
    load_or_build(str(shard))
    kept = Path(f"{shard}.idx")
    content = kept.read_bytes()
    kept.write_bytes(content[:-1] + b"?")
    load_or_build(str(shard))
    assert kept.read_bytes() == content


def test_index_file_of_another_tool_is_left_alone(shard: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = np.arange(5, dtype=np.int64).tobytes()
    Path(f"{shard}.idx").write_bytes(foreign)
    built = load_or_build(str(shard))
    assert Path(f"{shard}.idx").read_bytes() == foreign
    assert len(list(cache.glob("index/*.idx"))) == 1
    monkeypatch.setattr(index_store, "index_tar", no_walk)
    assert_equal(load_or_build(str(shard)), built)


def test_file_is_plain_arrays_that_safetensors_reads(shard: Path) -> None:
    index = load_or_build(str(shard))
    arrays = safetensors.numpy.load_file(f"{shard}.idx")
    assert sorted(arrays) == sorted(ARRAYS)
    np.testing.assert_array_equal(arrays["member_offset"], index.member_offset)


def test_kept_index_can_be_read_by_whoever_the_umask_allows(shard: Path) -> None:
    previous = os.umask(0o027)
    try:
        load_or_build(str(shard))
    finally:
        os.umask(previous)
    assert stat.S_IMODE(os.stat(f"{shard}.idx").st_mode) == 0o640


def test_failed_write_leaves_nothing_behind(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.warns(UserWarning, match="No space left"):
        load_or_build(str(shard))
    assert os.listdir(shard.parent) == ["x.tar"]


def _count_samples(path: str, barrier: object, results: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    results.put([load_or_build(path).num_samples for _ in range(20)])  # type: ignore[attr-defined]


def test_many_processes_at_once_all_see_a_whole_index(shard: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_count_samples, args=(str(shard), barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == [[5] * 20] * 4
    for process in processes:
        process.join()
    assert sorted(os.listdir(shard.parent)) == ["x.tar", "x.tar.idx"]


@pytest.fixture
def server(shard: Path) -> Iterator[FileServer]:
    pytest.importorskip("aiohttp", reason="http needs aiohttp: pip install 'dtrain[http]'")
    with serving(shard.parent) as server:
        yield server


def assert_same_members(index: ShardIndex, other: ShardIndex) -> None:
    assert index.extensions == other.extensions
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(index, name), getattr(other, name))


def test_index_of_a_url_is_kept_in_the_cache(server: FileServer, shard: Path, cache: Path) -> None:
    built = load_or_build(server.url("x.tar"))
    assert_same_members(built, index_tar(str(shard)))
    assert os.listdir(shard.parent) == ["x.tar"]
    assert len(list(cache.glob("index/*.idx"))) == 1
    before = server.requests["x.tar"]
    assert_equal(load_or_build(server.url("x.tar")), built)
    assert server.requests["x.tar"] == before


def test_index_of_a_url_that_changed_is_built_again(server: FileServer, shard: Path) -> None:
    load_or_build(server.url("x.tar"))
    write_shard(shard, 5, first=100)
    assert load_or_build(server.url("x.tar")).key(0) == "000100"


def test_index_that_was_uploaded_with_a_shard_is_used(
    server: FileServer, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = load_or_build(str(shard))
    os.utime(shard, ns=(1, 1))  # what an upload does to it
    monkeypatch.setattr(index_store, "index_tar", no_walk)
    assert_same_members(load_or_build(server.url("x.tar")), built)


@pytest.mark.parametrize("lie", ["another shard of its size", "another size", "a page", "damaged"])
def test_uploaded_index_that_lies_is_not_believed(server: FileServer, shard: Path, lie: str) -> None:
    load_or_build(str(shard))
    kept = Path(f"{shard}.idx")
    if lie == "another shard of its size":
        size = shard.stat().st_size
        shard.write_bytes(tar_bytes({"other.jpg": b"1" * 700}).ljust(size, b"\0"))
        assert shard.stat().st_size == size
    elif lie == "another size":
        write_shard(shard, 40)
    elif lie == "a page":
        kept.write_bytes(b"<html>not here</html>" * 50)
    else:
        kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    assert_same_members(load_or_build(server.url("x.tar")), index_tar(str(shard)))


def test_shard_behind_a_server_without_ranges_is_indexed_in_the_cache(
    server: FileServer, shard: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "_PIECE", 1024)
    monkeypatch.setattr(read_ahead, "_HEADERS", 1024)
    server.ranges = False
    write_shard(shard, 500)
    assert_same_members(load_or_build(server.url("x.tar")), index_tar(str(shard)))
    assert len(list(cache.glob("shards/*.tar"))) == 1


def test_page_in_place_of_a_shard_is_refused_with_what_it_says(server: FileServer) -> None:
    server.page = b"<html>Sign in to the portal</html>".ljust(600)
    with pytest.raises(
        ShardError, match=r"x\.tar', byte 0: HTML or XML, not a tar: it begins with b'<html>Sign in to the"
    ):
        load_or_build(server.url("x.tar") + "?token=secret")

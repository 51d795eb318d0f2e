"""The index of a dataset is its shards' tars end to end, however it was built and wherever its arrays lie."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import tarfile
import warnings
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.data.shards import index_builder
from dtrain.data.shards.dataset_index import DatasetIndex
from dtrain.data.shards.shard_index import ShardIndex, load_or_build
from dtrain.data.shards.tar import ShardError
from tests.property_tests import examples
from tests.refusals import assert_refused, refused
from tests.shards import tar_bytes, webdataset_samples, write_shard

FIELDS = ["jpg", "cls"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """Uneven shards, one of them empty, two of them called 000.tar."""
    counts = {"a/000.tar": 3, "a/001.tar": 0, "b/000.tar": 7, "b/002.tar": 1}
    first = np.cumsum([0, *counts.values()])
    return [str(write_shard(tmp_path / name, n, first=f)) for (name, n), f in zip(counts.items(), first, strict=False)]


@pytest.fixture(params=["in memory", "mapped"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "mapped":
        monkeypatch.setattr(index_builder, "MAPPED_ABOVE", 0)
    return str(request.param)


def assert_equal(index: DatasetIndex, other: DatasetIndex) -> None:
    for name in ("counts", "starts", "offsets", "sizes"):
        assert getattr(index, name).dtype == np.int64
        np.testing.assert_array_equal(getattr(index, name), getattr(other, name))
    assert index.shards == other.shards
    assert index.describe() == other.describe()
    assert index.keys(range(index.num_samples)) == other.keys(range(other.num_samples))


def test_rows_are_what_webdataset_reads_shard_after_shard(shards: list[str], place: str) -> None:
    index = DatasetIndex.build(shards, FIELDS)
    expected = [(shard, sample) for shard in shards for sample in webdataset_samples(Path(shard).read_bytes())]
    assert index.num_samples == len(expected) == 11
    for number, (shard, sample) in enumerate(expected):
        assert index.shards[int(index.shards_of(number))] == shard
        for column, extension in enumerate(FIELDS):
            offset, size = int(index.offsets[number, column]), int(index.sizes[number, column])
            assert Path(shard).read_bytes()[offset : offset + size] == sample[extension]
    assert index.keys(np.array([0, 3, 10])) == ["a/000.tar/000000", "b/000.tar/000003", "002.tar/000010"]
    assert (index.counts.tolist(), index.starts.tolist()) == ([3, 0, 7, 1], [0, 3, 3, 10, 11])
    assert index.names == ["a/000.tar", "001.tar", "b/000.tar", "002.tar"]


def test_later_start_of_many_shards_does_not_load_their_indexes(
    shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_builder, "MAPPED_ABOVE_SHARDS", len(shards) - 1)
    first = DatasetIndex.build(shards, FIELDS)
    monkeypatch.setattr(index_builder, "load_or_build", lambda *_: pytest.fail("the index of a shard was loaded"))
    assert_equal(DatasetIndex.build(shards, FIELDS), first)


@examples(20)
@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=7).filter(any), workers=st.integers(1, 3))
def test_any_unevenness_and_any_number_of_threads_give_the_same(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], workers: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    paths = [str(write_shard(folder / f"{number}.tar", count)) for number, count in enumerate(counts)]
    index = DatasetIndex.build(paths, FIELDS, workers=workers)
    keys = [f"{number}.tar/{sample:06d}" for number, count in enumerate(counts) for sample in range(count)]
    assert index.keys(range(index.num_samples)) == keys


def test_missing_fields_are_minus_one_and_alternatives_are_taken_in_turn(tmp_path: Path, place: str) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(tar_bytes({"a.png": b"1", "a.jpg": b"22", "b.png": b"333", "b.cls": b"4444"}))
    index = DatasetIndex.build([str(path)], ["jpg;png", "cls"])
    assert index.sizes.tolist() == [[2, -1], [3, 4]]
    assert index.offsets.tolist() == [[1536, -1], [2560, 3584]]


def test_extension_is_matched_exactly(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(tar_bytes({"a.seg.jpg": b"1", "a.jpg2": b"2", "a.CLS": b"3"}))
    with refused(ValueError, "'jpg'", "", "seg.jpg (1), jpg2 (1), cls (1)"):
        DatasetIndex.build([str(path)], ["jpg", "cls"])


def test_kept_indexes_give_the_same(shards: list[str], place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = DatasetIndex.build(shards, FIELDS)
    assert_equal(DatasetIndex.build(shards, FIELDS), built)
    assert sorted(os.listdir(Path(shards[0]).parent)) == ["000.tar", "000.tar.idx", "001.tar", "001.tar.idx"]


def test_large_columns_are_mapped_once_built(shards: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = DatasetIndex.build(shards, FIELDS)
    assert not cache.exists()
    monkeypatch.setattr(index_builder, "MAPPED_ABOVE", 0)
    built = DatasetIndex.build(shards, FIELDS)
    assert_equal(built, small)
    assert not built.offsets.flags.writeable

    def no_index(path: str, *others: object) -> NoReturn:
        raise AssertionError(f"{path} was looked at again")

    monkeypatch.setattr(index_builder, "load_or_build", no_index)
    assert_equal(DatasetIndex.build(shards, FIELDS), small)
    with pytest.raises(AssertionError, match="looked at again"):
        DatasetIndex.build(shards, ["cls"])
    os.utime(shards[2], ns=(0, 0))
    with pytest.raises(AssertionError, match="looked at again"):
        DatasetIndex.build(shards, FIELDS)


def test_large_columns_stay_in_memory_if_the_cache_cannot_be_written(
    shards: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = DatasetIndex.build(shards, FIELDS)
    monkeypatch.setattr(index_builder, "MAPPED_ABOVE", 0)
    cache.touch()
    with pytest.warns(UserWarning, match="DTRAIN_CACHE") as warned:
        assert_equal(DatasetIndex.build(shards, FIELDS), small)
    assert_refused(str(warned[0].message), cache, remedy="DTRAIN_CACHE")


def test_index_travels_to_another_process_by_value_or_by_name(shards: list[str], place: str) -> None:
    index = DatasetIndex.build(shards, FIELDS)
    travelling = pickle.dumps(index)
    assert_equal(pickle.loads(travelling), index)
    if place == "mapped":
        many = DatasetIndex.build([str(write_shard(Path(shards[0]).parent / "many.tar", 2000))], FIELDS)
        assert len(pickle.dumps(many)) < 1000


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_see_the_same_index_however_they_were_started(shards: list[str], place: str, method: str) -> None:
    index = DatasetIndex.build(shards, FIELDS)
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(index.keys, [[n] for n in range(11)]) == [[key] for key in index.keys(range(11))]


def _build(shards: list[str], barrier: object, results: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    index = DatasetIndex.build(shards, FIELDS)
    results.put((index.describe(), index.offsets.tolist()))  # type: ignore[attr-defined]


def test_processes_that_start_together_agree(shards: list[str], place: str, cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_build, args=(shards, barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    index = DatasetIndex.build(shards, FIELDS)
    assert found == [(index.describe(), index.offsets.tolist())] * 4
    assert len(list(cache.glob("columns/*")) + list(cache.glob("columns/.*"))) == (place == "mapped")


def test_ranks_begin_at_different_shards_and_share_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(write_shard(tmp_path / f"{number}.tar", 2)) for number in range(6)]
    looked_at: list[str] = []

    def note(path: str, *others: Any) -> ShardIndex:
        looked_at.append(Path(path).stem)
        return load_or_build(path, *others)

    monkeypatch.setattr(index_builder, "load_or_build", note)
    indexes = []
    for rank in range(3):
        indexes.append(DatasetIndex.build(paths, FIELDS, rank=rank, world_size=3))
        assert "".join(looked_at) == ("012345" * 2)[2 * rank : 2 * rank + 6]
        looked_at.clear()
    assert_equal(indexes[1], indexes[0])
    assert_equal(indexes[2], indexes[0])


def test_fingerprint_tells_names_sizes_counts_and_order_apart(tmp_path: Path) -> None:
    def build(folder: str, counts: dict[str, int], order: int = 1) -> DatasetIndex:
        paths = [str(write_shard(tmp_path / folder / name, count)) for name, count in counts.items()]
        return DatasetIndex.build(paths[::order], FIELDS)

    base = build("a", {"0.tar": 2, "1.tar": 3})
    assert build("moved/elsewhere", {"0.tar": 2, "1.tar": 3}).fingerprint == base.fingerprint
    others = [
        build("b", {"0.tar": 2, "2.tar": 3}),
        build("c", {"0.tar": 3, "1.tar": 2}),
        build("d", {"0.tar": 2, "1.tar": 3}, order=-1),
        build("e", {"0.tar": 2}),
    ]
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 5
    assert len({base.shards_fingerprint, *(other.shards_fingerprint for other in others)}) == 5


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda files: files[2:] + files[:2], id="order of samples"),
        pytest.param(lambda files: [("c.jpg", b"one"), ("c.cls", b"1"), *files[2:]], id="a key"),
        pytest.param(lambda files: [("a.png", files[0][1]), *files[1:]], id="an extension"),
        pytest.param(lambda files: [("a.jpg", b"longer"), *files[1:]], id="the size of a member"),
        pytest.param(lambda files: [("ab.jpg", b"1"), ("ab.cls", b"1"), *files[2:]], id="the length of a key"),
    ],
)
def test_fingerprint_covers_keys_extensions_and_member_sizes(tmp_path: Path, place: str, change: Any) -> None:
    files = [("a.jpg", b"one"), ("a.cls", b"1"), ("b.jpg", b"other"), ("b.cls", b"2")]

    def build(folder: str, files: list[tuple[str, bytes]]) -> DatasetIndex:
        path = tmp_path / folder / "0.tar"
        path.parent.mkdir()
        path.write_bytes(tar_bytes(files))
        return DatasetIndex.build([str(path)], ["cls"])

    base, same, other = build("base", files), build("same", files), build("other", change(files))
    assert same.fingerprint == base.fingerprint
    assert (other.shards_fingerprint, other.describe()["bytes"]) == (base.shards_fingerprint, base.describe()["bytes"])
    assert other.fingerprint != base.fingerprint
    assert_refused(base.difference(other.describe()), "same names, sizes", "keys or member sizes")


def test_description_is_json_and_differences_can_be_read(shards: list[str]) -> None:
    index, fewer = DatasetIndex.build(shards, FIELDS), DatasetIndex.build(shards[:3], FIELDS)
    described = json.loads(json.dumps(index.describe()))
    total = sum(os.path.getsize(shard) for shard in shards)
    assert described == {
        "num_shards": 4, "num_samples": 11, "bytes": total,
        "shards_fingerprint": index.shards_fingerprint, "fingerprint": index.fingerprint,
    }  # fmt: skip
    assert index.difference(described) == ""
    assert fewer.difference(described) == f"shards 4 -> 3, samples 11 -> 10, bytes {total} -> {total - 10240}."
    swapped = DatasetIndex.build(shards[::-1], FIELDS)
    assert "order" in swapped.difference(described)
    assert fewer.difference({}).startswith("shards unknown -> 3")


def test_all_damaged_shards_are_named_at_once(shards: list[str]) -> None:
    for shard in shards[1:3]:
        Path(shard).write_bytes(Path(shard).read_bytes()[:700])
    with pytest.raises(ShardError, match="before the second of the two end blocks") as caught:
        DatasetIndex.build(shards, FIELDS)
    assert caught.value.path == shards[1]
    assert f"1 more shards are damaged: {shards[2]}" in str(caught.value)


def test_shard_that_changes_between_two_looks_is_an_error(shards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def change_and_index(path: str, *others: Any) -> ShardIndex:
        if path == shards[2]:
            write_shard(Path(path), 30)
        return load_or_build(path, *others)

    monkeypatch.setattr(index_builder, "load_or_build", change_and_index)
    with pytest.raises(ShardError, match="changed while the dataset was indexed"):
        DatasetIndex.build(shards, FIELDS)


def test_no_sample_at_all_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(tar_bytes({"README": b"no key"}, tarfile.PAX_FORMAT))
    with refused(ValueError, "have no sample", "", "Links"):
        DatasetIndex.build([str(path)], FIELDS)


def test_no_shard_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 shards"):
        DatasetIndex.build([], FIELDS)


def test_doubtful_names_are_told_once_for_all_shards_and_at_every_start(tmp_path: Path, place: str) -> None:
    paths = [tmp_path / f"{number}.tar" for number in range(3)]
    for path in paths:
        path.write_bytes(tar_bytes({"img_0.5.jpg": b"", "img_0.7.jpg": b"", "x.jpg": b"", "x.cls": b""}))
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            DatasetIndex.build(list(map(str, paths)), FIELDS)
        (warning,) = caught
        assert "'img_0.5.jpg' and 'img_0.7.jpg' belong to one sample" in str(warning.message)
        assert "(2 more shards have such names)" in str(warning.message)

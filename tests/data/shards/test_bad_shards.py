"""Damaged shards: refused unless asked otherwise; else the data set is that of the other shards, on every start."""

from __future__ import annotations

import errno
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain.data import Mixture, ShardLoader
from dtrain.data.shards import index_builder
from dtrain.data.shards.bad_shards import RECORD, BadShards, as_recorded, read_record, write_record
from dtrain.data.shards.dataset_index import DatasetIndex
from dtrain.data.shards.patterns import expand
from dtrain.data.shards.shard_file import stamp_of
from dtrain.data.shards.tar import ShardError
from tests.refusals import assert_refused, refusal_of
from tests.shards import LABEL, write_numbered

COUNTS = (3, 4, 2, 5)
ANY = BadShards("skip", "100%")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    return write_numbered(tmp_path / "data", COUNTS)


def cut(path: str) -> None:
    os.truncate(path, 700)


DAMAGE: dict[str, Callable[[str], Any]] = {
    "cut": cut,
    "without end mark": lambda path: os.truncate(path, 4 * 1024),
    "empty": lambda path: os.truncate(path, 0),
    "no tar": lambda path: Path(path).write_bytes(b"{}" * 500),
    "missing": os.unlink,
    "a folder": lambda path: (os.unlink(path), os.mkdir(path)),
}


def build(shards: list[str], bad_shards: BadShards | None = None, **options: Any) -> DatasetIndex:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DatasetIndex.build(shards, ["cls"], bad_shards=bad_shards, **options)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("place", ["in memory", "mapped"])
def test_data_set_is_that_of_the_other_shards(
    shards: list[str], damage: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "mapped":
        monkeypatch.setattr(index_builder, "MAPPED_ABOVE", 0)
    DAMAGE[damage](shards[1])
    for workers in (1, 3):
        index = build(shards, ANY, workers=workers)
        assert list(index.left_out) == ["shard-001.tar"]
        assert index.describe() == build([*shards[:1], *shards[2:]]).describe()
    refused_with = (ValueError, OSError)
    with pytest.raises(refused_with):
        build(shards)


def test_refusal_names_all_shards_and_both_remedies(shards: list[str]) -> None:
    cut(shards[1]), cut(shards[3])
    message = refusal_of(build, shards)
    with pytest.raises(ShardError) as raised:
        build(shards)
    assert str(pickle.loads(pickle.dumps(raised.value))) == message
    assert_refused(message, "shard-001.tar", "shard-003.tar", "dtrain pack repair", "data.bad_shards=skip")


def test_shards_that_are_left_out_are_named_with_reasons_by_rank_0(shards: list[str]) -> None:
    cut(shards[1])
    with pytest.warns(UserWarning, match=r"1 of 4 shards left out.*shard-001\.tar \(byte \d+: the file ends"):
        DatasetIndex.build(shards, ["cls"], bad_shards=ANY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DatasetIndex.build(shards, ["cls"], bad_shards=ANY, rank=1, world_size=2)


@pytest.mark.parametrize(
    ("most", "damaged", "allowed"),
    [
        (0, 1, False),
        (0.01, 1, True),
        (0.01, 2, False),
        ("50%", 2, True),
        ("50%", 3, False),
        (3, 3, True),
        (None, 3, True),
    ],
)
def test_number_is_limited(shards: list[str], most: float | str | None, damaged: int, allowed: bool) -> None:
    for shard in shards[:damaged]:
        cut(shard)
    if allowed:
        assert len(build(shards, BadShards("skip", most)).left_out) == damaged
    else:
        message = refusal_of(build, shards, BadShards("skip", most))
        assert_refused(message, f"{damaged} of 4 shards", f"data.max_bad_shards={most}", "shard-000.tar", "repair")


def test_a_data_set_without_intact_shards_is_refused(shards: list[str]) -> None:
    for shard in shards:
        cut(shard)
    assert_refused(refusal_of(build, shards, ANY), "all 4 shards are damaged", "shard-000.tar")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("ignore",), ["data.bad_shards", "'ignore'", "refuse, skip"]),
        (("skip", -1), ["data.max_bad_shards", "-1", "0 or more"]),
        (("skip", "x"), ["data.max_bad_shards", "'x'", "percentage of all shards"]),
        (("skip", 1.0), ["data.max_bad_shards", "1.0", "=1 for one"]),
    ],
)
def test_impossible_values_are_refused(arguments: tuple[Any, ...], parts: list[str]) -> None:
    assert_refused(refusal_of(BadShards, *arguments), *parts)


def test_earlier_decision_holds_though_the_shard_was_repaired(shards: list[str]) -> None:
    whole = Path(shards[1]).read_bytes()
    cut(shards[1])
    first = build(shards, ANY)
    Path(shards[1]).write_bytes(whole)
    decided = BadShards("skip", 0, {"": first.left_out}, decided=True)
    with pytest.warns(UserWarning, match=r"as by the earlier starts.*Intact by now: shard-001\.tar"):
        again = DatasetIndex.build(shards, ["cls"], bad_shards=decided)
    assert again.describe() == first.describe()
    os.unlink(shards[1])
    assert build([*shards[:1], *shards[2:]], decided).describe() == first.describe()


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_another_damaged_shard_is_refused_after_the_decision(shards: list[str], damage: str) -> None:
    cut(shards[1])
    decided = BadShards("skip", "100%", {"": build(shards, ANY).left_out}, decided=True)
    DAMAGE[damage](shards[2])
    assert_refused(refusal_of(build, shards, decided), "shard-002.tar", "Earlier starts", "Restore it")


def test_failure_of_the_process_is_no_damage(shards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def too_many(path: str) -> Any:
        if path == shards[1]:
            raise OSError(errno.EMFILE, "Too many open files", path)
        return stamp_of(path)

    monkeypatch.setattr(index_builder, "stamp_of", too_many)
    with pytest.raises(OSError, match="Too many open files"):
        build(shards, ANY)


def test_named_files_may_be_missing_but_a_glob_must_match(shards: list[str], tmp_path: Path) -> None:
    os.unlink(shards[2])
    pattern = str(tmp_path / "data" / "shard-{000..003}.tar")
    assert expand(pattern, keep_missing=True) == shards
    assert_refused(refusal_of(expand, str(tmp_path / "x-*.tar"), keep_missing=True), "x-*.tar", "matches no file")


def test_loader_says_what_it_leaves_out_by_source(shards: list[str], tmp_path: Path) -> None:
    others = write_numbered(tmp_path / "others", (6, 6))
    cut(shards[1])
    options: dict[str, Any] = {"global_batch_size": 4, "num_workers": 0, "bad_shards": BadShards("skip")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = ShardLoader(shards, LABEL, **options)
        mixed = ShardLoader(Mixture({"a": others, "b": shards}), LABEL, **options)
    assert list(alone.bad_shards[""]) == list(mixed.bad_shards["b"]) == ["shard-001.tar"]
    assert list(mixed.bad_shards) == ["b"]
    assert "without 1 damaged: shard-001.tar" in alone.source.summary()
    assert sorted(int(n) for batch in alone for n in batch["label"][batch.valid]) == [0, 1, 2, *range(7, 14)]


def test_record_is_read_by_split_and_a_run_without_one_has_left_out_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out = {"web": {"a.tar": "why"}}
    write_record(tmp_path, {"train": left_out, "eval": {}})
    value = as_recorded("refuse", tmp_path)
    assert value == str(tmp_path / RECORD)
    read = BadShards.from_config(value, 0.01, "train")
    assert (read.left_out, read.decided) == (left_out, True)
    assert read.of_source("web").left_out == {"": {"a.tar": "why"}}
    assert BadShards.from_config(value, 0.01, "eval").left_out == {}
    monkeypatch.chdir(tmp_path)
    assert BadShards.from_config(RECORD, 0.01, "train") == read
    other = tmp_path / "other"
    other.mkdir()
    assert as_recorded("refuse", other) == "refuse"
    assert BadShards.from_config(as_recorded("skip", other), 0.01, "train") == BadShards("skip", decided=True)


@pytest.mark.parametrize("text", ["", "[]", '{"train": 1}', '{"train": {"": ["a"]}}'])
def test_damaged_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / RECORD).write_text(text)
    assert_refused(refusal_of(read_record, tmp_path / RECORD), RECORD, "not a record", "Restore it")

"""``data.random_offset``: rows are pieces of the text of their shard, wherever it was cut; numpy slices say what they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtrain.data import Limits, ShardLoader
from dtrain.data.fields.parse import parse_fields
from dtrain.data.loading.collate import Collator
from dtrain.data.sources import random_offset
from dtrain.data.sources.random_offset import RandomOffsetSource
from dtrain.data.sources.shard_source import ShardSource
from tests.refusals import refused
from tests.shards import write_tar

LENGTH = 8
FIELDS = {"tok": {"name": "tokens", "dtype": "uint16", "length": LENGTH + 1}}
ROWS = (5, 1, 12, 7)


def streams() -> list[np.ndarray]:
    """The text of each shard; the first number of every token is that of its shard."""
    return [1000 * shard + np.arange(rows * LENGTH + 1) for shard, rows in enumerate(ROWS)]


def rows_in(stream: np.ndarray) -> list[np.ndarray]:
    return [stream[begin : begin + LENGTH + 1] for begin in range(0, len(stream) - 1, LENGTH)]


def write_rows(path: Path, rows: list[np.ndarray]) -> None:
    write_tar(path, [(f"{number:06d}", {"tok": row.astype("<u2").tobytes()}) for number, row in enumerate(rows)])


@pytest.fixture
def shards(tmp_path: Path) -> str:
    for shard, stream in enumerate(streams()):
        write_rows(tmp_path / f"train-{shard:06d}.tar", rows_in(stream))
    return str(tmp_path / "train-*.tar")


def source_of(shards: str, fields: dict[str, Any] = FIELDS) -> RandomOffsetSource:
    return RandomOffsetSource.from_shards(ShardSource.build(shards, parse_fields(fields)))


def loader(shards: str, **options: Any) -> ShardLoader:
    return ShardLoader(source_of(shards), **{"global_batch_size": 4, "num_workers": 0, **options})


def rows_of(loader: ShardLoader, epoch: int = 0) -> dict[str, tuple[int, ...]]:
    """Key of each sample to its tokens."""
    rows = {}
    for batch in loader.epoch(epoch):
        for key, tokens, valid in zip(batch.sample_keys, batch["tokens"].tolist(), batch.valid.tolist(), strict=True):
            if valid:
                rows[key] = tuple(tokens)
    return rows


def test_rows_are_pieces_of_the_text_of_their_shard(shards: str) -> None:
    rows = rows_of(loader(shards))
    assert len(rows) == sum(ROWS)
    begins = set()
    for key, tokens in rows.items():
        begin = tokens[0]
        stream = streams()[begin // 1000]
        assert list(tokens) == stream[begin % 1000 : begin % 1000 + LENGTH + 1].tolist()
        assert key.startswith(f"train-{begin // 1000:06d}")
        begins.add(begin)
    assert any(begin % 1000 % LENGTH for begin in begins)
    assert rows != rows_of(loader(shards), epoch=1)
    assert rows != rows_of(loader(shards, seed=1))


def test_all_places_are_drawn_about_equally_often(shards: str) -> None:
    places = np.zeros((ROWS[0] - 1) * LENGTH + 1, np.int64)
    reader = loader(shards).source.open(0)
    for epoch in range(200):
        for sample in range(ROWS[0]):
            (row,) = reader.fetch(epoch, sample)
            places[np.frombuffer(row, "<u2")[0]] += 1
    assert places.sum() == 200 * ROWS[0]
    assert places[-1] > 0  # whose last token is the last one of the shard
    expected = places.mean()
    # chi-square with 32 degrees of freedom: above 63 once in a thousand seeds
    assert ((places - expected) ** 2 / expected).sum() < 63


def test_the_rows_are_the_same_for_any_ranks_workers_and_path_of_the_loader(
    shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = rows_of(loader(shards))
    of_ranks: dict[str, tuple[int, ...]] = {}
    for rank in range(2):
        of_ranks |= rows_of(loader(shards, rank=rank, world_size=2, micro_batch_size=1))
    assert of_ranks == expected
    assert rows_of(loader(shards, num_workers=1)) == expected
    monkeypatch.setattr(Collator, "_fill_fast", lambda self, buffers, epoch, samples, order, draws: order.tolist())
    assert rows_of(loader(shards)) == expected


def test_a_run_resumes_with_another_batch_size_in_the_same_rows(shards: str) -> None:
    expected = rows_of(loader(shards))
    first = loader(shards)
    iterator = first.epoch(0)
    seen = {}
    for _ in range(2):
        batch = next(iterator)
        seen |= dict(zip(batch.sample_keys, map(tuple, batch["tokens"].tolist()), strict=True))
        first.commit()
    second = loader(shards, global_batch_size=6)
    second.load_state_dict(first.state_dict())
    assert seen | rows_of(second) == expected


def test_a_row_of_another_length_makes_the_samples_that_need_it_bad(tmp_path: Path) -> None:
    *rows, last = rows_in(streams()[2])
    write_rows(tmp_path / "train-000000.tar", [*rows, last[:-1]])
    drawn = loader(str(tmp_path / "*.tar"), limits=Limits(max_bad=100))
    bad = [one for epoch in range(20) for batch in drawn.epoch(epoch) for one in batch.bad]
    assert drawn.bad_samples == len(bad) > 0
    assert all("000011, which" in one["reason"] and "16 bytes" in one["reason"] for one in bad)


@pytest.mark.parametrize(
    ("change", "got", "remedy"),
    [
        ("fit", "--fit best", "--fit cut"),
        ("order", "not begin with the last token", "--fit cut"),
        ("single rows", "two rows", "fewer shards"),
        ("fields", "label", "Remove the other fields"),
    ],
)
def test_what_is_no_text_is_refused(shards: str, tmp_path: Path, change: str, got: str, remedy: str) -> None:
    source, fields = shards, FIELDS
    if change == "fit":
        (tmp_path / "dataset.json").write_text(json.dumps({"fit": "best"}))
    if change == "order":
        write_rows(tmp_path / "train-000009.tar", [np.arange(row, row + LENGTH + 1) for row in range(3)])
    if change == "single rows":
        source = str(tmp_path / "train-000001.tar")
    if change == "fields":
        write_tar(tmp_path / "train-000001.tar", [("0", {"tok": bytes(2 * LENGTH + 2), "cls": b"1"})])
        fields = FIELDS | {"cls": {"name": "label"}}
    with refused(ValueError, "data.random_offset=true", got, remedy):
        source_of(source, fields)


def test_many_rows_are_read_in_several_blocks(shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rows_of(loader(shards))
    monkeypatch.setattr(random_offset, "_ROWS_AT_ONCE", 3)
    assert rows_of(loader(shards, global_batch_size=20)) == expected

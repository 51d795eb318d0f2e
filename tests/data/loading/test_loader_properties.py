"""What must hold for any shards and any topology. ``tarfile`` says what there is."""

from __future__ import annotations

import itertools
import os
import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.data import Limits
from tests.property_tests import examples
from tests.refusals import refused
from tests.shards import (
    IMAGE,
    global_batches,
    make_loader,
    make_ranks,
    read_epoch,
    stored_keys,
    stored_members,
    valid_keys,
    write_numbered,
    write_tar,
)

counts_of_shards = st.lists(st.integers(0, 7), min_size=1, max_size=9).filter(any)
shuffles = st.sampled_from(["window", "full", "none"])
few = examples(25)


@contextmanager
def folder() -> Iterator[Path]:
    """A new one for each example."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@few
@given(counts=counts_of_shards, shuffle=shuffles, batch=st.integers(1, 12), epoch=st.integers(0, 2), data=st.data())
def test_any_shards_give_the_same_batches_on_any_ranks_and_each_sample_once(
    counts: list[int], shuffle: str, batch: int, epoch: int, data: st.DataObject
) -> None:
    lanes = data.draw(st.sampled_from([k for k in range(1, batch + 1) if batch % k == 0]) | st.none())
    world = data.draw(st.integers(1, 6))
    rows = -(-batch // world)
    micro = data.draw(st.sampled_from([m for m in range(1, rows + 1) if batch % world or rows % m == 0]))
    options = {"global_batch_size": batch, "shuffle": shuffle, "lanes": lanes, "window": data.draw(st.integers(1, 3))}
    with folder() as path:
        shards = write_numbered(path, counts)
        alone = global_batches([make_loader(shards, **options)], epoch)
        assert sorted(itertools.chain(*alone)) == sorted(stored_keys(shards))
        assert all(len(step) == batch for step in alone[:-1])
        assert global_batches(make_ranks(shards, world, micro_batch_size=micro, **options), epoch) == alone


names = st.text(st.sampled_from("aB0_- é木\udcff/"), min_size=1, max_size=12).map(
    lambda text: f"k{text}".replace("/", "/k")
)


@few
@given(keys=st.lists(names | names.map(lambda text: text * 30), min_size=1, max_size=8, unique=True))
def test_any_names_come_out_as_they_were_stored(keys: list[str]) -> None:
    with folder() as path:
        shard = write_tar(path / "a.tar", [(key, {"cls": b"1"}) for key in keys])
        assert valid_keys(make_loader([shard], shuffle="none")) == [f"a.tar/{key}" for key in keys]


@few
@given(
    damage=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 600), st.binary(min_size=1, max_size=40)), max_size=6)
)
def test_damaged_samples_are_masked_or_read_and_all_others_are_as_before(damage: list[tuple[int, int, bytes]]) -> None:
    with folder() as path:
        (shard,) = write_numbered(path, [12], image=True)
        members = stored_members([shard])
        keys, touched = list(members), set()
        before = {key: row for batch in make_loader([shard], IMAGE, shuffle="none") for key, row in rows(batch)}
        with open(shard, "r+b") as file:
            for sample, place, garbage in damage:
                payload, offset = members[keys[sample]]["jpg"]
                place = min(place, len(payload) - 1)
                file.seek(offset + place)
                file.write(garbage[: len(payload) - place])
                touched.add(keys[sample])
        loader = make_loader([shard], IMAGE, shuffle="none", limits=Limits(max_bad=None))
        try:
            batches = list(itertools.chain(*read_epoch(loader)))
        except ValueError as error:  # garbage may happen to be an image, of another size
            assert "both are in one batch" in str(error)  # noqa: PT017
            return
        after = {key: row for batch in batches for key, row in rows(batch)}
        bad = {line["key"] for batch in batches for line in batch.bad}
        assert bad <= touched
        assert after.keys() == before.keys() - bad
        assert all(np.array_equal(after[key], before[key]) for key in after.keys() - touched)


def rows(batch: Any) -> list[tuple[str, Any]]:
    return [(key, row) for key, row in zip(batch.sample_keys, batch["image"].numpy(), strict=True) if key]


def draw(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"label": int(rng.integers(2**62))}


@few
@given(world=st.integers(1, 4), batch=st.integers(1, 15), shuffle=shuffles, epoch=st.integers(0, 1))
def test_a_sample_is_augmented_alike_in_any_place_of_any_batch(
    augmented: tuple[list[str], list[dict[str, int]]], world: int, batch: int, shuffle: str, epoch: int
) -> None:
    shards, expected = augmented
    ranks = make_ranks(shards, world, global_batch_size=batch, shuffle=shuffle, augment=draw)
    assert epoch_labels(ranks, epoch) == expected[epoch]


@pytest.fixture(scope="module")
def augmented(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[dict[str, int]]]:
    shards = write_numbered(tmp_path_factory.mktemp("shards"), [5, 9, 3])
    return shards, [epoch_labels([make_loader(shards, augment=draw)], epoch) for epoch in (0, 1)]


def epoch_labels(ranks: list[Any], epoch: int) -> dict[str, int]:
    return {
        key: label
        for loader in ranks
        for batch in loader.epoch(epoch)
        for key, label in zip(batch.sample_keys, batch["label"].tolist(), strict=True)
        if key
    }


class Trap:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_nothing_in_a_shard_is_ever_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    trap = pickle.dumps(Trap(mark))
    npy = b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(127) + b"\n" + trap
    members = {"cls": b"1", "pyd": trap, "pth": trap, "npy": npy, "json": trap}
    shard = write_tar(tmp_path / "a.tar", [("a", members), ("b", members)])
    assert len(valid_keys(make_loader([shard]))) == 2
    for ext in ("npy", "json"):
        with pytest.raises(ValueError, match="can be read"):
            list(make_loader([shard], {ext: {"name": "x"}}))
    with refused(ValueError, ".pyd", "pickle"):
        make_loader([shard], {"pyd": {"name": "x"}})
    (batch,) = make_loader([shard], {"pyd": {"name": "x", "decoder": lambda payload: payload}})
    assert batch["x"][0] == trap  # as bytes, for the user's own decoder
    assert not mark.exists()
    pickle.loads(trap)
    assert mark.exists()  # it would have worked

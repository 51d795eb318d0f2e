"""Samples that are masked because they were bad in an earlier run. The oracle is a loader of data in which they are bad."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtrain.data import Batch, Limits, Mixture, ShardLoader
from dtrain.data.loading.masked_source import as_recorded
from dtrain.data.mixing import Mix
from tests.shards import IMAGE, LABEL, close, jpeg, npy, read_epoch, vector, write_tar

BAD = frozenset({2, 3, 17, 39})
COUNT, SHARDS = 40, 4
#: Epoch and key of samples, as ``logs/bad-rank-*.jsonl`` has them.
Recorded = set[tuple[int, str]]
NO_LIMIT = Limits(max_bad=None, max_bad_consecutive=None)


def shards(folder: Path, bad: Collection[int] = (), first: int = 0, image: bool = False) -> str:
    """Shards of vectors or pictures; the fields of those that are bad cannot be decoded."""
    for shard, numbers in enumerate(np.array_split(np.arange(COUNT), SHARDS)):
        samples = []
        for n in numbers.tolist():
            good = jpeg(first + n) if image else npy(vector(first + n))
            members = {"jpg" if image else "npy": b"bad" if n in bad else good, "cls": str(n % 10).encode()}
            samples.append((f"{n:03d}", members))
        write_tar(folder / f"{shard}.tar", samples)
    return str(folder / "*.tar")


def key(number: int) -> str:
    return f"{number // (COUNT // SHARDS)}.tar/{number:03d}"


VECTORS = {"npy": {"name": "x", "role": "feature"}, **LABEL}


def loader(data: Any, fields: Any = VECTORS, **options: Any) -> ShardLoader:
    given = {"global_batch_size": 8, "micro_batch_size": 4, "num_workers": 0, "seed": 1, "limits": NO_LIMIT}
    return ShardLoader(data, fields, **{**given, **options})


def batches(made: ShardLoader, recorded: Recorded | None = None, epochs: int = 2) -> list[Batch]:
    """All micro-batches of the first epochs, with these samples masked."""
    if recorded is not None:
        made.source = as_recorded(made.source, recorded)
    found = [batch for epoch in range(epochs) for step in read_epoch(made, epoch) for batch in step]
    close([made])
    return found


def bad_of(found: list[Batch]) -> Recorded:
    return {(record["epoch"], record["key"]) for batch in found for record in batch.bad}


def assert_equal(ours: list[Batch], theirs: list[Batch]) -> None:
    """Compares every row, masked ones included, and which samples were bad in which micro-batch."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name in other:
            assert torch.equal(one[name], other[name]), name
        assert torch.equal(one.valid, other.valid)
        assert one.sample_keys == other.sample_keys
        assert bad_of([one]) == bad_of([other])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": "full"},
        {"shuffle": "none", "tail": "drop"},
        {"rank": 1, "world_size": 3, "micro_batch_size": 1, "global_batch_size": 12},
        {"num_workers": 1},
        {"global_batch_size": 48, "micro_batch_size": 48},
    ],
    ids=["window", "full", "stored order", "a rank of three", "worker", "one batch"],
)
def test_batches_of_shards_are_those_in_which_the_samples_were_unreadable(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    good, bad = shards(tmp_path / "good"), shards(tmp_path / "bad", BAD)
    then = batches(loader(bad, **options))
    recorded = bad_of(then)
    assert recorded <= {(epoch, key(number)) for epoch in (0, 1) for number in BAD}
    assert recorded
    assert_equal(batches(loader(good, **options), recorded), then)


def test_a_sample_is_masked_in_its_epoch_only(tmp_path: Path) -> None:
    good, bad = shards(tmp_path / "good"), shards(tmp_path / "bad", BAD)
    ours = batches(loader(good), {(1, key(number)) for number in BAD}, epochs=3)
    whole, broken = batches(loader(good), epochs=3), batches(loader(bad), epochs=3)
    of_epoch = len(whole) // 3
    assert_equal(ours[:of_epoch], whole[:of_epoch])
    assert_equal(ours[of_epoch : 2 * of_epoch], broken[of_epoch : 2 * of_epoch])
    assert_equal(ours[2 * of_epoch :], whole[2 * of_epoch :])


def test_without_recorded_samples_nothing_is_masked(tmp_path: Path) -> None:
    good = shards(tmp_path / "good")
    assert_equal(batches(loader(good), set()), batches(loader(good)))


def test_samples_that_are_bad_now_too_are_masked_once(tmp_path: Path) -> None:
    half, bad = shards(tmp_path / "half", {2, 3}), shards(tmp_path / "bad", BAD)
    recorded = {(epoch, key(number)) for epoch in (0, 1) for number in BAD}
    assert_equal(batches(loader(half), recorded), batches(loader(bad)))


@pytest.mark.parametrize("mix", [None, Mix(mixup_alpha=0.4, cutmix_alpha=1.0, classes=10)], ids=["plain", "mix"])
def test_images_are_as_then_also_where_a_partner_is_bad(tmp_path: Path, mix: Mix | None) -> None:
    good, bad = shards(tmp_path / "good", image=True), shards(tmp_path / "bad", BAD, image=True)
    then = batches(loader(bad, IMAGE | LABEL, mix=mix))
    recorded = {(epoch, key(number)) for epoch in (0, 1) for number in BAD}
    assert bad_of(then) == recorded
    assert_equal(batches(loader(good, IMAGE | LABEL, mix=mix), recorded), then)


# -- datasets

FIELDS = {"x": {"name": "x", "role": "feature"}, "label": {"name": "label", "role": "label"}}


class Numbers:
    """A map-style dataset, some samples of which raise."""

    def __init__(self, bad: Collection[int] = ()) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number in self.bad:
            raise OSError("unreadable")
        return {"x": vector(number), "label": number % 10}


def arrays() -> dict[str, np.ndarray]:
    return {"x": np.stack([vector(n) for n in range(COUNT)]), "label": np.arange(COUNT) % 10}


def over(dataset: Any, **options: Any) -> ShardLoader:
    given = {"global_batch_size": 8, "micro_batch_size": 4, "num_workers": 0, "seed": 1, "limits": NO_LIMIT}
    return ShardLoader.over(dataset, FIELDS, name="numbers", shard_size=1, **{**given, **options})


@pytest.mark.parametrize("make", [Numbers, arrays], ids=["map", "arrays"])
@pytest.mark.parametrize("options", [{}, {"shuffle": "none"}, {"num_workers": 1}], ids=["window", "none", "worker"])
def test_batches_of_a_dataset_are_those_in_which_the_samples_were_unreadable(
    make: Callable[[], Any], options: dict[str, Any]
) -> None:
    then = batches(over(Numbers(BAD), **options))
    recorded = {(epoch, f"numbers/{number}") for epoch in (0, 1) for number in BAD}
    assert bad_of(then) == recorded
    assert_equal(batches(over(make(), **options), recorded), then)


# -- mixtures


def mixture(folder: Path, bad_of_a: Collection[int], bad_of_b: Collection[int]) -> ShardLoader:
    """Two sources whose shards and keys have the same names, and a third one that is a dataset."""
    sources = {
        "a": shards(folder / "a", bad_of_a),
        "b": shards(folder / "b", bad_of_b, first=100),
        "c": Numbers(),
    }
    fields = {"c": {"x": FIELDS["x"], "label": FIELDS["label"]}}
    made = Mixture(sources, {"a": 2, "b": 1, "c": 1}, epoch_of="a", fields=fields)
    return loader(made, micro_batch_size=8)


def test_a_mixture_masks_samples_of_the_recorded_source_in_the_epoch_of_that_source(tmp_path: Path) -> None:
    then = batches(mixture(tmp_path / "bad", {3, 17}, {3, 39}), epochs=3)
    recorded = bad_of(then)
    assert {each for _, each in recorded} == {f"a/{key(3)}", f"a/{key(17)}", f"b/{key(3)}", f"b/{key(39)}"}
    assert {epoch for epoch, each in recorded if each.startswith("a/")} == {0, 1, 2}
    assert {epoch for epoch, each in recorded if each.startswith("b/")} <= {0, 1}
    good = mixture(tmp_path / "good", (), ())
    assert_equal(batches(good, recorded, epochs=3), then)


def test_a_sample_of_a_mixture_is_masked_in_one_epoch_of_its_source_only(tmp_path: Path) -> None:
    whole = batches(mixture(tmp_path / "whole", (), ()), epochs=3)
    ours = batches(mixture(tmp_path / "ours", (), ()), {(1, f"a/{key(17)}")}, epochs=3)
    different = [
        (one.sample_keys.index(""), other)
        for one, other in zip(ours, whole, strict=True)
        if one.sample_keys != other.sample_keys
    ]
    assert [other.sample_keys[row] for row, other in different] == [f"a/{key(17)}"]
    assert bad_of(ours) == {(1, f"a/{key(17)}")}

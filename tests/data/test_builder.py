"""One micro-batch. ``tarfile`` and simplejpeg say what its rows must hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch

from dtrain.data.builder import Augment, Builder
from dtrain.data.field_options import parse_fields
from dtrain.data.fields import DataError
from dtrain.data.shard_source import ShardSource
from dtrain.data.wire import Wire
from dtrain.precision import Precision
from tests.data.shards_for_tests import (
    IMAGE,
    LABEL,
    UNEVEN,
    jpeg,
    npy,
    stored_keys,
    stored_members,
    write_numbered,
    write_tar,
)

GOOD = {"jpg": jpeg(0), "cls": b"0"}


def builder_of(
    paths: Sequence[str], fields: dict[str, Any] = IMAGE | LABEL, augment: Augment | None = None, seed: int = 0
) -> Builder:
    source = ShardSource.build(paths, parse_fields(fields))
    return Builder(source, Wire(source.fields, Precision("fp32")), augment, seed)


def no_spare() -> list[int]:
    raise AssertionError("a micro-batch with a good sample needs no spare one")


def test_rows_hold_what_the_tar_holds_in_the_order_that_was_asked_for(tmp_path: Path) -> None:
    paths = write_numbered(tmp_path, UNEVEN, image=True)
    members = stored_members(paths)
    wanted = np.random.default_rng(0).permutation(len(members))
    batch = builder_of(paths).build(0, wanted, no_spare)
    keys = [stored_keys(paths)[number] for number in wanted]
    assert batch.sample_keys == keys
    assert batch.valid.all()
    assert batch["label"].tolist() == [int(members[key]["cls"][0]) for key in keys]
    assert np.array_equal(
        batch["image"].numpy(), np.stack([simplejpeg.decode_jpeg(members[key]["jpg"][0]) for key in keys])
    )


def test_masked_rows_repeat_valid_ones_in_turn(tmp_path: Path) -> None:
    batch = builder_of(write_numbered(tmp_path, [5], image=True)).build(0, np.array([-1, 3, -1, 1, -1]), no_spare)
    assert batch.valid.tolist() == [False, True, False, True, False]
    assert [bool(key) for key in batch.sample_keys] == batch.valid.tolist()
    assert batch["label"].tolist() == [3, 3, 1, 1, 3]
    for row, source in ((0, 1), (2, 3), (4, 1)):
        assert torch.equal(batch["image"][row], batch["image"][source])


def test_a_micro_batch_without_any_sample_has_the_shapes_of_the_first_good_spare_one(tmp_path: Path) -> None:
    path = write_tar(
        tmp_path / "a.tar", [("bad", GOOD | {"cls": b"x"}), ("good", GOOD | {"cls": b"4"}), ("next", GOOD)]
    )
    batch = builder_of([path]).build(0, np.array([-1, -1]), lambda: [0, 1, 2])
    assert batch["image"].shape == (2, 8, 8, 3)
    assert batch["label"].tolist() == [4, 4]
    assert batch.sample_keys == ["", ""]
    assert not batch.valid.any()
    assert batch.bad == []  # a spare sample is not of this micro-batch


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        pytest.param({"jpg": jpeg(1)[:-60], "cls": b"1"}, "truncated|cut|end", id="an image cut short"),
        pytest.param({"jpg": jpeg(1)[:40], "cls": b"1"}, "not a readable image", id="a header cut short"),
        pytest.param({"jpg": b"<html>", "cls": b"1"}, "not a readable image", id="no image"),
        pytest.param({"jpg": b"", "cls": b"1"}, "not a readable image", id="an empty image"),
        pytest.param({"jpg": jpeg(1), "cls": b"cat"}, "field 'label': 'cat' is not an integer", id="no number"),
        pytest.param({"cls": b"1"}, r"has no \.jpg member", id="a missing image"),
        pytest.param({"jpg": jpeg(1)}, r"has no \.cls member", id="a missing label"),
    ],
)
def test_a_bad_sample_is_masked_named_and_keeps_its_row(tmp_path: Path, members: dict[str, bytes], reason: str) -> None:
    path = write_tar(tmp_path / "a.tar", [("first", GOOD), ("torn", members), ("last", GOOD | {"cls": b"2"})])
    batch = builder_of([path]).build(3, np.array([2, 1, 0]), no_spare)
    assert batch.sample_keys == ["a.tar/last", "", "a.tar/first"]
    assert batch.valid.tolist() == [True, False, True]
    assert batch["label"].tolist() == [2, 2, 0]
    assert torch.equal(batch["image"][1], batch["image"][0])
    (line,) = batch.bad
    offset = min(offset for _, offset in stored_members([path])["a.tar/torn"].values())
    assert (line["key"], line["epoch"], line["shard"], line["offset"]) == ("a.tar/torn", 3, path, offset)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(line["reason"])


def test_data_of_which_nothing_can_be_read_ends_with_the_first_reason(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("a", {"cls": b"cat"}), ("b", {"cls": b"dog"})])
    told = rf"no sample can be read.*a\.tar/a, in {path} from 512 on: field 'label': 'cat'.*data\.fields right"
    with pytest.raises(DataError, match=told):
        builder_of([path], LABEL).build(0, np.array([0]), lambda: [0, 1])


@pytest.mark.parametrize("ext", ["jpg", "npy"])
def test_samples_of_different_shapes_name_both_and_the_remedy(tmp_path: Path, ext: str) -> None:
    def member(height: int) -> bytes:
        return jpeg(0, height, 8) if ext == "jpg" else npy(np.zeros((height, 8)))

    samples = [("small", {ext: member(8)}), ("large", {ext: member(16)})]
    path = write_tar(tmp_path / "a.tar", samples)
    with pytest.raises(ValueError, match=r"'a.tar/large' is .*16, 8.*'a.tar/small' is .*8, 8.*size: 224"):
        builder_of([path], {ext: {"name": "x"}}).build(0, np.array([0, 1]), no_spare)


def test_samples_that_a_size_makes_equal_go_together(tmp_path: Path) -> None:
    samples = [("small", {"jpg": jpeg(0, 8, 8)}), ("large", {"jpg": jpeg(0, 16, 9)})]
    path = write_tar(tmp_path / "a.tar", samples)
    fields = {"jpg": {"name": "image", "role": "image", "size": [6, 5]}}
    assert builder_of([path], fields).build(0, np.array([0, 1]), no_spare)["image"].shape == (2, 6, 5, 3)


# -- augmentation


def draw(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "label": int(rng.integers(2**62))}


def drawn(tmp_path: Path, seed: int = 0) -> Callable[[int, list[int]], list[int]]:
    builder = builder_of(write_numbered(tmp_path, [40]), LABEL, draw, seed)

    def of(epoch: int, samples: list[int]) -> list[int]:
        numbers: list[int] = builder.build(epoch, np.array(samples), no_spare)["label"].tolist()
        return numbers

    return of


def test_what_happens_to_a_sample_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    of = drawn(tmp_path)
    together = of(0, list(range(40)))
    assert [of(0, [sample])[0] for sample in range(40)] == together
    assert of(0, [7, 3, 7]) == [together[7], together[3], together[7]]


def test_every_sample_epoch_and_seed_is_augmented_in_its_own_way(tmp_path: Path) -> None:
    numbers = [
        number for seed in (0, 1) for epoch in (0, 1, 2) for number in drawn(tmp_path, seed)(epoch, [*range(40)])
    ]
    assert len(set(numbers)) == len(numbers)


def test_an_augmentation_may_change_what_it_is_given(tmp_path: Path) -> None:
    def blacken(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        sample["image"][...] = sample["label"]
        return sample

    batch = builder_of(write_numbered(tmp_path, [3], image=True), augment=blacken).build(
        0, np.array([2, 0, 1]), no_spare
    )
    assert [row.unique().tolist() for row in batch["image"]] == [[2], [0], [1]]


def test_an_augmentation_may_crop_what_differs_in_size(tmp_path: Path) -> None:
    def crop(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"image": sample["image"][1:7, 1:7]}

    samples = [("small", {"jpg": jpeg(0, 8, 8)}), ("large", {"jpg": jpeg(0, 16, 9)})]
    builder = builder_of([write_tar(tmp_path / "a.tar", samples)], IMAGE, crop)
    assert builder.build(0, np.array([0, 1]), no_spare)["image"].shape == (2, 6, 6, 3)


def test_an_augmentation_that_loses_a_field_is_told_which(tmp_path: Path) -> None:
    builder = builder_of(write_numbered(tmp_path, [1], image=True), augment=lambda sample, rng: {"label": 1})
    with pytest.raises(
        ValueError, match=r"augmentation of sample 'shard-000.tar/sample00000' returned 'label'.*'image'"
    ):
        builder.build(0, np.array([0]), no_spare)

"""One micro-batch. ``tarfile``, simplejpeg and decoding by hand say what its rows must hold."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from dtrain.data import ShardLoader
from dtrain.data.augment import Augment, ColorJitter, Compose, Flip, RandomResizedCrop
from dtrain.data.fields.decode import decode
from dtrain.data.fields.field import DataError
from dtrain.data.fields.parse import parse_fields
from dtrain.data.loading.batch import Transfer
from dtrain.data.loading.collate import Collator
from dtrain.data.loading.field_buffer import FieldBuffer
from dtrain.data.shards.shard_file import ShardChanged
from dtrain.data.sources import shard_source as shard_source_module
from dtrain.data.sources.datasets import SampleSource
from dtrain.data.sources.shard_source import ShardSource
from dtrain.precision import Precision
from tests.property_tests import examples
from tests.refusals import refused
from tests.shards import (
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


def png(seed: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(stream, "PNG")
    return stream.getvalue()


PNG = png(3)
GOOD = {"jpg": jpeg(0), "cls": b"0"}


def make_builder(
    paths: Sequence[str], fields: dict[str, Any] = IMAGE | LABEL, augment: Augment | None = None, seed: int = 0
) -> Collator:
    source = ShardSource.build(paths, parse_fields(fields))
    return Collator(source, Transfer(source.fields, Precision("fp32")), augment, seed)


def no_spare() -> list[int]:
    raise AssertionError("a micro-batch with a good sample needs no spare one")


def test_rows_hold_what_the_tar_holds_in_the_order_that_was_asked_for(tmp_path: Path) -> None:
    paths = write_numbered(tmp_path, UNEVEN, image=True)
    members = stored_members(paths)
    wanted = np.random.default_rng(0).permutation(len(members))
    batch = make_builder(paths).build(0, wanted, no_spare)
    keys = [stored_keys(paths)[number] for number in wanted]
    assert batch.sample_keys == keys
    assert batch.valid.all()
    assert batch["label"].tolist() == [int(members[key]["cls"][0]) for key in keys]
    assert np.array_equal(
        batch["image"].numpy(), np.stack([simplejpeg.decode_jpeg(members[key]["jpg"][0]) for key in keys])
    )


def test_masked_rows_repeat_valid_ones_in_turn(tmp_path: Path) -> None:
    batch = make_builder(write_numbered(tmp_path, [5], image=True)).build(0, np.array([-1, 3, -1, 1, -1]), no_spare)
    assert batch.valid.tolist() == [False, True, False, True, False]
    assert [bool(key) for key in batch.sample_keys] == batch.valid.tolist()
    assert batch["label"].tolist() == [3, 3, 1, 1, 3]
    for row, source in ((0, 1), (2, 3), (4, 1)):
        assert torch.equal(batch["image"][row], batch["image"][source])


def test_a_micro_batch_without_any_sample_has_the_shapes_of_the_first_good_spare_one(tmp_path: Path) -> None:
    path = write_tar(
        tmp_path / "a.tar", [("bad", GOOD | {"cls": b"x"}), ("good", GOOD | {"cls": b"4"}), ("next", GOOD)]
    )
    batch = make_builder([path]).build(0, np.array([-1, -1]), lambda: [0, 1, 2])
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
    batch = make_builder([path]).build(3, np.array([2, 1, 0]), no_spare)
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
    with refused(DataError, "a.tar/a", path, "byte 512", "'label'", "'cat'", "data.fields"):
        make_builder([path], LABEL).build(0, np.array([0]), lambda: [0, 1])


@pytest.mark.parametrize("heights", [(8, 16), (16, 8)])
@pytest.mark.parametrize("ext", ["jpg", "npy"])
def test_samples_of_different_shapes_name_both_and_the_remedy(
    tmp_path: Path, ext: str, heights: tuple[int, int]
) -> None:
    def member(height: int) -> bytes:
        return jpeg(0, height, 8) if ext == "jpg" else npy(np.zeros((height, 8)))

    samples = [(f"sample{height}", {ext: member(height)}) for height in heights]
    path = write_tar(tmp_path / "a.tar", samples)
    remedy = "size: 224" if ext == "jpg" else "equal shapes"
    with refused(ValueError, "'a.tar/sample16'", "16, 8", remedy, "'a.tar/sample8'", "8, 8"):
        make_builder([path], {ext: {"name": "x"}}).build(0, np.array([0, 1]), no_spare)


def test_samples_that_a_size_makes_equal_go_together(tmp_path: Path) -> None:
    samples = [("small", {"jpg": jpeg(0, 8, 8)}), ("large", {"jpg": jpeg(0, 16, 9)})]
    path = write_tar(tmp_path / "a.tar", samples)
    fields = {"jpg": {"name": "image", "role": "image", "size": [6, 5]}}
    assert make_builder([path], fields).build(0, np.array([0, 1]), no_spare)["image"].shape == (2, 6, 5, 3)


# -- augmentation


def draw(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "label": int(rng.integers(2**62))}


def drawn(tmp_path: Path, seed: int = 0) -> Callable[[int, list[int]], list[int]]:
    builder = make_builder(write_numbered(tmp_path, [40]), LABEL, draw, seed)

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

    batch = make_builder(write_numbered(tmp_path, [3], image=True), augment=blacken).build(
        0, np.array([2, 0, 1]), no_spare
    )
    assert [row.unique().tolist() for row in batch["image"]] == [[2], [0], [1]]


def test_an_augmentation_may_crop_what_differs_in_size(tmp_path: Path) -> None:
    def crop(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"image": sample["image"][1:7, 1:7]}

    samples = [("small", {"jpg": jpeg(0, 8, 8)}), ("large", {"jpg": jpeg(0, 16, 9)})]
    builder = make_builder([write_tar(tmp_path / "a.tar", samples)], IMAGE, crop)
    assert builder.build(0, np.array([0, 1]), no_spare)["image"].shape == (2, 6, 6, 3)


def test_an_augmentation_that_loses_a_field_is_told_which(tmp_path: Path) -> None:
    builder = make_builder(write_numbered(tmp_path, [1], image=True), augment=lambda sample, rng: {"label": 1})
    with refused(ValueError, "'shard-000.tar/sample00000'", "'label'", "'image'"):
        builder.build(0, np.array([0]), no_spare)


def make_column(rows: int, ext: str = "npy", precision: str = "fp32", **options: Any) -> FieldBuffer:
    fields = parse_fields({ext: {"name": "x", **options}})
    return FieldBuffer(fields[0], rows, Transfer(fields, Precision(precision)), decode, "shard.tar/{}".format)


def filled(column: FieldBuffer, values: list[Any]) -> Tensor | list[Any]:
    for row, value in enumerate(values):
        column.put(row, value)
    return column.data()


@pytest.mark.parametrize(
    "dtype", ["uint8", "int16", "int32", "int64", "uint16", "bool", "float16", "float32", "float64", "complex64"]
)
def test_arrays_become_one_tensor_of_their_type(dtype: str) -> None:
    values = [(np.arange(6).reshape(2, 3) * row).astype(dtype) for row in range(4)]
    got = filled(make_column(4), values)
    assert isinstance(got, Tensor)
    assert got.numpy().dtype == dtype
    assert np.array_equal(got.numpy(), np.stack(values))


def test_arrays_may_be_strided_read_only_or_tensors() -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    frozen = base[:, :3].copy()
    frozen.flags.writeable = False
    values = [base[:, ::2], base[::-1, :3], frozen, torch.from_numpy(base[:, :3])]
    got = filled(make_column(4), values)
    assert isinstance(got, Tensor)
    assert np.array_equal(got.numpy(), np.stack([np.asarray(value) for value in values]))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "float32", "bool"])
def test_masked_rows_repeat_others_of_any_type(dtype: str) -> None:
    column = make_column(4)
    for row in (1, 3):
        column.put(row, np.array([row, 0]).astype(dtype))
    column.repeat([1, 3], [0, 2])
    got = column.data()
    assert isinstance(got, Tensor)
    assert got.numpy().tolist() == np.array([[1, 0], [1, 0], [3, 0], [3, 0]]).astype(dtype).tolist()


def test_bf16_tensors_pass_through() -> None:
    values = [torch.tensor([1.5, row], dtype=torch.bfloat16) for row in range(3)]
    for role in (None, "feature"):
        got = filled(make_column(3, precision="bf16", role=role), values)
        assert isinstance(got, Tensor)
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, torch.stack(values))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([3, 1, 2**62], torch.tensor([3, 1, 2**62]), id="integers"),
        pytest.param([True, False], torch.tensor([1, 0]), id="truth values"),
        pytest.param([np.True_, np.False_], torch.tensor([1, 0]), id="numpy's truth values"),
        pytest.param([1, 2.5], torch.tensor([1.0, 2.5]), id="numbers"),
        pytest.param([np.int32(3), np.float32(2.5)], torch.tensor([3.0, 2.5]), id="numpy's numbers"),
    ],
)
def test_numbers_become_a_tensor_of_int64_or_fp32(values: list[Any], expected: Tensor) -> None:
    got = filled(make_column(len(values), "json"), values)
    assert isinstance(got, Tensor)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


def test_numbers_that_are_features_travel_in_the_compute_dtype() -> None:
    got = filled(make_column(3, "json", "bf16", role="feature"), [1, 2.5, 3])
    assert isinstance(got, Tensor)
    assert got.dtype == torch.bfloat16
    assert got.tolist() == [1, 2.5, 3]
    with refused(ValueError, "field 'x'", "100000", "", "'shard.tar/1'"):
        filled(make_column(2, "json", "fp16", role="feature"), [1.0, 1e5])


def test_everything_else_becomes_a_list() -> None:
    for values in (["a", "b"], [b"a", b""], [{"a": 1}, None], [None, 3], [[1, 2], []], ["a", 3]):
        assert filled(make_column(2, "json"), values) == values


def test_a_decoder_may_write_into_the_column() -> None:
    column = make_column(3, "jpg", role="image")
    assert column.target(0) is None  # nobody knows the size yet
    column.put(0, np.full((2, 4, 3), 7, np.uint8))
    target = column.target(2)
    assert target is not None
    assert target.shape == (2, 4, 3)
    target[...] = 9
    column.put(2, target)
    column.target(1)
    column.put(1, np.full((2, 4, 3), 8, np.uint8))  # another array than the target counts
    got = column.data()
    assert isinstance(got, Tensor)
    assert [row.unique().tolist() for row in got] == [[7], [8], [9]]


def test_only_images_have_a_target() -> None:
    column = make_column(2, "npy")
    column.put(0, np.zeros((2, 4, 3), np.uint8))
    assert column.target(1) is None


def test_rows_are_repeated_in_tensors_and_in_lists() -> None:
    for ext, values in (("npy", [np.array([row]) for row in range(4)]), ("txt", ["0", "1", "2", "3"])):
        column = make_column(6, ext)
        for row, value in zip((0, 2, 3, 4), values, strict=True):
            column.put(row, value)
        column.repeat([3, 0], [1, 5])
        got = column.data()
        found = got.flatten().tolist() if isinstance(got, Tensor) else [int(value) for value in got]
        assert found == [0, 2, 1, 2, 3, 0]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        pytest.param(np.zeros((3, 4)), np.zeros((4, 3)), r"float64 \[4, 3\].*float64 \[3, 4\]", id="shape"),
        pytest.param(
            np.zeros(3, int), np.zeros(3), r"float64 \[3\].*int64 \[3\]", id="a cast that would lose something"
        ),
        pytest.param(np.zeros(3), "a", r"is str, 'shard.tar/0' is float64 \[3\]", id="an object after arrays"),
        pytest.param("a", np.zeros(3), r"is float64 \[3\], 'shard.tar/0' is str", id="an array after objects"),
    ],
)
def test_values_that_do_not_go_together_name_both_samples_and_the_remedy(first: Any, second: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"field 'x': sample 'shard.tar/1' .*{message}.*equal shapes"):
        filled(make_column(2), [first, second])


@pytest.mark.parametrize(
    "value",
    [np.zeros((4, 4, 3), np.float32), np.zeros((3, 4, 4), np.uint8), np.zeros((4, 4), np.uint8), torch.zeros(3, 4, 4)],
    ids=["floats", "channels first", "grey", "a float tensor"],
)
def test_an_image_that_is_no_pixels_any_more_is_refused(value: Any) -> None:
    # Cast to uint8, an image on [0, 1] would be black, and nothing would fail.
    with refused(ValueError, "field 'x'", "'shard.tar/0'", "uint8 [height, width, 3]"):
        filled(make_column(1, "jpg", role="image"), [value])


def test_what_no_tensor_can_hold_is_refused() -> None:
    with refused(ValueError, "'shard.tar/0'", "<U3"):
        filled(make_column(1), [np.array(["abc"])])


def test_a_number_of_more_than_64_bits_is_refused() -> None:
    with refused(ValueError, "field 'x'", "", "64 bits"):
        filled(make_column(2, "json"), [1, 2**64])


def test_rows_of_images_begin_where_libjpeg_turbo_writes_through_the_caches() -> None:
    column = make_column(4, "jpg")
    column.put(0, np.zeros((32, 32, 3), np.uint8))
    tensor = column.data()
    assert isinstance(tensor, torch.Tensor)
    assert tensor.data_ptr() % 32 == 16
    assert tensor.is_contiguous()


SIZES = [(30, 41), (25, 25), (60, 22), (44, 80)]
WINDOW = RandomResizedCrop([9, 8])


@pytest.fixture
def shard(tmp_path: Path) -> str:
    """Four images of different sizes, and in their midst one that is cut short."""
    samples = [(f"s{n}", {"jpg": jpeg(n, *size), "cls": str(n).encode()}) for n, size in enumerate(SIZES)]
    samples.insert(2, ("torn", {"jpg": jpeg(9, 40, 40)[:-200], "cls": b"9"}))
    return write_tar(tmp_path / "a.tar", samples)


def built(shard: str, fields: dict[str, Any], augment: Augment | None, epoch: int = 3) -> Any:
    source = ShardSource.build([shard], parse_fields(fields))
    builder = Collator(source, Transfer(source.fields, Precision("fp32")), augment, 0)
    return builder.build(epoch, np.arange(source.index.num_samples), lambda: [])


def by_hand(augment: Augment) -> Augment:
    """The same, but nobody can tell that it begins with a crop."""
    return lambda sample, rng: augment(sample, rng)


@pytest.mark.parametrize(
    "augment",
    [WINDOW, Compose([WINDOW, Flip()]), Compose([WINDOW, ColorJitter(0.4), Flip()])],
    ids=["window", "window and flip", "window, colours and flip"],
)
@pytest.mark.parametrize("fields", [IMAGE | LABEL, LABEL | IMAGE], ids=["image first", "label first"])
def test_a_crop_done_while_decoding_is_the_one_done_after_it(
    shard: str, augment: Augment, fields: dict[str, Any]
) -> None:
    batch, expected = built(shard, fields, augment), built(shard, fields, by_hand(augment))
    assert batch["image"].shape == (5, 9, 8, 3)
    assert torch.equal(batch["image"], expected["image"])
    assert torch.equal(batch["label"], expected["label"])
    assert batch.sample_keys == expected.sample_keys
    assert batch.valid.tolist() == [True, True, False, True, True]
    assert not torch.equal(batch["image"], built(shard, fields, augment, epoch=4)["image"])


def test_an_augmentation_that_begins_with_a_crop_replaces_the_size_that_evaluation_uses(shard: str) -> None:
    sized = {"jpg": {"name": "image", "role": "image", "size": 6, "shorter_side": 7}}
    assert torch.equal(built(shard, sized, WINDOW)["image"], built(shard, IMAGE, WINDOW)["image"])
    assert built(shard, sized, None)["image"].shape == (5, 6, 6, 3)
    assert built(shard, sized, Flip())["image"].shape == (5, 6, 6, 3)


def test_reduced_decoding_crops_the_same_windows(tmp_path: Path) -> None:
    ramp = np.add.outer(np.arange(400), np.arange(500))[..., np.newaxis] * np.array([0.1, 0.2, 0.28])
    image = simplejpeg.encode_jpeg(ramp.astype(np.uint8), quality=95)
    path = write_tar(tmp_path / "a.tar", [(f"s{n}", {"jpg": image}) for n in range(8)])
    crop = RandomResizedCrop(16, scale=(0.3, 1))
    full, reduced = (
        built(path, {"jpg": {"name": "image", "role": "image", "decode": decode}}, crop)["image"].int()
        for decode in ("full", "reduced")
    )
    assert not torch.equal(full, reduced)
    assert (full - reduced).abs().max() <= 6


def test_a_crop_of_something_else_than_an_image_is_refused_before_anything_is_read(shard: str) -> None:
    with refused(ValueError, "data.augment", "'pixels'", "image"):
        built(shard, IMAGE, RandomResizedCrop(4, field="pixels"))


def test_an_oversized_member_is_a_bad_sample_that_is_not_read(shard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_source_module, "MAX_MEMBER_BYTES", len(jpeg(3, *SIZES[3])) - 1)
    batch = built(shard, IMAGE | LABEL, WINDOW)
    assert batch.valid.tolist() == [True, True, False, True, False]
    assert [line["key"] for line in batch.bad] == ["a.tar/torn", "a.tar/s3"]
    assert "more than the limit" in batch.bad[1]["reason"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_rows_of_tokens_arrive_as_they_were_stored(tmp_path: Path, num_workers: int) -> None:
    rows = np.random.default_rng(0).integers(0, 2**16, (5, 9), dtype=np.uint16)
    stored = [row.astype("<u2").tobytes() for row in rows]
    stored.insert(1, stored[0][:-1])
    path = write_tar(tmp_path / "a.tar", [(f"{n:02}", {"tok": payload}) for n, payload in enumerate(stored)])
    fields = {"tok": {"name": "tokens", "dtype": "uint16", "length": 9}}
    loader = ShardLoader([path], fields, global_batch_size=6, shuffle="none", num_workers=num_workers, precision="bf16")
    batch = next(loader.epoch(0)).to("cpu")
    loader.close()
    assert batch["tokens"].dtype == torch.uint16
    assert np.array_equal(batch["tokens"].numpy()[batch.valid], rows)
    assert batch.valid.tolist() == [True, False, True, True, True, True]
    assert batch.bad[0]["reason"] == "field 'tokens': 17 bytes are not 9 numbers of uint16"


# -- the fast path and the careful path


class Carefully(Collator):
    """Fills every row on the careful path."""

    def _fill_fast(
        self, buffers: Any, epoch: int, samples: np.ndarray, order: np.ndarray, draws: np.ndarray
    ) -> list[int]:
        return [int(row) for row in order]


#: What a shard of random samples is made of: members by name, with an id that says what is wrong.
KINDS: dict[str, dict[str, bytes]] = {
    "good": {"jpg": jpeg(1), "cls": b"1", "npy": npy(np.arange(3, dtype=np.float32))},
    "other": {"jpg": jpeg(2), "cls": b" -22\n", "npy": npy(np.ones(3, np.float32))},
    "no JPEG": {"jpg": PNG, "cls": b"3", "npy": npy(np.zeros(3, np.float32))},
    "cut": {"jpg": jpeg(3)[:-60], "cls": b"4", "npy": npy(np.zeros(3, np.float32))},
    "no label": {"jpg": jpeg(4), "npy": npy(np.zeros(3, np.float32))},
    "bad label": {"jpg": jpeg(5, 9, 7), "cls": b"cat", "npy": npy(np.zeros(3, np.float32))},
    "large label": {"jpg": jpeg(5), "cls": b"9" * 30, "npy": npy(np.zeros(3, np.float32))},
    "bad array": {"jpg": jpeg(6), "cls": b"6", "npy": b"\x93NUMPY"},
    "oversized": {"jpg": jpeg(7, 40, 40), "cls": b"7", "npy": npy(np.zeros(3, np.float32))},
    "apart": {"jpg": jpeg(8), "txt": bytes(9000), "cls": b"8", "npy": npy(np.full(3, 8, np.float32))},
}
#: These do not go together with others: the run ends.
CLASHES: dict[str, dict[str, bytes]] = {
    "small": {"jpg": jpeg(1, 4, 4), "cls": b"1", "npy": npy(np.zeros(3, np.float32))},
    "as many pixels": {"jpg": jpeg(1, 16, 4), "cls": b"1", "npy": npy(np.zeros(3, np.float32))},
    "long array": {"jpg": jpeg(1), "cls": b"1", "npy": npy(np.zeros(5, np.float32))},
    "out of range": {"jpg": jpeg(1), "cls": b"1", "npy": npy(np.full(3, 1e6, np.float32))},
}
BOTH_FIELDS = IMAGE | LABEL | {"npy": {"name": "x", "role": "feature"}}


def outcome(collator: Collator, samples: np.ndarray, count: int) -> Any:
    """A batch as plain values, or the error."""
    try:
        batch = collator.build(2, samples, lambda: range(count))
    except (DataError, ValueError) as error:
        return type(error), str(error)
    dtypes = {name: column.dtype for name, column in batch.items()}
    columns = {name: column.float().tolist() for name, column in batch.items()}
    return batch.sample_keys, batch.valid.tolist(), batch.bad, dtypes, columns


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    # Without any member of a field the dataset is refused.
    kinds=st.lists(st.sampled_from([*["good", "other"] * 6, *KINDS, *CLASHES]), max_size=8).map(
        lambda some: [*some, "good"]
    ),
    rows=st.lists(st.integers(-1, 8), min_size=1, max_size=9),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    augment=st.sampled_from([None, Flip(), RandomResizedCrop(5), Compose([RandomResizedCrop(5), Flip()])]),
    block=st.sampled_from([1, 2000, 1 << 17]),
)
def test_both_paths_give_the_same_batches_and_the_same_errors(
    tmp_path: Path, kinds: list[str], rows: list[int], precision: str, augment: Augment | None, block: int
) -> None:
    samples = [(f"{n} {kind}".replace(" ", "-"), (KINDS | CLASHES)[kind]) for n, kind in enumerate(kinds)]
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    half = len(samples) // 2
    paths = [write_tar(folder / "a.tar", samples[:half]), write_tar(folder / "b.tar", samples[half:])]
    source = ShardSource.build(paths, parse_fields(BOTH_FIELDS))
    transfer = Transfer(source.fields, Precision(precision))
    numbers = np.array([min(row, len(samples) - 1) for row in rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_source_module, "MAX_MEMBER_BYTES", len(jpeg(7, 40, 40)) - 1)
        patch.setattr(shard_source_module, "_BLOCK_BYTES", block)
        fast, careful = (
            outcome(kind(source, transfer, augment, 5), numbers, len(samples)) for kind in (Collator, Carefully)
        )
    assert fast == careful


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(
        st.sampled_from([*["3", "-7", " 12\n", "+5", "1_0"] * 3, "x", "", str(1 << 63)]), min_size=1, max_size=8
    ),
    rows=st.lists(st.integers(-1, 7), min_size=1, max_size=9),
    role=st.sampled_from(["label", "id", "target", "feature"]),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    block=st.sampled_from([1, 600, 1 << 17]),
)
def test_integers_are_the_same_on_both_paths(
    tmp_path: Path, values: list[str], rows: list[int], role: str, precision: str, block: int
) -> None:
    samples = [(str(n), {"cls": value.encode()}) for n, value in enumerate(values)]
    path = write_tar(Path(tempfile.mkdtemp(dir=tmp_path)) / "a.tar", samples)
    source = ShardSource.build([path], parse_fields({"cls": {"name": "x", "role": role}}))
    transfer = Transfer(source.fields, Precision(precision))
    numbers = np.array([min(row, len(samples) - 1) for row in rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_source_module, "_BLOCK_BYTES", block)
        fast, careful = (
            outcome(kind(source, transfer, None, 5), numbers, len(samples)) for kind in (Collator, Carefully)
        )
    assert fast == careful


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.sampled_from([16, 16, 16, 16, 8, 15]), min_size=1, max_size=8),
    rows=st.lists(st.integers(-1, 7), min_size=1, max_size=9),
    dtype=st.sampled_from(["uint16", "int8", "int64", "float32", "float64"]),
    has_length=st.booleans(),
    role=st.sampled_from(["id", "feature", "target"]),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    block=st.sampled_from([1, 40, 1 << 17]),
)
def test_rows_of_plain_numbers_are_the_same_on_both_paths(
    tmp_path: Path,
    sizes: list[int],
    rows: list[int],
    dtype: str,
    has_length: bool,
    role: str,
    precision: str,
    block: int,
) -> None:
    rng = np.random.default_rng(len(sizes))
    samples = [
        (str(n), {"bin": rng.integers(1, 60, 16).astype(dtype).tobytes()[:size]}) for n, size in enumerate(sizes)
    ]
    path = write_tar(Path(tempfile.mkdtemp(dir=tmp_path)) / "a.tar", samples)
    length = {"length": 16 // np.dtype(dtype).itemsize} if has_length else {}
    source = ShardSource.build([path], parse_fields({"bin": {"name": "x", "dtype": dtype, "role": role, **length}}))
    numbers = np.array([min(row, len(samples) - 1) for row in rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_source_module, "_BLOCK_BYTES", block)
        fast, careful = (
            outcome(kind(source, Transfer(source.fields, Precision(precision)), None, 5), numbers, len(samples))
            for kind in (Collator, Carefully)
        )
    assert fast == careful


def test_a_shard_that_is_overwritten_while_it_is_open_ends_the_run(tmp_path: Path) -> None:
    paths = write_numbered(tmp_path, [8], image=True)
    builder = make_builder(paths)
    assert builder.build(0, np.arange(4), no_spare).valid.all()
    size = Path(paths[0]).stat().st_size
    with open(paths[0], "r+b") as file:  # the same file, of the same size
        file.write(np.random.default_rng(0).bytes(size))
    os.utime(paths[0], ns=(1, 1))
    with refused(ShardChanged, "shard-000.tar", "was replaced"):
        builder.build(0, np.arange(4, 8), no_spare)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "int8",
        "uint16",
        "int32",
        "int64",
        "uint64",
        "float16",
        "float32",
        "float64",
        "bf16 tensor",
        "int32 tensor",
    ],
)
@pytest.mark.parametrize("role", [None, "feature"])
def test_columns_of_arrays_are_taken_as_their_rows_one_by_one(precision: str, dtype: str, role: str | None) -> None:
    numbers, image = np.arange(24).reshape(8, 3) % 5, np.arange(8 * 48, dtype=np.uint8).reshape(8, 4, 4, 3)
    kind, _, tensor = dtype.partition(" ")
    x: Any = (
        torch.from_numpy(numbers).to(getattr(torch, kind.replace("bf16", "bfloat16")))
        if tensor
        else numbers.astype(kind)
    )
    fields = {"x": {"name": "x", "role": role}, "y": {"name": "y", "role": role}, "i": {"name": "i", "role": "image"}}
    source = SampleSource.build({"x": x, "y": x[:, 1], "i": image}, fields)
    transfer = Transfer(source.fields, Precision(precision))
    samples = np.array([3, -1, 7, 0, -1, 3])
    collator, slow = Collator(source, transfer, None, 0), Carefully(source, transfer, None, 0)
    assert (collator._columns is None) == (dtype == "uint64")
    assert outcome(collator, samples, 8) == outcome(slow, samples, 8)


def test_a_value_out_of_range_in_a_column_names_its_sample() -> None:
    source = SampleSource.build({"x": np.array([[1.0], [1e6]])}, {"x": {"name": "x", "role": "feature"}}, name="set")
    builder = Collator(source, Transfer(source.fields, Precision("fp16")), None, 0)
    assert builder.build(0, np.array([0, -1]), no_spare)["x"].tolist() == [[1], [1]]
    with refused(DataError, "'set/1'", "1e+06", "data.on_overflow"):
        builder.build(0, np.array([0, 1]), no_spare)

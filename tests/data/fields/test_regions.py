"""Masks and boxes: read as stored, and moved as their image. Oracles: images whose colours are places, and loops."""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dtrain.data import ShardDataset, ShardLoader
from dtrain.data.augment import Compose, Flip, Geometric, RandomCropFlip, RandomResizedCrop, TorchvisionTransform
from dtrain.data.fields import DataError, SampleError, parse_fields
from dtrain.data.fields.crop import Crop, kept_boxes, whole
from dtrain.data.fields.decode import decode
from dtrain.data.fields.field import Field
from dtrain.data.fields.regions import REGIONS_KEY
from dtrain.data.mixing import Mix
from tests.refusals import refused
from tests.shards import npy, write_tar

HEIGHT, WIDTH, BLOCK = 40, 56, 8
FIELDS: dict[str, Any] = {
    "image.png": {"name": "image", "role": "image"},
    "mask.png": {"name": "mask", "role": "mask"},
    "json": {"name": "boxes", "role": "boxes", "key": "boxes", "length": 6},
    "cls": {"name": "label", "role": "label"},
}
MASK = Field("png", "mask", "mask", of="image")
BOXES = Field("json", "boxes", "boxes", key="boxes", length=6, of="image")
#: Each keeps the place of a pixel in its colours, which tells where it was.
AUGMENTATIONS: dict[str, tuple[Any, Any]] = {
    "shift and flip": (RandomCropFlip(padding=6), None),
    "flip": (Flip(), None),
    "size": (None, [60, 28]),
    "crop while decoding": (RandomResizedCrop([32, 48], scale=(0.3, 0.9)), None),
    "crop, then shift": (Compose([RandomResizedCrop(32, scale=(0.3, 0.9)), RandomCropFlip(padding=3)]), None),
    "shift, then crop": (Compose([RandomCropFlip(padding=3), RandomResizedCrop(32, scale=(0.3, 0.9))]), None),
}


def places() -> np.ndarray:
    """An image whose red is four times the column of a pixel, and whose green is four times its row; blue is 255."""
    image = np.full((HEIGHT, WIDTH, 3), 255, np.uint8)
    image[..., 0], image[..., 1] = np.arange(WIDTH) * 4, np.arange(HEIGHT)[:, np.newaxis] * 4
    return image


def blocks() -> np.ndarray:
    """A mask in which each block of 8 x 8 pixels has its own number."""
    rows, columns = np.arange(HEIGHT)[:, np.newaxis] // BLOCK, np.arange(WIDTH) // BLOCK
    return (rows * 10 + columns).astype(np.uint8)


def png(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, "PNG")
    return stream.getvalue()


def members(boxes: Any = ((8, 8, 24, 32, 1), (16, 16, 40, 24, 0)), **changed: bytes) -> dict[str, bytes]:
    mine = {"image.png": png(places()), "mask.png": png(blocks()), "json": json.dumps({"boxes": boxes}).encode()}
    return {**mine, "cls": b"3", **{name.replace("_", "."): payload for name, payload in changed.items()}}


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tar(tmp_path_factory.mktemp("shard") / "a.tar", [(f"{n:02d}", members()) for n in range(21)])


def loader(shards: str, augment: Any = None, size: Any = None, **options: Any) -> ShardLoader:
    image = {**FIELDS["image.png"], **({} if size is None else {"size": size})}
    given = {"global_batch_size": 4, "num_workers": 0, **options}
    return ShardLoader(shards, given.pop("fields", {**FIELDS, "image.png": image}), augment=augment, **given)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_a_mask_and_boxes_go_where_the_pixels_of_the_image_go(name: str, shard: str) -> None:
    augment, size = AUGMENTATIONS[name]
    batches = list(loader(shard, augment, size).epoch(0))
    pixels = torch.cat([batch["image"][batch.valid] for batch in batches]).numpy().astype(int)
    masks = torch.cat([batch["mask"][batch.valid] for batch in batches]).numpy()
    assert pixels.shape[:3] == masks.shape
    assert len(np.unique(pixels.reshape(len(pixels), -1), axis=0)) > (10 if "shift" in name or "crop" in name else 0)
    columns, rows, inside = pixels[..., 0] / 4, pixels[..., 1] / 4, pixels[..., 2] == 255
    # Within a pixel of the border of a block, interpolation may show the colours of the next one.
    clear = inside & (np.abs((columns + 0.5) % BLOCK - 4) < 3) & (np.abs((rows + 0.5) % BLOCK - 4) < 3)
    numbers = np.floor((rows + 0.5) / BLOCK) * 10 + np.floor((columns + 0.5) / BLOCK)
    assert clear.mean() > 0.3
    assert (masks[clear] == numbers[clear]).all()
    assert set(np.unique(masks)) <= {*np.unique(blocks()), 255}
    assert (masks[pixels[..., 2] == 0] == 255).all()
    found = 0
    for batch in batches:
        assert (batch["boxes"].dtype, batch["boxes_count"].dtype) == (torch.float32, torch.int64)
        for row in torch.arange(4)[batch.valid].tolist():
            boxes, number = batch["boxes"][row], int(batch["boxes_count"][row])
            assert not boxes[number:].any()
            image = batch["image"][row].numpy()
            for left, top, right, bottom, kind in boxes[:number].tolist():
                found += 1
                theirs = (8, 8, 24, 32) if kind == 1 else (16, 16, 40, 24)
                part = image[int(np.ceil(top)) : int(bottom), int(np.ceil(left)) : int(right)]
                if part.size:  # the box holds pixels of the stored box alone
                    assert theirs[0] - 1.5 <= part[..., 0].min() / 4 <= part[..., 0].max() / 4 < theirs[2] + 1
                    assert theirs[1] - 1.5 <= part[..., 1].min() / 4 <= part[..., 1].max() / 4 < theirs[3] + 1
    assert found >= 21


@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 9), st.booleans(), st.sampled_from(["zero", "reflect"]))
def test_a_mask_and_an_image_with_the_same_numbers_stay_the_same(
    seed: int, height: int, width: int, flip: bool, mode: str
) -> None:
    numbers = np.random.default_rng(seed).integers(0, 255, (height, width), dtype=np.uint8)
    field = Field("png", "mask", "mask", of="image", ignore=0)  # what an image is padded with
    sample = {"image": np.repeat(numbers[..., None], 3, axis=2), "mask": numbers.copy(), REGIONS_KEY: (field,)}
    padding = 3 if mode == "zero" else min(height, width, 3) - 1
    moved = RandomCropFlip(padding=padding, flip=flip, mode=mode)(sample, np.random.default_rng(seed))
    assert (moved["image"] == moved["mask"][..., None]).all()
    assert (sample["mask"] == numbers).all()
    assert not np.shares_memory(sample["mask"], moved["mask"])


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 20), st.integers(1, 20), st.booleans())
def test_a_resized_mask_takes_the_pixel_at_the_centre(
    height: int, width: int, rows: int, columns: int, middle: bool
) -> None:
    mask = np.random.default_rng(0).integers(0, 1000, (height + 2, width + 3))
    size = (max(rows, columns),) * 2 if middle else (rows, columns)
    crop = Crop(1, 2, height, width, size, center=(rows, columns) if middle else None)
    top, left = (round((whole - part) / 2) for whole, part in zip(size, (rows, columns), strict=True))
    want = [
        [
            mask[1 + int((y + 0.5) * height / size[0]), 2 + int((x + 0.5) * width / size[1])]
            for x in range(left, left + columns)
        ]
        for y in range(top, top + rows)
    ]
    assert crop.cut_mask(mask).tolist() == np.array(want).tolist()


@given(st.lists(st.tuples(*[st.integers(0, 60)] * 2, *[st.integers(2, 40)] * 2, st.integers(0, 9)), max_size=6))
def test_boxes_that_are_mirrored_twice_are_the_same(corners: list[tuple[int, ...]]) -> None:
    boxes = np.array([(x / 2, y / 2, (x + w) / 2, (y + h) / 2, kind) for x, y, w, h, kind in corners], np.float32)
    move = Flip(probability=1).move(50, 60, np.random.default_rng(0))
    boxes = boxes.reshape(-1, 5)
    once = move.move_boxes(boxes)
    assert np.array_equal(move.move_boxes(once), boxes)
    assert np.array_equal(once[:, 0], 60 - boxes[:, 2])
    assert np.array_equal(once[:, [1, 3, 4]], boxes[:, [1, 3, 4]])


def test_boxes_are_clipped_and_left_out_with_less_than_a_pixel() -> None:
    boxes = np.array([[-5, -5, 3, 40, 7], [9.5, 0, 12, 5, 1], [0, 0, 0.5, 9, 2], [30, 3, 40, 9, 3]], np.float32)
    assert kept_boxes(boxes, 20, 10).tolist() == [[0, 0, 3, 20, 7]]
    middle = whole(40, 20, (10, 10), shorter_side=10).move_boxes(np.array([[4, 12, 8, 40, 5]], np.float32))
    assert middle.tolist() == [[2, 1, 4, 10, 5]]  # halved, and five pixels are cut off at the top and at the bottom


def grey(bits: int, values: list[int]) -> bytes:
    """A PNG of one row of grey pixels of 2 or 4 bits, written by hand."""
    row = b"\0" + int("".join(f"{value:0{bits}b}" for value in values).ljust(8, "0"), 2).to_bytes(1, "big")

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", len(values), 1, bits, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(row)) + chunk(b"IEND", b"")


def palette(values: np.ndarray) -> bytes:
    image, stream = Image.fromarray(values).convert("P"), io.BytesIO()
    image.putpalette([9, 9, 9, 200, 0, 0, 0, 200, 0] * 20)
    image.putdata(values.flatten().tolist())
    image.save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("payload", "numbers"),
    [
        (png(np.array([[0, 7, 255]], np.uint8)), [0, 7, 255]),
        (palette(np.array([[0, 1, 2]], np.uint8)), [0, 1, 2]),
        (png(np.array([[False, True]])), [0, 1]),
        (grey(2, [0, 1, 2, 3]), [0, 1, 2, 3]),
        (grey(4, [11, 3]), [11, 3]),
        (png(np.array([[0, 300, 65535]], np.uint16)), [0, 300, 65535]),
    ],
    ids=["grey", "palette", "1 bit", "2 bits", "4 bits", "16 bits"],
)
def test_a_mask_has_the_numbers_that_are_stored(payload: bytes, numbers: list[int]) -> None:
    mask = decode(MASK, payload)
    assert mask.tolist() == [numbers]
    assert mask.dtype == (np.int32 if max(numbers) > 255 else np.uint8)


def test_what_is_no_mask_is_a_bad_sample_with_the_reason() -> None:
    jpeg = io.BytesIO()
    Image.fromarray(blocks()).save(jpeg, "JPEG")
    for payload, reason in ((jpeg.getvalue(), "JPEG"), (png(places()), "RGB"), (b"nonsense", "not a readable image")):
        with pytest.raises(SampleError, match=f"'mask'.*{reason}"):
            decode(MASK, payload)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"mask_png": png(blocks()[:-1])}, "the mask is 39 x 56, its image 'image' is 40 x 56"),
        ({"boxes": [[1, 1, 9, 9]] * 7}, "7 boxes, more than its length 6"),
        ({"boxes": [[1, 1, 9, 9], [9, 1, 8, 9]]}, "box 1 is [9.0, 1.0, 8.0, 9.0]"),
        ({"boxes": [[1, 1, 9]]}, "not boxes"),
        ({"boxes": [[1, 1, 9, 9], [1, 1]]}, "role boxes wants numbers"),
        ({"boxes": "none"}, "role boxes wants numbers"),
    ],
)
@pytest.mark.parametrize("augment", [None, RandomResizedCrop(8), RandomCropFlip()])
def test_a_region_that_does_not_fit_makes_a_bad_sample(
    changed: dict[str, Any], reason: str, augment: Any, tmp_path: Path
) -> None:
    samples = [("good", members()), ("bad", members(**changed)), ("fine", members(boxes=[]))]
    (batch,) = loader(write_tar(tmp_path / "a.tar", samples), augment, shuffle="none").epoch(0)
    assert batch.valid.tolist() == [True, False, True, False]
    assert [record["key"].rpartition("/")[2] for record in batch.bad] == ["bad"]
    assert reason in batch.bad[0]["reason"]
    assert int(batch["boxes_count"][2]) == 0


def test_masked_rows_repeat_whole_samples_and_numbers_keep_their_types_in_low_precision(shard: str) -> None:
    for precision in ("bf16", "fp16"):
        *_, last = loader(shard, Flip(), precision=precision, fields=dict(reversed(FIELDS.items()))).epoch(0)
        (row,) = last.valid.nonzero()[:, 0].tolist()  # the twenty-first sample
        for name in ("image", "mask", "boxes", "boxes_count", "label"):
            assert (last[name] == last[name][row]).all()
        arrived = last.to("cpu")
        assert [arrived[name].dtype for name in ("mask", "boxes", "boxes_count")] == [
            torch.uint8,
            torch.float32,
            torch.int64,
        ]


def test_batches_are_the_same_with_workers_in_other_ranks_and_in_a_shard_dataset(shard: str) -> None:
    augment = AUGMENTATIONS["crop, then shift"][0]
    alone = {key: row for batch in loader(shard, augment).epoch(2) for key, row in rows(batch)}
    for rank in (0, 1):
        for batch in loader(shard, augment, rank=rank, world_size=2, num_workers=1).epoch(2):
            for key, row in rows(batch):
                assert all(torch.equal(row[name], alone[key][name]) for name in row)
    samples = ShardDataset(shard, FIELDS, augment=augment)
    samples.set_epoch(2)
    seen = {sample["__key__"]: sample for sample in samples}
    assert len(seen) == 21
    for key, row in alone.items():
        (sample,) = (sample for name, sample in seen.items() if name.endswith(key.rpartition("/")[2]))
        assert set(sample) == {*row, "__key__"}
        assert all(np.array_equal(np.asarray(sample[name]), row[name]) for name in row)


def rows(batch: Any) -> list[tuple[str, dict[str, Any]]]:
    keys = enumerate(batch.sample_keys)
    return [(key, {name: column[number] for name, column in batch.items()}) for number, key in keys if key]


def test_arrays_and_the_values_of_a_dataset_can_be_masks_and_boxes(tmp_path: Path) -> None:
    fields = {"npy": {"name": "mask", "role": "mask"}, "b.npy": {"name": "boxes", "role": "boxes", "length": 2}}
    array = blocks().astype(np.int64) * 1000
    path = write_tar(tmp_path / "a.tar", [("a", {"npy": npy(array), "b.npy": npy(np.array([[0, 1, 2, 3]]))})])
    (batch,) = loader(path, fields=fields, global_batch_size=1).epoch(0)
    assert batch["mask"][0].tolist() == array.tolist()
    assert (batch["boxes"][0].tolist(), batch["boxes_count"].tolist()) == ([[0, 1, 2, 3, 0], [0] * 5], [1])
    dataset = [
        {"picture": Image.fromarray(places()), "seg": mask, "box": [[8, 8, 24, 32]]}
        for mask in (png(blocks()), blocks())
    ]
    given = {"picture": ("image", {}), "seg": ("mask", {}), "box": ("boxes", {"length": 3})}
    declared = {key: {"name": role, "role": role, **more} for key, (role, more) in given.items()}
    values = ShardLoader.over(dataset, declared, global_batch_size=2, num_workers=0, augment=Flip(probability=1))
    (batch,) = values.epoch(0)
    assert (batch["mask"].numpy() == blocks()[:, ::-1]).all()
    assert batch["boxes"][1, 0].tolist() == [WIDTH - 24, 8, WIDTH - 8, 32, 0]


class Half(Geometric):
    """A move of a user's own: the left half."""

    field = "image"

    def move(self, height: int, width: int, rng: np.random.Generator) -> Crop:
        return Crop(0, 0, height, width // 2, (height, width // 2))


def test_a_geometric_augmentation_of_ones_own_moves_regions_even_inside_a_step_that_nobody_knows(shard: str) -> None:
    def sometimes(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return Half()(sample, rng)

    batch = next(loader(shard, sometimes).epoch(0))
    assert (batch["mask"].numpy() == blocks()[:, : WIDTH // 2]).all()
    assert batch["boxes"][0, :2].tolist() == [[8, 8, 24, 32, 1], [16, 16, 28, 24, 0]]


def test_an_augmentation_that_would_separate_image_and_regions_is_refused(shard: str) -> None:
    def only_some(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {name: sample[name] for name in ("image", "mask", "boxes", "label")}

    def one_is_larger(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return Flip()({**sample, "image": np.zeros((80, 80, 3), np.uint8)}, rng)

    def too_many(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {**sample, "boxes": np.zeros((7, 5), np.float32)}

    turned = TorchvisionTransform(lambda image: image.flip(2))
    for augment, parts in (
        (turned, ("'image'", "'mask'", "only_colours=true", "Geometric")),
        (only_some, (REGIONS_KEY, "{**sample")),
        (one_is_larger, ("'mask'", "(40, 56)", "change both")),
        (too_many, ("'boxes'", "[7, 5]", "at most 6")),
    ):
        with refused(DataError, *parts):
            next(loader(shard, augment).epoch(0))
    same = next(loader(shard, TorchvisionTransform(lambda image: 255 - image, only_colours=True)).epoch(0))
    assert (same["mask"].numpy() == blocks()).all()


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({"jpg": {"name": "m", "role": "mask"}}, ("'m'", ".jpg", "png")),
        ({"txt": {"name": "b", "role": "boxes", "length": 2}}, ("'b'", ".txt", "json or npy")),
        ({"b.json": {"name": "b", "role": "boxes"}}, ("'b'", "length", "length: 50")),
        ({"m.png": {"name": "m", "role": "mask", "ignore": 300}}, ("'m'", "300", "0 to 255")),
        ({"m.png": {"name": "m", "role": "mask", "ignore": "x"}}, ("ignore", "'x'", "int")),
        ({"m.png": {"name": "m", "role": "mask", "of": "label"}}, ("'m'", "'label'", "Images: image")),
        ({"b.png": {"name": "second", "role": "image"}}, ("'mask'", "None", "Images: image, second")),
        ({"image.png": {"name": "image", "role": "image", "of": "x"}}, ("'image'", "of needs the role mask or boxes")),
    ],
)  # fmt: skip
def test_impossible_declarations_are_refused(changed: dict[str, Any], parts: tuple[str, ...]) -> None:
    with refused(ValueError, *parts):
        parse_fields({**FIELDS, **changed})


def test_of_two_images_the_named_one_is_followed_and_mixing_it_is_refused() -> None:
    two = {**FIELDS, "b.png": {"name": "second", "role": "image"}}
    two["mask.png"], two["json"] = {**two["mask.png"], "of": "second"}, {**two["json"], "of": "second"}
    fields = parse_fields(two)
    assert [field.of for field in fields] == [None, "second", "second", None, None]
    Mix(classes=4, mixup_alpha=1).fields(fields)
    with refused(ValueError, "data.mix", "'mask'", "Remove"):
        Mix(classes=4, mixup_alpha=1, image="second").fields(fields)

"""Crops that are done while decoding, and rows of tokens: what reaches the batch is what doing it by hand gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch

from dtrain.data import ShardLoader
from dtrain.data import shard_source as shard_source_module
from dtrain.data.augment import Augment, Compose, Flip, RandomResizedCrop
from dtrain.data.builder import Builder
from dtrain.data.color_jitter import ColorJitter
from dtrain.data.field_options import parse_fields
from dtrain.data.shard_source import ShardSource
from dtrain.data.wire import Wire
from dtrain.precision import Precision
from tests.data.shards_for_tests import IMAGE, LABEL, jpeg, write_tar

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
    builder = Builder(source, Wire(source.fields, Precision("fp32")), augment, 0)
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
    with pytest.raises(ValueError, match=r"data.augment crops 'pixels', which is none of the images: image"):
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

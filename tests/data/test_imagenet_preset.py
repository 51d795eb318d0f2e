"""``data=imagenet``: photographs of any size go in, crops of 224 pixels come out; evaluation shows the middle."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import simplejpeg
from omegaconf import OmegaConf
from PIL import Image

from dtrain.config.app import conf_dir
from dtrain.data import ShardLoader
from dtrain.training.build import by_target
from tests.data.shards_for_tests import write_tar


def smooth(height: int, width: int) -> bytes:
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([y * 255 // height, x * 255 // width, (x + y) * 255 // (height + width)], axis=-1)
    return simplejpeg.encode_jpeg(pixels.astype(np.uint8), quality=95)


def test_the_imagenet_preset_crops_at_random_to_train_and_shows_the_middle_to_evaluate(tmp_path: Path) -> None:
    config = OmegaConf.create({"data": OmegaConf.load(conf_dir() / "data" / "imagenet.yaml")})
    preset = OmegaConf.merge(config, {"data": {"image_size": 224}}).data
    files = [smooth(300, 400), smooth(500, 260), smooth(100, 90)]
    shard = write_tar(tmp_path / "a.tar", [(f"s{n}", {"jpg": file, "cls": b"1"}) for n, file in enumerate(files)])
    fields = OmegaConf.to_container(preset.fields, resolve=True)
    augment = by_target("data.augment", preset.augment)
    seen = {}
    for use in ("train", "eval"):
        loader = ShardLoader(
            [shard],
            fields,
            global_batch_size=3,
            num_workers=0,
            shuffle="none",
            augment=augment if use == "train" else None,
        )
        seen[use] = next(loader.epoch(0))["image"].numpy()
    assert seen["train"].shape == seen["eval"].shape == (3, 224, 224, 3)
    assert not np.array_equal(seen["train"], seen["eval"])
    for shown, file in zip(seen["eval"], files, strict=True):
        image = Image.open(io.BytesIO(file))
        scale = 256 / min(image.size)
        image = image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.BILINEAR)
        left, top = round((image.width - 224) / 2), round((image.height - 224) / 2)
        middle = np.asarray(image.crop((left, top, left + 224, top + 224)))
        assert np.abs(shown.astype(int) - middle).max() <= 3

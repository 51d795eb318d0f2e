"""Segmentation: a class for each pixel. The masks are cropped and mirrored together with the images.

    python examples/segmentation.py shapes-masks       # writes the dataset: KEY.image.png and KEY.mask.png
    PYTHONPATH=examples dtrain train --nproc 2 --config-dir examples/presets experiment=segmentation

An image shows some shapes on noise: red circles, green squares and blue triangles. Its mask is a PNG with one channel:
0 is the background, and each kind of shape has a class number. As in the masks of PASCAL VOC, a line of 255 around each shape
is ignored by loss and metrics.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from dtrain.data import Batch
from dtrain.data.writer import write_shards
from dtrain.tasks.losses import softmax_cross_entropy
from dtrain.training.task import Evaluation, Output

CLASSES = ("background", "circle", "square", "triangle")
SIDE, IGNORE = 48, 255


class UNet(nn.Module):
    """A small U-Net (Ronneberger et al. 2015): two levels down and up, with the details of each level passed across.

    Args:
        classes: Number of classes.
        width: Channels of the first level.
    """

    def __init__(self, classes: int = len(CLASSES), width: int = 16) -> None:
        super().__init__()
        self.first = block(3, width)
        self.second = block(width, 2 * width, stride=2)
        self.third = block(2 * width, 4 * width, stride=2)
        self.up_to_second = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.after_second = block(4 * width, 2 * width)
        self.up_to_first = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.after_first = nn.Sequential(block(2 * width, width), nn.Conv2d(width, classes, 3, padding=1))

    def forward(self, images: Tensor) -> Tensor:
        """Logits, ``[rows, classes, height, width]``; height and width are multiples of 4."""
        first = self.first(images)
        second = self.second(first)
        third = self.third(second)
        second = self.after_second(torch.cat([self.up_to_second(third), second], dim=1))
        logits: Tensor = self.after_first(torch.cat([self.up_to_first(second), first], dim=1))
        return logits


def block(channels: int, out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(channels, out, 3, stride, 1), nn.GroupNorm(4, out), nn.ReLU()),
        *(nn.Conv2d(out, out, 3, 1, 1), nn.GroupNorm(4, out), nn.ReLU()),
    )


class Segmentation:
    """Cross-entropy over all pixels except those with the class number ``ignore``; evaluations report the mean IoU.

    Args:
        ignore: Class number of pixels that do not count.
    """

    def __init__(self, ignore: int = IGNORE) -> None:
        self._ignore = ignore

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        """Reads ``image`` and ``mask``, uint8 ``[rows, height, width]``."""
        logits = model(batch["image"]).permute(0, 2, 3, 1)  # [rows, height, width, classes]
        mask, classes = batch["mask"].long(), logits.shape[-1]
        counts = (mask != self._ignore) & batch.valid[:, None, None]
        mask = mask.masked_fill(~counts, 0)
        losses = softmax_cross_entropy(logits, mask).masked_fill(~counts, 0)
        predicted = logits.argmax(dim=-1)
        metrics = {"pixel_accuracy": (((predicted == mask) & counts).sum(), counts.sum())}
        tables = {}
        if not model.training:
            confusion = torch.zeros(classes * classes, dtype=torch.int64, device=mask.device)
            confusion.index_add_(0, (mask * classes + predicted).flatten(), counts.long().flatten())
            tables["confusion"] = confusion.view(classes, classes)
        return Output(losses.sum(), counts.sum(), metrics, tables)  # a mean over all pixels of the global batch

    def conclude(self, model: nn.Module, evaluation: Evaluation) -> Mapping[str, float]:
        """The IoU of each class, and their mean."""
        confusion = evaluation.tables["confusion"].double()  # [class, predicted class], exact on any number of ranks
        iou = confusion.diag() / (confusion.sum(0) + confusion.sum(1) - confusion.diag())
        names = CLASSES if len(iou) == len(CLASSES) else range(len(iou))
        return {"mean_iou": iou.nanmean().item()} | {
            f"iou_{name}": it for name, it in zip(names, iou.tolist(), strict=True)
        }


def write(folder: Path, train: int = 1200, test: int = 240) -> None:
    """Writes ``train-*.tar`` and ``test-*.tar``."""
    for prefix, count, seed in (("train", train, 0), ("test", test, 1)):
        write_shards(samples(count, np.random.default_rng(seed)), folder, prefix=prefix, shards=6, total=count)


def samples(count: int, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    for number in range(count):
        image = Image.fromarray(rng.integers(0, 120, (SIDE, SIDE, 3), dtype=np.uint8))
        mask = Image.new("L", (SIDE, SIDE))
        for _ in range(rng.integers(1, 4)):
            kind, radius = int(rng.integers(1, len(CLASSES))), int(rng.integers(5, 11))
            x, y = (int(place) for place in rng.integers(radius, SIDE - radius, 2))
            colour = [int(part) for part in rng.integers(0, 100, 3)]
            colour[kind - 1] = 255
            draw(ImageDraw.Draw(image), kind, x, y, radius, fill=tuple(colour))
            draw(ImageDraw.Draw(mask), kind, x, y, radius, fill=kind, outline=IGNORE)
        yield {"__key__": f"{number:05d}", "image.png": encoded(image), "mask.png": encoded(mask)}


def draw(pen: Any, kind: int, x: int, y: int, radius: int, **colours: Any) -> None:
    if kind == 1:
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), **colours)
    elif kind == 2:
        pen.rectangle((x - radius, y - radius, x + radius, y + radius), **colours)
    else:
        pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], **colours)


def encoded(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)

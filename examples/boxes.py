"""Object detection: images with any number of boxes, which are cropped and mirrored together with the images.

    python examples/boxes.py shapes-boxes        # writes the dataset: KEY.png and KEY.json
    PYTHONPATH=examples dtrain train --nproc 2 --config-dir examples/presets experiment=boxes

The json has, under ``boxes``, [left, top, right, bottom, class] in pixels for each shape of the image.

For each cell of a grid, the detector predicts whether the centre of a box of each class lies in the cell, and the edges of this
box (Zhou et al. 2019, "Objects as points", without its Gaussians). Evaluations report the average precision at an IoU of 0.5.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from segmentation import block, encoded  # the example next to this one
from torch import Tensor, nn

from dtrain.data import Batch
from dtrain.data.writer import write_shards
from dtrain.training.task import Evaluation, Output

CLASSES, SIDE, STRIDE = 2, 64, 8  # a cell is STRIDE pixels wide
_BINS = 1000  # of scores


class Detector(nn.Sequential):
    """Class logits and four box numbers for each cell, ``[rows, classes + 4, height / 8, width / 8]``."""

    def __init__(self, classes: int = CLASSES, width: int = 16) -> None:
        layers = block(3, width, 2), block(width, 2 * width, 2), block(2 * width, 4 * width, 2)
        super().__init__(*layers, nn.Conv2d(4 * width, classes + 4, 3, padding=1))
        with torch.no_grad():
            self[-1].bias[:classes] = -4  # most cells have no box


class Detection:
    """Focal loss of the cells, and L1 loss of the edges of the boxes whose centre is in a cell.

    Args:
        most: Boxes that are predicted for an image, those with the highest scores.
    """

    def __init__(self, most: int = 10) -> None:
        self._most = most

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        """Reads ``image``, ``boxes``, fp32 ``[rows, length, 5]``, and their number, ``boxes_count``."""
        predicted = model(batch["image"]).float()  # [rows, classes + 4, height, width]
        (_, channels, height, width), boxes = predicted.shape, batch["boxes"]
        logits, edges = predicted.flatten(2).split([channels - 4, 4], dim=1)  # [rows, ..., cells]
        present = torch.arange(boxes.shape[1], device=boxes.device) < batch["boxes_count"][:, None]  # [rows, length]
        kinds, centres = boxes[..., 4].long(), (boxes[..., :2] + boxes[..., 2:4]) / 2
        column, row = (centres / STRIDE).long().unbind(-1)
        cells = (row.clamp(max=height - 1) * width + column.clamp(max=width - 1)).masked_fill(~present, 0)
        # One entry for each class and cell; a sum would depend on the order where two boxes share one.
        number = (kinds * height * width + cells).masked_fill(~present, -1)
        entries = torch.arange(logits[0].numel(), device=boxes.device)
        target = (number[..., None] == entries).any(dim=1).view_as(logits).float()
        p = logits.sigmoid()
        focal = F.binary_cross_entropy_with_logits(logits, target, reduction="none") * (target - p).square()
        at_centres = edges.gather(2, cells[:, None].expand(-1, 4, -1)).transpose(1, 2)  # [rows, length, 4]
        error = (at_centres - _relative(boxes, centres)).abs().sum(dim=-1).masked_fill(~present, 0)
        losses = (focal.sum(dim=(1, 2)) + 0.2 * error.sum(dim=1)).masked_fill(~batch.valid, 0)
        tables = (
            {} if model.training else self._tables(p, edges, width, boxes, present & batch.valid[:, None], batch.valid)
        )
        return Output(losses.sum(), batch.valid.sum(), {}, tables)

    def _tables(
        self, scores: Tensor, edges: Tensor, width: int, boxes: Tensor, present: Tensor, valid: Tensor
    ) -> dict[str, Tensor]:
        """Predictions that are correct, and all of them, by score, int64 ``[2, bins]``; and the number of boxes, ``[1]``."""
        cells = scores.shape[2]
        top, index = scores.flatten(1).topk(min(self._most, scores[0].numel()), dim=1)  # [rows, most]
        kinds, cell = index // cells, index % cells
        centres = (torch.stack([cell % width, cell // width], dim=-1) + 0.5) * STRIDE
        offsets = edges.gather(2, cell[:, None].expand(-1, 4, -1)).transpose(1, 2) * STRIDE
        found = torch.cat([centres, centres], dim=-1) + offsets
        overlap = iou(found[:, :, None], boxes[:, None, :, :4])  # [rows, most, length]
        overlap = overlap.masked_fill((kinds[..., None] != boxes[:, None, :, 4]) | ~present[:, None], 0)
        correct = torch.zeros_like(top, dtype=torch.bool)
        for number in range(top.shape[1]):  # in falling order of scores; a box is found once
            best, box = overlap[:, number].max(dim=1)
            correct[:, number] = best >= 0.5
            taken = F.one_hot(box, boxes.shape[1]).bool() & correct[:, number, None]
            overlap = overlap.masked_fill(taken[:, None], 0)
        counts = torch.zeros(2, _BINS, dtype=torch.int64, device=top.device)
        bins = (top * _BINS).long().clamp(max=_BINS - 1).flatten()
        for table, which in zip(counts, (correct & valid[:, None], valid[:, None].expand_as(correct)), strict=True):
            table.index_add_(0, bins, which.long().flatten())
        return {"predictions": counts, "boxes": present.sum().view(1)}

    def conclude(self, model: nn.Module, evaluation: Evaluation) -> Mapping[str, float]:
        """The average precision over all boxes at an IoU of 0.5: the area below precision as a function of recall."""
        correct, every = evaluation.tables["predictions"].flip(1).cumsum(1).double()  # from the highest score down
        precision = (correct / every.clamp(min=1)).flip(0).cummax(0).values.flip(0)
        recall = correct / evaluation.tables["boxes"]
        return {"ap50": (precision * recall.diff(prepend=recall.new_zeros(1))).sum().item()}


def _relative(boxes: Tensor, centres: Tensor) -> Tensor:
    """The edges of each box, in cells, relative to the middle of the cell that contains its centre."""
    middle = (centres / STRIDE).floor() + 0.5
    return boxes[..., :4] / STRIDE - torch.cat([middle, middle], dim=-1)


def iou(one: Tensor, other: Tensor) -> Tensor:
    """Intersection over union of boxes ``[..., 4]``; shapes are broadcast."""
    shared = (torch.minimum(one[..., 2:], other[..., 2:]) - torch.maximum(one[..., :2], other[..., :2])).clamp(min=0)
    areas = [(box[..., 2:] - box[..., :2]).clamp(min=0).prod(dim=-1) for box in (one, other)]
    intersection = shared.prod(dim=-1)
    return intersection / (areas[0] + areas[1] - intersection).clamp(min=1e-6)


def write(folder: Path, train: int = 1200, test: int = 240) -> None:
    """Writes ``train-*.tar`` and ``test-*.tar``."""
    for prefix, count, seed in (("train", train, 0), ("test", test, 1)):
        write_shards(samples(count, np.random.default_rng(seed)), folder, prefix=prefix, shards=6, total=count)


def samples(count: int, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Up to five shapes on noise: class 0 is an ellipse, class 1 a rectangle. Some images have no shape."""
    for number in range(count):
        image, boxes = Image.fromarray(rng.integers(0, 120, (SIDE, SIDE, 3), dtype=np.uint8)), []
        for _ in range(rng.integers(0, 6)):
            kind, width, height = (int(it) for it in rng.integers((0, 10, 10), (2, 25, 25)))
            left, top = int(rng.integers(SIDE - width)), int(rng.integers(SIDE - height))
            place = (left, top, left + width - 1, top + height - 1)  # Pillow includes the last pixel
            draw = ImageDraw.Draw(image)
            (draw.rectangle if kind else draw.ellipse)(place, fill=(80, 255, 80) if kind else (255, 80, 80))
            boxes.append([left, top, left + width, top + height, kind])
        yield {"__key__": f"{number:05d}", "png": encoded(image), "json": {"boxes": boxes}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)

"""Image fitting: a network learns a picture from the coordinates of its pixels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from dtrain.data import Batch
from dtrain.tasks.squared_error import squared_error
from dtrain.tracking.png import png
from dtrain.training.task import Output

_LARGEST = 16_000_000  # pixels that are shown


class ImageFitting:
    """Squared error of pixels; a row of the batch is a part of the picture, such as one line of pixels.

    Args:
        coordinates: The field that the model takes, ``[rows, 2, height, width]``. Role ``coord`` keeps it in fp32 on the way.
        pixels: The field with the picture's values there, in [0, 1], ``[rows, channels, height, width]``.
    """

    counts = "pixels"

    def __init__(self, coordinates: str = "coordinates", pixels: str = "pixels") -> None:
        self._coordinates = coordinates
        self._pixels = pixels

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        """Loss and count are those of pixel values. Metric: ``accuracy``, the share on the right side of one half.

        Raises:
            ValueError: If prediction and picture differ in shape; names both.
        """
        predicted, pixels = model(batch[self._coordinates]), batch[self._pixels]
        errors = squared_error(predicted, pixels, "image fitting").flatten(1)
        count = batch.valid.sum() * errors.shape[1]
        right = ((predicted > 0.5) == (pixels > 0.5)).flatten(1).sum(dim=1)
        masked = ~batch.valid
        accuracy = (right.masked_fill(masked, 0).sum(), count)
        return Output(errors.sum(dim=1).masked_fill(masked, 0).sum(), count, {"accuracy": accuracy})

    def illustrate(
        self, model: nn.Module, evaluation: Mapping[str, float], samples: Iterable[Batch]
    ) -> dict[str, bytes]:
        """What a run shows after an evaluation: ``fit``, the picture, and the fitted one to its right.

        Rows of the batch are laid below each other in their stored order. Nothing is shown if they are neither grey nor red,
        green and blue, or too many.
        """
        strips, pixels = [], 0
        for batch in samples:
            both = torch.cat([batch[self._pixels].float(), model(batch[self._coordinates]).float()], dim=-1)[
                batch.valid
            ]
            pixels += both.numel()
            if both.shape[1] not in (1, 3) or pixels > _LARGEST:
                return {}
            strips.append(both.permute(0, 2, 3, 1).flatten(0, 1).cpu())
        return {"fit": png(torch.cat(strips).squeeze(2).numpy())} if strips else {}

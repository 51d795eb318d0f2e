"""Regression tasks with squared error: values of any shape, and the pixels of one image."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from dtrain.data import Batch
from dtrain.tasks.losses import squared_error
from dtrain.training.task import Output, png


class Regression:
    """Mean squared error between ``model(batch[input])`` and ``batch[target]``.

    The loss of a row is the mean over its values. Metric: ``mae``, the mean absolute error.

    Args:
        input: Name of the field passed to the model.
        target: Name of the field with the target values, shape ``[rows, ...]``: the shape of the prediction, or ``[rows]`` if
            the prediction is ``[rows, 1]``. Declare it with role ``target`` (transfer dtype fp32).

    Example:
        >>> import torch
        >>> from dtrain.data import Batch
        >>> from dtrain.tasks import Regression
        >>> batch = Batch({"x": torch.ones(2, 3), "y": torch.zeros(2)}, ["a", "b"], valid=torch.tensor([True, True]))
        >>> output = Regression()(torch.nn.Linear(3, 1), batch)
        >>> int(output.count), sorted(output.metrics)
        (2, ['mae'])
    """

    def __init__(self, input: str = "x", target: str = "y") -> None:
        self._input = input
        self._target = target

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        """Returns the loss and the metric ``mae``, the mean absolute error.

        Raises:
            DataError: If prediction and target differ in shape; names both.
        """
        predicted, target = model(batch[self._input]), batch[self._target]
        if target.dim() == 1 and predicted.shape == (len(target), 1):
            target = target.unsqueeze(1)
        errors = squared_error(predicted, target, "regression").flatten(1)
        valid = batch.valid_for(self._input, self._target)
        count = valid.sum()
        absolute = errors.detach().sqrt().mean(dim=1).masked_fill(~valid, 0).sum()
        losses = errors.mean(dim=1).masked_fill(~valid, 0)
        return Output(losses.sum(), count, {"mae": (absolute, count)} | batch.by_source(losses, valid))


_MAX_PIXELS = 16_000_000  # larger pictures are not logged


class ImageFitting:
    """Fits one image: a network maps the coordinates of a pixel to its value.

    A row of the batch is a part of the image, such as one line of pixels. The loss is the mean over all pixel values. Metric:
    ``accuracy``, the share of values on the correct side of 0.5.

    Args:
        coordinates: Name of the field passed to the model, ``[rows, 2, height, width]``. Declare it with role ``coord``
            (transfer dtype fp32).
        pixels: Name of the field with the pixel values, in [0, 1], ``[rows, channels, height, width]``.

    Example:
        >>> import torch
        >>> from dtrain.data import Batch
        >>> from dtrain.models import CoordinateNet
        >>> from dtrain.tasks import ImageFitting
        >>> columns = {"coordinates": torch.rand(4, 2, 1, 8), "pixels": torch.rand(4, 1, 1, 8)}
        >>> batch = Batch(columns, list("abcd"), valid=torch.ones(4, dtype=torch.bool))
        >>> int(ImageFitting()(CoordinateNet(width=16), batch).count)  # 4 rows of 8 values
        32
    """

    counts = "pixels"

    def __init__(self, coordinates: str = "coordinates", pixels: str = "pixels") -> None:
        self._coordinates = coordinates
        self._pixels = pixels

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        """Returns the squared error summed over pixel values, their count, and the metric ``accuracy``.

        Raises:
            DataError: If prediction and image differ in shape; names both.
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
        """The PNG file logged after an evaluation: ``fit``, the target image with the fitted one to its right.

        The rows of the evaluation set are stacked vertically in stored order. Empty if the image has neither 1 nor 3 channels,
        or too many pixels.
        """
        strips, pixels = [], 0
        for batch in samples:
            both = torch.cat([batch[self._pixels].float(), model(batch[self._coordinates]).float()], dim=-1)[
                batch.valid
            ]
            pixels += both.numel()
            if both.shape[1] not in (1, 3) or pixels > _MAX_PIXELS:
                return {}
            strips.append(both.permute(0, 2, 3, 1).flatten(0, 1).cpu())
        return {"fit": png(torch.cat(strips).squeeze(2).numpy())} if strips else {}

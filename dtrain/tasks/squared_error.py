"""The squared error of predictions that have the shape of their targets."""

from __future__ import annotations

import torch
from torch import Tensor

from dtrain.data.fields import DataError


def squared_error(prediction: Tensor, target: Tensor, task: str) -> Tensor:
    """Squares of the differences, elementwise, in fp32 whatever autocast says.

    Args:
        prediction: Floating.
        target: Of the same shape; converted to fp32.
        task: Named in the error.

    Returns:
        fp32, of that shape.

    Raises:
        DataError: If the shapes differ; names both. torch would broadcast ``[8, 1]`` against ``[8]`` to 64 errors.
    """
    if prediction.shape != target.shape:
        raise DataError(
            f"{task}: the model returns {list(prediction.shape)} and the target is {list(target.shape)}. They must be of "
            "the same shape: reshape the one in the model, or the other in the data."
        )
    with torch.autocast(prediction.device.type, enabled=False):
        return (prediction.float() - target.float()).square()

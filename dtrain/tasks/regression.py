"""Regression: mean squared error over the valid rows."""

from __future__ import annotations

from torch import nn

from dtrain.data import Batch
from dtrain.tasks.squared_error import squared_error
from dtrain.training.task import Output


class Regression:
    """Squared error between ``model(batch[input])`` and ``batch[target]``; the loss of a row is the mean over its values.

    Args:
        input: The field that the model takes.
        target: The field with the values, shape ``[rows, ...]``. Role ``target`` keeps it in fp32 on the way.
    """

    def __init__(self, input: str = "x", target: str = "y") -> None:
        self._input = input
        self._target = target

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        """Metric: ``mae``, the mean absolute error.

        Raises:
            ValueError: If prediction and target differ in shape; names both.
        """
        errors = squared_error(model(batch[self._input]), batch[self._target], "regression").flatten(1)
        masked = ~batch.valid
        count = batch.valid.sum()
        absolute = errors.detach().sqrt().mean(dim=1).masked_fill(masked, 0).sum()
        return Output(errors.mean(dim=1).masked_fill(masked, 0).sum(), count, {"mae": (absolute, count)})

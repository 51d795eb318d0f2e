"""Classification: cross-entropy and accuracy over the valid rows."""

from __future__ import annotations

from torch import nn

from dtrain.data import Batch
from dtrain.tasks.losses import softmax_cross_entropy
from dtrain.training.task import Output


class Classification:
    """Cross-entropy between ``model(batch[input])``, logits ``[rows, classes]``, and int64 class numbers.

    Args:
        input: The field that the model takes.
        label: The field with the class numbers, int64, shape ``[rows]``.
        label_smoothing: Weight of the uniform distribution in the target, in [0, 1).
    """

    def __init__(self, input: str = "image", label: str = "label", label_smoothing: float = 0.0) -> None:
        self._input = input
        self._label = label
        self._label_smoothing = label_smoothing

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        """Metrics: ``accuracy``."""
        logits, labels, valid = model(batch[self._input]), batch[self._label], batch.valid
        losses = softmax_cross_entropy(logits, labels, label_smoothing=self._label_smoothing)
        count = valid.sum()
        correct = (logits.argmax(dim=1) == labels) & valid
        return Output(losses.masked_fill(~valid, 0).sum(), count, {"accuracy": (correct.sum(), count)})

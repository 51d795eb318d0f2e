"""Classification: cross-entropy and accuracy over the valid rows, and in evaluations which class is taken for which."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dtrain.data import Batch
from dtrain.data.fields import DataError
from dtrain.tasks.losses import softmax_cross_entropy
from dtrain.training.task import Output

#: Beyond as many classes nothing is said about single ones: the table would be large, and added to in each micro-batch.
MOST_CLASSES = 2048


class Classification:
    """Cross-entropy between ``model(batch[input])``, logits ``[rows, classes]``, and class numbers or distributions.

    Args:
        input: The field that the model takes.
        label: The field with the class numbers, int64, shape ``[rows]``; or with the probability of each class, floating,
            shape ``[rows, classes]``, as an augmentation that mixes samples returns them. Of these the most probable counts
            as the right one.
        label_smoothing: Weight of the uniform distribution in the target, in [0, 1).
        top5: Measure also whether the right class is among the five most probable.
    """

    def __init__(
        self, input: str = "image", label: str = "label", label_smoothing: float = 0.0, top5: bool = False
    ) -> None:
        self._input = input
        self._label = label
        self._label_smoothing = label_smoothing
        self._top5 = top5

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        """Metrics: ``accuracy``, and ``top5_accuracy`` where asked for.

        In evaluation mode also the table ``confusion``, int64, shape ``[classes, classes]``: how many valid rows of the
        class that the row number says had the class that the column number says as the most probable. Not with more than
        ``MOST_CLASSES``.

        Raises:
            ValueError: If logits and labels do not fit, ``top5`` is asked of fewer than five classes, or, on a CPU, the model
                has no such class.
        """
        logits, labels, valid = model(batch[self._input]), batch[self._label], batch.valid
        try:
            losses = softmax_cross_entropy(logits, labels, label_smoothing=self._label_smoothing)
        except RuntimeError as error:
            _require_classes(labels, logits.shape[1], error)
            raise
        right = labels.argmax(dim=1) if labels.is_floating_point() else labels
        predicted = logits.argmax(dim=1)
        count = valid.sum()
        metrics: dict[str, tuple[Tensor, Tensor]] = {"accuracy": (((predicted == right) & valid).sum(), count)}
        if self._top5:
            metrics["top5_accuracy"] = ((_among_five(logits, right) & valid).sum(), count)
        classes = logits.shape[1]
        tables = {}
        if not model.training and classes <= MOST_CLASSES:
            tables["confusion"] = _confusion(right, predicted, valid, classes)
        return Output(losses.masked_fill(~valid, 0).sum(), count, metrics, tables)


def _require_classes(labels: Tensor, classes: int, failure: RuntimeError) -> None:
    """Names a label that has no class, after the failure: to look at all labels before would cost every step."""
    if labels.device.type != "cpu" or labels.is_floating_point():
        return  # a GPU's kernels tell by themselves, and nothing can be asked of it any more
    low, high = (int(label) for label in labels.aminmax())
    if low < 0 or high >= classes:
        raise DataError(
            f"task: a label is {low if low < 0 else high}, the model has {classes} classes, 0 to {classes - 1}. Set "
            "model.classes, or number the classes from 0 when packing."
        ) from failure


def _confusion(right: Tensor, predicted: Tensor, valid: Tensor, classes: int) -> Tensor:
    # Not bincount, which makes the host wait for a GPU to learn the size of its result.
    table = torch.zeros(classes * classes, dtype=torch.int64, device=valid.device)
    return table.index_add_(0, right.long() * classes + predicted, valid.long()).view(classes, classes)


def _among_five(logits: Tensor, right: Tensor) -> Tensor:
    if logits.shape[1] < 5:
        raise DataError(f"task.top5: the model has {logits.shape[1]} classes, want at least 5. Set task.top5=false.")
    return (torch.topk(logits, 5, dim=1).indices == right.unsqueeze(1)).any(dim=1)

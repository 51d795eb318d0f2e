"""Classification: cross-entropy and accuracy over the valid rows, and a confusion matrix in evaluations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dtrain.data import Batch
from dtrain.data.fields.field import DataError
from dtrain.tasks.losses import softmax_cross_entropy
from dtrain.training.task import Output

#: No confusion matrix for more classes: it has classes^2 entries and is updated in each micro-batch.
MOST_CLASSES = 2048


class Classification:
    """Cross-entropy between ``model(batch[input])``, logits ``[rows, classes]``, and class numbers or probabilities.

    Args:
        input: Name of the field passed to the model.
        label: Name of the field with class numbers, int64, shape ``[rows]``; or with class probabilities, a floating dtype,
            shape ``[rows, classes]``, as mixup and cutmix return them. The most probable class then counts as the correct one.
        label_smoothing: Weight of the uniform distribution in the target, in [0, 1).
        top5: Whether to compute top-5 accuracy as well.

    Example:
        >>> import torch
        >>> from dtrain.data import Batch
        >>> from dtrain.tasks import Classification
        >>> columns = {"image": torch.ones(3, 4), "label": torch.tensor([0, 1, 1])}
        >>> batch = Batch(columns, ["a", "b", ""], valid=torch.tensor([True, True, False]))
        >>> output = Classification()(torch.nn.Linear(4, 2), batch)
        >>> output.loss_sum.shape, int(output.count), sorted(output.metrics)
        (torch.Size([]), 2, ['accuracy'])
    """

    def __init__(
        self, input: str = "image", label: str = "label", label_smoothing: float = 0.0, top5: bool = False
    ) -> None:
        self._input = input
        self._label = label
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"task.label_smoothing: got {label_smoothing}, want a number in [0, 1), such as 0.1.")
        self._label_smoothing = label_smoothing
        self._top5 = top5
        self._kept: tuple[nn.Module, Batch, Tensor] | None = (
            None  # the logits of ``metric_inputs``, for the call that follows
        )

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        """Returns the loss and the metrics ``accuracy`` and, if enabled, ``top5_accuracy``.

        In evaluation mode with at most ``MOST_CLASSES`` classes also the table ``confusion``, int64, shape
        ``[classes, classes]``: entry ``[i, j]`` counts the valid rows of class ``i`` that were predicted as class ``j``.

        Raises:
            ValueError: If the shapes of logits and labels do not match.
            DataError: If ``top5`` is set with fewer than five classes, or, on a CPU, a label is out of range.
        """
        logits, labels, valid = (
            self._logits(model, batch),
            batch[self._label],
            batch.valid_for(self._input, self._label),
        )
        try:
            losses = softmax_cross_entropy(logits, labels, label_smoothing=self._label_smoothing)
        except RuntimeError as error:
            _require_classes(labels, logits.shape[1], error)
            raise
        correct = labels.argmax(dim=1) if labels.is_floating_point() else labels
        predicted = logits.argmax(dim=1)
        count = valid.sum()
        metrics: dict[str, tuple[Tensor, Tensor]] = {"accuracy": (((predicted == correct) & valid).sum(), count)}
        if self._top5:
            metrics["top5_accuracy"] = ((_in_top5(logits, correct) & valid).sum(), count)
        classes = logits.shape[1]
        tables = {}
        if not model.training and classes <= MOST_CLASSES:
            tables["confusion"] = _confusion(correct, predicted, valid, classes)
        losses = losses.masked_fill(~valid, 0)
        return Output(losses.sum(), count, metrics | batch.by_source(losses, valid), tables)

    def samples(self, model: nn.Module, batch: Batch) -> str:
        """For ``dtrain.hooks.Samples``: a line for each valid row with its key, label, prediction and probability."""
        labels = batch[self._label]
        labels = labels.argmax(dim=1) if labels.is_floating_point() else labels
        probability, predicted = model(batch[self._input]).float().softmax(dim=1).max(dim=1)
        rows = zip(batch.sample_keys, labels.tolist(), predicted.tolist(), probability.tolist(), strict=True)
        return "\n".join(f"{key}: label {y}, predicted {it} ({p:.3f})" for key, y, it, p in rows if key)

    def metric_inputs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Probabilities, fp32, shape ``[valid rows, classes]``, and class numbers, int64, ``[valid rows]``."""
        logits, labels, valid = (
            self._logits(model, batch),
            batch[self._label],
            batch.valid_for(self._input, self._label),
        )
        self._kept = model, batch, logits
        correct = labels.argmax(dim=1) if labels.is_floating_point() else labels.long()
        return logits.float().softmax(dim=1)[valid], correct[valid]

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        kept, self._kept = self._kept, None
        if kept is not None and kept[0] is model and kept[1] is batch:
            return kept[2]
        logits: Tensor = model(batch[self._input])
        return logits


def _require_classes(labels: Tensor, classes: int, failure: RuntimeError) -> None:
    """Raises an error that names a label out of range. Called after a failure: checking in every step would cost time."""
    if labels.device.type != "cpu" or labels.is_floating_point():
        return  # CUDA kernels report it themselves; after the failed assertion the device cannot be read
    low, high = (int(label) for label in labels.aminmax())
    if low < 0 or high >= classes:
        raise DataError(
            f"task: a label is {low if low < 0 else high}, the model has {classes} classes, 0 to {classes - 1}. Set "
            "model.classes, or number the classes from 0 when packing."
        ) from failure


def _confusion(correct: Tensor, predicted: Tensor, valid: Tensor, classes: int) -> Tensor:
    # Not bincount: it synchronises with the device to find the size of its result.
    table = torch.zeros(classes * classes, dtype=torch.int64, device=valid.device)
    return table.index_add_(0, correct.long() * classes + predicted, valid.long()).view(classes, classes)


def _in_top5(logits: Tensor, correct: Tensor) -> Tensor:
    if logits.shape[1] < 5:
        raise DataError(f"task.top5: the model has {logits.shape[1]} classes, want at least 5. Set task.top5=false.")
    return (torch.topk(logits, 5, dim=1).indices == correct.unsqueeze(1)).any(dim=1)

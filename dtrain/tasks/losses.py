"""Losses per row, computed in fp32 regardless of autocast.

The cross-entropies return one loss per row, ``squared_error`` one per element; no function averages over rows, because a task
sums the losses of its valid rows. No small number is computed as the difference of two large ones, so confident predictions
give neither a loss of exactly 0 nor NaN.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.data.fields.field import DataError


def softmax_cross_entropy(
    logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Cross-entropy of ``softmax(logits)`` against class numbers or distributions over the classes.

    Args:
        logits: Floating, shape ``[rows, classes]``, or ``[..., classes]``.
        targets: Class numbers, an integer dtype, shape ``[rows]``; or probabilities, a floating dtype, of the shape of
            ``logits``.
        label_smoothing: Weight of the uniform distribution mixed into the targets, in [0, 1) (Szegedy et al. 2016).
        z_loss: Weight of ``logsumexp(logits) ** 2``, which limits the size of the logits (Chowdhery et al. 2022,
            PaLM: 1e-4).

    Returns:
        Loss of each row, fp32, shape ``[rows]``.

    Raises:
        ValueError: If shapes or dtypes do not fit; names both. If a weight is out of range.
    """
    _require_weights(label_smoothing, z_loss)
    hard = not targets.is_floating_point()
    if targets.shape != (logits.shape[:-1] if hard else logits.shape) or targets.dtype == torch.bool:
        raise ValueError(
            f"softmax_cross_entropy: logits {_describe(logits)} and targets {_describe(targets)} do not fit. Want "
            f"class numbers, an integer dtype of shape {list(logits.shape[:-1])}, or probabilities, a floating dtype "
            f"of shape {list(logits.shape)}"
        )
    with torch.autocast(logits.device.type, enabled=False):
        logits = logits.float()
        log_p = F.log_softmax(logits, dim=-1)
        if hard:
            loss = -log_p.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)
        else:
            loss = -_weighted_sum(targets.float(), log_p)
        if label_smoothing:
            loss = (1 - label_smoothing) * loss - label_smoothing * log_p.mean(dim=-1)
        if z_loss:
            loss = loss + z_loss * logits.logsumexp(dim=-1).square()
    return loss


def binary_cross_entropy(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Binary cross-entropy of ``sigmoid(logits)`` against independent labels.

    Args:
        logits: Floating, shape ``[rows]``, or ``[rows, labels]`` for several labels per row.
        targets: Of the shape of ``logits``: bool, integers 0 and 1, or probabilities.
        label_smoothing: Weight of the value 1/2 mixed into the targets, in [0, 1).

    Returns:
        Loss of each row, averaged over its labels, fp32, shape ``[rows]``.

    Raises:
        ValueError: If the shapes differ; names both. If ``label_smoothing`` is out of range.
    """
    _require_weights(label_smoothing, 0.0)
    if targets.shape != logits.shape or logits.dim() == 0:
        raise ValueError(
            f"binary_cross_entropy: logits {_describe(logits)} and targets {_describe(targets)} do not fit. Want the "
            "same shape, [rows] or [rows, labels]"
        )
    with torch.autocast(logits.device.type, enabled=False):
        logits = logits.float()
        targets = targets.float() * (1 - label_smoothing) + label_smoothing / 2
        # Both terms are positive. The common form `logits * (1 - targets) - logsigmoid(logits)` suffers from cancellation
        # for large logits.
        losses = targets * F.softplus(-logits) + (1 - targets) * F.softplus(logits)
    return losses if losses.dim() == 1 else losses.flatten(1).mean(dim=1)


def squared_error(prediction: Tensor, target: Tensor, task: str) -> Tensor:
    """Elementwise squared error, computed in fp32 regardless of autocast.

    Args:
        prediction: A floating dtype, any shape.
        target: Same shape as ``prediction``.
        task: Name of the task, for the error message.

    Returns:
        fp32, same shape.

    Raises:
        DataError: If the shapes differ; names both. (torch would broadcast ``[8, 1]`` and ``[8]`` to ``[8, 8]``.)
    """
    if prediction.shape != target.shape:
        raise DataError(
            f"{task}: the model returns {list(prediction.shape)} and the target is {list(target.shape)}. The shapes "
            "must be equal: reshape the output in the model, or the target in the data."
        )
    with torch.autocast(prediction.device.type, enabled=False):
        return (prediction.float() - target.float()).square()


def _weighted_sum(weights: Tensor, log_p: Tensor) -> Tensor:
    # A class masked by a logit of -inf has log_p = -inf, and 0 * -inf is NaN.
    return (weights * log_p.masked_fill(weights == 0, 0)).sum(dim=-1)


def _require_weights(label_smoothing: float, z_loss: float) -> None:
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing: got {label_smoothing}, want 0 <= label_smoothing < 1")
    if z_loss < 0:
        raise ValueError(f"z_loss: got {z_loss}, want 0 or more")


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

"""Contrastive learning of pairs, such as images and captions (CLIP, Radford et al. 2021), over the global batch.

* A *pair* is a row: two inputs that belong together. The other rows of all ranks are its *negatives*.
* The loss of a row is the mean of two cross-entropies: its image against the texts of all ranks, its text against all images.
* The gather is differentiable: its backward adds up the gradients that all ranks have for the embeddings of one rank. So the
  result is the gradient of the loss over the global batch, for any number of ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.data import Batch
from dtrain.data.fields.field import DataError
from dtrain.errors import ConfigError
from dtrain.tasks.losses import softmax_cross_entropy
from dtrain.training.task import Output


class Contrastive:
    """Symmetric contrastive loss of the embeddings that ``model(batch[first], batch[second])`` returns.

    The model returns three tensors, as open_clip's models do: two embeddings, each a floating dtype and ``[rows, channels]``,
    which need not be normalised, and the scale of their similarities (the inverse temperature), ``[]``. The scale is usually
    ``log_scale.exp()`` of a parameter that CLIP initialises to ``log(1 / 0.07)``.

    With gradient accumulation the negatives come from one micro-batch on all ranks, not from the whole global batch: leave
    ``train.micro_batch_size`` at null where memory allows.

    Args:
        first: Name of the field with the first inputs.
        second: Name of the field with the second inputs.
        max_scale: Upper limit of the scale; CLIP's is 100. Above it the scale has no gradient.

    Raises:
        ConfigError: If ``max_scale`` is not a positive number.

    Example:
        >>> import torch
        >>> from dtrain.data import Batch
        >>> from dtrain.tasks import Contrastive
        >>> columns = {"image": torch.rand(3, 8), "caption": torch.rand(3, 8)}
        >>> batch = Batch(columns, ["a", "b", "c"], valid=torch.tensor([True, True, True]))
        >>> output = Contrastive()(lambda images, texts: (images, texts, torch.tensor(14.3, requires_grad=True)), batch)
        >>> sorted(output.metrics)
        ['first_to_second', 'second_to_first']
    """

    def __init__(self, first: str = "image", second: str = "caption", max_scale: float = 100.0) -> None:
        if not 0 < max_scale < math.inf:
            raise ConfigError(f"task.max_scale: got {max_scale}, want a positive number, such as 100.")
        self._first = first
        self._second = second
        self._max_scale = max_scale

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        """Collective. Returns the loss and the metrics ``first_to_second`` and ``second_to_first``.

        These are retrieval accuracies: the share of rows whose most similar partner, among the rows of all ranks, is the right
        one.

        Raises:
            DataError: If the model does not return two embeddings of the same shape and a scale.
        """
        first, second, scale = _require_embeddings(model(batch[self._first], batch[self._second]))
        valid = batch.valid_for(self._first, self._second)
        # In fp32: with a scale of 100, the spacing of similarities in bf16 is too coarse for the softmax.
        with torch.autocast(first.device.type, enabled=False):
            first, second = F.normalize(first.float(), dim=1), F.normalize(second.float(), dim=1)
            all_first, all_second = _gather(torch.stack([first, second], dim=1)).unbind(dim=1)
            scale = scale.float().clamp(max=self._max_scale)
            # A masked row is not a negative of other rows.
            masked = ~_gather(valid.float()).bool()
            to_second = (scale * first @ all_second.T).masked_fill(masked, -math.inf)
            to_first = (scale * second @ all_first.T).masked_fill(masked, -math.inf)
        own = torch.arange(len(valid), device=valid.device) + len(valid) * _rank()
        # The logits of a masked row may all be -inf, and 0 times the gradient of such a row is NaN.
        to_second, to_first = (logits.masked_fill(~valid.unsqueeze(1), 0) for logits in (to_second, to_first))
        losses = (softmax_cross_entropy(to_second, own) + softmax_cross_entropy(to_first, own)) / 2
        count = valid.sum()
        metrics: dict[str, tuple[Tensor, Tensor]] = {
            name: (((logits.argmax(dim=1) == own) & valid).sum(), count)
            for name, logits in (("first_to_second", to_second), ("second_to_first", to_first))
        }
        losses = losses.masked_fill(~valid, 0)
        return Output(losses.sum(), count, metrics | batch.by_source(losses, valid))


def _require_embeddings(returned: object) -> tuple[Tensor, Tensor, Tensor]:
    if isinstance(returned, (tuple, list)) and len(returned) == 3 and all(isinstance(it, Tensor) for it in returned):
        first, second, scale = returned
        if first.dim() == 2 and first.shape == second.shape and scale.numel() == 1:
            return first, second, scale.reshape(())
        got = ", ".join(str(list(it.shape)) for it in returned)
    else:
        got = type(returned).__name__
    raise DataError(
        f"task: the model returned {got}, want two embeddings of shape [rows, channels] and the scale of their "
        "similarities, shape []: return image_embeddings, text_embeddings, self.log_scale.exp()."
    )


def _gather(rows: Tensor) -> Tensor:
    """Collective. The rows of all ranks, in the order of the ranks; differentiable."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return rows
    gathered: Tensor = _Gather.apply(rows)
    return gathered


class _Gather(torch.autograd.Function):
    """``all_gather`` whose backward adds up the gradients of all ranks. torch's own is deprecated since 2.13."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.rows = len(rows)
        rows = rows.contiguous()
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient[_rank() * ctx.rows :][: ctx.rows]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0

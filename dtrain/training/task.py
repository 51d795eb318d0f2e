"""What a task returns: sums and counts, never means.

A task is any object with ``__call__(model, batch) -> Output``; there is no base class. It runs under autocast, computes
its loss in fp32 and leaves masked rows (``batch.valid`` false) out of both the sums and the counts. The trainer adds
the sums over micro-batches and ranks and divides once, so that a step's loss is the mean over all valid samples of the
global batch for any split. What is no single number, such as a confusion matrix, is a table of counts; evaluations alone
ask for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from dtrain.data import Batch


@dataclass(frozen=True)
class Output:
    """One micro-batch's result.

    Args:
        loss_sum: Sum of the losses of the valid rows (or tokens), fp32, shape ``[]``, with gradient.
        count: How many rows (or tokens) were summed; an int or an integer tensor of shape ``[]``. Zero is allowed.
        metrics: ``{name: (sum, count)}``, each a number or a tensor of shape ``[]``.
        tables: ``{name: counts}``, int64 tensors whose shape is the same for every micro-batch. An evaluation adds them up
            over micro-batches and ranks. In training (``model.training``) nobody looks at them: leave them out there.
    """

    loss_sum: Tensor
    count: Tensor | int
    metrics: Mapping[str, tuple[Tensor | float, Tensor | int]] = field(default_factory=dict)
    tables: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.loss_sum, Tensor) or self.loss_sum.dim() != 0 or self.loss_sum.dtype != torch.float32:
            got = (
                f"{self.loss_sum.dtype} of shape {list(self.loss_sum.shape)}"
                if isinstance(self.loss_sum, Tensor)
                else type(self.loss_sum).__name__
            )
            raise TypeError(
                f"Output.loss_sum: got {got}, want a float32 tensor of shape []. Sum the losses of the valid rows in "
                "fp32, for example cross_entropy(logits.float(), labels, reduction='none')[batch.valid].sum()."
            )
        for name, table in self.tables.items():
            if not isinstance(table, Tensor) or table.dtype != torch.int64:
                kind = table.dtype if isinstance(table, Tensor) else type(table).__name__
                raise TypeError(
                    f"Output.tables[{name!r}]: got {kind}, want an int64 tensor of counts. A sum of other numbers is a metric."
                )


class Task(Protocol):
    """From a model and a batch to a sum of losses."""

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        """Runs the model on ``batch`` and sums its loss over ``batch.valid`` rows.

        Before the first step of a run it is called three more times, to see that its sums add up.
        """
        ...


@runtime_checkable
class ConcludingTask(Protocol):
    """A task that has something to say after an evaluation which is no sum over samples, such as a perplexity."""

    def conclude(self, model: nn.Module, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Called on every rank after each evaluation, in evaluation mode, without gradients, under autocast.

        Args:
            model: The bare model.
            metrics: Of the evaluation, over all ranks.

        Returns:
            More metrics; equal on all ranks.
        """
        ...


def checked(output: object) -> Output:
    """What a task returned, if it is an ``Output``.

    Raises:
        TypeError: If it is something else, such as a mean.
    """
    if isinstance(output, Output):
        return output
    raise TypeError(
        f"the task returned {type(output).__name__}, want a dtrain.training.task.Output: loss_sum, which is the sum over "
        "the valid rows and not their mean, count and metrics."
    )

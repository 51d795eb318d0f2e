"""For authors of tasks: ``Output``, the protocols of a task, ``Evaluation``, and ``png``.

* A *task* is any object with ``__call__(model, batch) -> Output``; there is no base class. It runs under autocast, computes
  its loss in fp32 and leaves masked rows (``batch.valid`` false) out of both the sums and the counts.
* An ``Output`` has *sums and counts*, never means. The trainer adds them up over micro-batches and ranks and divides once, so
  that a step's loss is the mean over all valid samples of the global batch, however it is split.
* A *table* is a tensor of counts, such as a confusion matrix. Only evaluations add tables up.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from dtrain.data import Batch
from dtrain.errors import ConfigError, Explained, add_note, one_line


@dataclass(frozen=True)
class Output:
    """The result of one micro-batch.

    Args:
        loss_sum: Sum of the losses of the valid rows (or tokens), fp32, shape ``[]``, with gradient.
        count: How many rows (or tokens) were summed; an int or an integer tensor of shape ``[]``. Zero is allowed.
        metrics: ``{name: (sum, count)}``, each a number or a tensor of shape ``[]``.
        tables: ``{name: counts}``, int64 tensors whose shape is the same for every micro-batch. An evaluation adds them up
            over micro-batches and ranks. Training ignores them: leave them out where ``model.training`` is true.

    Raises:
        WrongOutput: If ``loss_sum``, a metric or a table has the wrong type, dtype or shape, or ``count`` is a negative number.

    Example:
        >>> import torch
        >>> from dtrain.training.task import Output
        >>> class MyTask:  # the config names it: task={_target_: my_package.MyTask}
        ...     def __call__(self, model, batch):
        ...         errors = (model(batch["x"]) - batch["y"]).float().square().mean(dim=1)
        ...         return Output(errors[batch.valid].sum(), batch.valid.sum())
    """

    loss_sum: Tensor
    count: Tensor | int
    metrics: Mapping[str, tuple[Tensor | float, Tensor | int]] = field(default_factory=dict)
    tables: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.loss_sum, Tensor) or self.loss_sum.dim() != 0 or self.loss_sum.dtype != torch.float32:
            raise WrongOutput(
                f"Output.loss_sum: got {_kind(self.loss_sum)}, want a float32 tensor of shape []. Sum the losses of the valid "
                "rows in fp32, for example cross_entropy(logits.float(), labels, reduction='none')[batch.valid].sum()."
            )
        # Not a tensor: reading one waits for the device.
        if isinstance(self.count, int | float) and self.count < 0:
            raise WrongOutput(f"Output.count: got {self.count}, want the number of valid rows (or tokens), 0 or more.")
        for name, pair in self.metrics.items():
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise WrongOutput(
                    f"Output.metrics[{name!r}]: got {_kind(pair)}, want a pair (sum over the valid rows, their number), for "
                    "example (right.sum(), batch.valid.sum()): dtrain divides once, over all ranks."
                )
            if any(isinstance(value, Tensor) and value.dim() for value in pair):
                raise WrongOutput(
                    f"Output.metrics[{name!r}]: got a sum and a number of {_kind(pair[0])} and {_kind(pair[1])}, want one "
                    "number each. Counts for each class are a table (Output.tables)."
                )
        for name, table in self.tables.items():
            if not isinstance(table, Tensor) or table.dtype != torch.int64:
                raise WrongOutput(
                    f"Output.tables[{name!r}]: got {_kind(table)}, want an int64 tensor of counts. Return sums of other "
                    "numbers as metrics."
                )


class Task(Protocol):
    """Computes the summed loss of a model on a batch."""

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        """Runs the model on ``batch`` and sums its loss over the rows where ``batch.valid`` is true.

        Before the first step of a run it is called three additional times, to check that its sums add up. If
        ``checkpoint.best`` names a metric, a copy of the task is also called once in evaluation mode, and then its
        ``conclude``. For a model with BatchNorm, masked rows are removed from training batches unless fewer than two rows are
        valid (``dtrain.training.setup.batchnorm``).

        Args:
            model: The model, wrapped for training or bare in evaluations; call it as ``model(...)``.
            batch: A micro-batch on the device.

        Returns:
            Sums and counts over the valid rows.
        """
        ...


@runtime_checkable
class ConcludingTask(Protocol):
    """A task that computes further evaluation metrics from its summed metrics and tables, such as perplexity or mean IoU.

    Example:
        >>> class SegmentationTask:  # its calls return Output(..., tables={"confusion": counts})
        ...     def conclude(self, model, evaluation):
        ...         confusion = evaluation.tables["confusion"].double()
        ...         union = confusion.sum(0) + confusion.sum(1) - confusion.diag()
        ...         return {"mean_iou": (confusion.diag() / union).nanmean().item()}
        >>> SegmentationTask().conclude(None, Evaluation({}, {"confusion": torch.tensor([[3, 1], [0, 2]])}))["mean_iou"]
        0.7083333333333333
    """

    def conclude(self, model: nn.Module, evaluation: Evaluation) -> Mapping[str, float]:
        """Called on every rank after each evaluation, in evaluation mode, without gradients, under autocast.

        Args:
            model: The bare model.
            evaluation: The result over all ranks: ``evaluation["loss"]``, and ``evaluation.tables``.

        Returns:
            Further metrics, equal on all ranks.
        """
        ...


@runtime_checkable
class MetricTask(Protocol):
    """A task that provides predictions and targets for the metrics of ``train.metrics``."""

    def metric_inputs(self, model: nn.Module, batch: Batch) -> tuple[Any, Any]:
        """Called on every rank in evaluations, immediately before the task with the same model and batch, under autocast.

        Args:
            model: The bare model.
            batch: A micro-batch on the device. The task may keep the result of its forward for the call that follows.

        Returns:
            The arguments of the metrics' ``update(preds, target)``, for the valid rows only; ``update`` is not called if
            ``target`` is empty.
        """
        ...


@runtime_checkable
class IllustratingTask(Protocol):
    """A task that draws pictures or writes texts after an evaluation, such as a plot of the fitted function."""

    def illustrate(
        self, model: nn.Module, evaluation: Evaluation, samples: Iterable[Batch]
    ) -> Mapping[str, bytes | str]:
        """Called on rank 0 alone, in evaluation mode, without gradients, under autocast.

        Args:
            model: The bare model. The other ranks do not run it, so it must not call collectives.
            evaluation: The result, with the task's tables.
            samples: Batches of the whole evaluation set in stored order, on the device, for any number of ranks. They are read
                lazily: iterate over as few as needed.

        Returns:
            Name to content: the bytes of a PNG file, or a text. Names consist of letters, digits, ``_``, ``-`` and ``.``.
        """
        ...


@dataclass(frozen=True, eq=False)
class Evaluation(Mapping[str, float]):
    """The result of an evaluation, equal on all ranks: a mapping of metric names to values.

    Attributes:
        metrics: ``loss``, the task's metrics, ``samples``, ``bad_samples``, the metrics of ``train.metrics``, and those that
            ``ConcludingTask.conclude`` returns (its own argument does not have them yet).
        tables: The task's tables, summed over all valid samples of all ranks: int64, on the CPU.

    Example:
        >>> from dtrain.training.task import Evaluation
        >>> result = Evaluation({"loss": 0.25, "accuracy": 0.9})
        >>> result["loss"], result.record()
        (0.25, {'eval/loss': 0.25, 'eval/accuracy': 0.9})
    """

    metrics: Mapping[str, float]
    tables: Mapping[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics)

    def __len__(self) -> int:
        return len(self.metrics)

    def record(self) -> dict[str, float]:
        """The metrics under their names in metrics.jsonl."""
        return {f"eval/{name}": value for name, value in self.metrics.items()}


class NotFinite(ConfigError):
    """The loss of an evaluation is infinite or NaN; ``evaluation`` is the result."""

    def __init__(self, message: str, evaluation: Evaluation) -> None:
        super().__init__(message)
        self.evaluation = evaluation


class WrongOutput(Explained, TypeError):
    """A task returned something other than a valid ``Output``, or passed wrong values to ``Output``."""


def run_task(task: Task, model: nn.Module, batch: Batch) -> Output:
    """Calls a task.

    Raises:
        WrongOutput: If it returns anything but an ``Output``, such as a mean, or passes wrong values to ``Output``; names the
            task.
    """
    try:
        return require_output(task(model, batch))
    except WrongOutput as error:
        raise WrongOutput(f"task: {_name(task)}: {error}") from error
    except Exception as error:
        if not isinstance(error, Explained):
            what = ": ".join([type(error).__name__, *([message] if (message := str(error).strip()) else [])])
            add_note(error, f"task {_name(task)}: {one_line(what)} The batch has {_shapes(batch)}.")
        raise


def _name(task: Task) -> str:
    return f"{getattr(task, '__module__', '?')}.{getattr(task, '__qualname__', type(task).__qualname__)}"


def _shapes(batch: Batch) -> str:
    """Such as ``image: float32 [64, 3, 8, 8], label: int64 [64]``."""
    tensors = {name: column for name, column in batch.items() if isinstance(column, Tensor)}
    others = [f"{name}: {type(column).__name__}" for name, column in batch.items() if name not in tensors]
    return ", ".join(
        [f"{name}: {str(it.dtype).removeprefix('torch.')} {list(it.shape)}" for name, it in tensors.items()] + others
    )


def no_gradient(task: Task) -> WrongOutput:
    """The error for a loss without a gradient."""
    return WrongOutput(
        f"task: {_name(task)}: Output.loss_sum has no gradient. It was computed under torch.no_grad() or from detached "
        "tensors, or does not depend on a parameter that is trained."
    )


def require_output(output: object) -> Output:
    """Returns the argument if it is an ``Output``.

    Raises:
        WrongOutput: If it is anything else, such as a mean.
    """
    if isinstance(output, Output):
        return output
    raise WrongOutput(
        f"the task returned {_kind(output)}, want a dtrain.training.task.Output with loss_sum (the sum over "
        "the valid rows, not their mean), count and metrics."
    )


def _kind(value: object) -> str:
    of = f" ({value.dtype} of shape {list(value.shape)})" if isinstance(value, Tensor) else ""
    return type(value).__name__ + of


def png(pixels: np.ndarray) -> bytes:
    """Encodes an array as a PNG file, for ``IllustratingTask.illustrate``.

    Args:
        pixels: Grey, shape ``[height, width]``, or RGB, ``[height, width, 3]``; uint8, or floating in [0, 1], where values
            outside are clipped.

    Returns:
        The bytes of the file.
    """
    if pixels.dtype != np.uint8:
        pixels = (np.nan_to_num(pixels).clip(0, 1) * 255).round().astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def copy_of_task(task: Task) -> Task:
    """A copy of a task, for a call that must not change the task's state, such as a queue or a counter.

    Parameters, such as those of a teacher model, are not copied. A task that cannot be copied is returned itself.
    """
    modules = [it for it in (task, *getattr(task, "__dict__", {}).values()) if isinstance(it, nn.Module)]
    try:
        return copy.deepcopy(task, {id(p): p for module in modules for p in module.parameters()})
    except Exception:  # noqa: BLE001 - of the user's objects
        return task

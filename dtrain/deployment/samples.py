"""Rows of the evaluation set, what the fp32 model makes of them, and what the task makes of that.

The task is run as it is in an evaluation. It tells what the model is called with, and, with a stand-in that answers what
an artefact answered, which metrics that artefact would have had on the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.config.errors import ConfigError
from dtrain.data import Batch, ShardLoader
from dtrain.data.fields import Field
from dtrain.deployment.image_input import ImageInput
from dtrain.training.task import Output, Task, checked


@dataclass(frozen=True)
class Samples:
    """Rows of the evaluation set with the fp32 model's outputs.

    Attributes:
        image: The image field that the model takes; None if it takes something else.
        rows: What goes in: an image as it is on the wire, uint8 ``[rows, height, width, 3]``, or the model's argument.
        outputs: fp32, ``[rows, ...]``.
        metrics: Of the fp32 model on these rows: ``loss`` and those of the task.
        task: The task.
        batches: The same rows with their labels, as they are on the wire.
        device: Where the task runs.
    """

    image: ImageInput | None
    rows: Tensor
    outputs: Tensor
    metrics: dict[str, float]
    task: Task
    batches: list[Batch]
    device: torch.device

    @torch.inference_mode()
    def metrics_of(self, outputs: Tensor) -> dict[str, float]:
        """The metrics of a model that gives these outputs, fp32 ``[rows, ...]``, for the rows."""
        parts = outputs.split([len(batch.valid) for batch in self.batches])
        return _means(
            checked(self.task(_StandIn(part.to(self.device)), batch.to(self.device)))
            for part, batch in zip(parts, self.batches, strict=True)
        )


class NotComparable(ValueError):
    """The task does not use its model as a function of one tensor; the text says what it does."""


class _Recorder(nn.Module):
    """Stands in for the model and notes what the task does with it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self._model(*args, **kwargs)
        self.calls.append((args, kwargs, output))
        return output


class _StandIn(nn.Module):
    """Answers what somebody else has computed."""

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self._outputs = outputs

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._outputs


@torch.inference_mode()
def sample(
    model: nn.Module,
    task: Task,
    loader: ShardLoader,
    images: Mapping[str, Field],
    device: torch.device,
    limit: int,
) -> Samples:
    """Runs the task on the first rows of the evaluation set.

    Args:
        model: In eval mode and fp32.
        task: Tells what the model is called with.
        loader: Of the evaluation set, one rank, wire dtypes of fp32.
        images: The image fields by name.
        device: Where the model is.
        limit: How many rows at most.

    Raises:
        NotComparable: If the model is not called once a batch, with one tensor, for one tensor of as many rows.
        ConfigError: If the evaluation set has no readable sample, or a metric is not finite.
    """
    taken: set[str | None] = set()
    rows: list[Tensor] = []
    outputs: list[Tensor] = []
    batches: list[Batch] = []
    results: list[Output] = []
    for handed in loader.epoch(0):
        batch = _valid_rows(handed, limit - sum(map(len, rows)))
        if not len(batch.valid):
            continue
        recorder = _Recorder(model)
        moved = batch.to(device)
        result = task(recorder, moved)
        argument, output = _single_call(recorder, len(batch.valid))
        name = next((name for name in images if moved.get(name) is argument), None)
        taken.add(name)
        rows.append(batch[name] if name is not None else argument.cpu())
        outputs.append(output.float().cpu())
        batches.append(batch)
        results.append(checked(result))
        if sum(map(len, rows)) >= limit:
            break
    if not rows:
        raise ConfigError(
            "data.eval: no sample could be read. Give another data.eval, or data.eval=null to go without."
        )
    shapes = {tuple(part.shape[1:]) for part in rows}
    if len(shapes) > 1 or len(taken) > 1:
        raise NotComparable(f"its input has several shapes, such as {' and '.join(map(str, sorted(shapes)[:2]))}")
    metrics = _means(results)
    if bad := [f"{name} {value}" for name, value in metrics.items() if not math.isfinite(value)]:
        raise ConfigError(
            f"export: the fp32 model's {', '.join(bad)} on {sum(map(len, rows))} rows of data.eval is not finite. Export "
            "another checkpoint (checkpoint=STEP, weights=raw), or give another data.eval."
        )
    name = taken.pop()
    image = ImageInput.of(images[name], (rows[0].shape[1], rows[0].shape[2])) if name is not None else None
    return Samples(image, torch.cat(rows), torch.cat(outputs), metrics, task, batches, device)


def _valid_rows(batch: Batch, limit: int) -> Batch:
    """The first valid rows of a batch."""
    chosen = batch.valid.nonzero().flatten()[:limit]
    numbers = chosen.tolist()
    columns = {
        name: column[chosen] if isinstance(column, Tensor) else [column[n] for n in numbers]
        for name, column in batch.items()
    }
    return Batch(columns, [batch.sample_keys[n] for n in numbers], batch.valid[chosen], wire=batch.wire)


def _means(results: Iterable[Output]) -> dict[str, float]:
    """``loss`` and the task's metrics, sums over counts; a metric that nothing counted for is left out."""
    sums: dict[str, list[float]] = {}
    for result in results:
        for name, pair in {"loss": (result.loss_sum, result.count), **result.metrics}.items():
            known = sums.setdefault(name, [0.0, 0.0])
            known[:] = [known[0] + float(pair[0]), known[1] + float(pair[1])]
    return {
        name: total / count if count else math.nan for name, (total, count) in sums.items() if count or name == "loss"
    }


def _single_call(recorder: _Recorder, rows: int) -> tuple[Tensor, Tensor]:
    if len(recorder.calls) != 1:
        raise NotComparable(f"the task calls it {len(recorder.calls)} times a batch")
    args, kwargs, output = recorder.calls[0]
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
        raise NotComparable(f"the task calls it with {len(args) + len(kwargs)} arguments, not with one tensor")
    if not isinstance(output, Tensor) or output.dim() == 0 or len(output) != rows:
        raise NotComparable(f"it returns {type(output).__name__}, not one tensor with a row for each sample")
    return args[0], output

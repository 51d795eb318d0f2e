"""The fp32 reference: inputs, outputs and metrics of the trained model on rows of the evaluation set.

* The task runs as in an evaluation, with a *recorder* in place of the model that records its arguments and outputs: the
  *reference rows*. They also show which image field the model takes.
* For the metrics of an artefact, the same task runs again with a stand-in model that returns the artefact's outputs.
* There is no reference for a task that does not call its model once, with one tensor (``NotComparable``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.config.instantiate import by_target
from dtrain.config.schema import Config
from dtrain.data import Batch, ShardLoader
from dtrain.data.fields.field import Field
from dtrain.distributed.world import World
from dtrain.errors import ConfigError, as_config_error
from dtrain.export.program import ImageInput
from dtrain.precision import Precision
from dtrain.training import build
from dtrain.training.setup.loaders import corpus_beside, declared_fields, eval_loader
from dtrain.training.task import Output, Task, require_output


class NotComparable(ValueError):
    """The task does not call its model as a function of one tensor."""


@dataclass(frozen=True)
class Reference:
    """The reference of an export.

    Attributes:
        rows: Rows with their fp32 outputs; None if there is nothing to compare with.
        missing_because: Reason why ``rows`` is None; else None.
        image: The image field that the task passes to the model or, if no task ran, the only one that the config declares;
            None if the model takes something else, or its input is unknown.
    """

    rows: ReferenceRows | None
    missing_because: str | None
    image: ImageInput | None

    @classmethod
    def measure(cls, cfg: Config, model: nn.Module, world: World, limit: int) -> Reference:
        """Runs the task on rows of ``data.eval``.

        Args:
            cfg: The config; ``data.num_workers`` is set to 0.
            model: In eval mode and fp32.
            world: A world of one process.
            limit: Largest number of rows; 0 for no reference.

        Raises:
            ConfigError: If the evaluation set cannot be read.
        """
        images = {field.name: field for field in declared_fields(cfg.data) if field.role == "image"}
        if not cfg.data.eval or not limit:
            only = ImageInput.from_field(next(iter(images.values()))) if len(images) == 1 else None
            return cls(None, "samples=0" if cfg.data.eval else "data.eval is not set", only)
        cfg.data.num_workers = 0  # starting a worker takes longer than reading some hundred rows
        try:
            if cfg.data.prepare is not None:
                with as_config_error("data.prepare"):
                    by_target("data.prepare", cfg.data.prepare)
            loader = eval_loader(cfg, world, Precision("fp32"), in_stored_order=True)
            assert loader is not None
        except ConfigError as error:
            raise ConfigError(f"{error} (Or set samples=0 to export without the comparison.)") from error
        try:
            rows = reference_rows(
                model, build.build_task(cfg.task, corpus_beside(cfg.data)), loader, images, world.device, limit
            )
        except NotComparable as error:
            return cls(None, f"the model is not a function of one tensor: {error}", None)
        finally:
            loader.close()
        return cls(rows, None, rows.image)

    def example(self, device: torch.device) -> Tensor | None:
        """Two rows to trace the model with, on ``device``; None if dtype or shape of its input are unknown."""
        if self.rows is not None:
            return self.rows.inputs[:2].clone().to(device)
        if self.image is not None and self.image.size is not None:
            return torch.zeros(2, *self.image.size, 3, dtype=torch.uint8, device=device)
        return None


@dataclass(frozen=True)
class ReferenceRows:
    """Rows of the evaluation set with the fp32 model's outputs.

    Attributes:
        image: The image field that the model takes; None if it takes something else.
        inputs: On the CPU: images, uint8 ``[rows, height, width, 3]``, or the model's argument.
        outputs: On the CPU, fp32, ``[rows, ...]``.
        metrics: Metrics of the fp32 model on these rows: ``loss`` and the task's.
        task: The task.
        batches: The same rows with all fields.
        device: Device on which the task runs.
    """

    image: ImageInput | None
    inputs: Tensor
    outputs: Tensor
    metrics: dict[str, float]
    task: Task
    batches: list[Batch]
    device: torch.device

    @torch.inference_mode()
    def metrics_of(self, outputs: Tensor) -> dict[str, float]:
        """The metrics of a model that returns ``outputs``, fp32 ``[rows, ...]``, on the same rows."""
        parts = outputs.split([len(batch.valid) for batch in self.batches])
        return _means(
            require_output(self.task(_StandIn(part.to(self.device)).eval(), batch.to(self.device)))
            for part, batch in zip(parts, self.batches, strict=True)
        )


@torch.inference_mode()
def reference_rows(
    model: nn.Module,
    task: Task,
    loader: ShardLoader,
    images: Mapping[str, Field],
    device: torch.device,
    limit: int,
) -> ReferenceRows:
    """Runs the task on the first valid rows of the evaluation set.

    Args:
        model: In eval mode and fp32.
        task: Task of the run.
        loader: Loader of the evaluation set, for one rank and with the transfer dtypes of fp32.
        images: The image fields by name.
        device: Device of the model.
        limit: Largest number of rows.

    Raises:
        NotComparable: If the task does not call the model once per batch, with one tensor, or the model does not return one
            tensor with as many rows.
        ConfigError: If the evaluation set has no readable sample, or a metric is not finite.
    """
    names: set[str | None] = set()
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    batches: list[Batch] = []
    results: list[Output] = []
    for loaded in loader.epoch(0):
        batch = loaded.chosen(loaded.kept_rows()[: limit - sum(map(len, inputs))])
        if not len(batch.valid):
            continue
        recorder = _Recorder(model).eval()
        moved = batch.to(device)
        result = task(recorder, moved)
        argument, output = _single_call(recorder, len(batch.valid))
        name = next((name for name in images if moved.get(name) is argument), None)
        names.add(name)
        inputs.append(batch[name] if name is not None else argument.cpu())
        outputs.append(output.float().cpu())
        batches.append(batch)
        results.append(require_output(result))
        if sum(map(len, inputs)) >= limit:
            break
    if not inputs:
        raise ConfigError(
            "data.eval: no sample could be read. Set a different data.eval, or data.eval=null to export without comparison."
        )
    shapes = {tuple(part.shape[1:]) for part in inputs}
    if len(shapes) > 1 or len(names) > 1:
        raise NotComparable(f"its input has several shapes, such as {' and '.join(map(str, sorted(shapes)[:2]))}")
    metrics = _means(results)
    if bad := [f"{name} {value}" for name, value in metrics.items() if not math.isfinite(value)]:
        raise ConfigError(
            f"export: the fp32 model's {', '.join(bad)} on {sum(map(len, inputs))} rows of data.eval is not finite. Export "
            "a different checkpoint (checkpoint=STEP, weights=raw), or set a different data.eval."
        )
    name = names.pop()
    image = ImageInput.from_field(images[name], (inputs[0].shape[1], inputs[0].shape[2])) if name is not None else None
    return ReferenceRows(image, torch.cat(inputs), torch.cat(outputs), metrics, task, batches, device)


class _Recorder(nn.Module):
    """Calls the model and records the arguments and the output of each call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # A document mask (``task.documents``): a row of an artefact is one document.
        kwargs.pop("documents", None)
        output = self._model(*args, **kwargs)
        self.calls.append((args, kwargs, output))
        return output


class _StandIn(nn.Module):
    """Returns the same outputs for any input."""

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self._outputs = outputs

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._outputs


def _single_call(recorder: _Recorder, rows: int) -> tuple[Tensor, Tensor]:
    """Argument and output of the only call."""
    if len(recorder.calls) != 1:
        raise NotComparable(f"the task calls it {len(recorder.calls)} times per batch")
    args, kwargs, output = recorder.calls[0]
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
        raise NotComparable(f"the task calls it with {len(args) + len(kwargs)} arguments, not with one tensor")
    if not isinstance(output, Tensor) or output.dim() == 0 or len(output) != rows:
        raise NotComparable(f"it returns {type(output).__name__}, not one tensor with a row for each sample")
    return args[0], output


def _means(results: Iterable[Output]) -> dict[str, float]:
    """``loss`` and the task's metrics as sums over counts; a metric with count 0 is left out."""
    sums: dict[str, list[float]] = {}
    for result in results:
        for name, (total, count) in {"loss": (result.loss_sum, result.count), **result.metrics}.items():
            known = sums.setdefault(name, [0.0, 0.0])
            known[:] = [known[0] + float(total), known[1] + float(count)]
    return {
        name: total / count if count else math.nan for name, (total, count) in sums.items() if count or name == "loss"
    }

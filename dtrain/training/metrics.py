"""Metrics that are no sums over samples, such as F1 and AUC: ``train.metrics`` in evaluations.

* A *metric* is a ``torchmetrics.Metric``. It is updated with the valid rows of each micro-batch (``MetricTask``).
* Its *states* are tensors, such as counts for each class, and lists of tensors, such as all predictions. A *reduction* says how
  states of several ranks become one: ``sum``, ``max``, ``min``, ``mean``, ``cat``, or a function of the stacked states.
* Rank 0 gets the states of all ranks and computes each metric once. torchmetrics itself communicates nothing.
* Each set of ``data.eval`` has metrics of its own. Their states, reduced like those of ranks, make the metric of all sets.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.config.metrics import build_metric
from dtrain.data import Batch
from dtrain.distributed.collectives import from_rank0
from dtrain.errors import ConfigError, in_brief
from dtrain.training.task import MetricTask, Task, WrongOutput

#: The states of one set on one or all ranks: for each state what each rank with rows has, with the number of its rows.
_Parts = list[list[tuple[int, Any]]]


class WrongMetric(ConfigError):
    """A metric of ``train.metrics`` does not suit the task."""


class EvaluationMetrics:
    """The metrics of one evaluation.

    Args:
        nodes: ``train.metrics``.
        device: Where states are kept.
        sets: Names of the sets; () for a single one without a name.

    Raises:
        ConfigError: If a metric cannot be built.
    """

    def __init__(self, nodes: Mapping[str, Any], device: torch.device, sets: Sequence[str] = ()) -> None:
        self._nodes = nodes
        self._device = device
        self._sets = sets
        self._metrics = [{name: _built(name, nodes[name], device) for name in sorted(nodes)} for _ in sets or [""]]
        self._rows = [0 for _ in self._metrics]

    def update(self, task: Task, model: nn.Module, batch: Batch, set_index: int) -> None:
        """Updates the metrics of a set; call it before the task, which may use the same forward.

        Raises:
            WrongOutput: If ``metric_inputs`` does not return two values.
            WrongMetric: If a metric refuses them.
        """
        if not self._nodes:
            return
        assert isinstance(task, MetricTask)
        inputs = task.metric_inputs(model, batch)
        if not isinstance(inputs, tuple) or len(inputs) != 2:
            raise WrongOutput(
                f"task: {type(task).__qualname__}.metric_inputs returned {type(inputs).__name__}, want (preds, target) of the "
                "valid rows."
            )
        rows = len(inputs[1])
        self._rows[set_index] += rows
        for name, metric in self._metrics[set_index].items() if rows else ():
            with torch.autocast(self._device.type, enabled=False), self._explained(name):
                metric.update(*inputs)

    def over_all_ranks(self) -> dict[str, float]:
        """Collective. The metrics over all ranks, equal on all of them: of all sets together, and of each; NaN without rows.

        Raises:
            ConfigError: On every rank, if a metric gives something else than a number.
        """
        if not self._nodes:
            return {}
        values = [[_value(*state) for state in self._states(number)] for number in range(len(self._metrics))]
        layouts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(layouts, (self._rows, [[_layout(value) for value in of_set] for of_set in values]))
        parts: list[_Parts] = [[[] for _ in of_set] for of_set in values]
        to_gather: list[tuple[int, int]] = []
        for set_index, of_set in enumerate(values):
            for number, (module, name, reduction) in enumerate(self._states(set_index)):
                alike = all(layout[set_index][number] == layouts[0][1][set_index][number] for _, layout in layouts)
                operation = _reduce_op(reduction, getattr(module, name)) if alike else None
                if operation is None:
                    to_gather.append((set_index, number))
                else:
                    reduced = of_set[number].clone()
                    dist.reduce(reduced, 0, operation)
                    parts[set_index][number] = [(sum(rows[set_index] for rows, _ in layouts), reduced)]
        # All others as bytes, in one collective.
        mine = [tensor for at, number in to_gather for tensor in _tensors(values[at][number])]
        layouts_of_rank = [[of_all[at][number] for at, number in to_gather] for _, of_all in layouts]
        for other, payload in enumerate(_gathered(mine, layouts_of_rank, self._device)):
            for (at, number), value in zip(to_gather, _unpacked(payload, layouts_of_rank[other]), strict=True):
                if rows := layouts[other][0][at]:
                    parts[at][number].append((rows, value))
        self._rows = [sum(rows[at] for rows, _ in layouts) for at in range(len(parts))]
        result: dict[str, float] = from_rank0(lambda: self._computed(parts))
        return result

    def alone(self) -> dict[str, float]:
        """The metrics of this rank."""
        return self._computed(
            [
                [[(rows, copy(getattr(module, name)))] if rows else [] for module, name, _ in self._states(set_index)]
                for set_index, rows in enumerate(self._rows)
            ]
        )

    def _states(self, set_index: int) -> Iterator[tuple[Any, str, Any]]:
        """The metric, the name and the reduction of each state of a set."""
        for metric in self._metrics[set_index].values():
            for module in metric.modules():  # a metric may have metrics inside it
                for name, reduction in getattr(module, "_reductions", {}).items():
                    yield module, name, reduction

    def _computed(self, parts: list[_Parts]) -> dict[str, float]:
        together = [[part for of_set in same for part in of_set] for same in zip(*parts, strict=True)]
        values = {
            f"{name}/{key}": it for at, name in enumerate(self._sets) for key, it in self._of(parts[at], at).items()
        }
        return self._of(together, 0) | values

    def _of(self, parts: _Parts, set_index: int) -> dict[str, float]:
        """Computes the metrics from these states, in place of those that the metrics of a set have."""
        metrics = self._metrics[set_index]
        if not any(rows for of_state in parts for rows, _ in of_state):
            return dict.fromkeys(metrics, math.nan)
        for metric in metrics.values():
            metric.reset()  # empties its lists in place
        for (module, name, reduction), of_state in zip(self._states(set_index), parts, strict=True):
            setattr(module, name, _combined(reduction, of_state))
        return {name: self._number(name, metric) for name, metric in metrics.items()}

    def _number(self, name: str, metric: Any) -> float:
        with self._explained(name), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*was called before the ``update`` method")
            value = metric.compute()
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            return float(value)
        shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
        raise WrongMetric(
            f"train.metrics.{name}: {self._nodes[name]['_target_']} gives a {type(value).__name__}{shape}, want one number. "
            "Choose options such as average=macro, or compute several numbers in the task's conclude."
        )

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            target = self._nodes[name]["_target_"]
            problem = in_brief(f"{type(error).__name__}: {error}")
            raise WrongMetric(
                f"train.metrics.{name}: {target} cannot use the predictions and targets of the task: {problem}"
            ) from error


def _built(name: str, node: Any, device: torch.device) -> Any:
    metric = build_metric(name, node).to(device)
    for module in metric.modules():
        module.distributed_available_fn = lambda: False  # else it would gather its states in compute()
    return metric


def _value(module: Any, name: str, reduction: Any) -> Any:
    """A state as it is sent: what would be concatenated is one tensor."""
    from torchmetrics.utilities import dim_zero_cat

    value = getattr(module, name)
    is_long = isinstance(value, list) and len(value) > 1 and reduction is dim_zero_cat
    return [dim_zero_cat(value)] if is_long else value


def _tensors(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _layout(value: Any) -> tuple[bool, list[tuple[tuple[int, ...], torch.dtype]]]:
    """Whether a state is a list, and the shape and dtype of each tensor."""
    for each in _tensors(value):
        if not isinstance(each, Tensor):
            raise WrongMetric(
                f"train.metrics: a metric keeps a {type(each).__name__} in its states, want only tensors."
            )
    return isinstance(value, list), [(tuple(tensor.shape), tensor.dtype) for tensor in _tensors(value)]


def _reduce_op(reduction: Any, value: Any) -> dist.ReduceOp.RedOpType | None:
    """The operation that reduces a state in a collective; None: it is gathered."""
    from torchmetrics.utilities import dim_zero_max, dim_zero_min, dim_zero_sum

    if isinstance(value, list) or value.dtype == torch.bool:
        return None
    by_function = {dim_zero_sum: dist.ReduceOp.SUM, dim_zero_max: dist.ReduceOp.MAX, dim_zero_min: dist.ReduceOp.MIN}
    return by_function.get(reduction)


def _combined(reduction: Any, parts: list[tuple[int, Any]]) -> Any:
    """One state from those of ranks and sets that have rows."""
    from torchmetrics.utilities import dim_zero_mean

    rows, values = [rows for rows, _ in parts if rows], [value for rows, value in parts if rows]
    if isinstance(values[0], list):
        return [tensor for value in values for tensor in value]
    if len(values) == 1:
        return values[0]
    stacked = torch.stack(values)
    if reduction is dim_zero_mean:  # over rows, so that it does not depend on how they were divided among ranks
        weights = torch.tensor(rows, dtype=torch.float64, device=stacked.device) / sum(rows)
        return torch.tensordot(weights, stacked.double(), 1).to(stacked.dtype)
    return stacked if reduction is None else reduction(stacked)


def _gathered(mine: list[Tensor], layouts: list[Any], device: torch.device) -> list[Tensor]:
    """Collective. On rank 0: the bytes of the tensors of each rank. Elsewhere: []."""
    sizes = [
        sum(math.prod(shape) * dtype.itemsize for _, tensors in layout for shape, dtype in tensors)
        for layout in layouts
    ]
    payload = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    if mine:
        packed = torch.cat([tensor.detach().to(device).reshape(-1).view(torch.uint8) for tensor in mine])
        payload[: packed.numel()] = packed
    received = [torch.empty_like(payload) for _ in sizes] if dist.get_rank() == 0 else []
    if payload.numel():
        dist.gather(payload, received or None, dst=0)
    return received


def _unpacked(payload: Tensor, layout: list[Any]) -> Iterator[Any]:
    """The states in a payload."""
    start = 0
    for is_list, tensors in layout:
        state = []
        for shape, dtype in tensors:
            end = start + math.prod(shape) * dtype.itemsize
            state.append(payload[start:end].clone().view(dtype).reshape(shape))  # a clone is aligned
            start = end
        yield state if is_list else state[0]

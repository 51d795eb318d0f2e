"""Evaluation: sums and counts over all ranks, each sample once, without gradients.

* ``evaluate`` runs a task over one epoch of a loader. It reads nothing from the device before the end, and adds micro-batches
  up, so its memory does not grow with their number. With several sets (``EvaluationSets``) each micro-batch is of one set, and
  each set has its own sums.
* ``evaluate_run`` is an evaluation during training: of the averaged weights if there are any, and interruptible by a stop
  request. The ranks agree on an interruption by an all-reduce that no rank waits for.
* ``metric_names`` tells before the first step which metrics evaluations will have.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.data import Batch, ShardLoader
from dtrain.data.loading.batch import DeviceCopies
from dtrain.data.order.randomness import seed_generators
from dtrain.data.sources.mixture import SOURCE, MixtureSource
from dtrain.distributed.collectives import broadcast_buffers
from dtrain.distributed.process_group import is_from_collective
from dtrain.distributed.sharding import reshard
from dtrain.distributed.store import say_to_all
from dtrain.distributed.world import World
from dtrain.errors import ConfigError, in_brief, nearest
from dtrain.precision import Precision
from dtrain.training.checkpoint.state import TrainState
from dtrain.training.metrics import EvaluationMetrics, WrongMetric
from dtrain.training.setup.buffers import BufferGuard
from dtrain.training.task import ConcludingTask, Evaluation, NotFinite, Output, Task, copy_of_task, run_task

_PATIENCE = 30.0  # seconds that a rank on which the task has raised waits for the others


class Interrupted(Exception):
    """All ranks leave an evaluation because one of them has a stop request."""


def evaluate_run(run: TrainState, stop: Callable[[], bool], *, stopping: bool = False) -> Evaluation | None:
    """Collective. Evaluates a run in training; ``data.eval`` is set.

    Args:
        run: The run.
        stop: Whether this rank has a stop request; called in every micro-batch.
        stopping: Whether the ranks have already agreed to stop; then nothing is evaluated.

    Returns:
        The result; None if a stop request interrupted it.

    Raises:
        NotFinite: As ``evaluate``; if steps were skipped, its message begins with the reason.
    """
    assert run.eval_loader is not None
    # Each rank has updated buffers such as BatchNorm statistics from its own rows; all must evaluate the same model.
    broadcast_buffers(run.model)
    # A task that draws random numbers gets the same ones on resume.
    seed_generators(run.world.device, run.cfg.run.seed, run.step.step, run.world.rank)
    if stopping:
        return None
    try:
        with run.averaged() as model:
            return evaluate(
                model,
                run.task,
                run.eval_loader,
                world=run.world,
                precision=run.precision,
                epoch=run.totals.evaluations,
                stop=stop,
                metrics=run.cfg.train.metrics,
            )
    except Interrupted:
        return None
    except NotFinite as error:
        # What made the training loss infinite makes the evaluation loss infinite too, so report the cause first.
        if skips := run.step.explain_skips():
            raise NotFinite(f"{skips}\nThis {error}", error.evaluation) from error
        raise


@torch.no_grad()  # not inference_mode: tensors that a model keeps (a ScriptModule does) could not be used in training
def evaluate(
    model: nn.Module,
    task: Task,
    loader: ShardLoader,
    *,
    world: World,
    precision: Precision,
    epoch: int = 0,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
    metrics: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Collective. Runs the task over one epoch of ``loader``.

    Args:
        model: The bare model: there are no gradients to average, and DDP's forward would be a collective.
        task: Returns loss sum, count, metrics and tables of a micro-batch.
        loader: This rank's part of the evaluation set, padded and masked.
        world: The ranks.
        precision: Provides autocast.
        epoch: Epoch of the loader. Counting it up in each evaluation keeps the loader's workers alive.
        progress: Called with (micro-batches done, all micro-batches).
        stop: Whether this rank has a stop request; called in every micro-batch. None: no interruption.
        metrics: ``train.metrics``; the task is a ``MetricTask`` then.

    Returns:
        ``loss`` and each metric of the task as sum / count over all ranks, ``samples`` (valid ones), ``bad_samples`` and
        ``metrics``; with several sets these are over all of them, and each has its own: ``NAME/loss``, and so on; the
        metrics of ``ConcludingTask.conclude``; the task's tables.

    Raises:
        Interrupted: On every rank before the same micro-batch, if ``stop()`` was true on one of them.
        NotFinite: On every rank, if the loss is not finite; it has the result.
        WrongOutput: If the task does not return an ``Output``.
        ConfigError: If one of ``metrics`` does not suit the task, or the task has a metric of its name.
        ValueError: If the task's metrics or tables differ between micro-batches or ranks, or no sample can be read.
    """
    was_training = model.training
    model.eval()
    sets = _sets(loader)
    sums, others = _Sums(world.device, sets), EvaluationMetrics(metrics or {}, world.device, sets)
    total = loader.steps_per_epoch * loader.micro_batches_per_step
    to_device = DeviceCopies(world.device)
    stop_vote = _StopVote(stop, world) if stop is not None else None
    try:
        for number, batch in enumerate(loader.epoch(epoch)):
            if stop_vote is not None and stop_vote.agreed():
                raise Interrupted
            set_index = sums.count(batch)
            batch = to_device(batch)
            with precision.autocast(world.device.type):
                others.update(task, model, batch, set_index)
                sums.add(run_task(task, model, batch), set_index)
            if progress is not None:
                progress(number + 1, total)
        result = sums.over_all_ranks()
        if not math.isfinite(result["loss"]):
            raise NotFinite(
                f"evaluation: the loss is {result['loss']} over {result['samples']} samples. Either the run diverged, "
                "or the task returns no valid rows for this data: check train/loss, data.eval and data.fields.",
                result,
            )
        result = _with_metrics(result, others.over_all_ranks())
        if isinstance(task, ConcludingTask):
            with precision.autocast(world.device.type):
                return _concluded(result, task.conclude(model, result), metrics or {})
        return result
    finally:
        model.train(was_training)
        reshard(model)


def _with_metrics(result: Evaluation, metrics: Mapping[str, float]) -> Evaluation:
    """The result with those of ``train.metrics``."""
    _require_own_names(result, metrics)
    return Evaluation({**result, **metrics}, result.tables)


def _concluded(result: Evaluation, concluded: Mapping[str, float], metrics: Iterable[str]) -> Evaluation:
    """The result with those of ``ConcludingTask.conclude``."""
    _require_own_names(concluded, metrics)
    return Evaluation({**result, **concluded}, result.tables)


def _require_own_names(of_task: Mapping[str, float], metrics: Iterable[str]) -> None:
    for name in metrics:
        if name in of_task:
            raise WrongMetric(f"train.metrics.{name}: the task has a metric {name!r}. Choose a different name.")


@dataclass(frozen=True)
class MetricNames:
    """The metrics that evaluations of a run will have.

    Attributes:
        names: Those that are known, as in metrics.jsonl.
        problem: Why there may be more; ``""`` if all are known.
    """

    names: tuple[str, ...]
    problem: str = ""

    def require(self, wanted: Iterable[tuple[str, str]]) -> list[str]:
        """Looks for metrics.

        Args:
            wanted: Places that name a metric, and the names, such as ``("checkpoint.best", "eval/accuracy")``.

        Returns:
            A warning for each metric that is not known but may exist.

        Raises:
            ConfigError: If evaluations will not have one of the metrics.
        """
        unknown = [(place, name) for place, name in wanted if name not in self.names]
        if unknown and not self.problem:
            place, name = unknown[0]
            raise ConfigError(f"{place}: got {name!r}, which no evaluation will have. {nearest(name, self.names)}")
        return [
            f"{place}: got {name!r}, which is not among {', '.join(self.names)}. The first evaluation will show whether it has "
            f"this metric: on the first batch of the training data {self.problem}"
            for place, name in unknown
        ]


def metric_names(run: TrainState, batch: Batch, wanted: Iterable[str]) -> MetricNames:
    """Collective. The metrics that evaluations will have, found without evaluation data; equal on all ranks.

    A copy of the task runs once in evaluation mode on a training micro-batch, then ``conclude`` on its result, each only while
    a name is missing, or there are ``train.metrics`` to check. The model, its buffers and the task are unchanged. An exception
    makes names unknown, because the task may expect other rows in an evaluation.

    Args:
        run: The run; ``data.eval`` is set.
        batch: A micro-batch on the device.
        wanted: The names to look for, as in metrics.jsonl.

    Raises:
        WrongMetric: If one of ``train.metrics`` cannot use what the task returns, or has the name of a metric of the task.
        Exception: What the task raised, if another rank waits for this one in the task.
    """
    assert run.eval_loader is not None
    sets = _sets(run.eval_loader)
    prefixes = ("", *(f"{name}/" for name in sets))
    metrics = run.cfg.train.metrics
    names = {f"eval/{prefix}{name}" for prefix in prefixes for name in ("loss", "samples", "bad_samples", *metrics)}
    if names.issuperset(wanted) and not metrics:
        return MetricNames(tuple(sorted(names)))
    error: Exception | None = None
    try:
        _add_names(names, wanted, run, batch, sets)
    except Exception as raised:
        if is_from_collective(raised) or isinstance(raised, WrongMetric):
            raise
        error = raised
    problem = in_brief(f"the task raised {type(error).__name__}: {error}") if error is not None else ""
    # Not with a collective: a rank on which the task has raised does not know whether the others wait for it in the task.
    patience = _PATIENCE if error is not None else run.cfg.parallel.timeout_start
    said = say_to_all("metric-names", json.dumps([sorted(names), problem]), run.world, patience)
    if said is None:
        raise error or RuntimeError("another rank has not reported the names of its metrics")
    by_rank = [json.loads(text) for text in said]
    every = {name for rank_names, _ in by_rank for name in rank_names}
    return MetricNames(tuple(sorted(every)), next((problem for _, problem in by_rank if problem), ""))


@torch.no_grad()
def _add_names(names: set[str], wanted: Iterable[str], run: TrainState, batch: Batch, sets: Sequence[str]) -> None:
    """Adds the names in this rank's result for a micro-batch, as if each set had it."""
    model, device = run.model, run.world.device
    task, was_training, buffers, sums = copy_of_task(run.task), model.training, BufferGuard(model), _Sums(device, sets)
    metrics = EvaluationMetrics(run.cfg.train.metrics, device, sets)
    buffers.save()
    model.eval()
    seed_generators(device, 0)
    try:
        with run.precision.autocast(device.type):
            # A batch of an evaluation has no sources of a mixture in training.
            copied = Batch(batch.clone(), batch.sample_keys, batch.valid.clone())
            with warnings.catch_warnings():  # of a metric, because a micro-batch lacks some classes
                warnings.simplefilter("ignore")
                for set_index in range(len(sets) or 1):
                    metrics.update(task, model, copied, set_index)
                alone = metrics.alone()
            output = run_task(task, model, copied)
            for set_index in range(len(sets) or 1):
                sums.add(output, set_index)
            result = _with_metrics(sums.of_rows(batch.num_valid), alone)
            names.update(result.record())
            if isinstance(task, ConcludingTask) and (run.cfg.train.metrics or not names.issuperset(wanted)):
                names.update(_concluded(result, task.conclude(model, result), run.cfg.train.metrics).record())
    finally:
        model.train(was_training)
        reshard(model)
        buffers.restore(torch.ones((), dtype=torch.bool, device=device))


def _sets(loader: ShardLoader) -> Sequence[str]:
    """Names of the evaluation sets; () for a single one without a name."""
    source = loader.source
    return source.names if isinstance(source, MixtureSource) and not source.mixed else ()


class _StopVote:
    """Whether any rank has a stop request; known one micro-batch later, so that no rank waits for the all-reduce."""

    def __init__(self, stop: Callable[[], bool], world: World) -> None:
        self._stop = stop
        self._alone = world.size == 1
        self._requests = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def agreed(self) -> bool:
        """Collective. Whether any rank had a request in the previous call; in a world of one, in this call."""
        if self._alone:
            return self._stop()
        if self._work is not None:
            self._work.wait()
            if self._requests.item():
                return True
        # On the host: gloo reduces while the GPUs compute.
        self._requests = torch.tensor([self._stop()], dtype=torch.int32)
        self._work = dist.all_reduce(self._requests, async_op=True)
        return False


class _Sums:
    """Sums of micro-batches on the device: pairs of sum and count in fp64, for each set, and tables in int64.

    Args:
        device: The device.
        sets: Names of the sets; () for a single one without a name.
    """

    def __init__(self, device: torch.device, sets: Sequence[str] = ()) -> None:
        self._device = device
        self._sets = sets
        self._names: list[str] = []
        self._pairs: Tensor | None = None  # [sets, 2 + 2 * metrics]: of the loss, then of each metric
        self._tables: dict[str, Tensor] = {}
        self._counted = [[0, 0] for _ in sets or [""]]  # samples and bad samples of each set

    def count(self, batch: Batch) -> int:
        """Counts the samples of a batch on the host; returns the number of its set."""
        set_index = int(batch[SOURCE][0]) if self._sets else 0
        self._counted[set_index][0] += batch.num_valid
        self._counted[set_index][1] += len(batch.bad)
        return set_index

    def add(self, output: Output, set_index: int) -> None:
        """Adds the result of a micro-batch of a set."""
        tables = dict(sorted(output.tables.items()))
        if self._pairs is None:
            self._names = sorted(output.metrics)
            shape = len(self._counted), 2 + 2 * len(self._names)
            self._pairs = torch.zeros(shape, dtype=torch.float64, device=self._device)
            self._tables = {name: torch.zeros_like(table, device=self._device) for name, table in tables.items()}
        elif (found := _layout(sorted(output.metrics), tables)) != (before := _layout(self._names, self._tables)):
            raise ValueError(
                f"the task returned {found}, before that {before}. Every micro-batch must have the same metrics and "
                "tables; a sum and a count of 0 are allowed."
            )
        pairs = [(output.loss_sum, output.count), *(output.metrics[name] for name in self._names)]
        self._pairs[set_index] += torch.stack([self._float64(value) for pair in pairs for value in pair])
        for name, table in tables.items():
            self._tables[name] += table.to(self._device)

    def over_all_ranks(self) -> Evaluation:
        """Collective. The result of all ranks."""
        layouts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(layouts, _layout(self._names, self._tables))
        for rank, layout in enumerate(layouts):
            if layout != layouts[0]:
                raise ValueError(f"the task returned {layouts[0]} on rank 0 and {layout} on rank {rank}.")
        sums = self._with_counts(self._counted)
        dist.all_reduce(sums)
        for table in self._tables.values():
            dist.all_reduce(table)
        return self._evaluation(sums)

    def of_rows(self, rows: int) -> Evaluation:
        """The result of this rank alone, as if each set had ``rows`` samples."""
        return self._evaluation(self._with_counts([[rows, 0] for _ in self._counted]))

    def _with_counts(self, counted: list[list[int]]) -> Tensor:
        assert self._pairs is not None
        counts = torch.tensor(counted, dtype=torch.float64, device=self._device)
        return torch.cat([self._pairs, counts], dim=1)

    def _evaluation(self, sums: Tensor) -> Evaluation:
        metrics = self._metrics(sums.sum(dim=0), "")
        for name, set_index in zip(self._sets, sums, strict=False):
            metrics |= self._metrics(set_index, f"{name}/")
        return Evaluation(metrics, {name: table.cpu() for name, table in self._tables.items()})

    def _metrics(self, sums: Tensor, prefix: str) -> dict[str, float]:
        *totals, samples, bad = sums.tolist()
        metrics = {
            f"{prefix}{name}": total / count if count else math.nan
            for name, total, count in zip(["loss", *self._names], totals[::2], totals[1::2], strict=True)
        }
        return metrics | {f"{prefix}samples": int(samples), f"{prefix}bad_samples": int(bad)}

    def _float64(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(self._device, torch.float64)
        return torch.full((), value, dtype=torch.float64, device=self._device)


def _layout(metrics: list[str], tables: Mapping[str, Tensor]) -> str:
    """A text that is equal for outputs that can be added."""
    shapes = "".join(f", table {name} {list(table.shape)}" for name, table in tables.items())
    return f"metrics {metrics}{shapes}"

"""Evaluation: sums and counts over all ranks, each sample once, without gradients.

* ``evaluate`` runs a task over one epoch of a loader. It reads nothing from the device before the end, and adds micro-batches
  up, so its memory does not grow with their number. With several sets (``EvaluationSets``) each micro-batch is of one set, and
  each set has sums of its own.
* ``evaluate_run`` is an evaluation during training: of the averaged weights if there are any, and interruptible by a stop
  request. The ranks agree on an interruption by an all-reduce that no rank waits for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.data import Batch, ShardLoader
from dtrain.data.batch import DeviceCopies
from dtrain.data.mixture import MixtureSource
from dtrain.data.mixture_collator import SOURCE
from dtrain.data.randomness import seed_generators
from dtrain.distributed.collectives import broadcast_buffers
from dtrain.distributed.sharding import reshard
from dtrain.distributed.world import World
from dtrain.precision import Precision
from dtrain.training.state import TrainState
from dtrain.training.task import ConcludingTask, Evaluation, NotFinite, Output, Task, require_output


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
            )
    except Interrupted:
        return None
    except NotFinite as error:
        # What made the loss of the steps infinite makes that of the evaluation infinite: say the cause first.
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

    Returns:
        ``loss`` and each metric of the task as sum / count over all ranks, ``samples`` (valid ones) and ``bad_samples``; with
        several sets these are over all of them, and each has its own: ``NAME/loss``, and so on; the
        metrics of ``ConcludingTask.conclude``; the task's tables.

    Raises:
        Interrupted: On every rank before the same micro-batch, if ``stop()`` was true on one of them.
        NotFinite: On every rank, if the loss is not finite; it has the result.
        TypeError: If the task does not return an ``Output``.
        ValueError: If the task's metrics or tables differ between micro-batches or ranks, or no sample can be read.
    """
    was_training = model.training
    model.eval()
    source = loader.source
    sums = _Sums(world.device, source.names if isinstance(source, MixtureSource) and not source.mixed else ())
    total = loader.steps_per_epoch * loader.micro_batches_per_step
    to_device = DeviceCopies(world.device)
    stop_vote = _StopVote(stop, world) if stop is not None else None
    try:
        for number, batch in enumerate(loader.epoch(epoch)):
            if stop_vote is not None and stop_vote.agreed():
                raise Interrupted
            of_set = sums.count(batch)
            with precision.autocast(world.device.type):
                sums.add(require_output(task(model, to_device(batch))), of_set)
            if progress is not None:
                progress(number + 1, total)
        result = sums.over_all_ranks()
        if not math.isfinite(result["loss"]):
            raise NotFinite(
                f"evaluation: the loss is {result['loss']} over {result['samples']} samples. Either the run diverged, "
                "or the task returns no valid rows for this data: check train/loss, data.eval and data.fields.",
                result,
            )
        if isinstance(task, ConcludingTask):
            with precision.autocast(world.device.type):
                return Evaluation({**result, **task.conclude(model, result)}, result.tables)
        return result
    finally:
        model.train(was_training)
        reshard(model)


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
        of_set = int(batch[SOURCE][0]) if self._sets else 0
        self._counted[of_set][0] += batch.num_valid
        self._counted[of_set][1] += len(batch.bad)
        return of_set

    def add(self, output: Output, of_set: int) -> None:
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
        self._pairs[of_set] += torch.stack([self._float64(value) for pair in pairs for value in pair])
        for name, table in tables.items():
            self._tables[name] += table.to(self._device)

    def over_all_ranks(self) -> Evaluation:
        """Collective. The result of all ranks."""
        layouts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(layouts, _layout(self._names, self._tables))
        for rank, layout in enumerate(layouts):
            if layout != layouts[0]:
                raise ValueError(f"the task returned {layouts[0]} on rank 0 and {layout} on rank {rank}.")
        assert self._pairs is not None
        counted = torch.tensor(self._counted, dtype=torch.float64, device=self._device)
        sums = torch.cat([self._pairs, counted], dim=1)
        dist.all_reduce(sums)
        for table in self._tables.values():
            dist.all_reduce(table)
        metrics = self._metrics(sums.sum(dim=0), "")
        for name, of_set in zip(self._sets, sums, strict=False):
            metrics |= self._metrics(of_set, f"{name}/")
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

"""Evaluation: sums and counts over all ranks, each sample once, without gradients.

* ``evaluate`` runs a task over one epoch of a loader. It reads nothing from the device before the end, and adds micro-batches
  up, so its memory does not grow with their number.
* ``evaluate_run`` is an evaluation during training: of the averaged weights if there are any, and interruptible by a stop
  request. The ranks agree on an interruption by an all-reduce that no rank waits for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.data import ShardLoader
from dtrain.data.batch import DeviceCopies
from dtrain.data.randomness import seed_generators
from dtrain.distributed.collectives import broadcast_buffers
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
        return evaluate(
            run.ema.averaged() if run.ema is not None else run.model,
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
        ``loss`` and each metric of the task as sum / count over all ranks, ``samples`` (valid ones) and ``bad_samples``; the
        metrics of ``ConcludingTask.conclude``; the task's tables.

    Raises:
        Interrupted: On every rank before the same micro-batch, if ``stop()`` was true on one of them.
        NotFinite: On every rank, if the loss is not finite; it has the result.
        TypeError: If the task does not return an ``Output``.
        ValueError: If the task's metrics or tables differ between micro-batches or ranks, or no sample can be read.
    """
    was_training = model.training
    model.eval()
    sums = _Sums(world.device)
    samples = bad = 0
    total = loader.steps_per_epoch * loader.micro_batches_per_step
    to_device = DeviceCopies(world.device)
    stop_vote = _StopVote(stop, world) if stop is not None else None
    try:
        for number, batch in enumerate(loader.epoch(epoch)):
            if stop_vote is not None and stop_vote.agreed():
                raise Interrupted
            samples += batch.num_valid
            bad += len(batch.bad)
            with precision.autocast(world.device.type):
                sums.add(require_output(task(model, to_device(batch))))
            if progress is not None:
                progress(number + 1, total)
        result = sums.over_all_ranks(samples, bad)
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
    """Sums of micro-batches on the device: pairs of sum and count in fp64, tables in int64."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names: list[str] = []
        self._pairs = torch.zeros(0, dtype=torch.float64, device=device)  # of the loss, then of each metric
        self._tables: dict[str, Tensor] = {}

    def add(self, output: Output) -> None:
        tables = dict(sorted(output.tables.items()))
        if not len(self._pairs):
            self._names = sorted(output.metrics)
            self._pairs = torch.zeros(2 + 2 * len(self._names), dtype=torch.float64, device=self._device)
            self._tables = {name: torch.zeros_like(table, device=self._device) for name, table in tables.items()}
        elif (found := _layout(sorted(output.metrics), tables)) != (before := _layout(self._names, self._tables)):
            raise ValueError(
                f"the task returned {found}, before that {before}. Every micro-batch must have the same metrics and "
                "tables; a sum and a count of 0 are allowed."
            )
        pairs = [(output.loss_sum, output.count), *(output.metrics[name] for name in self._names)]
        self._pairs += torch.stack([self._float64(value) for pair in pairs for value in pair])
        for name, table in tables.items():
            self._tables[name] += table.to(self._device)

    def over_all_ranks(self, samples: int, bad: int) -> Evaluation:
        """Collective. The result of all ranks."""
        layouts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(layouts, _layout(self._names, self._tables))
        for rank, layout in enumerate(layouts):
            if layout != layouts[0]:
                raise ValueError(f"the task returned {layouts[0]} on rank 0 and {layout} on rank {rank}.")
        counted = torch.tensor([samples, bad], dtype=torch.float64, device=self._device)
        sums = torch.cat([self._pairs, counted])
        dist.all_reduce(sums)
        for table in self._tables.values():
            dist.all_reduce(table)
        *totals, samples_of_all, bad_of_all = sums.tolist()
        metrics = {
            name: total / count if count else math.nan
            for name, total, count in zip(["loss", *self._names], totals[::2], totals[1::2], strict=True)
        }
        metrics |= {"samples": int(samples_of_all), "bad_samples": int(bad_of_all)}
        return Evaluation(metrics, {name: table.cpu() for name, table in self._tables.items()})

    def _float64(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(self._device, torch.float64)
        return torch.full((), value, dtype=torch.float64, device=self._device)


def _layout(metrics: list[str], tables: Mapping[str, Tensor]) -> str:
    """A text that is equal for outputs that can be added."""
    shapes = "".join(f", table {name} {list(table.shape)}" for name, table in tables.items())
    return f"metrics {metrics}{shapes}"

"""When a rank runs out of memory in a step, all ranks repeat the step with the same samples in smaller micro-batches.

The global batch, its order and, up to rounding, the result do not depend on the size of micro-batches, so only memory and speed
change. The other ranks do not know at once, because they may be waiting in a collective of the step:

1. The rank without memory drops its gradients and takes part in the remaining collectives of DDP or FSDP of the window,
   with zeros (``UnfinishedWindow``). It also does so in the next window, if that begins before all ranks know.
2. Its count in the vote is minus infinity. So all ranks skip the step, and read why in ``settle`` (``StepOutOfMemory``).
3. They move the loader back by one step, divide the micro-batch (``smaller``), and wrap the model in a new DDP or
   reset the sharded one.

``why_not`` says where that would change the result, or where collectives cannot be completed.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.data import Batch, ShardLoader
from dtrain.data.loading.stream import StreamLoader
from dtrain.data.order.randomness import seed_generators
from dtrain.distributed.sharding import can_reset, check_accumulation, is_sharded
from dtrain.errors import ConfigError
from dtrain.precision import Precision
from dtrain.training.breakpoints import without_breakpoints
from dtrain.training.checkpoint.state import TrainState
from dtrain.training.monitor.memory import OutOfMemory, is_out_of_memory
from dtrain.training.setup.batchnorm import calls_collectives, has_batchnorm
from dtrain.training.setup.buffers import BufferGuard
from dtrain.training.setup.model import is_compiled
from dtrain.training.task import Task, copy_of_task, run_task
from dtrain.training.unfinished import are_numbered, collectives_so_far

logger = logging.getLogger("dtrain")
#: A reason of ``why_not``, which is known only when the task has been called.
CALLS = "the task calls collectives"

_TESTED_ROWS = 4
_TOLERANCE = 1e-2  # of a loss; in 16 bits, single rows differ by some thousandths


def why_not(model: nn.Module, loader: ShardLoader, retries: int) -> str:
    """Why a step cannot be done again with smaller micro-batches; "" if it can.

    Args:
        model: In DDP, if there are several ranks.
        loader: Of the training data.
        retries: ``train.max_memory_retries``.
    """
    if not retries:
        return "train.max_memory_retries=0"
    if is_sharded(model) and not can_reset(model):
        return f"a sharded model cannot be used again after a failed forward before torch 2.13, and this is {torch.__version__}"
    if not are_numbered():
        return "this backend does not number its collectives"
    if has_batchnorm(model):
        return "the model has BatchNorm, whose statistics depend on the micro-batch"
    if is_compiled(model):
        return "train.compile has compiled one shape"
    if isinstance(model, DistributedDataParallel) and model.static_graph:
        return "parallel.static_graph=true"
    if isinstance(loader, StreamLoader):
        return "a stream cannot be read again from the step before"
    return ""


def _accumulates_in_16_bits(run: TrainState) -> str:
    """Why a sharded model, of which a step has one micro-batch, must not have several; "" if it may."""
    if run.is_sharded:
        try:
            check_accumulation(run.cfg.parallel, micro_batches=2)
        except ConfigError:
            return f"gradients of several micro-batches would be added up in {run.cfg.parallel.reduce_dtype}"
    return ""


def rehearse(run: TrainState, batch: Batch) -> str:
    """Collective, in a window that has begun. Notes the collectives of a sharded model, so that a rank can complete them.

    Args:
        run: The run, with a sharded model.
        batch: A few rows, on the device.

    Returns:
        Why that is impossible; "" if it was done.
    """
    if calls_collectives(run.task, run.model, batch, run.precision):
        return CALLS
    with without_breakpoints():
        run.step.rehearse(batch)
    return ""


def smaller(rows: int, share: int) -> int | None:
    """The size of micro-batches to continue with: the largest divisor of a rank's ``share``, at most half of ``rows``."""
    return next((size for size in range(rows // 2, 0, -1) if share % size == 0), None)


def free_memory(device: torch.device) -> None:
    """Releases what a failed forward or backward has left; the error, whose traceback holds tensors, must be gone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@torch.no_grad()
def rows_interact(task: Task, model: nn.Module, batch: Batch, precision: Precision, device: torch.device) -> bool:
    """Whether the loss of a row depends on the other rows of its micro-batch, as in a contrastive task.

    It does not if the sum of the losses of some rows is that of their two halves. A task that draws random numbers, such as a
    diffusion loss, draws others for the halves. So for such a task halves of two micro-batches of equal size are exchanged,
    where each row keeps its place and its random numbers: the sum of both losses changes only if rows interact.

    Args:
        task: A copy of it is called.
        model: The bare model, in training mode, where its own normalisation may use the whole batch. Buffers are restored.
        batch: Any micro-batch; a few of its valid rows are used.
        precision: Provides autocast.
        device: Of the model.
    """
    rows = batch.valid.nonzero().flatten().tolist()[:_TESTED_ROWS] or [0]
    half, buffers = len(rows) // 2, BufferGuard(model)
    one, two = (rows[:half], rows[half : 2 * half]) if half else (rows, rows)

    def loss(some: list[int], seed: int = 0) -> float:
        seed_generators(device, seed)
        with precision.autocast(device.type):
            return float(run_task(copy_of_task(task), model, batch.chosen(some).to(device)).loss_sum)

    buffers.save()
    try:
        # All of them in any case: with a sharded model each is a collective.
        whole, parts, other = loss(one + two), loss(one) + loss(two), loss(one + two, seed=1)
        exchanged, halves = whole + loss(two + one), loss(one + one) + loss(two + two)
    finally:
        buffers.restore(torch.ones((), dtype=torch.bool, device=device))
    if not half or _equal(whole, parts):
        return False
    is_random = not _equal(whole, other)
    return not (is_random and _equal(exchanged, halves))


def _equal(one: float, other: float) -> bool:
    return abs(one - other) <= _TOLERANCE * max(abs(one), abs(other), 1e-6)


class MemoryRetries:
    """Decides whether a step is done again, and with which micro-batches.

    Args:
        run: The run.
        warn: Shows a warning to the user, on rank 0.

    Attributes:
        metrics: Names of the task's metrics, for a window whose first micro-batch ran out of memory.
    """

    def __init__(self, run: TrainState, warn: Callable[[str], None]) -> None:
        self._run = run
        self._warn = warn
        self._left = run.cfg.train.max_memory_retries
        self._why_not = why_not(run.step.model, run.train_loader, self._left) or _accumulates_in_16_bits(run)
        self._exhausted = False  # on this rank
        self.metrics: list[str] | None = None

    @property
    def why_not(self) -> str:
        """Why the step cannot be done again; "" if it can."""
        if (reason := self._never()) or not self._run.is_sharded or self._run.step.is_rehearsed:
            return reason
        return "the other ranks take part in the checks before the first step of a sharded model"

    def _never(self) -> str:
        """Why no step can be done again from now on; "" if one can."""
        if self._why_not:
            return self._why_not
        if self._next() is None:
            return "a micro-batch has one row already"
        limit = self._run.cfg.train.max_memory_retries
        return "" if self._left else f"that was done train.max_memory_retries={limit} times"

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A task that is called in the block must not call collectives: the other ranks would wait for this one in them."""
        before = collectives_so_far()
        yield
        if collectives_so_far() != before and not self._run.is_sharded:
            self._why_not = CALLS

    def rehearse(self, batch: Batch) -> None:
        """Collective. Before the first step of a sharded model: runs one row, so that a rank can take part without memory.

        Args:
            batch: A micro-batch on the device.
        """
        if self._run.is_sharded and not self._never():
            self._why_not = rehearse(self._run, batch.chosen([0]))

    @contextmanager
    def without_check(self) -> Iterator[None]:
        """Ends the block, a check that runs the task on a micro-batch, if memory is exhausted: the step will be, too."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error) or self.why_not:
                raise
        else:
            return
        free_memory(self._run.world.device)

    def take(self, error: Exception, batch: Batch | None) -> bool:
        """Whether ``error`` says that memory is exhausted, and the step will be done again.

        Args:
            error: Raised by a window of this rank.
            batch: The last micro-batch, in host memory; None if there is none.
        """
        if not is_out_of_memory(error) or self.why_not or batch is None:
            return False
        logger.warning("step %d: memory is exhausted on this rank: %s", self._run.step.step + 1, error)
        self._exhausted = True
        if self.metrics is None and not self._run.is_sharded:  # else they are known from ``rehearse``
            self.metrics = self._metric_names(batch)
        return True

    def next_rows(self, batch: Batch | None) -> int:
        """Collective. The size of the micro-batches from now on.

        Args:
            batch: A micro-batch, in host memory.

        Raises:
            OutOfMemory: On every rank, if smaller micro-batches would change the result.
        """
        run, rows, ranks = self._run, self._next(), self._run.world.size
        said: list[tuple[bool, bool]] = [(False, False)] * ranks
        interact = batch is not None and rows_interact(run.task, run.model, batch, run.precision, run.world.device)
        dist.all_gather_object(said, (self._exhausted, interact))
        where = " and ".join(f"rank {rank}" for rank, (exhausted, _) in enumerate(said) if exhausted)
        step, before = run.step.step + 1, run.train_loader.rows_per_micro_batch
        if any(interacts for _, interacts in said) or rows is None:
            raise OutOfMemory(
                f"out of memory in step {step}, with micro-batches of {before} rows, on {where}. The step is not repeated with "
                "fewer rows, because the task's loss of a row depends on the other rows of its micro-batch."
            )
        self._left -= 1
        self._exhausted = False
        self._warn(
            f"step {step}: {where} ran out of memory with micro-batches of {before} rows. All ranks do the step again, and "
            f"continue, with {rows}: the same samples and global batch, and the same result up to rounding. "
            f"train.micro_batch_size={rows} begins with it."
        )
        return rows

    def _next(self) -> int | None:
        cfg, loader = self._run.cfg.train, self._run.train_loader
        return smaller(loader.rows_per_micro_batch, -(-cfg.global_batch_size // self._run.world.size))

    def _metric_names(self, batch: Batch) -> list[str]:
        run = self._run
        with run.precision.autocast(run.world.device.type), torch.no_grad():
            output = run_task(copy_of_task(run.task), run.model, batch.chosen([0]).to(run.world.device))
        return sorted(output.metrics)

"""``train.micro_batch_size=auto``: the largest micro-batch that fits into the memory of every rank.

Before step 1 each rank runs forward and backward of its largest possible micro-batch, then of half of it, until one fits; all
ranks take the smallest of these sizes. The gradients of the weights and the state of the optimizer are allocated meanwhile, as
in a step. The size is kept in ``micro_batch.json`` in the run directory, so that a later start on such a device does not search
again. It changes neither the global batch nor the order of samples.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dtrain.data import Batch
from dtrain.data.order.randomness import seed_generators
from dtrain.distributed.collectives import from_rank0
from dtrain.distributed.sharding import is_sharded
from dtrain.errors import ConfigError
from dtrain.files import replace_file
from dtrain.training.breakpoints import without_breakpoints
from dtrain.training.checkpoint.state import TrainState, device_kind
from dtrain.training.memory_retry import free_memory, smaller
from dtrain.training.monitor.memory import OutOfMemory, is_out_of_memory
from dtrain.training.setup.batchnorm import has_batchnorm
from dtrain.training.setup.buffers import BufferGuard
from dtrain.training.task import copy_of_task, run_task

AUTO = "auto"
FILE = "micro_batch.json"
#: Tensors of optimizer state per parameter, as of Adam, while the optimizer has none yet.
_STATES = 2


def choose_micro_batch(run: TrainState) -> list[str]:
    """Collective. Divides the steps of ``run`` into the largest micro-batches that fit; see the module.

    Returns:
        Lines for the user.

    Raises:
        ConfigError: If the ranks cannot search by themselves.
        OutOfMemory: On every rank, if not even one row fits on some rank.
    """
    if is_sharded(run.model):
        raise ConfigError(
            "train.micro_batch_size: got auto, which cannot be found with a sharded model: a rank whose memory is exhausted "
            "would leave the others waiting. `dtrain doctor memory` with the arguments of this run computes what fits; name it."
        )
    loader, world = run.train_loader, run.world
    share = loader.rows_per_micro_batch
    key = _key(run, share)
    known = from_rank0(lambda: _known(run.run_dir, key))
    if known is not None:
        loader.divide(known)
        return [f"micro-batches of {known} rows, as found by an earlier start on such a device ({FILE})"]
    if not _has_limit(world.device):
        return [f"micro-batches of {share} rows: a CPU has no limit that can be found before it is exceeded"]
    return [search(run, share)]


def search(run: TrainState, share: int) -> str:
    """Collective. As ``choose_micro_batch``, without an earlier result; returns a line for the user."""
    loader = run.train_loader
    batch = next(iter(loader))
    rows = _largest(run, batch, share)
    loader.close()
    agreed = torch.tensor(rows, device=run.world.device)
    if dist.is_initialized() and run.world.size > 1:
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
    if (rows := int(agreed)) < 1:
        raise OutOfMemory(
            "train.micro_batch_size=auto: on some rank not even one row fits. Try precision=bf16, "
            "train.checkpoint_activations=[PATTERN of modules] or parallel=fsdp."
        )
    loader.divide(rows)
    line = f"micro-batches of {rows} rows, the largest of {share}, {share // 2}, ... that fit"
    return f"{line}. BatchNorm uses the statistics of these rows" if has_batchnorm(run.model) else line


def remember(run: TrainState) -> None:
    """On rank 0: keeps the size of micro-batches for later starts. The run directory exists."""
    if run.world.rank:
        return
    share = -(-run.cfg.train.global_batch_size // run.world.size)
    found = _key(run, share) | {"micro_batch_size": run.train_loader.rows_per_micro_batch}
    with suppress(OSError), replace_file(run.run_dir / FILE) as file:  # a later start would search again
        file.write(json.dumps(found, indent=1).encode())


def _largest(run: TrainState, batch: Batch, share: int) -> int:
    """The largest micro-batch that fits on this rank; 0 if none does."""
    rows: int | None = share
    while rows is not None:
        if _fits(run, batch, rows):
            return rows
        free_memory(run.world.device)
        rows = smaller(rows, share)
    return 0


def _fits(run: TrainState, batch: Batch, rows: int) -> bool:
    """Runs a forward and a backward of the first ``rows`` rows, and leaves nothing behind."""
    device, model = run.world.device, run.model
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    buffers = BufferGuard(model)
    buffers.save()
    seed_generators(device, run.cfg.run.seed)
    try:
        states = 0 if run.optimizer.state else _STATES
        held = [torch.empty_like(parameter) for parameter in parameters for _ in range(states)]
        some = batch.chosen(range(rows)).to(device)
        with without_breakpoints(), run.precision.autocast(device.type):
            output = run_task(copy_of_task(run.task), model, some)
        output.loss_sum.backward()
        del held
        return True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        for parameter in parameters:
            parameter.grad = None
        buffers.restore(torch.ones((), dtype=torch.bool, device=device))


def _known(run_dir: Path, key: dict[str, Any]) -> int | None:
    try:
        found = json.loads((run_dir / FILE).read_text(encoding="utf-8"))
        rows = found.pop("micro_batch_size")
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return rows if found == key and isinstance(rows, int) and rows >= 1 and key["rows_of_a_rank"] % rows == 0 else None


def _key(run: TrainState, share: int) -> dict[str, Any]:
    """What the result of a search depends on."""
    shapes = [(name, tuple(p.shape), p.requires_grad) for name, p in run.model.named_parameters()]
    model = hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]
    kind = device_kind(run.world.device)
    return {"device": kind, "model": model, "precision": run.precision.name, "rows_of_a_rank": share}


def _has_limit(device: torch.device) -> bool:
    return device.type != "cpu"

"""What a run tells at its start: everything that was derived and not typed."""

from __future__ import annotations

import sys

import torch

from dtrain.config.run import Run
from dtrain.distributed.world import World
from dtrain.training.parts import Parts


def banner(run: Run, parts: Parts, resumed_from: str, last_step: int, horizon: int) -> dict[str, str]:
    """Rows for ``print_banner``.

    Args:
        run: The run.
        parts: Its objects, restored.
        resumed_from: Where it continues.
        last_step: Step after which it is finished.
        horizon: Steps that the learning-rate schedule is laid out for.
    """
    world, loader, cfg = parts.world, parts.train_loader, parts.cfg
    micro, rows = loader.micro_batches_per_step, loader.rows_per_micro_batch
    return {
        "run": run.name,
        "directory": str(run.dir),
        "starts": resumed_from,
        "ranks": f"{world.size} on {_device(world)}, {world.backend.split(':')[-1]}",
        "precision": f"{parts.precision.name} (autocast {_short(parts.precision.compute_dtype)}"
        + (", loss scaling)" if parts.precision.scales_gradients else ")"),
        "on the wire": loader.wire.describe(),
        "train data": loader.source.summary(),
        "eval data": parts.eval_loader.source.summary() if parts.eval_loader is not None else "none",
        "workers": f"{loader.num_workers} for each rank"
        + (f" ({loader.workers_reason})" if loader.workers_reason else ""),
        "global batch": f"{cfg.train.global_batch_size} = {world.size} ranks x {micro} micro-batches x "
        f"{rows} rows" + _masked(world.size * micro * rows - cfg.train.global_batch_size),
        "steps": f"{last_step:,} ({loader.steps_per_epoch:,} an epoch), schedule over {horizon:,}",
        "model": f"{sum(p.numel() for p in parts.model.parameters()):,} parameters, {type(parts.optimizer).__name__}"
        + (" (fused)" if parts.optimizer.defaults.get("fused") else ""),
        "versions": f"torch {torch.__version__}, Python {sys.version.split()[0]}",
    }


def _masked(rows: int) -> str:
    return f" ({rows} masked)" if rows else ""


def _device(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")

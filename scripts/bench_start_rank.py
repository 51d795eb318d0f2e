"""One rank of ``bench_start.py``: the trainer, or with ``--bare`` the least that can be done, and when its parts were done."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARKS, BEGAN = "DTRAIN_BENCH_MARKS", "DTRAIN_BENCH_BEGAN"


def main() -> None:
    """Runs the trainer, or the bare script, with marks where its parts end."""
    mark("python")
    if sys.argv[1:] == ["--bare"]:
        _bare()
        return
    import dtrain.train  # what the trainer imports, before it is patched and run as it is
    from dtrain.data.device_copies import DeviceCopies
    from dtrain.training.loop import Loop
    from dtrain.training.step import TrainStep

    mark("imports")
    at_the_first_call(dtrain.train, "run_locked", "config, ranks")
    at_the_first_call(dtrain.train, "schedule_horizon", "data")
    at_the_first_call(Loop, "run", "model")
    at_the_first_call(DeviceCopies, "__call__", "first batch")
    at_the_first_call(TrainStep, "apply", "first step", after=True)
    dtrain.train.main()


def _bare() -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from dtrain.models.small_cnn import SmallCNN

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(SmallCNN(classes=10, width=32))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(64 // dist.get_world_size(), 3, 32, 32)).square().mean().backward()
    optimizer.step()
    mark("first step")
    dist.destroy_process_group()


def mark(name: str) -> None:
    """Rank 0 notes how long after the command this is; the first time counts."""
    if os.environ.get("RANK", "0") != "0":
        return
    path = Path(os.environ[MARKS])
    marks = json.loads(path.read_text()) if path.exists() else {}
    marks.setdefault(name, time.time() - float(os.environ[BEGAN]))
    path.write_text(json.dumps(marks))


def at_the_first_call(owner: Any, name: str, called: str, *, after: bool = False) -> None:
    """Marks the first call of a function, when it begins or when it has ended, and then leaves the function alone."""
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def marking(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, function)
        if not after:
            mark(called)
        result = function(*args, **kwargs)
        if after:
            mark(called)
        return result

    setattr(owner, name, marking)


if __name__ == "__main__":
    main()

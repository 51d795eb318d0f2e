"""dtrain under Ray Train: Ray places the workers, and each worker is one rank of a run.

    pip install 'ray[train]'
    python examples/ray_train.py --workers 2 experiment=digits run.dir=$PWD/runs/digits

Ray's ``TorchTrainer`` passes each worker its rank in torchrun's variables. The training runs in a separate process, as under
torchrun, because Ray calls a worker's function in a thread, where Python allows no signal handlers. ``run.dir`` must be an
absolute path that all workers see; on machines without a shared disk, add ``checkpoint.mirror``. If a worker or its machine is
lost, Ray starts all workers again, at most ``--failures`` times, and the run continues from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from typing import Any

import torch.distributed as dist
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def worker(config: dict[str, Any]) -> int:
    """One rank. Returns the exit code of its training, 0."""
    # Rank 0 of Ray's own process group listens on MASTER_PORT, so the ranks of dtrain meet at a free port next to it.
    port = [_free_port()]
    dist.broadcast_object_list(port)
    ranks = os.environ | {"MASTER_PORT": str(port[0])}
    command = [sys.executable, "-m", "dtrain.train", *config["overrides"]]
    with subprocess.Popen(command, env=ranks, cwd=config["folder"]) as training:
        try:
            code = training.wait()
        finally:
            training.terminate()  # if Ray ends this worker: the ranks save and stop
    if code:
        raise RuntimeError(f"rank {os.environ['RANK']} ended with exit code {code}; its output is above")
    return code


def fit(overrides: list[str], workers: int, use_gpu: bool = False, failures: int = 3) -> Result:
    """Trains a run.

    Args:
        overrides: Arguments of ``dtrain train``, including ``run.dir``.
        workers: Number of ranks, with one GPU each if ``use_gpu``.
        use_gpu: Whether the workers have GPUs.
        failures: How many times Ray starts the workers again.
    """
    trainer = TorchTrainer(
        worker,
        train_loop_config={"overrides": overrides, "folder": os.getcwd()},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=use_gpu),
        torch_config=TorchConfig(backend="gloo"),  # of Ray's own group, which then takes no memory of the GPUs
        run_config=RunConfig(failure_config=FailureConfig(max_failures=failures)),
    )
    return trainer.fit()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--failures", type=int, default=3)
    options, rest = parser.parse_known_args()
    fit(rest, options.workers, options.gpu, options.failures)

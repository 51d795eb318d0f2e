"""Which rank this process is, and which device and backend it uses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dtrain.config.errors import ConfigError
from dtrain.distributed.srun import started_by_srun


@dataclass(frozen=True)
class World:
    """The ranks of a run, seen from one of them.

    Attributes:
        rank: This process, in ``[0, size)``.
        size: Number of processes.
        local_rank: This process among those of its machine.
        local_size: Processes of this machine.
        device: Where this rank computes.
        backend: For ``torch.distributed``: ``gloo`` on CPUs; on GPUs NCCL, with gloo for what lies in host memory.
        launched: Whether a launcher such as torchrun started this process.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str
    launched: bool

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> World:
        """The world that torchrun describes in the environment; without torchrun a world of one.

        Raises:
            ConfigError: If the environment is incomplete, or there are more ranks than GPUs on this machine.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        given = [name for name in names if name in environment]
        if given and len(given) < len(names):
            missing = [name for name in names if name not in environment]
            raise ConfigError(
                f"environment: {', '.join(given)} set, but not {', '.join(missing)}. Start with torchrun, which sets "
                "them all, or unset them for a single process."
            )
        rank, size, local_rank, local_size = (int(environment[name]) for name in names) if given else (0, 1, 0, 1)
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        # srun --gpus-per-task=1 shows each task a GPU of its own, which is the first that it sees.
        place = (0, 1) if gpus == 1 and started_by_srun(environment) else (local_rank, local_size)
        device, backend = choose_device(*place, gpus)
        return cls(rank, size, local_rank, local_size, device, backend, bool(given))


def choose_device(local_rank: int, local_size: int, gpus: int) -> tuple[torch.device, str]:
    """One GPU a rank and NCCL where there are GPUs, else the CPU and gloo.

    Args:
        local_rank: This process among those of its machine.
        local_size: Processes of this machine.
        gpus: GPUs that this process sees.

    Raises:
        ConfigError: If there are GPUs but fewer than ranks: two ranks on one GPU deadlock in NCCL.
    """
    if not gpus:
        return torch.device("cpu"), "gloo"
    if local_size > gpus:
        raise ConfigError(
            f"{local_size} processes on this machine, but {gpus} GPU{'s' if gpus > 1 else ''}. Start torchrun with "
            f"--nproc-per-node={gpus}, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU."
        )
    return torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"

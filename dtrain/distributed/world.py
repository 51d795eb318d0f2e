"""Rank, device and backend of this process, under torchrun or srun.

``srun --ntasks-per-node=4 --gpus-per-node=4 python -m dtrain.train ...`` starts one process per task without torchrun.
``join_srun`` translates SLURM's variables into torchrun's, so that the rest of dtrain reads only those.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import torch

from dtrain.errors import ConfigError

_FIRST_HOST = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_RANGES = re.compile(r"\[(\w+)[^\]]*\]")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_FROM_SRUN = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
_CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")
_OF_TORCHRUN = (*_FROM_SRUN, "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class World:
    """The ranks of a run, as one of them sees them.

    Attributes:
        rank: This process, in ``[0, size)``.
        size: Number of processes.
        local_rank: Number of this process on its machine.
        local_size: Number of processes on this machine.
        device: Where this rank computes.
        backend: For ``torch.distributed``: ``gloo`` on CPUs; on GPUs NCCL, and gloo for tensors in host memory.
        launched: Whether a launcher such as torchrun started this process.

    Example:
        >>> from dtrain.distributed.world import World
        >>> world = World.from_environment({})  # not started by a launcher
        >>> world.rank, world.size
        (0, 1)
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str
    launched: bool

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> World:
        """The world that torchrun's variables describe; a world of one without them.

        Raises:
            ConfigError: If some of the variables are missing, or there are more ranks than GPUs on this machine.
        """
        present = [name for name in _OF_TORCHRUN if name in environment]
        if present and len(present) < len(_OF_TORCHRUN):
            missing = [name for name in _OF_TORCHRUN if name not in environment]
            raise ConfigError(
                f"environment: {', '.join(present)} set, but not {', '.join(missing)}. Start with torchrun, which sets "
                "them all, or unset them for a single process."
            )
        values = (int(environment[name]) for name in _OF_TORCHRUN)
        rank, size, local_rank, local_size = values if present else (0, 1, 0, 1)
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        # With srun --gpus-per-task=1 each task sees one GPU, its own, as number 0.
        place = (0, 1) if gpus == 1 and started_by_srun(environment) else (local_rank, local_size)
        device, backend = choose_device(*place, gpus)
        return cls(rank, size, local_rank, local_size, device, backend, bool(present))

    @classmethod
    def of_one_process(cls, command: str, hint: str = "") -> World:
        """The world of a command that runs in one process.

        Args:
            command: Its name, for the message.
            hint: A sentence that is appended to the message.

        Raises:
            ConfigError: If a launcher started several processes, or as ``from_environment``.
        """
        world = cls.from_environment()
        if world.size > 1:
            raise ConfigError(
                f"{command}: got {world.size} processes, want one. Start it without torchrun and srun.{hint}"
            )
        return world


def choose_device(local_rank: int, local_size: int, gpus: int) -> tuple[torch.device, str]:
    """One GPU per rank and NCCL where there are GPUs, else the CPU and gloo.

    Args:
        local_rank: Number of this process on its machine.
        local_size: Number of processes of this machine.
        gpus: Number of GPUs that this process sees.

    Returns:
        The device, and the backend for ``torch.distributed``.

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


def process_cpu_count() -> int:
    """Number of cores that this process may use: its CPU affinity, limited by the quota of its container (cgroup v2)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CGROUP_CPU.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def rendezvous_options(environment: Mapping[str, str] = os.environ) -> list[str]:
    """torchrun's options for a run on this machine; none if ``PET_NNODES`` says that there are several machines.

    torchrun then reads number, address and port of the machines from ``PET_*``, which Kubeflow sets in each pod.
    """
    return [] if environment.get("PET_NNODES", "1") not in ("1", "1:1") else ["--standalone"]


# -- srun


def join_srun(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets torchrun's variables in a task of an srun step with several tasks, unless torchrun or the user has set one.

    Only the variables of a step are read: ``SLURM_NTASKS`` and ``SLURM_PROCID`` are also set in batch scripts and
    interactive shells. A step of one task is left alone: it may be a single process, or a shell in which other
    processes are started.

    Args:
        environment: Of this process. ``MASTER_ADDR`` and ``MASTER_PORT`` stay if set. If SLURM's variables are incomplete,
            so are torchrun's, and ``World.from_environment`` refuses them.
    """
    if not started_by_srun(environment) or any(name in environment for name in _OF_TORCHRUN):
        return
    ours = {name: environment[slurm] for name, slurm in _FROM_SRUN.items() if slurm in environment}
    if {"SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"} <= environment.keys():
        tasks = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
        ours["LOCAL_WORLD_SIZE"] = str(tasks[int(environment["SLURM_NODEID"])])
    # All tasks have to choose the same port without communicating; job and step separate runs on one machine.
    job, step = int(environment.get("SLURM_JOB_ID", "0")), int(environment.get("SLURM_STEP_ID", "0"))
    environment.setdefault("MASTER_PORT", str(20000 + (job + 101 * step) % 10000))
    environment.setdefault("MASTER_ADDR", first_host(environment.get("SLURM_STEP_NODELIST", "localhost")))
    environment.update(ours)


def started_by_srun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of several tasks of an srun step, and was not started by torchrun."""
    return int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "TORCHELASTIC_RUN_ID" not in environment


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list: ``n07`` of ``n[07-09,12],gpu3``."""
    first = _FIRST_HOST.match(nodelist)
    return _RANGES.sub(r"\1", first.group()) if first else nodelist


def tasks_per_node(notation: str) -> list[int]:
    """The numbers in SLURM's notation: ``[4, 4, 2]`` of ``4(x2),2``."""
    return [int(tasks) for tasks, times in _TASKS.findall(notation) for _ in range(int(times or 1))]

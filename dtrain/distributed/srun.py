"""Ranks that ``srun`` started, one task for each, without torchrun: what SLURM tells, in torchrun's words.

srun --ntasks-per-node=4 --gpus-per-node=4 python -m dtrain.train experiment=digits
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

_FIRST_HOST = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_RANGES = re.compile(r"\[(\w+)[^\]]*\]")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_BY_SRUN = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
_BY_TORCHRUN = (*_BY_SRUN, "LOCAL_WORLD_SIZE")


def join_srun(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets what torchrun would have set, in a task of a step with several tasks; nothing where torchrun, or the user, has.

    The batch shell and an interactive one have ``SLURM_NTASKS`` and ``SLURM_PROCID`` as well, so that only the variables of
    a step tell. A step of one task is left alone: it may be one process, or a shell in which somebody starts others.

    Args:
        environment: Of this process; ``MASTER_ADDR`` and ``MASTER_PORT`` in it are kept. Where SLURM's part is not complete,
            neither is the result, and ``World.of`` refuses it.
    """
    if not started_by_srun(environment) or any(name in environment for name in _BY_TORCHRUN):
        return
    given = {ours: environment[slurms] for ours, slurms in _BY_SRUN.items() if slurms in environment}
    if {"SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"} <= environment.keys():
        tasks = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
        given["LOCAL_WORLD_SIZE"] = str(tasks[int(environment["SLURM_NODEID"])])
    # All tasks must come to the same port without asking; job and step keep those of one machine apart.
    job, step = int(environment.get("SLURM_JOB_ID", "0")), int(environment.get("SLURM_STEP_ID", "0"))
    environment.setdefault("MASTER_PORT", str(20000 + (job + 101 * step) % 10000))
    environment.setdefault("MASTER_ADDR", first_host(environment.get("SLURM_STEP_NODELIST", "localhost")))
    environment.update(given)


def started_by_srun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of several tasks of a step, and not torchrun's."""
    return int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "TORCHELASTIC_RUN_ID" not in environment


def first_host(nodelist: str) -> str:
    """The first host of SLURM's notation: ``n07`` of ``n[07-09,12],gpu3``."""
    first = _FIRST_HOST.match(nodelist)
    return _RANGES.sub(r"\1", first.group()) if first else nodelist


def tasks_per_node(notation: str) -> list[int]:
    """The numbers of SLURM's notation: ``[4, 4, 2]`` of ``4(x2),2``."""
    return [int(tasks) for tasks, times in _TASKS.findall(notation) for _ in range(int(times or 1))]

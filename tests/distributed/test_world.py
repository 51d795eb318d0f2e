from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from dtrain.distributed import world as world_module
from dtrain.distributed.world import World, choose_device, first_host, join_srun, tasks_per_node
from dtrain.errors import ConfigError
from tests.refusals import refused

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_without_gpus_every_rank_is_on_the_cpu_with_gloo() -> None:
    assert choose_device(local_rank=5, local_size=8, gpus=0) == (torch.device("cpu"), "gloo")


def test_with_gpus_each_rank_has_one_with_nccl() -> None:
    assert choose_device(local_rank=1, local_size=2, gpus=4) == (torch.device("cuda", 1), "cpu:gloo,cuda:nccl")


def test_more_ranks_than_gpus_is_an_error_that_says_what_to_start() -> None:
    with refused(ConfigError, "3 processes", "2 GPUs", "--nproc-per-node=2"):
        choose_device(local_rank=0, local_size=3, gpus=2)


def test_faked_cuda_decides_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    world = World.from_environment(TORCHRUN)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 8, 1, 2)
    assert world.device == torch.device("cuda", 1)
    assert "nccl" in world.backend
    assert world.launched


def test_without_a_launcher_the_world_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    world = World.from_environment({})
    assert (world.rank, world.size, world.launched, world.backend) == (0, 1, False, "gloo")


def test_half_an_environment_is_an_error_that_names_the_other_half() -> None:
    with pytest.raises(ConfigError, match="LOCAL_RANK, LOCAL_WORLD_SIZE"):
        World.from_environment({"RANK": "0", "WORLD_SIZE": "2"})


# -- srun


# Of the last of 2 + 1 tasks on two nodes, as SLURM 22.05 sets them.
TASK = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "gpu[07,11]",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}


def joined(**changes: str) -> dict[str, str]:
    environment = TASK | changes
    join_srun(environment)
    return {name: value for name, value in environment.items() if not name.startswith("SLURM_")}


def test_a_task_of_a_step_is_a_rank() -> None:
    assert joined() == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "20315",
    }


def test_the_users_master_address_and_port_are_kept() -> None:
    environment = joined(MASTER_ADDR="10.0.0.1", MASTER_PORT="29500")
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "29500")


def test_ranks_of_torchrun_are_left_alone() -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    assert joined(**ranks) == ranks
    assert joined(TORCHELASTIC_RUN_ID="a") == {"TORCHELASTIC_RUN_ID": "a"}


def test_a_batch_shell_an_interactive_one_and_a_single_task_are_no_ranks() -> None:
    for environment in (
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {"SLURM_STEP_NUM_TASKS": "1"},
    ):
        before = dict(environment)
        join_srun(environment)
        assert environment == before


def test_incomplete_variables_are_refused_and_not_taken_for_a_world_of_one() -> None:
    environment = {name: value for name, value in TASK.items() if name != "SLURM_LOCALID"}
    join_srun(environment)
    with refused(ConfigError, "LOCAL_RANK", "WORLD_SIZE"):
        World.from_environment(environment)


def test_a_task_that_sees_one_gpu_has_it_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    environment = TASK | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
    join_srun(environment)
    assert str(World.from_environment(environment).device) == "cuda:0"
    with refused(ConfigError, "2 processes", "1 GPU"):
        World.from_environment(environment | {"TORCHELASTIC_RUN_ID": "a"})


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-3]", "n1"),
        ("gpu[007-009,12],login", "gpu007"),
        ("rack[2,4]n[10-11]", "rack2n10"),
    ],
)
def test_the_first_host_of_a_list_is_slurms_first(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_tasks_of_nodes_are_counted() -> None:
    assert tasks_per_node("4") == [4]
    assert tasks_per_node("4(x2),2,1(x3)") == [4, 4, 2, 1, 1, 1]


def test_the_quota_of_a_container_limits_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(world_module, "_CGROUP_CPU", tmp_path / "cpu.max")
    assert world_module.process_cpu_count() == 64
    for text, cores in (("max 100000", 64), ("350000 100000", 4), ("50000 100000", 1)):
        (tmp_path / "cpu.max").write_text(text)
        assert world_module.process_cpu_count() == cores

from __future__ import annotations

import pytest
import torch

from dtrain.config.errors import ConfigError
from dtrain.distributed.world import World, choose_device

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_without_gpus_every_rank_is_on_the_cpu_with_gloo() -> None:
    assert choose_device(local_rank=5, local_size=8, gpus=0) == (torch.device("cpu"), "gloo")


def test_with_gpus_each_rank_has_one_with_nccl() -> None:
    assert choose_device(local_rank=1, local_size=2, gpus=4) == (torch.device("cuda", 1), "cpu:gloo,cuda:nccl")


def test_more_ranks_than_gpus_is_an_error_that_says_what_to_start() -> None:
    with pytest.raises(ConfigError, match=r"3 processes .* 2 GPUs.*--nproc-per-node=2"):
        choose_device(local_rank=0, local_size=3, gpus=2)


def test_faked_cuda_decides_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    world = World.of(TORCHRUN)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 8, 1, 2)
    assert world.device == torch.device("cuda", 1)
    assert "nccl" in world.backend
    assert world.launched


def test_without_a_launcher_the_world_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    world = World.of({})
    assert (world.rank, world.size, world.launched, world.backend) == (0, 1, False, "gloo")


def test_half_an_environment_is_an_error_that_names_the_other_half() -> None:
    with pytest.raises(ConfigError, match="LOCAL_RANK, LOCAL_WORLD_SIZE"):
        World.of({"RANK": "0", "WORLD_SIZE": "2"})

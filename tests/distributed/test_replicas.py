"""Ranks that should hold the same parameters are compared bit by bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.fsdp
from torch import nn

from dtrain.config.schema import ParallelConfig
from dtrain.distributed.replicas import require_equal_replicas
from dtrain.distributed.sharding import local_part, shard_model
from dtrain.errors import ConfigError
from tests.ranks import run_ranks
from tests.toys import Net, world


class Odd(nn.Module):
    """Parameters of several dtypes and layouts, with values that compare unequal as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.tensor([1.0, float("nan")], dtype=torch.bfloat16))
        self.whole = nn.Parameter(torch.arange(3), requires_grad=False)
        self.pairs = nn.Parameter(torch.tensor([1 + 2j, 3 - 4j]))
        self.images = nn.Parameter(torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)))
        self.images.data = self.images.data.contiguous(memory_format=torch.channels_last)
        self.empty = nn.Parameter(torch.empty(0, dtype=torch.float64))
        self.own = nn.Parameter(torch.zeros(1))


def message(model: nn.Module, *ignored: str) -> str:
    """The message of the refusal; "" if the replicas are equal."""
    try:
        require_equal_replicas(model, ignored)
    except ConfigError as error:
        return str(error)
    return ""


def test_equal_bits_are_equal_and_one_changed_bit_is_found_on_every_rank() -> None:
    def on_rank(rank: int) -> list[str]:
        model = Odd()
        model.own.data += rank  # as DDP's ignored parameters
        found = [message(model, "own"), message(model)]
        for name, place in (("images", (1, 2, 3, 3)), ("low", 0), ("whole", 2), ("pairs", 1)):
            value = dict(model.named_parameters())[name].data
            before = value[place].clone()
            if rank == 1:
                value[place] = value[place] + (1e-6 if name == "images" else 1)
            found.append(message(model, "own"))
            value[place] = before
        images = model.images.data
        if rank == 1:  # the same values in other places
            images[0, 0, 0, 0], images[1, 2, 3, 3] = images[1, 2, 3, 3].item(), images[0, 0, 0, 0].item()
        found.append(message(model, "own"))
        if rank == 1:
            images[0, 0, 0, 0], images[1, 2, 3, 3] = images[1, 2, 3, 3].item(), images[0, 0, 0, 0].item()
        return [*found, message(model, "own")]

    for equal, own, *changed, again in run_ranks(3, on_rank):
        assert (equal, again) == ("", "")
        assert own.startswith("model: own differs")
        assert [text.split()[1] for text in changed] == ["images", "low", "whole", "pairs", "images"]


@pytest.mark.slow
def test_the_copies_of_a_part_are_compared_and_a_part_without_a_copy_is_not() -> None:
    def on_rank(rank: int) -> list[str]:
        found = []
        for shard in ("hybrid", "full"):
            model = Net()
            options = ParallelConfig(shard=shard, shard_size=2 if shard == "hybrid" else None)
            shard_model(model, options, world(rank, 4))
            found.append(message(model))
            if rank == 3:  # the second part of the second copy
                local_part(model.trunk.weight)[0, 0] += 1e-6
            found.append(message(model))
        return found

    for hybrid, drifted, full, changed in run_ranks(4, on_rank):
        assert (hybrid, full, changed) == ("", "", "")
        assert "trunk.weight differs" in drifted

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from dtrain.distributed.collectives import broadcast_buffers, from_rank0, on_all_ranks, wait_for_all
from dtrain.errors import ConfigError
from tests.ranks import run_ranks


def _raise(text: str) -> None:
    raise ConfigError(text)


def test_rank_zero_decides_for_all() -> None:
    def rank(number: int) -> object:
        return from_rank0(lambda: {"from": number, "nested": [1, None, "é"]})

    assert run_ranks(3, rank) == [{"from": 0, "nested": [1, None, "é"]}] * 3


def test_rank_zero_s_error_is_everybody_s() -> None:
    def rank(number: int) -> str:
        try:
            from_rank0(lambda: _raise("no such thing"))
        except ConfigError as error:
            return str(error)
        return "nothing raised"

    assert run_ranks(2, rank) == ["no such thing"] * 2


def test_one_rank_s_problem_is_raised_on_all_and_names_the_rank() -> None:
    def rank(number: int) -> str:
        try:
            on_all_ranks(lambda: _raise("shard missing") if number == 1 else number)
        except ConfigError as error:
            return str(error)
        return "nothing raised"

    assert run_ranks(3, rank) == ["rank 1: shard missing"] * 3


def test_together_returns_each_rank_its_own_result() -> None:
    assert run_ranks(2, lambda number: on_all_ranks(lambda: number)) == [0, 1]


def test_buffers_are_rank_zero_s_afterwards() -> None:
    def rank(number: int) -> list[float]:
        norm = nn.BatchNorm1d(2)
        norm.running_mean.fill_(float(number + 1))
        broadcast_buffers(norm)
        wait_for_all()
        return norm.running_mean.tolist()

    assert run_ranks(2, rank) == [[1.0, 1.0]] * 2


def test_nothing_here_needs_more_than_one_rank() -> None:
    def rank(number: int) -> object:
        assert dist.get_world_size() == 1
        return from_rank0(lambda: 5), on_all_ranks(lambda: torch.ones(1).item())

    assert run_ranks(1, rank) == [(5, 1.0)]

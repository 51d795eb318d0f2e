"""The helper that starts real processes."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RanksFailed, run_ranks


def test_ranks_share_a_group_and_return_by_rank() -> None:
    def work(rank: int, offset: int) -> tuple[int, torch.Tensor]:
        total = torch.tensor([float(rank + offset)])
        dist.all_reduce(total)
        return dist.get_rank(), total

    results = run_ranks(3, work, 10)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(torch.equal(total, torch.tensor([33.0])) for _, total in results)


def test_environment_is_torchruns_and_the_group_is_optional() -> None:
    def work(rank: int) -> tuple[bool, dict[str, str]]:
        return dist.is_initialized(), dict(os.environ)

    for rank, (initialised, environment) in enumerate(run_ranks(2, work, init=False)):
        assert not initialised
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "2"
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert int(environment["MASTER_PORT"]) > 0
    assert "MASTER_PORT" not in os.environ


def test_a_raising_rank_is_shown_first_and_ends_the_others() -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise ValueError("the reason")
        dist.barrier()

    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, work)
    assert next(iter(failed.value.reports)) == 1
    assert "ValueError: the reason" in failed.value.reports[1]
    assert 0 in failed.value.reports


def test_a_rank_that_dies_is_reported_with_its_code() -> None:
    with pytest.raises(RanksFailed, match=r"rank 0: \(pid \d+\) ended with code 7"):
        run_ranks(1, lambda rank: os._exit(7))


def test_a_hanging_rank_is_killed_and_named_with_its_stack() -> None:
    def work(rank: int) -> int:
        if rank == 1:
            time.sleep(600)
        return os.getpid()

    with pytest.raises(RanksFailed, match="still running at the timeout") as failed:
        run_ranks(2, work, timeout=1.0, init=False)
    assert list(failed.value.hung) == [1]
    assert "in work" in failed.value.reports[1]
    with pytest.raises(ProcessLookupError):
        os.kill(failed.value.hung[1], 0)

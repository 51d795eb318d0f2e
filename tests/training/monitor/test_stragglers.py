from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.distributed.world import World
from dtrain.training.monitor.stragglers import (
    EVERY,
    Change,
    SlowRanks,
    StragglerReport,
    StragglerTimer,
    _Begin,
    by_node,
    straggler,
)
from tests.ranks import run_ranks
from tests.toys import CPU, Net, NetWithBatchNorm, world

# -- own time


class Ticks:
    """A clock that shows another number whenever it is looked at."""

    def __init__(self) -> None:
        self._ticks: Iterator[int] = count()

    def now(self) -> int:
        return next(self._ticks)

    def between(self, began: int, ended: int) -> float:
        return float(10 ** (ended - began))


def pieces(model: nn.Module, micro_batches: int) -> list[tuple[int, int]]:
    """What a step of ``model`` takes, in ticks; a look at the clock takes one."""
    model.double()
    wrapped = DistributedDataParallel(model)
    own = StragglerTimer(wrapped, CPU, Ticks())
    wrapped(torch.randn(4, 3).double())  # as an evaluation would: nobody takes the time
    own.begin()
    for number in range(micro_batches):
        loss = wrapped(torch.randn(4, 3).double()).sum()
        if number == micro_batches - 1:
            loss.backward()
    taken = own.taken()
    assert own.seconds(taken) == sum(10.0 ** (ended - began) for began, ended in taken)
    assert own.taken() == []
    return taken


def test_own_time_ends_with_the_last_forward_and_leaves_out_the_wait_for_rank_0s_buffers() -> None:
    def both(rank: int) -> Any:
        return pieces(Net(), 1), pieces(Net(), 2), pieces(NetWithBatchNorm(), 2)

    for plain, twice, buffers in run_ranks(2, both):
        assert plain == [(0, 1)]
        assert twice == [(0, 1), (1, 2)]
        # From the begin to DDP; from the model's first line to its end, and on to DDP's next; and so on.
        assert buffers == [(0, 1), (2, 3), (3, 4), (5, 6)]


def test_nothing_stays_on_the_model_when_nobody_watches_any_more() -> None:
    def hooks(rank: int) -> list[int]:
        wrapped = DistributedDataParallel(NetWithBatchNorm())
        own = StragglerTimer(wrapped, CPU)
        own.end()
        modules = (wrapped, wrapped.module)
        return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules]

    assert run_ranks(2, hooks) == [[0, 0]] * 2


def test_the_straggler_is_the_slowest_rank_and_its_distance_is_to_the_median() -> None:
    assert straggler(torch.tensor([0.3, 0.1, 0.9, 0.2, 0.2], dtype=torch.float64)) == {
        "time/slowest_rank": 2,
        "time/straggler_seconds": pytest.approx(0.7),
    }
    assert straggler(torch.tensor([1.0, 3.0], dtype=torch.float64))["time/straggler_seconds"] == 2.0


def test_each_exchange_is_told_in_the_record_after_and_there_are_steps_between_two_of_them() -> None:
    def gather(rank: int) -> list[dict[str, float | int]]:
        stragglers = StragglerReport(world(rank, 3))
        results = []
        for number, step in enumerate((5, 5 + EVERY, 5 + EVERY + 1, 5 + EVERY + 2)):
            for add in range(2):
                stragglers.add(float(10**number * (add + (5 if rank == number else 1))), 1.0)
            results.append(stragglers.exchange(step))
        stragglers.end()
        return results

    for results in run_ranks(3, gather):
        assert results == [
            {},
            {"time/slowest_rank": 0, "time/straggler_seconds": 4.0},
            {"time/slowest_rank": 1, "time/straggler_seconds": 40.0},
            {},
        ]


def test_there_is_nothing_to_exchange_before_the_first_step_that_counts() -> None:
    def gather(rank: int) -> list[dict[str, float | int]]:
        stragglers = StragglerReport(world(rank, 2))
        results = [stragglers.exchange(1)]
        for step in (2, 3):
            stragglers.add(float(rank), 1.0)
            results.append(stragglers.exchange(step))
        stragglers.end()
        return results

    assert run_ranks(2, gather) == [[{}, {}, {"time/slowest_rank": 1, "time/straggler_seconds": 1.0}]] * 2


def test_a_world_of_one_has_no_straggler() -> None:
    alone = StragglerReport(World(0, 1, 0, 1, CPU, "gloo", launched=False))
    alone.add(1.0, 1.0)
    assert alone.exchange(100) == alone.exchange(200) == {}
    alone.end()


# -- slow ranks


def said(*own_times: list[float], step_seconds: float = 1.0) -> list[tuple[int, int, int, bool]]:
    """(exchange, rank, first step, recovered) of each change; an exchange has 50 steps."""
    ranks, found = SlowRanks(), []
    for number, own in enumerate(own_times):
        for change in ranks.add(_Begin(50 * number, 0.0), step_seconds, own):
            found.append((number, change.rank, change.since.step, change.recovered))
    return found


FAST, SLOW, BETWEEN = [0.5, 0.5, 0.5], [0.5, 0.5, 0.8], [0.5, 0.5, 0.65]


def test_a_rank_that_stays_slow_is_named_once_with_its_first_step_and_once_more_when_it_has_recovered() -> None:
    assert said(FAST, SLOW, SLOW, SLOW, SLOW, BETWEEN, FAST, SLOW, FAST, FAST, FAST) == [
        (3, 2, 50, False),
        (9, 2, 400, True),
    ]


def test_ranks_that_are_slow_now_and_then_or_in_turn_are_not_named() -> None:
    assert said(SLOW, SLOW, FAST, SLOW, SLOW, BETWEEN, SLOW) == []
    assert said([1, 0.5, 0.5], [0.5, 1, 0.5], [0.5, 0.5, 1], [1, 0.5, 0.5], [0.5, 1, 0.5]) == []


def test_what_is_short_beside_a_step_or_for_a_clock_is_not_named() -> None:
    assert said(SLOW, SLOW, SLOW, step_seconds=2.0) == []
    assert said([1e-3, 1e-3, 5e-3], [1e-3, 1e-3, 5e-3], [1e-3, 1e-3, 5e-3], step_seconds=6e-3) == []


def test_half_of_the_ranks_may_be_slow() -> None:
    assert said(*[[0.1, 0.5, 0.1, 0.5]] * 3) == [(2, 1, 0, False), (2, 3, 0, False)]


def test_a_node_is_named_if_all_of_its_ranks_are_slow() -> None:
    def change(rank: int, own: float) -> Change:
        return Change(rank, _Begin(0, 0.0), own, 0.1, recovered=False)

    hosts = ["a", "a", "b", "b", "c"]
    first, second, third = change(2, 0.5), change(3, 0.6), change(0, 0.7)
    assert by_node([third, first, second], hosts) == [("rank 0 on a", third), ("node b (ranks 2 to 3)", second)]
    assert by_node([first], hosts) == [("rank 2 on b", first)]
    assert by_node([change(4, 0.5)], hosts) == [("rank 4 on c", change(4, 0.5))]
    assert by_node([first, second], ["?"] * 5) == [("rank 2 on ?", first), ("rank 3 on ?", second)]
    alone = ["a"] * 4
    assert [name for name, _ in by_node([first, second], alone)] == ["rank 2 on a", "rank 3 on a"]

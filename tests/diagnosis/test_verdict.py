"""The verdict is arithmetic on measured times: a table of them, and what a person would say."""

from __future__ import annotations

import math

import pytest

from dtrain.diagnosis.verdict import Times, judge, save_stall


def times(data: float, compute: float, step: float, together: float | None = None, save: float = 0.0) -> Times:
    return Times(data, compute, step, max(data, step) if together is None else together, save)


def by_turns(data: float, compute: float, step: float) -> Times:
    """Without workers."""
    return Times(data, compute, step, data + step, at_once=False)


@pytest.mark.parametrize(
    ("measured", "limit", "gain"),
    [
        (times(data=10, compute=1, step=1), "data", 10),
        (times(data=10, compute=1, step=4), "data", 2.5),
        (times(data=1, compute=10, step=10), "model", None),
        (times(data=1, compute=9, step=10), "model", None),
        (times(data=1, compute=2, step=10), "communication", 5),
        (times(data=5, compute=2, step=10), "communication", 2),
        (times(data=9.5, compute=10, step=10), "balanced", None),
        (times(data=10.5, compute=10, step=10), "balanced", None),
        # Communication that the loader would take the place of is no gain.
        (times(data=9.5, compute=2, step=10), "balanced", None),
        (times(data=1, compute=10, step=10, save=5), "saves", 1.5),
        (times(data=1, compute=10, step=10, save=0.1), "model", None),
        (times(data=6, compute=6, step=6, together=12), "cores", 2),
        (times(data=30, compute=3, step=3, together=40), "data", 10),
        (by_turns(data=10, compute=10, step=10), "data", 2),
        (by_turns(data=1, compute=10, step=10), "model", None),
        (by_turns(data=1, compute=2, step=10), "communication", 11 / 3),
        # A measure of both together that was luckier than its parts.
        (times(data=1, compute=10, step=10, together=8), "model", None),
        # A step that was luckier with communication than without.
        (times(data=1, compute=10, step=9), "model", None),
    ],
)
def test_the_largest_waste_is_the_limit(measured: Times, limit: str, gain: float | None) -> None:
    verdict = judge(measured)
    assert verdict.limit == limit
    if gain is not None:
        assert verdict.gains[limit] == pytest.approx(gain)
        assert verdict.worthwhile()[0] == limit
    else:
        assert verdict.worthwhile() == []
    assert all(1 <= other < math.inf for other in verdict.gains.values())


def test_a_second_waste_is_named_after_the_first() -> None:
    assert judge(times(data=20, compute=4, step=10, save=8)).worthwhile() == ["data", "saves"]


def test_only_a_disk_slower_than_the_saves_makes_the_loop_wait_for_it() -> None:
    assert save_stall(copy=0.1, write=5, interval=10) == pytest.approx(0.01)
    assert save_stall(copy=0.1, write=25, interval=10) == pytest.approx(1.51)
    assert save_stall(copy=0.1, write=25, interval=math.inf) == 0

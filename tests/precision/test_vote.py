from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
import torch

from dtrain.config.errors import ConfigError
from dtrain.precision.host_vote import HostVote
from dtrain.precision.vote import Tally, Vote
from tests.ranks import run_ranks

CPU = torch.device("cpu")
# The arithmetic of a GPU, and that of a CPU. Half of the ranks use either, as if the machines were mixed.
KINDS = (partial(Vote, CPU), HostVote)


def cast(vote: Vote | HostVote, sums: Sequence[float] = (2.0, 4.0, 1.0, 4.0), **changes: Any) -> None:
    """The vote of a rank that has nothing special to say but ``sums`` and ``changes``."""
    said: dict[str, Any] = {
        "overflow": torch.tensor(False),
        "norm": torch.tensor(1.0),
        "scale": torch.tensor(1.0),
        "stop": False,
        "save": False,
        "samples": 4,
        "bad": 0,
        "nbytes": 100,
    } | changes
    vote.add(sums)
    vote.cast(said.pop("overflow"), said.pop("norm"), said.pop("scale"), **said)


def by_ranks(*changes: dict[str, Any]) -> Tally:
    """The tally of as many ranks as there are ``changes``; equal on all of them, and so is the decision."""

    def rank(number: int) -> tuple[str, dict[str, Any]]:
        texts = []
        for kind in (KINDS[number % 2], KINDS[1 - number % 2]):
            vote = kind(len(changes))
            cast(vote, **changes[number])
            scale = changes[number].get("scale", torch.tensor(1.0))
            decisions = [
                [1.0 if part is None else float(part) for part in vote.decide(scale, 8, clip)] for clip in (None, 0.5)
            ]
            tally = vote.tally(["m"])
            assert {bool(skip) for skip, _, _ in decisions} == {not tally.applied}
            assert {bool(overflowed) for _, overflowed, _ in decisions} == {tally.overflow > 0}
            texts.append(repr((decisions, tally)))
        assert texts[0] == texts[1]
        return texts[0], asdict(tally)

    texts, tallies = zip(*run_ranks(len(changes), rank), strict=True)
    assert len(set(texts)) == 1  # as text, where NaN equals NaN
    return Tally(**tallies[0])


def test_the_norm_has_what_all_ranks_share_once_and_each_rank_s_own_part() -> None:
    tally = by_ranks({"norm": torch.tensor(3.0), "own_norm": torch.tensor(4.0)}, {"norm": torch.tensor(3.0)})
    assert tally.grad_norm == 5.0


def test_all_ranks_read_the_sums_of_what_each_said() -> None:
    tally = by_ranks(
        {"norm": torch.tensor(2.0)},
        {"sums": [3.0, 5.0, 2.0, 6.0], "norm": torch.tensor(2.0), "stop": True, "bad": 2, "samples": 3},
        {"norm": torch.tensor(2.0), "save": True},
    )
    assert tally == Tally(
        overflow=0,
        grad_norm=2.0,
        loss_scale=1.0,
        loss_sum=7.0,
        count=13.0,
        metrics={"m": (4.0, 14.0)},
        stop=1,
        save=1,
        samples=11,
        bad=2,
        bytes=300.0,
    )
    assert tally.applied


@pytest.mark.parametrize("kind", KINDS)
def test_the_coefficient_makes_a_clipped_mean_of_scaled_sums(kind: Any) -> None:
    vote, scale = kind(1), torch.tensor(1024.0)
    # Gradients are 1024 * sum / 8, and 5 rows were valid: the mean's norm is 10 / 1024 * 8 / 5.
    cast(vote, norm=torch.tensor(10.0), scale=scale, sums=[1.0, 5.0])
    for clip_norm, factor in ((None, 1.0), (1.0, 1.0), (0.001, 0.001 / (10 / 1024 * 8 / 5))):
        skip, overflowed, coefficient = vote.decide(scale, 8, clip_norm)
        assert not skip
        assert not overflowed
        assert coefficient.dtype == torch.float32
        assert float(coefficient) == pytest.approx(8 / 5 / 1024 * factor, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("norm", "loss", "count", "overflow"),
    [
        (1.0, 1.0, 1.0, False),
        (0.0, 0.0, 0.0, False),
        (float("inf"), 1.0, 1.0, True),
        (1.0, float("nan"), 1.0, True),
        (1.0, 1.0, float("nan"), True),
        (float("nan"), -float("inf"), 0.0, True),
    ],
)
def test_norm_loss_and_count_that_are_not_finite_are_overflows(
    kind: Any, norm: float, loss: float, count: float, overflow: bool
) -> None:
    vote = kind(1)
    vote.add([torch.tensor(loss), count, 1.0, torch.tensor(3)])
    found = vote.overflow(torch.tensor(norm))
    assert found.dtype == torch.bool
    assert bool(found) == overflow


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_what_one_rank_cannot_say_does_not_drown_what_the_others_do(culprit: int, value: float) -> None:
    spoilt = [value, 4.0, value, 4.0]
    said: list[dict[str, Any]] = [{}, {}, {"stop": True}]
    said[culprit] |= {"overflow": torch.tensor(True), "norm": torch.tensor(value), "sums": spoilt}
    tally = by_ranks(*said)
    assert not tally.applied
    assert tally.overflow == 1
    assert (tally.loss_sum, tally.count, tally.metrics) == (4.0, 8.0, {"m": (2.0, 8.0)})
    assert (tally.stop, tally.samples, tally.bytes) == (1, 12, 300.0)


def test_two_overflows_are_one_skip() -> None:
    overflow = {"overflow": torch.tensor(True), "norm": torch.tensor(float("inf"))}
    tally = by_ranks(overflow, overflow)
    assert tally.overflow == 2
    assert not tally.applied


@pytest.mark.parametrize("kind", KINDS)
def test_the_decision_is_a_bool_that_two_overflows_do_not_make_larger(kind: Any) -> None:
    vote = kind(1)
    cast(vote, overflow=torch.tensor(True))
    vote.word[0] = 2
    skip, overflowed, _ = vote.decide(torch.tensor(1.0), 8, None)
    assert skip.dtype == overflowed.dtype == torch.bool
    assert float(skip) == float(overflowed) == 1.0


def test_nothing_to_learn_from_is_a_skip_without_an_overflow() -> None:
    nothing: dict[str, Any] = {"sums": [0.0] * 4}
    assert by_ranks(nothing, {}).applied
    tally = by_ranks(nothing, nothing)
    assert not tally.applied
    assert tally.overflow == 0


def test_counts_are_exact_up_to_two_to_the_53() -> None:
    many = [0.0, 2.0**52 + 1, 0.0, 1.0]
    assert by_ranks({"sums": many}, {"sums": [0.0, 2.0, 0.0, 1.0]}).count == 2**52 + 3


@pytest.mark.parametrize("scale", [2.0**-14, 1.0, 3.0, 65536.0, 2.0**24])
def test_equal_scales_of_any_size_pass_the_audit(scale: float) -> None:
    said = {"scale": torch.tensor(scale)}
    assert by_ranks(said, said, said).loss_scale == scale


@pytest.mark.parametrize("other", [2.0, 0.5, 1.001])
def test_ranks_whose_scales_differ_all_say_so(other: float) -> None:
    def rank(number: int) -> str:
        vote = Vote(CPU, 3)
        cast(vote, scale=torch.tensor(1024.0 * (other if number == 2 else 1.0)))
        with pytest.raises(ConfigError, match="loss scales of the 3 ranks differ") as raised:
            vote.tally(["m"])
        return str(raised.value)

    assert len(set(run_ranks(3, rank))) == 1

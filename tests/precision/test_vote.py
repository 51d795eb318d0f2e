"""The vote. Every test runs the tensor arithmetic of a GPU and the Python floats of a CPU, which must agree to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
import torch

from dtrain.errors import ConfigError
from dtrain.precision.vote import Agreement, StepStats, Vote, _HostVote, equal_scales, make_vote, payload_bytes
from tests.ranks import run_ranks
from tests.refusals import refused

CPU = torch.device("cpu")
# The arithmetic of a GPU, and that of a CPU. Half of the ranks use either, as if the machines were mixed.
KINDS = (partial(Vote, CPU), _HostVote)


def vote_on(vote: Vote, sums: Sequence[Any] = (2.0, 4.0, 1.0, 4.0), **changes: Any) -> None:
    """Adds ``sums`` as one micro-batch and all-reduces ordinary values but for ``changes``."""
    vote.add(sums)
    values: dict[str, Any] = {
        "norm": torch.tensor(1.0),
        "scale": torch.tensor(1.0),
        "stop": False,
        "save": False,
        "samples": 4,
        "bad": 0,
        "nbytes": 100,
    } | changes
    overflow = values.pop("overflow", None)
    # By the number of ranks that hold the same gradients: two entries of the same number would be one group.
    norms = {vote._world_size: values.pop("norm")} | values.pop("norms", {})
    scale = values.pop("scale")
    vote.all_reduce(vote.overflow(norms) if overflow is None else overflow, norms, scale, **values)


def vote_payload(vote: Vote) -> list[float]:
    return vote.numbers if isinstance(vote, _HostVote) else vote.payload.tolist()


def by_ranks(*changes: dict[str, Any]) -> StepStats:
    """The step statistics of one rank per ``changes``. They and the decisions are checked to be equal on all ranks."""

    def rank(number: int) -> tuple[str, dict[str, Any]]:
        texts = []
        for kind in (KINDS[number % 2], KINDS[1 - number % 2]):
            vote = kind(len(changes))
            vote_on(vote, **changes[number])
            scale = changes[number].get("scale", torch.tensor(1.0))
            decisions = [
                [1.0 if part is None else float(part) for part in vote.decide(scale, 8, clip)[:3]]
                for clip in (None, 0.5)
            ]
            stats = vote.step_stats(["m"])
            assert {bool(skip) for skip, _, _ in decisions} == {not stats.applied}
            assert {bool(overflowed) for _, overflowed, _ in decisions} == {stats.overflowed_ranks > 0}
            texts.append(repr((decisions, stats)))
        assert texts[0] == texts[1]
        return texts[0], asdict(stats)

    texts, dicts = zip(*run_ranks(len(changes), rank), strict=True)
    assert len(set(texts)) == 1  # as text, where NaN equals NaN
    return StepStats(**dicts[0])


def test_the_norm_has_what_all_ranks_share_once_and_each_rank_s_own_part() -> None:
    stats = by_ranks({"norm": torch.tensor(3.0), "norms": {1: torch.tensor(4.0)}}, {"norm": torch.tensor(3.0)})
    assert stats.grad_norm == 5.0


def test_the_norm_has_a_part_once_that_some_of_the_ranks_hold() -> None:
    # Two groups of two ranks: the ranks of a group hold different parts, the groups hold the same.
    parts = [{"norm": torch.tensor(0.0), "norms": {2: torch.tensor(part)}} for part in (3.0, 4.0, 3.0, 4.0)]
    assert by_ranks(*parts).grad_norm == 5.0


def test_all_ranks_read_the_same_sums() -> None:
    stats = by_ranks(
        {"norm": torch.tensor(2.0)},
        {"sums": [3.0, 5.0, 2.0, 6.0], "norm": torch.tensor(2.0), "stop": True, "bad": 2, "samples": 3},
        {"norm": torch.tensor(2.0), "save": True},
    )
    assert stats == StepStats(
        overflowed_ranks=0,
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
    assert stats.applied


@pytest.mark.parametrize("kind", KINDS)
def test_the_coefficient_makes_a_clipped_mean_of_scaled_sums(kind: Any) -> None:
    vote, scale = kind(1), torch.tensor(1024.0)
    # Gradients are 1024 * sum / 8, and 5 rows were valid: the mean's norm is 10 / 1024 * 8 / 5.
    vote_on(vote, norm=torch.tensor(10.0), scale=scale, sums=[1.0, 5.0])
    for clip_norm, factor in ((None, 1.0), (1.0, 1.0), (0.001, 0.001 / (10 / 1024 * 8 / 5))):
        skip, overflowed, coefficient, _ = vote.decide(scale, 8, clip_norm)
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
    found = vote.overflow({1: torch.tensor(norm)})
    assert found.dtype == torch.bool
    assert bool(found) == overflow


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_the_values_of_a_rank_that_overflowed_do_not_spoil_those_of_the_others(culprit: int, value: float) -> None:
    spoilt = [value, 4.0, value, 4.0]
    ranks: list[dict[str, Any]] = [{}, {}, {"stop": True}]
    ranks[culprit] |= {"overflow": torch.tensor(True), "norm": torch.tensor(value), "sums": spoilt}
    stats = by_ranks(*ranks)
    assert not stats.applied
    assert stats.overflowed_ranks == 1
    assert (stats.loss_sum, stats.count, stats.metrics) == (4.0, 8.0, {"m": (2.0, 8.0)})
    assert (stats.stop, stats.samples, stats.bytes) == (1, 12, 300.0)


def test_two_overflows_are_one_skip() -> None:
    overflow = {"overflow": torch.tensor(True), "norm": torch.tensor(float("inf"))}
    stats = by_ranks(overflow, overflow)
    assert stats.overflowed_ranks == 2
    assert not stats.applied


def test_nothing_to_learn_from_is_a_skip_without_an_overflow() -> None:
    nothing: dict[str, Any] = {"sums": [0.0] * 4}
    assert by_ranks(nothing, {}).applied
    stats = by_ranks(nothing, nothing)
    assert not stats.applied
    assert stats.overflowed_ranks == 0


def test_a_negative_count_is_a_skip_for_the_decision_and_for_the_statistics() -> None:
    assert not by_ranks({"sums": [1.0, -9.0, 0.0, 1.0]}, {}).applied


@pytest.mark.parametrize("other", [{}, {"norm": torch.tensor(float("nan"))}], ids=["finite", "overflow"])
def test_a_rank_without_memory_makes_all_ranks_skip_and_know_why(other: dict[str, Any]) -> None:
    def rank(number: int) -> list[tuple[bool, bool]]:
        found = []
        for kind in (KINDS[number % 2], KINDS[1 - number % 2]):
            vote = kind(3)
            vote.cannot_compute(metrics=1)
            vote.drop_window()
            if number == 1:
                vote_on(vote, (0.0, -float("inf"), 0.0, 0.0), overflow=torch.tensor(False))
            else:
                vote_on(vote, **(other if number == 2 else {}))
            decision, stats = vote.decide(torch.tensor(1.0), 8, 1.0), vote.step_stats(["m"])
            found.append((bool(decision.skip), stats.out_of_memory))
        return found

    assert run_ranks(3, rank) == [[(True, True)] * 2] * 3
    assert not by_ranks({}, {}).out_of_memory


def test_counts_are_exact_up_to_two_to_the_53() -> None:
    many = [0.0, 2.0**52 + 1, 0.0, 1.0]
    assert by_ranks({"sums": many}, {"sums": [0.0, 2.0, 0.0, 1.0]}).count == 2**52 + 3


@pytest.mark.parametrize("scale", [2.0**-14, 1.0, 3.0, 65536.0, 2.0**24])
def test_equal_scales_of_any_size_pass_the_check(scale: float) -> None:
    values = {"scale": torch.tensor(scale)}
    assert by_ranks(values, values, values).loss_scale == scale


@pytest.mark.parametrize("other", [2.0, 0.5, 1.001, float("nan")])
def test_different_scales_are_refused_on_every_rank_with_one_message(other: float) -> None:
    def rank(number: int) -> str:
        texts = []
        for kind in KINDS:
            vote = kind(3)
            vote_on(vote, scale=torch.tensor(1024.0 * (other if number == 2 else 1.0)))
            with refused(ConfigError, "3 ranks", "", "last checkpoint") as raised:
                vote.step_stats(["m"])
            texts.append(str(raised.value))
        assert texts[0] == texts[1]
        return texts[0]

    assert len(set(run_ranks(3, rank))) == 1


def test_equal_scales_decides_alike_for_numbers_and_tensors() -> None:
    for scales in ([1.0] * 3, [2.0**24] * 3, [1.0, 1.0, 2.0], [3.0, 3.003, 3.0]):
        total, squares = sum(scales), sum(scale * scale for scale in scales)
        expected = len(set(scales)) == 1
        assert equal_scales(3, total, squares) == expected
        assert bool(equal_scales(3, torch.tensor(total).double(), torch.tensor(squares).double())) == expected


# -- bit for bit


WINDOWS: dict[str, tuple[Any, ...]] = {
    "ordinary": (0.7, 3.3, 11),
    "small": (1e-3, 0.1, 7),
    "large": (4e4, 2.2, 1),
    "infinite norm": (torch.inf, 0.1, 7),
    "NaN loss": (0.7, torch.nan, 11),
    "no rows": (0.0, 0.0, 0),
    "square beyond float64": (1e200, 1.0, 4),
}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_payloads_and_decisions_of_both_kinds_are_equal(window: str, own: bool) -> None:
    norm, loss, count = WINDOWS[window]
    shared = torch.tensor(norm, dtype=torch.float64)
    payloads, decisions = [], []
    for kind in KINDS:
        vote = kind(1)
        vote.add([torch.tensor(loss, requires_grad=True), torch.tensor(count), torch.tensor(0.3), 2])
        vote_on(
            vote,
            [0.1, 0, torch.tensor(7), torch.tensor(True)],
            norm=shared,
            scale=torch.tensor(1024.0),
            nbytes=2**40 + 1,
            norms={2: 2 * shared} if own else {},
        )
        payloads.append(vote_payload(vote))
        assert len(payloads[-1]) * 8 == payload_bytes(metrics=1)
        of_kind = [vote.decide(torch.tensor(1024.0), 64, clip_norm) for clip_norm in (None, 1.0, 1e-9, 1e9)]
        decisions.append([[*map(float, (d.skip, d.overflowed)), float(d.coefficient)] for d in of_kind])
        assert {(part.dtype, part.shape) for d in of_kind for part in d[:2]} == {(torch.bool, torch.Size([]))}
    assert payloads[0] == payloads[1]
    assert repr(decisions[0]) == repr(decisions[1])  # as text, where NaN equals NaN


@pytest.mark.parametrize("window", WINDOWS)
def test_ranks_of_both_kinds_decide_alike_whatever_one_of_them_brings(window: str) -> None:
    norm, loss, count = WINDOWS[window]
    odd = {"norm": torch.tensor(norm), "sums": [loss, count, 0.3, 2.0]}
    stats = by_ranks({"norm": torch.tensor(norm)}, odd | {"stop": True}, {"norm": torch.tensor(0.5)})
    assert stats.stop == 1
    overflows = {"infinite norm": 2, "square beyond float64": 2, "NaN loss": 1}  # 1e200 is infinite in fp32
    assert stats.overflowed_ranks == overflows.get(window, 0)


def test_a_coefficient_of_one_leaves_the_gradients_alone_on_a_cpu() -> None:
    vote, one = make_vote(CPU, 1), torch.ones(())
    vote_on(vote, [1.0, 64], samples=64)
    assert vote.decide(one, 64, None).coefficient is None
    assert vote.decide(one, 65, None).coefficient is not None


# -- the agreement


def test_an_agreement_looks_its_group_up_when_it_is_used() -> None:
    agreement = Agreement()
    assert agreement.size == 1

    def rank(number: int) -> tuple[int, list[int], list[float]]:
        payload = torch.tensor([1.0, number], dtype=torch.float64)
        agreement.sum_payload(payload)
        return agreement.size, agreement.gather(number), payload.tolist()

    assert run_ranks(3, rank) == [(3, [0, 1, 2], [3.0, 3.0])] * 3

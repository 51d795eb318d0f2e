from __future__ import annotations

import pytest

from dtrain.data.bad_samples import BadSampleBudget, TooManyBadSamples

LAST = {"key": "a.tar/1", "reason": "torn"}


def test_the_budget_is_a_count_a_share_or_nothing_at_all() -> None:
    for bad, samples, most in ((0, 10, 0), (10, 20, 0.01), (50, 5000, 0.01), (3, 4, 3), (1, 1, 1)):
        BadSampleBudget(most).count(samples - bad, bad, LAST)
    for bad, samples, most in ((1, 10_000, 0), (11, 20, 0.01), (51, 5000, 0.01), (4, 4, 3), (2, 2, 1)):
        with pytest.raises(
            TooManyBadSamples, match=rf"{bad} of {samples} samples .*data\.max_bad={most:g}.*a\.tar/1: torn"
        ):
            BadSampleBudget(most).count(samples - bad, bad, LAST)


def test_counting_at_once_and_by_and_by_comes_to_the_same() -> None:
    budget = BadSampleBudget(0.1)
    for _ in range(300):
        budget.count(9, 1, LAST)
    assert (budget.bad, budget.samples) == (300, 3000)
    with pytest.raises(TooManyBadSamples, match="301 of 3001"):
        budget.count(0, 1, LAST)


def test_a_run_that_goes_on_has_used_up_what_it_had() -> None:
    with pytest.raises(TooManyBadSamples, match="51 of 5001"):
        BadSampleBudget(0.01, bad=50, samples=5000).count(0, 1, LAST)


def test_a_row_is_ended_by_one_good_sample_and_by_nothing_else() -> None:
    budget = BadSampleBudget(1e9, 5)
    for good, bad in ((0, 5), (1, 7), (0, 3), (0, 0), (0, 2)):
        budget.count(good, bad, LAST)
    with pytest.raises(TooManyBadSamples, match=r"6 samples in a row .*data\.max_bad_consecutive=5"):
        budget.count(0, 1, LAST)
    with pytest.raises(TooManyBadSamples, match="1 samples in a row"):
        BadSampleBudget(1e9, 0).count(0, 1, LAST)
    BadSampleBudget(1e9, None).count(0, 10**6, LAST)


def test_a_rank_whose_own_samples_are_good_ends_too_and_gives_no_example() -> None:
    with pytest.raises(TooManyBadSamples, match=r"allows\. All are named in"):
        BadSampleBudget(0).count(3, 1, {})


@pytest.mark.parametrize(
    ("limits", "message"), [((-1, None), "max_bad: got -1"), ((0, -2), "max_bad_consecutive: got -2")]
)
def test_limits_below_zero_are_refused(limits: tuple[float, int | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BadSampleBudget(*limits)

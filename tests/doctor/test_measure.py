"""Speed of a loader, and the estimate for an all-reduce."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest

from dtrain.data import ShardLoader, WorkerOptions
from dtrain.doctor.measure import AllReduce, _busy, endless_batches, loader_rate
from tests.doctor.slow import SleepyAugmentation

FIELDS: dict[str, Any] = {"x": {"name": "x", "role": "feature"}}


def loader(**options: Any) -> ShardLoader:
    values = {"x": np.arange(10, dtype=np.float32).reshape(10, 1)}
    return ShardLoader.over(values, FIELDS, global_batch_size=4, micro_batch_size=2, seed=0, **options)


def test_batches_come_in_the_order_of_training_over_epochs() -> None:
    one, other = loader(num_workers=0), loader(num_workers=0)
    keys = [batch.sample_keys for batch in islice(endless_batches(one), 14)]
    expected = []
    for epoch in range(3):
        for batch in other.epoch(epoch):
            expected.append(batch.sample_keys)
            if len(expected) % 2 == 0:
                other.commit()
    assert keys == expected[:14]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_that_sleep_are_waiting(workers: int) -> None:
    slept = loader(num_workers=workers, augment=SleepyAugmentation(0.02))
    rate = loader_rate(slept, endless_batches(slept), seconds=0.2)
    slept.close()
    assert rate.waiting
    # Masked rows of the last batch of an epoch are not samples.
    assert rate.seconds >= 0.02 / max(workers, 1) * 0.9
    assert rate.bad == 0


def test_workers_that_compute_are_not_waiting() -> None:
    def compute(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        rng.random(1_000_000).sort()
        return sample

    computing = loader(num_workers=1, augment=compute, workers=WorkerOptions(start_method="fork"))
    rate = loader_rate(computing, endless_batches(computing), seconds=0.2)
    computing.close()
    assert not rate.waiting


@pytest.mark.parametrize(
    ("after", "busy"),
    [
        ((1.1, 2.1), 0.1 / 0.9),  # ready without a core for 0.1 s: that is no waiting of the dataset, and no work
        ((1.1, 2.9), 1.0),  # computes whenever it gets a core
        ((1.0, 2.0), 0.0),
        (None, None),
    ],
)
def test_time_without_a_core_is_neither_work_nor_waiting(after: tuple[float, float] | None, busy: float | None) -> None:
    assert _busy((1.0, 2.0), after, 1.0) == pytest.approx(busy)
    assert _busy(None, after, 1.0) is None


def test_the_time_of_an_all_reduce_is_interpolated() -> None:
    measured = AllReduce(2, {32: 1e-4, 2**20: 1e-3, 25 * 2**20: 1e-2})
    assert measured.estimate(16) == pytest.approx(1e-4)
    assert measured.estimate(2**20) == pytest.approx(1e-3)
    assert measured.estimate(13 * 2**20) == pytest.approx((1e-3 + 1e-2) / 2)
    assert measured.estimate(250 * 2**20) == pytest.approx(1e-1)

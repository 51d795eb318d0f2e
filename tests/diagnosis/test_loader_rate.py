from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest

from dtrain.data import ShardLoader
from dtrain.diagnosis.loader_rate import endless, loader_rate
from tests.diagnosis.slow import SleepyAugmentation

FIELDS: dict[str, Any] = {"x": {"name": "x", "role": "feature"}}


def loader(**options: Any) -> ShardLoader:
    values = {"x": np.arange(10, dtype=np.float32).reshape(10, 1)}
    return ShardLoader.over(values, FIELDS, global_batch_size=4, micro_batch_size=2, seed=0, **options)


def test_epoch_follows_epoch_in_the_order_of_training() -> None:
    one, other = loader(num_workers=0), loader(num_workers=0)
    keys = [batch.sample_keys for batch in islice(endless(one), 14)]
    expected = []
    for epoch in range(3):
        for batch in other.epoch(epoch):
            expected.append(batch.sample_keys)
            if len(expected) % 2 == 0:
                other.commit()
    assert keys == expected[:14]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_that_sleep_are_told_from_workers_that_compute(workers: int) -> None:
    slept = loader(num_workers=workers, augment=SleepyAugmentation(0.02))
    rate = loader_rate(slept, endless(slept), seconds=0.2)
    slept.close()
    assert rate.waiting
    # The tail's masked rows cost nothing and are no samples.
    assert rate.seconds >= 0.02 / max(workers, 1) * 0.9
    assert rate.bad == 0


def test_workers_that_compute_are_not_waiting() -> None:
    def compute(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        rng.random(1_000_000).sort()
        return sample

    computing = loader(num_workers=1, augment=compute, start_method="fork")
    rate = loader_rate(computing, endless(computing), seconds=0.2)
    computing.close()
    assert not rate.waiting

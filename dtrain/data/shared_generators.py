"""The generators that all code of a process shares: Python's, numpy's and torch's.

Code that draws from them would draw other numbers in another worker. Keyed by (seed, epoch, sample) before it is called, it
draws the same ones everywhere. In the trainer's own process they are put back afterwards, for the run's own use.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils.data import get_worker_info


@contextmanager
def generators_at(key: int) -> Iterator[None]:
    """For a while the shared generators give the numbers of ``key``.

    Args:
        key: 64 bits, not negative.
    """
    if get_worker_info() is not None:  # nobody else draws from them there
        _seed(key)
        yield
        return
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    _seed(key)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _seed(key: int) -> None:
    random.seed(key)
    np.random.seed(key % 2**32)
    # Not torch.manual_seed, which would also wake a GPU in the worker.
    torch.default_generator.manual_seed(key)

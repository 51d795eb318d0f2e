"""Loader workers that die. The oracle is a loader without workers, or one whose shards have bad samples in their place."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dtrain.data import Batch, Limits, Mixture, ShardLoader, WorkerOptions
from dtrain.data.loading import worker_processes
from dtrain.data.loading.stream import Stream, StreamLoader
from dtrain.data.loading.worker_deaths import WorkerEnded, WorkerRestarts, explain_ended
from tests.refusals import assert_refused, refused
from tests.shards import IMAGE, LABEL, read_epoch, valid_keys, write_numbered

NO_LIMIT = Limits(max_bad=None, max_bad_consecutive=None)
MANY = 1000
#: Three epochs of this have 36 micro-batches with images of 32 KiB to 64 KiB rows: large enough for shared memory.
COUNTS = (17, 1, 30)
FIELDS = {**IMAGE, **LABEL}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_numbered(tmp_path_factory.mktemp("shards"), COUNTS, image=True)


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory() -> Iterator[None]:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    yield
    assert not multiprocessing.active_children()
    if before:
        assert {name for name in os.listdir("/dev/shm") if name.startswith("torch_")} <= before


def enlarged(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """96 KiB of random pixels, so that a batch needs slots, and some time in which a worker can be killed."""
    time.sleep(0.002)
    return {**sample, "image": rng.integers(0, 256, (128, 128, 3), np.uint8)}


def make(shards: list[str], start_method: str | None = None, **options: Any) -> ShardLoader:
    restarts = options.pop("max_restarts", MANY)
    workers = WorkerOptions(start_method=start_method, max_restarts=restarts, prefetch=options.pop("prefetch", 2))
    given = {"global_batch_size": 8, "micro_batch_size": 4, "num_workers": 2, "seed": 3, "augment": enlarged, **options}
    return ShardLoader(shards, FIELDS, workers=workers, limits=NO_LIMIT, **given)


def pids(loader: ShardLoader) -> list[int]:
    assert loader._stream is not None
    return [worker.pid for worker in loader._stream._iterator._workers]  # type: ignore[union-attr]


def batches(loader: ShardLoader, epochs: int, before: Callable[[int], None] = lambda number: None) -> list[Batch]:
    """All micro-batches of some epochs; ``before(n)`` is called before the n-th is taken."""
    found: list[Batch] = []
    for epoch in range(epochs):
        iterator = loader.epoch(epoch)
        for step in range(loader.steps_per_epoch):
            for _ in range(loader.micro_batches_per_step):
                before(len(found))
                found.append(next(iterator))
            loader.commit()
    return found


def assert_equal(ours: list[Batch], theirs: list[Batch]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.sample_keys == other.sample_keys
        assert torch.equal(one.valid, other.valid)
        assert [record["key"] for record in one.bad] == [record["key"] for record in other.bad]
        for name in other:
            assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_workers_that_are_killed_at_random_change_no_bit(shards: list[str], num_workers: int) -> None:
    expected = batches(make(shards, num_workers=0), 3)
    rng = np.random.default_rng(num_workers)
    loader = make(shards, num_workers=num_workers, start_method="fork")
    kills = set(rng.choice(len(expected), 4, replace=False).tolist())

    def kill(number: int) -> None:
        if number in kills:
            time.sleep(rng.uniform(0, 0.03))
            os.kill(int(rng.choice(pids(loader))), rng.choice([signal.SIGKILL, signal.SIGSEGV]))

    assert_equal(batches(loader, 3, kill), expected)
    assert 1 <= loader.restarts.count <= 4
    assert not loader.restarts.deadly
    loader.close()

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtrain.data import Generated, ShardLoader, workers
from dtrain.data.workers import choose_workers, cores_per_rank, seconds_to_build
from tests.data.shards_for_tests import global_batches, loader_of, write_numbered


@pytest.mark.parametrize(
    ("seconds", "cores", "number", "told"),
    [
        (0.003, 8, 1, "3.0 ms to build: enough for one every 20 ms"),
        (0.02, 8, 1, "enough"),
        (0.05, 8, 3, "50.0 ms to build: enough for one every 20 ms"),
        (0.5, 8, 7, "one every 71 ms, all that 8 cores for each rank leave"),
        (0.05, 2, 1, "one every 50 ms, all that 2 cores"),
        (0.003, 1, 0, "built between the steps, all that 1 core for each rank leave"),
    ],
)
def test_workers_are_as_many_as_needed_and_no_more_than_cores_allow(
    seconds: float, cores: int, number: int, told: str
) -> None:
    chosen, reason = choose_workers(seconds, cores)
    assert chosen == number
    assert told in reason


def test_cores_are_shared_by_the_ranks_of_a_machine_and_granted_by_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(32)), raising=False)
    assert cores_per_rank({}) == 32
    assert cores_per_rank({"LOCAL_WORLD_SIZE": "4"}) == 8
    assert cores_per_rank({"LOCAL_WORLD_SIZE": "4", "SLURM_CPUS_PER_TASK": "12"}) == 3
    assert cores_per_rank({"LOCAL_WORLD_SIZE": "64", "SLURM_CPUS_PER_TASK": "99"}) == 1


def test_the_time_is_the_median_without_the_first_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.accumulate([0, 4, 0, 1, 0, 2])
    monkeypatch.setattr(workers.time, "perf_counter", lambda: next(clock))
    threads = []
    before = torch.get_num_threads()
    assert seconds_to_build(iter(lambda: threads.append(torch.get_num_threads()), 1)) == 2
    assert threads == [1] * 4
    assert torch.get_num_threads() == before


def test_a_loader_that_chooses_its_workers_hands_over_the_same_batches(tmp_path: Path) -> None:
    shards = write_numbered(tmp_path, [20, 13])
    chosen = loader_of(shards, num_workers="auto")
    assert chosen.num_workers in range(os.cpu_count() or 1)
    assert re.match(r"a micro-batch takes \d+\.\d ms to build: ", chosen.workers_reason)
    assert chosen.position == (0, 0)
    assert global_batches([chosen]) == global_batches([loader_of(shards)])
    chosen.close()
    assert loader_of(shards).workers_reason == ""


def test_what_was_built_to_measure_is_not_handed_over_and_counts_nothing() -> None:
    def sample(number: int, rng: np.random.Generator) -> dict[str, Any]:
        if number < 3:
            raise ValueError("bad")
        return {"x": number}

    loader = ShardLoader.over(
        Generated(sample, 9), {"x": {"name": "x"}}, global_batch_size=3, num_workers="auto", shuffle="none", max_bad=3
    )
    assert loader.bad_samples == 0
    loader.close()


@pytest.mark.parametrize("asked", ["many", -1])
def test_what_is_no_number_of_workers_is_refused(tmp_path: Path, asked: Any) -> None:
    with pytest.raises(ValueError, match=f"num_workers: got {asked!r}, want a number from 0 on, or auto"):
        loader_of(write_numbered(tmp_path, [20]), num_workers=asked)

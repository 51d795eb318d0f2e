from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from dtrain.data.field_options import parse_fields
from dtrain.data.sample_source import SampleSource
from dtrain.data.shard_source import ShardSource
from dtrain.diagnosis.file_system import ReadSpeed
from dtrain.diagnosis.storage import Reading
from dtrain.distributed.world import World
from tests.data.tars import tar_bytes
from tests.ranks import run_ranks

WORLD = World(0, 1, 0, 1, torch.device("cpu"), "gloo", False)


def reading(rate: float, total_bytes: float, hosts: int = 1) -> Reading:
    return Reading(ReadSpeed(10**8, 10**8 / rate, 0.01, 1e-5, 1e-4, 1000, True), "node7", hosts, 1000.0, total_bytes)


def test_a_disk_is_too_slow_only_for_data_that_memory_does_not_keep() -> None:
    [slow] = reading(1e6, total_bytes=1e18).findings(needed=10_000)
    assert (slow.level, "1,000 samples/s" in slow.text) == ("warning", True)
    assert "data.storage=slow" in slow.remedy
    for fine in (reading(1e6, 1e6), reading(1e9, 1e18), reading(1e6, 1e18, hosts=100)):
        [finding] = fine.findings(needed=10_000)
        assert finding.level == "ok"


def test_the_bytes_of_a_sample_are_those_of_its_members(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_bytes((f"{number}.x", bytes(100 * (number + 1))) for number in range(3)))
    source = ShardSource.build(str(tmp_path / "a.tar"), parse_fields({"x": {"name": "x", "role": "bytes"}}))
    [measured] = run_ranks(1, lambda rank: Reading.measure(source, WORLD, seconds=1))
    assert measured is not None
    assert measured.sample_bytes == 200
    assert measured.total_bytes == 600
    assert measured.speed.nbytes == (tmp_path / "a.tar").stat().st_size
    assert measured.samples_per_second is None  # too little to tell


def test_samples_that_are_in_no_files_are_not_read_as_files() -> None:
    source = SampleSource.build({"x": np.zeros((4, 1), np.float32)}, {"x": {"name": "x", "role": "feature"}})
    assert Reading.measure(source, WORLD, seconds=1) is None

"""Speed of reading shards and of writing checkpoints."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from dtrain.config.schema import CheckpointConfig
from dtrain.data.fields.parse import parse_fields
from dtrain.data.sources.datasets import SampleSource
from dtrain.data.sources.shard_source import ShardSource
from dtrain.distributed.world import World
from dtrain.doctor import disks
from dtrain.doctor.disks import (
    MIN_BYTES_FOR_RATE,
    CheckpointWrites,
    ReadSpeed,
    ShardReads,
    read_speed,
    save_interval,
    write_rate,
)
from tests.ranks import RanksFailed, run_ranks
from tests.shards import tar_bytes

WORLD = World(0, 1, 0, 1, torch.device("cpu"), "gloo", False)


def test_shards_of_the_whole_list_are_read(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.tar").write_bytes(os.urandom(200_000))
    speed = read_speed([str(tmp_path / f"{number}.tar") for number in range(40)], 1000, seconds=5)
    assert speed.nbytes == 16 * 200_000
    assert speed.rate is None  # too few bytes
    assert min(speed.cold, speed.warm, speed.open, speed.random_read) > 0


def test_reading_stops_after_a_number_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "_MAX_READ", MIN_BYTES_FOR_RATE)
    (tmp_path / "a.tar").write_bytes(bytes(2 * MIN_BYTES_FOR_RATE + 1))
    speed = read_speed([str(tmp_path / "a.tar")], 1000, seconds=60)
    assert speed.nbytes == MIN_BYTES_FOR_RATE
    assert speed.rate == speed.nbytes / speed.cold


def test_an_empty_shard_and_one_smaller_than_a_sample_are_read(tmp_path: Path) -> None:
    for name, size in (("a.tar", 0), ("b.tar", 10)):
        (tmp_path / name).write_bytes(bytes(size))
    assert read_speed([str(tmp_path / "a.tar"), str(tmp_path / "b.tar")], 1000, seconds=5).nbytes == 10


def test_files_are_closed_if_a_shard_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"a")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        read_speed([str(tmp_path / "a.tar"), str(tmp_path / "b.tar")], 1, seconds=5)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_written_file_has_no_name_and_a_maximum_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "_MAX_WRITE", 3_000_000)
    seen = []
    sync = os.fsync

    def look(file: int) -> None:
        seen.append((os.fstat(file).st_size, os.listdir(tmp_path)))
        sync(file)

    monkeypatch.setattr(os, "fsync", look)
    assert write_rate(tmp_path, 10**12, seconds=60) > 0
    assert seen == [(3_000_000, [])]


def test_writing_stops_after_a_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda file: sizes.append(os.fstat(file).st_size))
    write_rate(tmp_path, 10**12, seconds=1e-9)
    assert sizes[0] <= 2**20


@pytest.mark.parametrize(
    ("steps", "minutes", "seconds"),
    [(10, None, 20), (None, 1.0, 60), (10, 1.0, 20), (100, 1.0, 60), (None, None, math.inf), (None, 0.0, 2)],
)
def test_the_save_interval_follows_steps_or_minutes(steps: int | None, minutes: float | None, seconds: float) -> None:
    assert save_interval(CheckpointConfig(every_steps=steps, every_minutes=minutes), 2.0) == seconds


def test_the_nearest_existing_parent_of_the_run_directory_is_written(tmp_path: Path) -> None:
    [found] = run_ranks(1, lambda rank: CheckpointWrites.measure(tmp_path / "runs" / "new", 10, 0.1, seconds=1))
    assert found.folder == tmp_path
    assert found.write == 10 / found.rate
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disks, "write_rate", full)
    with pytest.raises(RanksFailed, match=r"ConfigError: run.dir: .*No space left"):
        run_ranks(1, lambda rank: CheckpointWrites.measure(tmp_path, 10, 0.1, seconds=1))


def shard_reads(rate: float, total_bytes: float, hosts: int = 1) -> ShardReads:
    return ShardReads(ReadSpeed(10**8, 10**8 / rate, 0.01, 1e-5, 1e-4, 1000, True), "node7", hosts, 1000.0, total_bytes)


def test_a_slow_disk_is_a_problem_only_if_the_data_do_not_fit_into_memory() -> None:
    [slow] = shard_reads(1e6, total_bytes=1e18).findings(needed=10_000)
    assert (slow.level, "1,000 samples/s" in slow.text) == ("warning", True)
    assert "data.storage=slow" in slow.remedy
    for fine in (shard_reads(1e6, 1e6), shard_reads(1e9, 1e18), shard_reads(1e6, 1e18, hosts=100)):
        [finding] = fine.findings(needed=10_000)
        assert finding.level == "ok"


def test_the_size_of_a_sample_is_that_of_its_members(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_bytes((f"{number}.x", bytes(100 * (number + 1))) for number in range(3)))
    source = ShardSource.build(str(tmp_path / "a.tar"), parse_fields({"x": {"name": "x", "role": "bytes"}}))
    [measured] = run_ranks(1, lambda rank: ShardReads.measure(source, WORLD, seconds=1))
    assert measured is not None
    assert measured.sample_bytes == 200
    assert measured.total_bytes == 600
    assert measured.speed.nbytes == (tmp_path / "a.tar").stat().st_size
    assert measured.samples_per_second is None  # too few bytes


def test_in_memory_samples_are_not_read() -> None:
    source = SampleSource.build({"x": np.zeros((4, 1), np.float32)}, {"x": {"name": "x", "role": "feature"}})
    assert ShardReads.measure(source, WORLD, seconds=1) is None

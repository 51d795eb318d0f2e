from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtrain.diagnosis import file_system
from dtrain.diagnosis.file_system import ENOUGH_TO_TELL, read_speed, write_speed


def test_reading_covers_shards_from_one_end_of_the_list_to_the_other(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.tar").write_bytes(os.urandom(200_000))
    speed = read_speed([str(tmp_path / f"{number}.tar") for number in range(40)], 1000, seconds=5)
    assert speed.nbytes == 16 * 200_000
    assert speed.rate is None  # too little to tell
    assert min(speed.cold, speed.warm, speed.open, speed.seek) > 0


def test_reading_ends_after_so_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_system, "_READ_AT_MOST", ENOUGH_TO_TELL)
    (tmp_path / "a.tar").write_bytes(bytes(2 * ENOUGH_TO_TELL + 1))
    speed = read_speed([str(tmp_path / "a.tar")], 1000, seconds=60)
    assert speed.nbytes == ENOUGH_TO_TELL
    assert speed.rate == speed.nbytes / speed.cold


def test_an_empty_shard_and_one_smaller_than_a_sample_are_read(tmp_path: Path) -> None:
    for name, size in (("a.tar", 0), ("b.tar", 10)):
        (tmp_path / name).write_bytes(bytes(size))
    assert read_speed([str(tmp_path / "a.tar"), str(tmp_path / "b.tar")], 1000, seconds=5).nbytes == 10


def test_files_are_closed_where_a_shard_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"a")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        read_speed([str(tmp_path / "a.tar"), str(tmp_path / "b.tar")], 1, seconds=5)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_written_has_no_name_and_an_upper_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_system, "_WRITE_AT_MOST", 3_000_000)
    seen = []
    sync = os.fsync

    def look(file: int) -> None:
        seen.append((os.fstat(file).st_size, os.listdir(tmp_path)))
        sync(file)

    monkeypatch.setattr(os, "fsync", look)
    speed = write_speed(tmp_path, 10**12, seconds=60)
    assert seen == [(3_000_000, [])]
    assert speed.nbytes == 3_000_000
    assert speed.rate > 0


def test_a_write_that_takes_too_long_is_cut_short(tmp_path: Path) -> None:
    assert write_speed(tmp_path, 10**12, seconds=1e-9).nbytes <= 2**20

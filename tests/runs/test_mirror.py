"""The layout of a mirror: claims, uploads, downloads and deletions, on a folder and in fsspec's memory."""

from __future__ import annotations

import json
import shutil
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from dtrain.files import size_and_hash
from dtrain.runs.mirror import (
    MANIFEST,
    Claim,
    Mirror,
    MirroredCheckpoint,
    Records,
    check_url,
    fetched_records,
    is_record,
)
from dtrain.runs.run_dir import retained_steps
from tests.refusals import refused


@pytest.fixture(params=["file", "memory"])
def mirror(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mirror]:
    if request.param == "file":
        yield Mirror(f"file://{tmp_path}/bucket/runs/mine")
        return
    url = f"memory://{uuid.uuid4().hex}/runs/mine"
    yield Mirror(url)
    fsspec.filesystem("memory").store.clear()


def checkpoint(folder: Path, step: int, value: str = "x") -> Path:
    """A folder like that of a checkpoint, with a manifest."""
    path = folder / f"step-{step:09d}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "model.safetensors").write_text(value * 1000)
    (path / "state.json").write_text(json.dumps({"step": step}))
    files = {name: size_and_hash(path / name) for name in ("model.safetensors", "state.json")}
    (path / MANIFEST).write_text(json.dumps(files))
    return path


def put(mirror: Mirror, claim: Claim, folder: Path, *steps: int, upload: int = 1) -> None:
    for step in steps:
        target = MirroredCheckpoint(claim, step, upload)
        mirror.put_checkpoint(target, checkpoint(folder, step), lambda: None)


def put_record(mirror: Mirror, claim: Claim, folder: Path, number: int, content: str, best: int | None = None) -> None:
    path = folder / "metrics.jsonl"
    path.write_text(content)
    entry = size_and_hash(path)
    mirror.put_file(claim, path, entry["sha256"])
    mirror.put_records(Records(claim, number, {"metrics.jsonl": entry}, best))


def test_each_claim_has_a_higher_number_and_the_highest_counts(mirror: Mirror) -> None:
    assert not mirror.exists()
    first = mirror.claim()
    assert mirror.exists()
    assert (first.number, mirror.newer_than(first)) == (1, None)
    second = Mirror(mirror.url).claim()
    assert second.number == 2
    assert "claim 2" in str(mirror.newer_than(first))
    assert mirror.newer_than(second) is None


def test_starts_that_claim_at_the_same_time_get_different_numbers(tmp_path: Path) -> None:
    url, claims = f"file://{tmp_path}/mirror", []
    barrier = threading.Barrier(8)

    def claim() -> None:
        barrier.wait()
        claims.append(Mirror(url).claim())

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(it.number for it in claims) == list(range(1, 9))


def test_where_a_store_cannot_refuse_the_last_writer_has_the_claim(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overwrites(place: str, content: bytes) -> bool:
        mirror._write(place, content)
        return True

    monkeypatch.setattr(mirror, "_create", overwrites)
    mine = mirror.claim()
    mirror._write("claims/000001.json", json.dumps({"token": "other", "host": "elsewhere"}).encode())
    assert "elsewhere" in str(mirror.newer_than(mine))


def test_a_checkpoint_is_whole_when_its_manifest_is_there(mirror: Mirror, tmp_path: Path) -> None:
    claim = mirror.claim()
    put(mirror, claim, tmp_path, 5)

    class Killed(Exception):
        pass

    def killed() -> None:
        raise Killed

    with pytest.raises(Killed):
        mirror.put_checkpoint(MirroredCheckpoint(claim, 10, 1), checkpoint(tmp_path, 10), killed)
    assert [it.step for it in mirror.checkpoints()] == [5]
    mirror.fetch_checkpoint(mirror.checkpoints()[0], tmp_path / "fetched")
    for file in (tmp_path / "step-000000005").iterdir():
        assert (tmp_path / "fetched" / file.name).read_bytes() == file.read_bytes()


def test_the_newest_checkpoint_is_the_newest_of_the_last_start_that_has_one(mirror: Mirror, tmp_path: Path) -> None:
    first, second, _ = mirror.claim(), mirror.claim(), mirror.claim()
    put(mirror, first, tmp_path, 5, 90)  # the first start did not know of the second one
    put(mirror, second, tmp_path, 10)
    assert [(it.claim.number, it.step) for it in mirror.checkpoints()] == [(2, 10), (1, 90), (1, 5)]


def test_retention_keeps_what_the_run_keeps_over_all_starts(mirror: Mirror, tmp_path: Path) -> None:
    first, second = mirror.claim(), mirror.claim()
    put(mirror, first, tmp_path, 10, 20, 30, 40, 99)
    put_record(mirror, first, tmp_path, 1, "old")
    put(mirror, second, tmp_path, 50, 60)
    mirror.delete_old(second, lambda steps: retained_steps(steps, 60, keep_last=2, keep_every=20, best=30))
    assert sorted(it.step for it in mirror.checkpoints()) == [20, 30, 40, 50, 60]
    put_record(mirror, second, tmp_path, 1, "new")
    records = mirror.records()
    assert records is not None
    assert records.claim == second
    # An upload that ended early is deleted with the next one.
    mirror._write(f"{MirroredCheckpoint(second, 70, 3).place}/model.safetensors", b"part")
    mirror.delete_old(second, lambda steps: retained_steps(steps, 60, keep_last=1, keep_every=None, best=None))
    assert [it.step for it in mirror.checkpoints()] == [60]
    assert list(mirror._uploads().values()) == [True]


def test_of_records_the_last_two_stay_and_equal_contents_are_there_once(mirror: Mirror, tmp_path: Path) -> None:
    claim = mirror.claim()
    for number, content in enumerate(["a", "b", "c", "c"], 1):
        put_record(mirror, claim, tmp_path, number, content)
    assert len(mirror.delete_old_records(claim)) == 1
    assert len(mirror._names(f"{claim.folder}/files")) == 1
    records = mirror.records()
    assert records is not None
    assert records.number == 4
    assert mirror.fetch_records(records, tmp_path / "fetched") == []
    assert (tmp_path / "fetched" / "metrics.jsonl").read_text() == "c"


def test_records_that_are_damaged_are_named_and_left_out(tmp_path: Path) -> None:
    mirror = Mirror(f"file://{tmp_path}/mirror")
    claim = mirror.claim()
    put_record(mirror, claim, tmp_path, 1, "abc")
    (file,) = (tmp_path / "mirror" / claim.folder / "files").iterdir()
    file.write_text("abd")
    records = mirror.records()
    assert records is not None
    (problem,) = mirror.fetch_records(records, tmp_path / "fetched")
    assert "metrics.jsonl" in problem
    assert not (tmp_path / "fetched" / "metrics.jsonl").exists()
    # A list that is cut, as a killed copy into a folder leaves it: the one before is used.
    (tmp_path / "mirror" / claim.folder / "records" / "000002.json").write_text('{"files": {')
    assert mirror.records() == records


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/passwd", "logs/../../evil", ".bashrc", "logs/.x", "report.html", "logs/a/rank-00000.log"]
)
def test_names_that_are_no_records_of_a_run_are_never_written(tmp_path: Path, name: str) -> None:
    assert not is_record(name)
    mirror = Mirror(f"file://{tmp_path}/mirror")
    claim = mirror.claim()
    entry = {"size": 1, "sha256": "0" * 64}
    mirror.put_records(Records(claim, 1, {name: entry}, None))
    assert mirror.records() is None


@pytest.mark.parametrize("name", ["../evil", "a/b", ".lock"])
def test_a_manifest_with_other_names_is_refused(tmp_path: Path, name: str) -> None:
    mirror = Mirror(f"file://{tmp_path}/mirror")
    claim = mirror.claim()
    it = MirroredCheckpoint(claim, 5, 1)
    mirror._write(f"{it.place}/{MANIFEST}", json.dumps({name: {"size": 1, "sha256": "0"}}).encode())
    with refused(ValueError, name):
        mirror.fetch_checkpoint(it, tmp_path / "fetched")


def test_a_file_of_another_size_is_not_downloaded(tmp_path: Path) -> None:
    mirror = Mirror(f"file://{tmp_path}/mirror")
    claim = mirror.claim()
    put(mirror, claim, tmp_path, 5)
    (whole,) = mirror.checkpoints()
    with (tmp_path / "mirror" / whole.place / "model.safetensors").open("ab") as file:
        file.truncate(1 << 30)
    with refused(ValueError, "model.safetensors", 1 << 30, 1000):
        mirror.fetch_checkpoint(whole, tmp_path / "fetched")
    assert not (tmp_path / "fetched" / "model.safetensors").exists()


def test_names_of_records() -> None:
    for name in (
        "metrics.jsonl",
        "logs/rank-00000.log",
        "logs/bad-rank-00001.jsonl",
        "media/fit@12.png",
        "wandb/run-id",
    ):
        assert is_record(name), name


@pytest.mark.parametrize(
    ("url", "seconds", "named"),
    [
        ("/mnt/runs/mine", 60.0, ("checkpoint.mirror", "/mnt/runs/mine", "file:///")),
        ("https://host/runs/mine", 60.0, ("checkpoint.mirror", "https", "s3://")),
        ("memory://runs/mine", 60.0, ("checkpoint.mirror", "memory")),
        ("tape://robot/mine", 60.0, ("tape",)),
        ("s3://", 60.0, ("checkpoint.mirror", "s3://")),
        ("file:///tmp/x", -1.0, ("checkpoint.mirror_seconds", "-1")),
    ],
)
def test_values_that_cannot_work_are_refused(url: str, seconds: float, named: tuple[Any, ...]) -> None:
    with refused(ValueError, *named):
        check_url(url, seconds)


def test_mirrors_stand_for_run_directories(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        mirror = Mirror(f"file://{tmp_path}/bucket/{name}")
        claim = mirror.claim()
        if name != "three":  # whose first upload has not ended
            put_record(mirror, claim, tmp_path, 1, name)
    with fetched_records([str(tmp_path), f"file://{tmp_path}/bucket"]) as found:
        assert [*found.values()] == [str(tmp_path), *(f"file://{tmp_path}/bucket/{name}" for name in ("one", "two"))]
        folders = list(found)
        assert [(path / "metrics.jsonl").read_text() for path in folders[1:]] == ["one", "two"]
    assert not folders[1].exists()
    for url, named in ((f"file://{tmp_path}/bucket/three", "no records"), (f"file://{tmp_path}/none", "not a mirror")):
        with refused(ValueError, url, named), fetched_records([url]):
            pass


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_not_found(mirror: Mirror, tmp_path: Path) -> None:
    claim = mirror.claim()
    put(mirror, claim, tmp_path, 5)
    (whole,) = mirror.checkpoints()
    mirror._remove(whole.place)
    with pytest.raises(FileNotFoundError):
        mirror.fetch_checkpoint(whole, tmp_path / "fetched")
    shutil.rmtree(tmp_path / "fetched", ignore_errors=True)

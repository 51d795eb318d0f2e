"""The process that uploads a run: what it uploads, in which order, what it does after failures, and when it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from dtrain.files import size_and_hash
from dtrain.runs import mirror_uploads
from dtrain.runs.mirror import KNOWN, Mirror
from dtrain.runs.mirror_uploads import Save, State, Superseded, Task, Uploader, Worker, read_known
from tests.runs.test_mirror import checkpoint

ROOT = Path(__file__).parents[2]


class Run:
    """A run directory and its mirror, both folders."""

    def __init__(self, folder: Path, *, keep_last: int = 2, keep_every: int | None = None) -> None:
        self.folder = folder
        self.url = f"file://{folder}/bucket/mine"
        self.mirror = Mirror(self.url)
        self.dir = folder / "run"
        (self.dir / "logs").mkdir(parents=True, exist_ok=True)
        (self.dir / "staged").mkdir(exist_ok=True)
        self.task = Task(self.url, str(self.dir), str(self.dir / "staged"), 0, keep_last, keep_every)
        self.states: list[State] = []

    def uploader(self, **changes: Any) -> Uploader:
        return Uploader(replace(self.task, **changes), lambda state: self.states.append(replace(state)))

    def save(self, step: int, best: int | None = None, value: str = "x") -> Save:
        """A staged checkpoint, after which the run has logged its step."""
        with (self.dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "time": 0}) + "\n")
        staged = self.dir / "staged" / f"step-{step:09d}.{value}"
        shutil.copytree(checkpoint(self.folder / value, step, value), staged)
        return Save(str(staged), step, best)

    @property
    def steps(self) -> list[int]:
        return [it.step for it in self.mirror.checkpoints()]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def logged(run: Run) -> list[int]:
    records = run.mirror.records()
    assert records is not None
    shutil.rmtree(run.folder / "fetched", ignore_errors=True)
    run.mirror.fetch_records(records, run.folder / "fetched")
    lines = (run.folder / "fetched" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_records_of_a_checkpoint_are_there_before_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    uploader = run.uploader()
    found: list[tuple[list[int], list[int]]] = []
    put = Mirror.put_checkpoint

    def watched(self: Mirror, *arguments: Any) -> None:
        found.append((logged(run), run.steps))
        put(self, *arguments)

    monkeypatch.setattr(Mirror, "put_checkpoint", watched)
    for step in (5, 10):
        uploader.upload(run.save(step))
    assert found == [([5], []), ([5, 10], [5])]
    assert run.steps == [10, 5]
    assert (uploader.state.claim, uploader.state.step) == (1, 10)
    assert read_known(run.dir, run.url) == 1


def test_the_mirror_keeps_what_the_run_keeps(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=1, keep_every=10)
    uploader = run.uploader()
    for step in (5, 10, 15, 20, 25):
        uploader.upload(run.save(step, best=15))
    assert run.steps == [25, 20, 15, 10]
    records = run.mirror.records()
    assert records is not None
    assert records.best == 15


def test_only_records_that_changed_are_uploaded_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    put = Mirror.put_file

    def watched(self: Mirror, claim: Any, path: Path, sha256: str) -> None:
        names.append(path.read_bytes()[:9])
        put(self, claim, path, sha256)

    monkeypatch.setattr(Mirror, "put_file", watched)
    (run.dir / "config.yaml").write_text("config")
    (run.dir / "secret.txt").write_text("no record of a run")
    (run.dir / "logs" / "rank-00000.log").symlink_to(run.dir / "secret.txt")
    uploader = run.uploader()
    uploader.upload(run.save(5))
    uploader.upload(run.save(10))
    assert names == [b"config", b'{"step": ', b'{"step": ']
    assert logged(run) == [5, 10]
    assert not (run.folder / "fetched" / "logs").exists()


def test_a_checkpoint_that_is_there_is_not_uploaded_again(run: Run) -> None:
    run.uploader().upload(run.save(5))
    again = run.uploader(known=1)
    again.upload(Save(run.save(5, value="y").folder, 5, None))  # the same step, with other values
    again.upload(Save(run.save(5, value="z").folder, 5, None))
    assert [(it.claim.number, it.step) for it in run.mirror.checkpoints()] == [(2, 5)]
    third = run.uploader(known=2)
    third.upload(Save(_like(run, "z"), 5, None))
    assert [it.claim.number for it in run.mirror.checkpoints()] == [2]
    assert third.state.step == 5


def _like(run: Run, value: str) -> str:
    """A staged copy of the checkpoint with these values."""
    folder = run.dir / "staged" / "copy"
    shutil.copytree(run.folder / value / "step-000000005", folder)
    return str(folder)


def test_a_start_that_was_overtaken_uploads_nothing_more(run: Run) -> None:
    first = run.uploader()
    first.upload(run.save(5))
    second = run.uploader(known=1)
    second.upload(run.save(10))
    with pytest.raises(Superseded, match="claim 2"):
        first.upload(run.save(15))
    assert run.steps == [10, 5]
    # Nor does a start that could not read the mirror when it began, and has not the newest steps.
    with pytest.raises(Superseded, match="claim 2"):
        run.uploader(known=1).upload(run.save(20))
    assert run.mirror.newer_than(run.mirror.checkpoints()[0].claim) is None


def test_an_upload_that_ends_early_is_repeated_and_nothing_is_written_twice(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_uploads, "_FIRST_PAUSE", 0.01)
    failures = [OSError("the network is down"), OSError("the network is down")]
    put, places = Mirror._put, []

    def failing(self: Mirror, path: Path, place: str) -> None:
        places.append(place)
        if place.endswith("state.json") and failures:
            raise failures.pop()
        put(self, path, place)

    monkeypatch.setattr(Mirror, "_put", failing)
    worker = Worker(run.uploader(), lambda state: run.states.append(replace(state)))
    staged = run.save(5)
    worker.requests.put({"save": asdict(staged)})
    worker.requests.put({"records": 5})
    worker.requests.put({"end": True})
    worker.run()
    assert run.steps == [5]
    assert len(places) == len(set(places))
    assert not Path(staged.folder).exists()
    assert [bool(state.error) for state in run.states].count(True) == 2
    assert run.states[-1] == replace(run.states[-1], step=5, waiting=None, error=None)
    records = run.mirror.records()
    assert records is not None
    assert records.best == 5


def test_of_checkpoints_that_wait_only_the_newest_is_uploaded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    began, may_go = threading.Event(), threading.Event()
    upload, uploaded = Uploader.upload, []

    def slow(self: Uploader, save: Save) -> None:
        uploaded.append(save.step)
        began.set()
        assert may_go.wait(200)
        upload(self, save)

    monkeypatch.setattr(Uploader, "upload", slow)
    worker = Worker(run.uploader(), lambda state: None)
    saves = [run.save(step) for step in (5, 10, 15, 20)]
    worker.requests.put({"save": asdict(saves[0])})
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert began.wait(200)
    for save in saves[1:]:
        worker.requests.put({"save": asdict(save)})
    worker.requests.put({"end": True})
    may_go.set()
    thread.join()
    assert uploaded == [5, 20]
    assert run.steps == [20, 5]
    assert not list((run.dir / "staged").glob("step-*"))


def test_a_worker_that_is_superseded_takes_no_disk_space_and_ends_at_the_end(run: Run) -> None:
    worker = Worker(run.uploader(), lambda state: run.states.append(replace(state)))
    other = run.uploader()
    other.upload(run.save(30))
    for step in (5, 10):
        worker.requests.put({"save": asdict(run.save(step))})
    worker.requests.put({"records": None})
    worker.requests.put({"end": True})
    worker.run()
    assert "claim 1" in str(run.states[-1].superseded)
    assert run.states[-1].waiting is None
    assert not list((run.dir / "staged").glob("step-0000000[01]*"))


def started(run: Run) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "dtrain.runs.mirror_uploads"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    send(process, asdict(run.task))
    return process


def send(process: subprocess.Popen[bytes], request: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()


def wait_for(process: subprocess.Popen[bytes], condition: Callable[[dict[str, Any]], bool]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if condition(json.loads(line)):
            return
    raise AssertionError(f"it ended with {process.wait()}")


def test_the_process_ignores_signals_and_ends_when_everything_is_uploaded(run: Run) -> None:
    with started(run) as process:
        send(process, {"save": asdict(run.save(5))})
        wait_for(process, lambda state: state["step"] == 5)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            process.send_signal(number)  # of a terminal or a scheduler, which mean rank 0
        send(process, {"save": asdict(run.save(10))})
        send(process, {"records": None})
        send(process, {"end": True})
        assert process.wait(200) == 0
    assert run.steps == [10, 5]
    assert json.loads((run.dir / KNOWN).read_text())["claim"] == 1


def test_the_process_ends_at_once_when_rank_0_is_gone(run: Run) -> None:
    with started(run) as process:
        send(process, {"save": asdict(run.save(5))})
        wait_for(process, lambda state: state["step"] == 5)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(200) == 1


def test_a_record_that_grows_while_it_is_uploaded_has_the_hash_of_what_is_uploaded(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Mirror.put_file

    def growing(self: Mirror, claim: Any, path: Path, sha256: str) -> None:
        with (run.dir / "metrics.jsonl").open("a") as file:
            file.write("more\n")
        assert size_and_hash(path)["sha256"] == sha256
        put(self, claim, path, sha256)

    monkeypatch.setattr(Mirror, "put_file", growing)
    run.uploader().upload(run.save(5))
    assert logged(run) == [5]

"""What a start takes from a mirror, when it is refused, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from dtrain import command_line, train
from dtrain.config.schema import Config, ParallelConfig
from dtrain.errors import ConfigError
from dtrain.runs.mirror import KNOWN, Mirror
from dtrain.runs.mirror_uploads import Save, Task, Uploader, read_known
from dtrain.runs.recompose import recompose
from dtrain.runs.run_spec import RunSpec
from dtrain.training.checkpoint.checkpoints import Checkpoints
from dtrain.training.checkpoint.mirror import RunMirror, run_mirror
from dtrain.training.checkpoint.uploads import MirrorUploads
from tests.ranks import RanksFailed, run_ranks
from tests.refusals import refused
from tests.training.checkpoints_for_tests import content
from tests.whole_runs import QUIET, metrics, records, status, train_on, tree, weights

SMALL = (
    "model.width=4",
    "train.eval_every=0",
    "checkpoint.every_steps=4",
    "checkpoint.best=null",
    "train.max_epochs=null",
)


class Bucket:
    """A folder as the mirror of a run, and run directories on different machines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"file://{folder}/bucket"
        self.mirror = Mirror(self.url)

    def run(self, name: str, *steps: int, known: int = 0, best: int | None = None) -> Path:
        """A run directory that was trained to these steps, and uploaded each of its checkpoints."""
        run_dir = self.folder / name / "run"
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        (run_dir / ".mirror").mkdir(exist_ok=True)
        (run_dir / "config.yaml").write_text("{}")
        (run_dir / "overrides.yaml").write_text("{overrides: [], config_dirs: []}")
        (run_dir / "logs" / "rank-00000.log").write_text(name)
        uploader = Uploader(Task(self.url, str(run_dir), str(run_dir / ".mirror"), known, 9, None), lambda state: None)
        checkpoints = Checkpoints(run_dir / "checkpoints", keep_last=9)
        for step in steps:
            with (run_dir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "time": 0}) + "\n")
            uploader.upload(Save(str(checkpoints.save(step, content(float(step)))), step, best))
        return run_dir

    def damage(self, step: int) -> None:
        """Changes a bit of a checkpoint in the bucket."""
        (path,) = (self.folder / "bucket").glob(f"*/checkpoints/step-{step:09d}-*/model.safetensors")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    def start(self, name: str, resume: str = "auto") -> RunMirror:
        """What a start on a machine finds."""
        cfg = Config()
        cfg.checkpoint.mirror, cfg.run.resume = self.url, resume
        mirror = RunMirror(cfg, RunSpec("run", self.folder / name / "run", {}, (), ()))
        mirror.fetch()
        return mirror


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path)


def test_an_empty_directory_gets_the_newest_checkpoint_the_best_one_and_the_records(bucket: Bucket) -> None:
    bucket.run("a", 4, 8, 12, best=4)
    empty = bucket.folder / "b" / "run"
    empty.mkdir(parents=True)
    found = bucket.start("b")
    assert found.is_fetched
    checkpoints = Checkpoints(found.source / "checkpoints")
    assert checkpoints.steps() == [4, 12]
    assert checkpoints.newest_good() == (12, [])
    assert [line["step"] for line in records(found.source)] == [4, 8, 12]
    # Nothing but the temporary folder is there until the start is valid, and nothing at all if it is not.
    assert [path for path in empty.iterdir() if path != found.source] == []
    found.close()
    assert list(empty.iterdir()) == []


def test_what_is_moved_in_is_the_run(bucket: Bucket) -> None:
    first = bucket.run("a", 4, 8)
    logs = bucket.folder / "b" / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "slurm-17.out").write_text("of the batch script, which was there before")
    found = bucket.start("b")
    found.move_in()
    second = bucket.folder / "b" / "run"
    assert not found.is_fetched
    for name in ("config.yaml", "overrides.yaml", "metrics.jsonl", "logs/rank-00000.log"):
        assert (second / name).read_bytes() == (first / name).read_bytes()
    assert (second / "logs" / "slurm-17.out").exists()
    assert Checkpoints(second / "checkpoints").newest_good() == (8, [])
    assert read_known(second, bucket.url) == 1
    assert {path.name for path in second.iterdir() if path.name.startswith(".")} == {KNOWN}
    # Now it is a run of this machine, with nothing newer in the mirror.
    assert not bucket.start("b").is_fetched


def test_a_start_that_was_killed_while_it_moved_files_in_fetches_them_again(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.run("a", 4)

    class Killed(BaseException):
        pass

    replace, moved = os.replace, []

    def killed(source: Path, target: Path) -> None:
        if len(moved) == 3:
            raise Killed
        moved.append(target)
        replace(source, target)

    first = bucket.start("b")
    monkeypatch.setattr("dtrain.training.checkpoint.mirror.os.replace", killed)
    with pytest.raises(Killed):
        first.move_in()
    monkeypatch.undo()
    first._lock.close()  # as the end of the process does
    again = bucket.start("b")
    assert again.is_fetched
    again.move_in()
    assert Checkpoints(bucket.folder / "b" / "run" / "checkpoints").newest_good() == (4, [])
    assert not list((bucket.folder / "b").glob("**/*mirror-*")), "the folder of the killed start is still there"


def test_a_damaged_checkpoint_in_the_mirror_is_skipped_and_named(bucket: Bucket) -> None:
    bucket.run("a", 4, 8)
    bucket.damage(8)
    found = bucket.start("b")
    assert Checkpoints(found.source / "checkpoints").steps() == [4]
    (note,) = found.notes
    assert all(part in note for part in ("step-000000008", "model.safetensors", "SHA-256", bucket.url))
    found.close()
    bucket.damage(4)
    with refused(ConfigError, bucket.url, "step-000000004", "no whole checkpoint"):
        bucket.start("b")


def test_a_directory_that_a_later_start_elsewhere_overtook_continues_from_the_mirror(bucket: Bucket) -> None:
    first = bucket.run("a", 4, 8)
    bucket.run("b", 8, 12, known=1)
    found = bucket.start("a")
    assert found.is_fetched
    assert "moved-aside" in found.notes[0]
    assert "12" in found.notes[0]
    found.move_in()
    assert Checkpoints(first / "checkpoints").steps() == [12]
    (aside,) = (first / "moved-aside").iterdir()
    assert Checkpoints(aside / "checkpoints").steps() == [4, 8]
    assert read_known(first, bucket.url) == 2


def test_a_run_that_was_never_mirrored_there_is_refused(bucket: Bucket) -> None:
    bucket.run("a", 4, 8)
    other = bucket.folder / "b" / "run"
    Checkpoints(other / "checkpoints").save(2, content(2.0))
    before = tree(other)
    with refused(ConfigError, "checkpoint.mirror", bucket.url, "step 8", str(other), "empty run.dir"):
        bucket.start("b")
    assert tree(other) == before


def test_run_resume_never_is_refused_if_the_mirror_has_the_run(bucket: Bucket) -> None:
    assert not bucket.start("b", "never").is_fetched
    bucket.run("a", 4)
    with refused(ConfigError, "run.resume=never", "step 4", bucket.url):
        bucket.start("b", "never")


def test_a_mirror_that_cannot_be_read_stops_only_a_start_that_needs_it(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = bucket.run("a", 4)

    def unreachable(self: Mirror) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(Mirror, "checkpoints", unreachable)
    here = bucket.start("a")
    assert here.source == run_dir
    assert "no route to host" in here.notes[0]
    with refused(ConfigError, "checkpoint.mirror", "no route to host", "Start again"):
        bucket.start("b")
    assert not list((bucket.folder / "b").glob("*"))


def test_a_checkpoint_that_is_deleted_meanwhile_is_looked_for_again(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.run("a", 4)
    fetch, calls = Mirror.fetch_checkpoint, []

    def deleted(self: Mirror, *arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            bucket.run("c", 4, 8, known=1)
            raise FileNotFoundError("gone")
        fetch(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Mirror, "fetch_checkpoint", deleted)
    found = bucket.start("b")
    assert Checkpoints(found.source / "checkpoints").steps() == [8]
    found.close()


class Listener:
    """Collects what the user would see."""

    def __init__(self) -> None:
        self.uploads: MirrorUploads | None = None
        self.warnings: list[str] = []
        self.notes: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def note(self, line: str) -> None:
        self.notes.append(line)


def uploads_of(bucket: Bucket, run_dir: Path, listener: Listener, **changes: object) -> MirrorUploads:
    cfg = Config()
    for key, value in changes.items():
        setattr(cfg.checkpoint, key, value)
    return MirrorUploads(bucket.url, run_dir, cfg, Checkpoints.from_config(run_dir, cfg.checkpoint), listener)


def test_a_checkpoint_that_is_being_uploaded_is_kept_from_retention(bucket: Bucket) -> None:
    run_dir, listener = bucket.folder / "run", Listener()
    checkpoints = Checkpoints(run_dir / "checkpoints", keep_last=1)
    path = checkpoints.save(4, content(4.0))
    uploads = uploads_of(bucket, run_dir, listener, keep_last=1)
    assert uploads._process is not None
    uploads._process.send_signal(signal.SIGSTOP)
    uploads.saved(path, 4)
    checkpoints.save(8, content(8.0))
    assert not path.exists()
    uploads._process.send_signal(signal.SIGCONT)
    uploads.request_end()
    assert uploads.wait(200)
    uploads.close(warns=True)
    assert [it.step for it in bucket.mirror.checkpoints()] == [4]
    assert listener.warnings == []
    assert not (run_dir / ".mirror").exists()


def test_an_upload_that_does_not_end_in_time_is_named(bucket: Bucket) -> None:
    run_dir, listener = bucket.folder / "run", Listener()
    path = Checkpoints(run_dir / "checkpoints").save(4, content(4.0))
    (bucket.folder / "bucket").write_text("no folder can be made here")
    uploads = uploads_of(bucket, run_dir, listener, mirror_seconds=0.5)
    uploads.saved(path, 4)
    uploads.request_end()
    while not listener.warnings:
        assert not uploads.wait(0.05)
    assert not uploads.wait(0.0)
    uploads.close(warns=True)
    failed, unfinished = listener.warnings
    assert all(part in failed for part in ("checkpoint.mirror", bucket.url, "continues"))
    assert all(part in unfinished for part in ("step 4", "checkpoint.mirror_seconds=0.5"))


# -- whole runs


@pytest.mark.slow
def test_the_same_command_continues_on_another_machine_with_equal_losses(
    digits: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    a, b, c = (tmp_path / name / "run" for name in "abc")
    mirror = f"checkpoint.mirror=file://{tmp_path}/bucket"
    schedule = "schedule=constant"
    train_on(2, a, *SMALL, schedule, mirror, "train.max_steps=6")
    # What the mirror says about the command is never composed.
    for path in (tmp_path / "bucket").glob("*/files/*"):
        if path.read_bytes().startswith(b"overrides:"):
            path.unlink()
    b.mkdir(parents=True)
    with pytest.raises(RanksFailed):
        train_on(2, b, *SMALL, schedule, mirror, "train.max_steps=12", "run.seed=7")
    assert "run.seed: 0 -> 7" in capfd.readouterr().err
    assert list(b.iterdir()) == []
    train_on(2, b, *SMALL, schedule, mirror, "train.max_steps=12")
    train_on(2, c, *SMALL, schedule, "train.max_steps=12")
    assert metrics(b) == metrics(c)
    assert all(torch.equal(tensor, weights(c, 12)[name]) for name, tensor in weights(b, 12).items())
    state = status(b)
    assert (state["mirror"]["claim"], state["mirror"]["step"]) == (2, 12)
    assert len((b / "starts.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_a_finished_run_is_put_where_the_command_is_repeated(
    digits: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    a, b = (tmp_path / name / "run" for name in "ab")
    command = [*SMALL, "schedule=constant", f"checkpoint.mirror=file://{tmp_path}/bucket", "train.max_steps=4"]
    train_on(1, a, *command)
    train_on(1, b, *command)
    assert "finished at step 4 already" in capfd.readouterr().out
    assert status(b) == status(a) | {"mirror": status(b)["mirror"], "time": status(b)["time"]}
    assert weights(b, 4).keys() == weights(a, 4).keys()
    assert "experiment=digits" in recompose([f"run.dir={b}"])  # it is this user's
    assert not list((tmp_path / "b").glob(".*"))


# -- several machines without a common disk


def train_on_machines(folders: list[Path], *overrides: str, parallel: str = "ddp") -> None:
    """Trains with one rank on each machine, whose current folder is all that it has."""
    arguments = ["experiment=digits", "run.dir=run", *QUIET, f"parallel={parallel}", *overrides]

    def rank(number: int) -> None:
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        folders[number].mkdir(parents=True, exist_ok=True)
        os.chdir(folders[number])
        command_line.run(train.train, arguments)

    run_ranks(len(folders), rank, init=False, timeout=250)


@pytest.mark.slow
def test_machines_without_a_common_disk_continue_from_the_mirror_of_rank_0(digits: Path, tmp_path: Path) -> None:
    mirror = f"checkpoint.mirror=file://{tmp_path}/bucket"
    command = [*SMALL, "schedule=constant", mirror]
    first, second = ([tmp_path / name for name in names] for names in ("ab", "cd"))
    train_on_machines(first, *command, "train.max_steps=6")
    assert status(first[1] / "run")["state"] == "finished"
    assert (first[1] / "run" / "logs" / "rank-00001.log").exists()
    assert not (first[1] / "run" / "checkpoints").exists()
    train_on_machines(second, *command, "train.max_steps=12")
    train_on(2, tmp_path / "whole", *SMALL, "schedule=constant", "train.max_steps=12")
    assert metrics(second[0] / "run") == metrics(tmp_path / "whole")
    assert [path.name for path in second[1].iterdir()] == ["run"], "the received checkpoint is still there"
    # The other machine becomes rank 0; what it has itself is older.
    train_on_machines([first[0], tmp_path / "e"], *command, "train.max_steps=14")
    assert records(first[0] / "run")[-1]["step"] == 14
    # A run that is finished is finished on every machine.
    train_on_machines([tmp_path / "f", tmp_path / "g"], *command, "train.max_steps=14")
    assert [status(tmp_path / name / "run")["state"] for name in "fg"] == ["finished", "finished"]


@pytest.mark.slow
def test_a_stop_file_on_any_machine_stops_all_and_each_knows(digits: Path, tmp_path: Path) -> None:
    machines = [tmp_path / "a", tmp_path / "b"]

    def stop() -> None:
        while not (machines[0] / "run" / "metrics.jsonl").exists():
            time.sleep(0.05)
        (machines[1] / "run" / "STOP").touch()

    thread = threading.Thread(target=stop)
    thread.start()
    train_on_machines(machines, *SMALL, f"checkpoint.mirror=file://{tmp_path}/bucket", "train.max_steps=100000")
    thread.join()
    states = [status(machine / "run") for machine in machines]
    assert [state["state"] for state in states] == ["stopped", "stopped"]
    assert not (machines[1] / "run" / "STOP").exists()
    (newest, *_) = Mirror(f"file://{tmp_path}/bucket").checkpoints()
    assert newest.step == states[0]["step"]


@pytest.mark.slow
def test_a_sharded_run_on_machines_without_a_common_disk_is_refused(
    digits: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [*SMALL, "schedule=constant", f"checkpoint.mirror=file://{tmp_path}/bucket"]
    train_on(2, tmp_path / "a" / "run", *command, "train.max_steps=4", "parallel=fsdp")
    (newest, *_) = Mirror(f"file://{tmp_path}/bucket").checkpoints()
    assert newest.step == 4
    with pytest.raises(RanksFailed):
        train_on_machines([tmp_path / "b", tmp_path / "c"], *command, "train.max_steps=8", parallel="fsdp")
    error = capfd.readouterr().err
    assert all(part in error for part in ("run.dir", "all machines share", "parallel=ddp"))
    assert not (tmp_path / "b" / "run").exists()


def test_a_run_without_a_mirror_has_none(tmp_path: Path) -> None:
    cfg = Config(parallel=ParallelConfig())
    with run_mirror(cfg, RunSpec("run", tmp_path / "run", {}, (), ())) as nothing:
        nothing.fetch()
        nothing.move_in()
        nothing.finish()
        assert nothing.source == tmp_path / "run"
        assert nothing.notes == []
    assert list(tmp_path.iterdir()) == []

import json
import math
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import wandb

from dtrain.config.schema import TrackerConfig
from dtrain.tracking import build_sinks
from dtrain.tracking.wandb_log import last_step
from dtrain.tracking.wandb_sink import WandbSink
from tests.tracking.wandb_records import records, rows, run_of

TRACKER = TrackerConfig(name="wandb", mode="offline", project="digits-project", tags=["a", "b"])


@pytest.fixture
def notes(home):
    return []


def record(step):
    return {"step": step, "time": 1000.0 + step, "epoch": 0, "train/loss": 1 / (step + 1), "data/bad_samples": 0}


def pieces(run_dir):
    return sorted(run_dir.glob("wandb/*run-*/*.wandb"))


def train(run_dir, steps, notes, config=None):
    """One start of a run: logs ``steps`` and ends well."""
    sink = WandbSink(TRACKER, "offline", run_dir, "digits-12", config or {}, notes.append)
    for step in steps:
        sink.log(record(step))
    sink.finish("finished")
    return sink


def test_two_offline_starts_are_one_run_with_each_step_once_and_the_names_of_the_metrics_file(tmp_path, home, capsys):
    config = {"train": {"max_steps": 4}, "optimizer": {"lr": 0.1}}
    for steps, resumed in (((1, 2, 3), 0), ((2, 3, 4), 1)):
        sinks = build_sinks(TRACKER, tmp_path, "digits-12", config, resumed)
        for step in steps:
            sinks.log(record(step))
        sinks.log({"step": steps[-1], "time": 2000.0, "eval/accuracy": 0.5 + steps[-1] / 10, "eval/loss": math.nan})
        sinks.finish("finished")

    runs = [run_of(piece) for piece in pieces(tmp_path)]
    assert len(runs) == 2
    kept = (tmp_path / "wandb" / "run-id").read_text().strip()
    for run, kept_config in runs:
        assert (run.run_id, run.display_name, run.project) == (kept, "digits-12", "digits-project")
        assert list(run.tags) == ["a", "b"]
        assert kept_config == config

    sent = [row for piece in pieces(tmp_path) for row in rows(piece)]
    assert sorted(row["_step"] for row in sent) == sorted(row["step"] for row in sent) == [1, 2, 3, 4]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {name for row in sent for name in row if not name.startswith("_")} == {
        name for line in lines for name in line
    }
    by_step = {row["step"]: row for row in sent}
    assert by_step[4]["eval/accuracy"] == 0.9
    assert by_step[4]["train/loss"] == 0.2
    assert "wandb: offline in" in capsys.readouterr().out


def test_a_killed_start_leaves_no_hole_and_no_step_twice(tmp_path, notes, monkeypatch):
    # wandb's own process keeps the newest rows in memory when its parent is killed: these must be sent again.
    script = f"""
        import os, signal, time
        from pathlib import Path
        from dtrain.config.schema import TrackerConfig
        from dtrain.tracking.wandb_sink import WandbSink
        sink = WandbSink(TrackerConfig(), "offline", Path({str(tmp_path)!r}), "digits-12", {{}}, print)
        for step in range(400):
            sink.log({{"step": step, "time": 0.0, "train/loss": 1 / (step + 1)}})
        while not any(path.stat().st_size > 3 * 32768 for path in Path({str(tmp_path)!r}).glob("wandb/off*/*.wandb")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    monkeypatch.delenv("WANDB_SERVICE", raising=False)  # a wandb process of its own, not this one's
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    (piece,) = pieces(tmp_path)
    kept = [row["_step"] for row in rows(piece)]
    assert 0 < len(kept) < 400
    train(tmp_path, range(100, 500), notes)
    sent = [row["_step"] for piece in pieces(tmp_path) for row in rows(piece)]
    assert sorted(sent) == list(range(500))


def test_the_last_step_is_found_however_the_file_is_torn(tmp_path, notes):
    train(tmp_path, range(700), notes, config={"long": "x" * 100_000})
    (piece,) = pieces(tmp_path)
    data = piece.read_bytes()
    assert len(data) > 8 * 32768
    torn = tmp_path / "torn.wandb"
    for size in {*range(7, len(data), len(data) // 50), 32768, 32768 + 3, 3 * 32768 - 2, len(data) - 1, len(data)}:
        torn.write_bytes(data[:size])
        assert last_step(torn) == max((row["_step"] for row in rows(torn)), default=None)


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("stopped", 0), ("failed", 1)])
def test_wandb_is_told_how_the_run_ended(tmp_path, notes, state, code):
    sink = WandbSink(TRACKER, "offline", tmp_path, "digits-12", {}, notes.append)
    sink.finish(state)
    (ended,) = [r.exit for r in records(pieces(tmp_path)[0]) if r.WhichOneof("record_type") == "exit"]
    assert ended.exit_code == code


def test_a_server_that_is_not_there_is_reported_once_and_holds_up_nothing(tmp_path, home):
    # In a process of its own: wandb reads its environment once.
    script = f"""
        from pathlib import Path
        import dtrain.tracking.wandb_sink as module
        from dtrain.config.schema import TrackerConfig
        module.TIMEOUT, module.START = 2, 0.5
        sink = module.WandbSink(TrackerConfig(), "online", Path({str(tmp_path)!r}), "digits-12", {{}}, print)
        for step in range(1000):
            sink.log({{"step": step, "time": 0.0}})
        print("trained", flush=True)
        sink.finish("finished")
        sink.log({{"step": 1000, "time": 0.0}})
        print("ended")
    """
    environ = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    environ |= {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environ,
        timeout=120,
        check=True,
        capture_output=True,
        text=True,
    )
    assert [line.split(":")[0] for line in done.stdout.splitlines() if line[:1].isalpha()] == [
        "trained",
        "wandb",
        "ended",
    ]
    assert "The run goes on without it" in done.stdout
    assert "Traceback" not in done.stderr


def test_an_error_in_wandb_is_reported_once_and_later_records_are_let_go(tmp_path, notes, monkeypatch):
    class Broken:
        starting_step = 0

        def log(self, *_, **__):
            raise wandb.errors.CommError("the server said no")

    monkeypatch.setattr(wandb, "init", lambda **_: Broken())
    train(tmp_path, range(5), notes)
    assert [note for note in notes if "server said no" in note] == [notes[-1]]
    assert len(notes) == 2


def test_wandb_has_started_its_processes_before_the_loader_can_fork_its_own(tmp_path, notes, monkeypatch):
    # A worker that is forked in between keeps the new process's pipes open, and wandb waits for their end.
    done = []
    real = wandb.init

    def slow(**settings):
        run = real(**settings)
        time.sleep(0.5)
        done.append(True)
        return run

    monkeypatch.setattr(wandb, "init", slow)
    sink = WandbSink(TRACKER, "offline", tmp_path, "digits-12", {}, notes.append)
    assert done
    sink.finish("finished")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_that_nobody_foresaw_ends_the_thread_and_not_the_training(tmp_path, notes, monkeypatch):
    def init(**_):
        raise RuntimeError("a bug in wandb")

    monkeypatch.setattr(wandb, "init", init)
    train(tmp_path, range(5), notes)


def test_a_wandb_that_hangs_costs_no_memory_and_no_time_but_the_last_wait(tmp_path, notes, monkeypatch):
    release = threading.Event()

    def hang(**_):
        release.wait()
        raise OSError("much too late")

    monkeypatch.setattr(wandb, "init", hang)
    monkeypatch.setattr("dtrain.tracking.wandb_sink.TIMEOUT", -2.4)  # so that finish waits 0.2 s
    monkeypatch.setattr("dtrain.tracking.wandb_sink.WAITING", 3)
    monkeypatch.setattr("dtrain.tracking.wandb_sink.START", 0.01)
    sink = WandbSink(TRACKER, "offline", tmp_path, "digits-12", {}, notes.append)
    for step in range(10):
        sink.log(record(step))
    with pytest.raises(queue.Full):
        sink._queue.put_nowait(record(10))
    sink.finish("finished")
    assert [note.split(".")[0] for note in notes] == [
        "wandb: 3 records wait to be sent; the next are left out",
        "wandb: not done in time",
    ]
    release.set()
    sink._thread.join()

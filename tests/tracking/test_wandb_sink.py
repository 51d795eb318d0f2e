import json
import math
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import wandb

from dtrain.config.schema import TrackerConfig
from dtrain.tracking import build_sinks, sinks, wandb_sink
from dtrain.tracking.sinks import BackgroundSink, write_media
from tests.tracking.pictures import png
from tests.tracking.wandb_records import records, rows, run_of

TRACKER = TrackerConfig(name="wandb", mode="offline", project="digits-project", tags=["a", "b"])


@pytest.fixture
def notes(home):
    return []


def record(step):
    return {"step": step, "time": 1000.0 + step, "epoch": 0, "train/loss": 1 / (step + 1), "data/bad_samples": 0}


def pieces(run_dir):
    return sorted(run_dir.glob("wandb/*run-*/*.wandb"))


def started(run_dir, notes, config=None, resumed=0, media=()):
    """One start of a run."""
    return BackgroundSink(
        "wandb",
        lambda: wandb_sink.WandbSink(
            TRACKER, "offline", run_dir, "digits-12", config or {}, resumed, notes.append, media
        ),
        note=notes.append,
    )


def train(run_dir, steps, notes, config=None):
    """One start of a run: logs ``steps`` and ends well."""
    sink = started(run_dir, notes, config)
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
        assert kept_config.pop("provenance")["torch"] == torch.__version__
        assert kept_config == config

    sent = [row for piece in pieces(tmp_path) for row in rows(piece)]
    assert sorted(row["_step"] for row in sent) == sorted(row["step"] for row in sent) == [1, 2, 3, 4]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {name for row in sent for name in row if not name.startswith("_")} == {
        name for line in lines for name in line
    }
    by_step = {row["step"]: row for row in sent}
    for line in lines:  # an evaluation is in the row of its step
        row = by_step[line["step"]]
        values = {name: row[name] for name in line if name != "time"}
        assert {name: None if math.isnan(value) else value for name, value in values.items()} == {
            name: line[name] for name in values
        }
    assert by_step[4]["eval/accuracy"] == 0.9
    assert by_step[4]["train/loss"] == 0.2
    assert "wandb: offline in" in capsys.readouterr().out


def write_metrics(run_dir, steps):
    lines = [json.dumps(record(step) | ({"train/loss": None} if step == 4 else {})) for step in steps]
    (run_dir / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))


@pytest.mark.slow
def test_a_killed_start_leaves_no_hole_and_no_step_twice(tmp_path, notes, monkeypatch):
    # wandb's own process keeps the newest rows in memory when its parent is killed: these must be sent again.
    script = f"""
        import os, signal, time
        from pathlib import Path
        from dtrain.config.schema import TrackerConfig
        from dtrain.tracking.wandb_sink import WandbSink
        sink = WandbSink(TrackerConfig(), "offline", Path({str(tmp_path)!r}), "digits-12", {{}}, 0, print)
        step = 0
        # Rows this wide fill its buffers, which it otherwise writes every 15 seconds.
        while not any(path.stat().st_size > 3 * 32768 for path in Path({str(tmp_path)!r}).glob("wandb/off*/*.wandb")):
            sink.log({{"step": step, "time": 0.0, "train/loss": 1 / (step + 1)}} | {{f"m/{{n}}": n for n in range(20)}})
            step += 1
            time.sleep(0.001)
        Path({str(tmp_path / "logged")!r}).write_text(str(step))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    monkeypatch.delenv("WANDB_SERVICE", raising=False)  # a wandb process of its own, not this one's
    train(tmp_path, range(50), notes)
    command = [sys.executable, "-c", textwrap.dedent(script)]
    killed = subprocess.run(command, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    logged = int((tmp_path / "logged").read_text())
    assert any(0 < len(rows(piece)) < logged for piece in pieces(tmp_path))
    write_metrics(tmp_path, range(100))
    picture = write_media(tmp_path / "media", 99, "confusion", png(4, 3))
    sink = started(tmp_path, notes, resumed=99, media=[(99, "confusion", picture)])
    for step in range(100, 500):
        sink.log(record(step))
    sink.finish("finished")
    assert len(list((tmp_path / "wandb" / "killed").iterdir())) == 1
    sent = [row for piece in pieces(tmp_path) for row in rows(piece)]
    assert sorted(row["_step"] for row in sent) == list(range(500))
    assert [row["_step"] for row in sent if "media/confusion/path" in row] == [99]


def test_a_killed_start_that_was_uploaded_is_kept(tmp_path, notes):
    train(tmp_path, (1, 2), notes)
    (piece,) = pieces(tmp_path)
    (tmp_path / "wandb" / "sent.json").unlink()  # as if it had been killed
    piece.with_name(f"{piece.name}.synced").touch()
    train(tmp_path, (3,), notes)
    assert piece in pieces(tmp_path)


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("stopped", 0), ("failed", 1)])
def test_wandb_gets_the_exit_code_and_a_failure_is_an_alert(tmp_path, notes, state, code):
    sink = started(tmp_path, notes)
    sink.alert("rank 1 is slow")
    sink.finish(state, "rank 1 failed: ValueError: no")
    found = records(pieces(tmp_path)[0])
    (ended,) = [r.exit for r in found if r.WhichOneof("record_type") == "exit"]
    assert ended.exit_code == code
    alerts = [(r.alert.title, r.alert.text, r.alert.level) for r in found if r.WhichOneof("record_type") == "alert"]
    assert alerts == [
        ("digits-12 needs attention", "rank 1 is slow", "WARN"),
        *([("digits-12 failed", "rank 1 failed: ValueError: no", "ERROR")] if code else []),
    ]


def test_media_are_sent_with_their_step_and_once(tmp_path, notes):
    picture = write_media(tmp_path / "media", 2, "confusion", png(4, 3))
    text = write_media(tmp_path / "media", 2, "sample", "a < b")
    for steps in ((1, 2), (2, 3)):
        sink = started(tmp_path, notes)
        for step in steps:
            sink.log(record(step))
            if step == 2:
                sink.media(step, "confusion", picture)
                sink.media(step, "sample", text)
        sink.finish("finished")
    sent = {row["_step"]: row for piece in pieces(tmp_path) for row in rows(piece)}
    assert sorted(sent) == [1, 2, 3]
    assert {name for name in sent[2] if name.startswith("media/confusion/")} >= {"media/confusion/path"}
    (shown,) = tmp_path.glob(f"wandb/*run-*/files/{sent[2]['media/confusion/path']}")
    assert shown.read_bytes() == picture.read_bytes()
    (page,) = tmp_path.glob(f"wandb/*run-*/files/{sent[2]['media/sample/path']}")
    assert "<pre>a &lt; b</pre>" in page.read_text()


def test_records_that_wandb_lacks_are_sent_from_the_metrics_file(tmp_path, notes):
    train(tmp_path, (1, 2), notes)
    write_metrics(tmp_path, range(1, 7))
    sink = started(tmp_path, notes, resumed=5)
    sink.log(record(6))
    sink.finish("finished")
    sent = {row["_step"]: row for piece in pieces(tmp_path) for row in rows(piece)}
    assert sorted(sent) == [1, 2, 3, 4, 5, 6]
    assert sent[3]["train/loss"] == 1 / 4
    assert math.isnan(sent[4]["train/loss"])
    assert sum(len(rows(piece)) for piece in pieces(tmp_path)) == 6


def evaluation(step):
    return {"step": step, "time": 2000.0 + step, "epoch": 0, "eval/loss": 1 / (step + 2)}


@pytest.mark.slow
def test_an_evaluation_that_comes_in_a_later_start_than_its_step_is_sent_once(tmp_path, notes):
    # Stopped in an evaluation; gone on and killed before the next checkpoint; gone on to the end.
    for resumed, logged in (
        (0, [record(1), record(2)]),
        (2, [evaluation(2), record(3)]),
        (2, [evaluation(2), record(3), evaluation(3)]),
    ):
        sink = started(tmp_path, notes, resumed=resumed)
        for each in logged:
            sink.log(each)
        sink.finish("stopped")
    sent = [row for piece in pieces(tmp_path) for row in rows(piece)]
    assert [row["_step"] for row in sent if "train/loss" in row] == [1, 2, 3]
    assert {row["_step"]: row["eval/loss"] for row in sent if "eval/loss" in row} == {2: 1 / 4, 3: 1 / 5}
    assert sum("eval/loss" in row for row in sent) == 2


@pytest.mark.parametrize("first", ["online", "offline"])
def test_a_server_that_takes_no_earlier_row_gets_a_late_evaluation_in_the_next_one(tmp_path, notes, monkeypatch, first):
    train(tmp_path, (1, 2), notes)
    (piece,) = tmp_path.glob("wandb/offline-run-*")
    if first == "online":
        piece.rename(piece.with_name(piece.name.removeprefix("offline-")))
    sent = []

    class Server:
        starting_step, url = 3, "https://wandb.example"

        def log(self, values, step):
            sent.append((values["step"], step))

    monkeypatch.setattr(wandb, "init", lambda **_: Server())
    sink = wandb_sink.WandbSink(TRACKER, "online", tmp_path, "digits-12", {}, 2, notes.append)
    for each in (record(2), evaluation(2)):
        sink.log(each)
    assert sent == [(2, 3)]
    sink.log(record(4))
    assert sent == [(2, 3), (4, 4)]


@pytest.mark.parametrize(
    ("offline", "starting_step", "sent"),
    [
        # Killed: nothing is known here, and the server has the rows below its next step.
        (-1, 3, [(2, 3), (3, 3), (4, 4), (5, 5)]),
        # An offline piece that nobody has uploaded yet has the first record.
        (1, 0, [(2, 2), (2, 2), (3, 3), (4, 4), (5, 5)]),
        # It is uploaded, and a killed online start has sent more.
        (1, 4, [(4, 4), (5, 5)]),
    ],
)
def test_an_online_start_sends_what_neither_the_server_nor_an_offline_piece_has(
    tmp_path, notes, monkeypatch, offline, starting_step, sent
):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "sent.json").write_text(json.dumps({"newest": [offline, False], "closed": []}))
    lines = [record(1), record(2), evaluation(2), record(3), record(4), record(5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    got = []

    class Server:
        url = "https://wandb.example"

        def log(self, values, step):
            got.append((values["step"], step))

    Server.starting_step = starting_step
    monkeypatch.setattr(wandb, "init", lambda **_: Server())
    sink = wandb_sink.WandbSink(TRACKER, "online", tmp_path, "digits-12", {}, 4, notes.append)
    sink.log(record(5))
    assert got == sent


def test_no_secret_of_the_command_line_gets_into_what_wandb_sends(tmp_path, notes, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "data.train.api_key=hunter2"])
    train(tmp_path, (1,), notes)
    written = [path for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
    assert len(written) > 2
    assert not [path for path in written if b"hunter2" in path.read_bytes()]


@pytest.mark.slow
def test_an_unreachable_server_is_reported_once_and_delays_nothing(tmp_path, home):
    # In a process of its own: wandb reads its environment once.
    script = f"""
        from pathlib import Path
        from dtrain.config.schema import TrackerConfig
        from dtrain.runs.run_dir import open_rank_log
        from dtrain.tracking import build_sinks, sinks, wandb_sink
        (Path({str(tmp_path)!r}) / "logs").mkdir()
        open_rank_log(Path({str(tmp_path)!r}), 0)  # the traceback is in it
        wandb_sink.TIMEOUT, sinks.OPEN_TIMEOUT = 2, 0.5
        tracker = TrackerConfig(name="wandb", mode="online")
        sink = build_sinks(tracker, Path({str(tmp_path)!r}), "digits-12", {{}}, 0)
        for step in range(1000):
            sink.log({{"step": step, "time": 0.0}})
        print("trained", flush=True)
        sink.finish("finished")
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
    words = [line.split(":")[0] for line in done.stdout.splitlines() if line[:1].isalpha()]
    assert [word for word in words if not word.startswith("step")] == ["trained", "wandb", "ended"]
    assert "The run continues without it" in done.stdout
    assert "Traceback" not in done.stderr


def test_an_error_in_wandb_is_reported_once_and_later_records_are_dropped(tmp_path, notes, monkeypatch):
    class Broken:
        starting_step, url = 0, None

        def log(self, *_, **__):
            raise wandb.errors.CommError("the server said no")

    monkeypatch.setattr(wandb, "init", lambda **_: Broken())
    train(tmp_path, range(5), notes)
    assert [note for note in notes if "server said no" in note] == [notes[-1]]
    assert len(notes) == 2


@pytest.mark.slow
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
    monkeypatch.setattr(sinks, "OPEN_TIMEOUT", 100.0)  # a busy machine needs more than the 5 seconds of a run
    sink = started(tmp_path, notes)
    assert done
    sink.finish("finished")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_unexpected_error_ends_the_thread_and_not_the_training(tmp_path, notes, monkeypatch):
    def init(**_):
        raise RuntimeError("a bug in wandb")

    monkeypatch.setattr(wandb, "init", init)
    train(tmp_path, range(5), notes)


def test_a_blocked_wandb_costs_no_memory_and_no_time_except_the_final_wait(tmp_path, notes, monkeypatch):
    release = threading.Event()

    def hang(**_):
        release.wait()
        raise OSError("much too late")

    monkeypatch.setattr(wandb, "init", hang)
    monkeypatch.setattr(sinks, "FINISH_TIMEOUT", 0.2)
    monkeypatch.setattr(sinks, "QUEUE_SIZE", 3)
    monkeypatch.setattr(sinks, "OPEN_TIMEOUT", 0.01)
    sink = started(tmp_path, notes)
    for step in range(10):
        sink.log(record(step))
    with pytest.raises(queue.Full):
        sink._queue.put_nowait(None)
    sink.finish("finished")
    assert [note.split(".")[0] for note in notes] == [
        "wandb: 3 records are waiting; further ones are dropped",
        "wandb: did not end in time",
    ]
    release.set()
    sink._thread.join()


# -- artifacts


def artifacts(piece):
    """The artifacts of a .wandb file: (name, aliases, files, step) each."""
    found = [r.request.log_artifact.artifact for r in records(piece) if r.WhichOneof("record_type") == "request"]
    found += [r.artifact for r in records(piece) if r.WhichOneof("record_type") == "artifact"]
    return [
        (
            each.name,
            sorted(each.aliases),
            sorted(entry.path for entry in each.manifest.contents),
            json.loads(each.metadata)["step"],
        )
        for each in found
        if each.name
    ]


def uploads(piece):
    """The files that `wandb sync` would upload for the artifacts."""
    found = [r.artifact for r in records(piece) if r.WhichOneof("record_type") == "artifact"]
    return [Path(entry.local_path) for each in found for entry in each.manifest.contents]


def saved_checkpoint(run_dir, step):
    folder = run_dir / "checkpoints" / f"step-{step:09d}"
    folder.mkdir(parents=True)
    for name in ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"):
        (folder / name).write_text(f"{name} of {step}")
    (run_dir / "config.yaml").write_text("train: {}\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "expected"),
    [("none", []), ("best", [(2, True)]), ("last", [(3, False)]), ("all", [(1, False), (2, True), (3, False)])],
)
def test_checkpoints_become_artifacts_even_if_the_run_deletes_them_at_once(tmp_path, home, which, expected):
    tracker = TrackerConfig(name="wandb", mode="offline", artifacts=which)
    sinks = build_sinks(tracker, tmp_path, "digits-12", {}, 0)
    for step in (1, 2, 3):
        sinks.log(record(step))
        folder = saved_checkpoint(tmp_path, step)
        sinks.checkpoint(folder, step, step == 2)
        shutil.rmtree(folder)
    sinks.finish("finished")
    (piece,) = pieces(tmp_path)
    name = f"checkpoint-{(tmp_path / 'wandb' / 'run-id').read_text().strip()}"
    files = ["config.yaml", "model.safetensors", "state.json"]
    assert artifacts(piece) == [
        (name, [*(["best"] if best else []), "latest", f"step-{step}"], files, step) for step, best in expected
    ]
    assert all(path.exists() for path in uploads(piece))
    kept = {path.read_text() for path in tmp_path.glob("wandb/checkpoints/*/model.safetensors")}
    assert kept == {f"model.safetensors of {step}" for step, _ in expected}
    assert [row["_step"] for row in rows(piece)] == [1, 2, 3]


def test_a_checkpoint_that_cannot_be_staged_or_uploaded_ends_nothing(tmp_path, home, capsys):
    sinks = build_sinks(TrackerConfig(name="wandb", mode="offline", artifacts="all"), tmp_path, "digits-12", {}, 0)
    sinks.checkpoint(tmp_path / "nowhere", 1, False)
    sinks.checkpoint(saved_checkpoint(tmp_path, 2), 2, False)
    shutil.rmtree(tmp_path / "wandb" / "checkpoints")
    sinks.log(record(3))
    sinks.finish("finished")
    assert [row["_step"] for row in rows(pieces(tmp_path)[0])] == [3]
    assert "could not be passed to wandb" in capsys.readouterr().out


# -- sweeps of wandb


def test_a_run_of_a_sweeps_agent_has_the_id_that_the_agent_gave_it_and_keeps_it(tmp_path, notes, monkeypatch):
    with monkeypatch.context() as agent:
        agent.setenv("WANDB_SWEEP_ID", "abcdefgh")
        agent.setenv("WANDB_RUN_ID", "01234567")
        train(tmp_path, (1,), notes)
    train(tmp_path, (2,), notes)
    assert [run_of(piece)[0].run_id for piece in pieces(tmp_path)] == ["01234567"] * 2


@pytest.mark.slow
def test_a_wandb_process_that_is_killed_leaves_one_line_and_no_traceback(tmp_path, home, monkeypatch):
    script = f"""
        import os, signal
        from pathlib import Path
        from dtrain.config.schema import TrackerConfig
        from dtrain.tracking import build_sinks
        from dtrain.runs.run_dir import open_rank_log
        Path({str(tmp_path / "logs")!r}).mkdir()
        open_rank_log(Path({str(tmp_path)!r}), 0)
        sinks = build_sinks(TrackerConfig(name="wandb", mode="offline"), Path({str(tmp_path)!r}), "digits-12", {{}}, 0)
        sinks.log({{"step": 1, "time": 1.0, "train/loss": 0.5}})
        for process in Path("/proc").glob("[0-9]*"):
            try:
                status = (process / "stat").read_text()
            except OSError:
                continue
            if "wandb" in status and int(status.rpartition(")")[2].split()[1]) == os.getpid():
                os.kill(int(process.name), signal.SIGKILL)
        sinks.finish("finished")
        print("finished at step 1")
    """
    monkeypatch.delenv("WANDB_SERVICE", raising=False)  # a wandb process of its own, not this one's
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.endswith("finished at step 1\n")
    # What wandb raises depends on its version and on the moment: the connection is lost, or reset, or the pipe is broken.
    told = re.findall(r"^wandb: .*(?:onnection |Broken pipe).*The run continues without it", done.stdout, re.MULTILINE)
    assert len(told) == 1, done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "Traceback" in (tmp_path / "logs" / "rank-00000.log").read_text()

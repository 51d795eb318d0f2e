import inspect
import json
import os
import subprocess
import sys
from contextlib import suppress

import pytest

from dtrain.config.errors import ConfigError
from dtrain.config.schema import TrackerConfig
from dtrain.tracking import NullSinks, Sinks, build_sinks, tracker_mode
from dtrain.tracking.console import PlainLines
from dtrain.tracking.jsonl import JsonlSink


def record(step):
    return {"step": step, "time": 1000.0 + step, "train/loss": 0.5}


def test_records_reach_the_file_and_the_console(tmp_path, capsys):
    sinks = build_sinks(TrackerConfig(), tmp_path, "digits-12", {}, 0, total_steps=20)
    sinks.log(record(10))
    sinks.note("a word")
    sinks.finish("finished")
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == record(10)
    assert capsys.readouterr().out == "step 10/20  loss 0.5\na word\n"


def test_a_resumed_run_writes_each_step_once(tmp_path, capsys):
    for first, last, resumed in ((0, 5, 0), (3, 8, 2)):
        sinks = build_sinks(TrackerConfig(), tmp_path, "digits-12", {}, resumed)
        for step in range(first, last):
            sinks.log(record(step))
        sinks.finish("stopped")
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(8))
    assert "2 lines after step 2 dropped" in capsys.readouterr().out


def test_a_start_from_nothing_keeps_no_line_of_an_earlier_one(tmp_path):
    for _ in range(2):
        sinks = build_sinks(TrackerConfig(), tmp_path, "digits-12", {}, 0)
        sinks.log({"step": 0, "time": 1.0, "eval/loss": 2.3})
        sinks.finish("failed")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_an_unknown_tracker_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match=r"tracker\.name: got 'mlflow'; known are none, wandb, tensorboard, both"):
        build_sinks(TrackerConfig(name="mlflow"), tmp_path, "digits-12", {}, 0)
    assert not list(tmp_path.iterdir())


def test_a_mode_that_cannot_work_is_refused_before_anything_is_written(tmp_path, home):
    with pytest.raises(ConfigError, match="no key"):
        build_sinks(TrackerConfig(name="wandb", mode="online"), tmp_path, "digits-12", {}, 0)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("dtrain.tracking.sinks.find_spec", lambda _: None)
    assert tracker_mode(TrackerConfig(name="none")) == "disabled"
    with pytest.raises(ConfigError, match="pip install wandb"):
        tracker_mode(TrackerConfig(name="wandb"))
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        tracker_mode(TrackerConfig(name="tensorboard"))


def test_disabled_wandb_writes_nothing_of_its_own(tmp_path):
    build_sinks(TrackerConfig(name="wandb", mode="disabled"), tmp_path, "digits-12", {}, 0).finish("finished")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_the_other_ranks_sinks_can_be_called_like_rank_0s(tmp_path):
    def methods(cls):
        return {name: inspect.signature(member) for name, member in vars(cls).items() if name[0] != "_"}

    assert methods(NullSinks) == methods(Sinks)
    null = NullSinks()
    null.log(record(1))
    null.note("a word")
    null.media(1, "picture", b"")
    null.finish("finished")


def test_a_run_without_wandb_and_tensorboard_does_not_import_them(tmp_path):
    script = (
        "import sys; from pathlib import Path; from dtrain.tracking import build_sinks; "
        "from dtrain.config.schema import TrackerConfig; "
        f"build_sinks(TrackerConfig(), Path({str(tmp_path)!r}), 'r', {{}}, 0).finish('finished'); "
        "sys.exit(not {'wandb', 'tensorboard'}.isdisjoint(sys.modules))"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


class Refusing:
    """A sink on a full disk."""

    def log(self, record):
        raise OSError(28, "No space left on device")

    def media(self, step, name, path):
        raise OSError(28, "No space left on device")

    def finish(self, state, reason=None):
        raise OSError(28, "No space left on device")


def test_a_sink_that_fails_is_reported_once_and_keeps_nothing_from_the_others(tmp_path, capsys):
    sinks = Sinks(tmp_path / "media", PlainLines(sys.stdout, None), Refusing())
    for step in range(3):
        sinks.log(record(step))
    sinks.media(2, "text", "a text")
    sinks.finish("finished")
    said = capsys.readouterr().out
    assert said.count("WARNING: a record could not be written to Refusing ([Errno 28] No space left") == 1
    assert said.count("loss 0.5") == 3
    assert (tmp_path / "media" / "text" / "step-000000002.txt").read_text() == "a text"


def test_an_output_that_nobody_reads_any_more_ends_no_run(tmp_path):
    read, write = os.pipe()
    os.close(read)
    with suppress(BrokenPipeError), open(write, "w") as broken:
        sinks = Sinks(tmp_path / "media", PlainLines(broken, None), JsonlSink(tmp_path / "metrics.jsonl"))
        sinks.note("a word")
        sinks.log(record(1))
        sinks.finish("finished")
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == record(1)


def test_the_end_of_a_run_is_told_once_whoever_is_first(tmp_path):
    told = []

    class Ears(Refusing):
        def finish(self, state, reason=None):
            told.append((state, reason))

    sinks = Sinks(tmp_path / "media", PlainLines(sys.stdout, None), Ears())
    sinks.finish("failed", "the run hangs")
    sinks.finish("failed", "rank 0 failed")
    assert told == [("failed", "the run hangs")]

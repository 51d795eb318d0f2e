import json
import math
import sys

import pytest

from benchmarks.fault_hook import faulty
from dtrain.config.schema import TrackerConfig
from dtrain.tracking import build_sinks, sinks
from tests.tracking.pictures import png
from tests.whole_runs import records, torchrun

trackio = pytest.importorskip("trackio", reason="Trackio is an extra: pip install 'dtrain[trackio]'")
SQLiteStorage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
CONFIG = {"optimizer": {"lr": 0.1}, "train": {"max_steps": 4}}


@pytest.fixture
def database(tmp_path, monkeypatch):
    """A folder for the databases of projects, for this process and for those that it starts."""
    folder = tmp_path / "trackio"
    monkeypatch.setenv("TRACKIO_DIR", str(folder))
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    for module in [module for name, module in sys.modules.items() if name.startswith("trackio")]:
        for name, value in {"TRACKIO_DIR": folder, "MEDIA_DIR": folder / "media"}.items():
            monkeypatch.setattr(module, name, value, raising=False)
    return folder


@pytest.fixture
def run_dir(tmp_path, database):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def start(run_dir, lines, resumed=0, state="stopped"):
    """One start of a run."""
    sinks = build_sinks(
        TrackerConfig(name="trackio"), run_dir, "digits-12", CONFIG, resumed, evaluation_due=resumed > 0
    )
    for line in lines:
        sinks.log(line)
    sinks.finish(state, "why it ended")


def step(number):
    return {"step": number, "time": 1000.0 + number, "epoch": 0.5, "train/loss": 1 / number}


def evaluation(number):
    return {"step": number, "time": 2000.0 + number, "epoch": 0.5, "eval/accuracy": number / 10, "eval/loss": math.nan}


def in_trackio():
    """(name, step) to the values that Trackio has."""
    (run,) = trackio.Api().runs("dtrain")
    found = {}
    for row in SQLiteStorage.get_logs("dtrain", run.name, run_id=run.id):
        for name, value in row.items():
            if name not in ("step", "timestamp"):
                found.setdefault((name, row["step"]), []).append(value)
    return found


def in_file(run_dir, name="metrics.jsonl"):
    """The same of metrics.jsonl."""
    return {
        (name, line["step"]): [value]
        for line in map(json.loads, (run_dir / name).read_text().splitlines())
        for name, value in line.items()
        if name not in ("step", "time") and value is not None
        if name.startswith("eval/") or not any(each.startswith("eval/") for each in line)
    }


def test_two_starts_are_one_run_with_the_values_of_the_metrics_file(run_dir, capsys):
    start(run_dir, [step(1), step(2), evaluation(2), step(3)])
    start(run_dir, [evaluation(2), step(3), step(4), evaluation(4)], resumed=2, state="finished")
    assert in_trackio() == in_file(run_dir)
    (run,) = trackio.Api().runs("dtrain")
    assert run.name == (run_dir / "trackio" / "run-name").read_text().strip()
    assert {name: run.config[name] for name in CONFIG} == CONFIG
    assert run.config["provenance"]["torch"]
    # Trackio prints nothing itself.
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if "rackio" in line] == ["trackio"] * 2


def test_an_evaluation_that_comes_in_a_later_start_than_its_step_is_there_once(run_dir):
    start(run_dir, [step(1), step(2)])
    start(run_dir, [evaluation(2), step(3)], resumed=2)
    assert in_trackio() == in_file(run_dir)
    assert ("eval/accuracy", 2) in in_trackio()


def test_records_that_trackio_lacks_are_sent_from_the_metrics_file(run_dir, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sinks.BackgroundSink, "log", lambda *_: None)  # as if it had been killed
        start(run_dir, [step(1), step(2), evaluation(2)])
    start(run_dir, [step(3)], resumed=2)
    assert in_trackio() == in_file(run_dir)
    assert {number for _, number in in_trackio()} == {1, 2, 3}


def test_two_runs_of_one_name_stay_two(run_dir, tmp_path):
    (tmp_path / "other").mkdir()
    start(run_dir, [step(1)])
    start(tmp_path / "other", [step(1)])
    assert len(trackio.Api().runs("dtrain")) == 2


def test_media_and_alerts(run_dir, database):
    sinks = build_sinks(TrackerConfig(name="trackio"), run_dir, "digits-12", CONFIG, 0)
    sinks.log(evaluation(2))
    sinks.media(2, "confusion", png(4, 3))
    sinks.media(2, "sample", "a < b")
    sinks.alert("rank 1 is slow")
    sinks.finish("failed", "ValueError: no")
    found = in_trackio()
    assert found["media/sample", 2][0]["_value"] == "    a < b\n"
    assert (database / "media" / found["media/confusion", 2][0]["file_path"]).read_bytes() == png(4, 3)
    alerts = {(alert["level"], alert["text"]) for alert in trackio.Api().alerts("dtrain")}
    assert alerts == {("warn", "rank 1 is slow"), ("error", "ValueError: no")}


def test_a_folder_that_cannot_be_written_ends_no_run(run_dir, database, capsys):
    database.touch()
    start(run_dir, [step(1), step(2)])
    assert len(records(run_dir)) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_training_run_that_is_killed_and_resumed_is_one_run_of_trackio(run_dir):
    quick = ("experiment=digits", f"run.dir={run_dir}", "tracker=trackio", "train.log_every=1", "train.eval_every=5")
    quick += ("data.num_workers=0", "model.width=4", "train.max_epochs=null", "train.max_steps=10")
    assert torchrun(2, *quick, "checkpoint.every_steps=3", faulty("kill@rank=0,step=9")).returncode != 0
    done = torchrun(2, *quick)
    assert done.returncode == 0, done.stderr
    assert "Trackio" not in done.stdout
    found, expected = in_trackio(), in_file(run_dir)
    assert found.pop(("media/confusion", 10))
    repeated = in_file(run_dir, "cut-metrics.jsonl")  # of these Trackio keeps the first values
    assert repeated
    assert found.keys() == expected.keys()
    for key, values in found.items():
        assert values in (expected[key], repeated.get(key)), key

import json
import logging
import math
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.fault_hook import faulty
from dtrain.config.schema import TrackerConfig
from dtrain.tracking import build_sinks
from tests.tracking.pictures import png
from tests.whole_runs import records, torchrun

pytest.importorskip("mlflow", reason="MLflow is an extra: pip install 'dtrain[mlflow]'")
pytest.importorskip("sqlalchemy", reason="mlflow-skinny has no local store: pip install 'dtrain[mlflow]'")
from mlflow.tracking import MlflowClient

from dtrain.tracking import mlflow_sink

CONFIG = {
    "optimizer": {"lr": 0.1, "betas": [0.9, 0.99]},
    "train": {"max_steps": 4},
    "vars": {},
    "data": {"train": None},
}


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """MLflow's database without runs: creating it takes seconds."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(empty_store, tmp_path, monkeypatch):
    """The URI of an empty database, in which MLflow's default directory is this test's."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def start(run_dir, lines, resumed=0, state="stopped", config=CONFIG, **tracker):
    """One start of a run."""
    tracker = TrackerConfig(name="mlflow", **tracker)
    sinks = build_sinks(tracker, run_dir, "digits-12", config, resumed, evaluation_due=resumed > 0)
    for line in lines:
        sinks.log(line)
    sinks.finish(state, "why it ended")


def step(number, loss=None):
    return {"step": number, "time": 1000.0 + number, "epoch": 0.5, "train/loss": 1 / number if loss is None else loss}


def evaluation(number):
    return {"step": number, "time": 2000.0 + number, "epoch": 0.5, "eval/accuracy": number / 10, "eval/loss": math.nan}


def the_run(uri, project="dtrain"):
    """The only run of an experiment."""
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name(project).experiment_id])
    return client, run


def in_mlflow(uri, project="dtrain"):
    """(name, step) to the values that MLflow has, read back through its own client."""
    client, run = the_run(uri, project)
    found = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            found.setdefault((name, metric.step), []).append((metric.value, metric.timestamp))
    return found


def in_file(run_dir, name="metrics.jsonl"):
    """The same of metrics.jsonl."""
    return {
        (name, line["step"]): [(value, round(1000 * line["time"]))]
        for line in map(json.loads, (run_dir / name).read_text().splitlines())
        for name, value in line.items()
        if name not in ("step", "time") and value is not None
        if name.startswith("eval/") or not any(each.startswith("eval/") for each in line)
    }


def test_two_starts_are_one_run_with_the_values_of_the_metrics_file(run_dir, store):
    start(run_dir, [step(1), step(2), evaluation(2), step(3)], state="failed")
    assert the_run(store)[1].info.status == "FAILED"
    start(run_dir, [evaluation(2), step(3), step(4), evaluation(4)], resumed=2, state="finished")
    assert in_mlflow(store) == in_file(run_dir)
    client, run = the_run(store)
    assert (run.info.status, run.info.run_name, run.data.tags["reason"]) == ("FINISHED", "digits-12", "why it ended")
    assert json.loads((run_dir / "mlflow" / "run.json").read_text())["run_id"] == run.info.run_id
    assert run.data.params == {
        "optimizer.lr": "0.1",
        "optimizer.betas": "[0.9, 0.99]",
        "train.max_steps": "4",
        "vars": "{}",
        "data.train": "None",
    }
    assert run.data.tags["torch"]
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["config.yaml"]


def test_a_step_that_a_resumed_run_repeats_is_not_sent_again(run_dir, store):
    start(run_dir, [step(1), step(2)])
    start(run_dir, [step(2) | {"time": 5000.0}, step(3)], resumed=1)
    assert in_mlflow(store)["train/loss", 2] == [(0.5, 1002000)]
    assert ("train/loss", 3) in in_mlflow(store)


def test_records_that_mlflow_lacks_are_sent_from_the_metrics_file(run_dir, store):
    start(run_dir, [step(1)])
    with (run_dir / "metrics.jsonl").open("a") as file:  # as if the server had been away
        for line in (step(2), evaluation(2) | {"eval/loss": 0.5}, step(3)):
            file.write(json.dumps(line) + "\n")
    start(run_dir, [step(4)], resumed=3)
    assert in_mlflow(store) == in_file(run_dir)
    assert {number for _, number in in_mlflow(store)} == {1, 2, 3, 4}


def test_a_run_that_mlflow_lost_begins_again_with_all_records(run_dir, store, capsys):
    start(run_dir, [step(1), step(2)])
    client, run = the_run(store)
    client.delete_run(run.info.run_id)
    start(run_dir, [step(3)], resumed=2)
    assert the_run(store)[1].info.run_id != run.info.run_id
    assert in_mlflow(store) == in_file(run_dir)
    assert f"mlflow: run {run.info.run_id} of the earlier start" in capsys.readouterr().out


def test_the_default_store_of_a_resumed_run_is_that_of_its_first_start(run_dir, store, tmp_path, monkeypatch):
    start(run_dir, [step(1)])
    monkeypatch.chdir(run_dir)
    start(run_dir, [step(2)], resumed=1)
    assert in_mlflow(store) == in_file(run_dir)
    assert not (run_dir / "mlflow.db").exists()


def test_names_and_values_outside_of_mlflows_limits(run_dir, store):
    config = {"vars": {"a@b": "x" * 10_000, "/up": 1, "..": 2}, "data": {str(n): n for n in range(150)}}
    start(run_dir, [step(1) | {"acc@5": 0.5, "m//x": 1.0, **{f"m/{n}": n for n in range(1500)}}], config=config)
    _client, run = the_run(store)
    assert run.data.metrics["acc_5"] == 0.5
    assert run.data.metrics["m/x"] == 1.0
    assert run.data.metrics["m/1499"] == 1499
    assert len(run.data.params) == 153
    assert len(run.data.params["vars.a_b"]) == 6000


def test_a_changed_config_is_the_artifact_and_the_first_one_the_parameters(run_dir, store, tmp_path):
    start(run_dir, [step(1)])
    start(run_dir, [step(2)], resumed=1, config={"train": {"max_steps": 8}})
    client, run = the_run(store)
    assert run.data.params["train.max_steps"] == "4"
    assert "max_steps: 8" in (tmp_path / client.download_artifacts(run.info.run_id, "config.yaml")).read_text()
    assert in_mlflow(store) == in_file(run_dir)


def test_project_tags_and_media(run_dir, store):
    tracker = TrackerConfig(name="mlflow", project="other", tags=["a", "b"])
    sinks = build_sinks(tracker, run_dir, "digits-12", CONFIG, 0)
    sinks.log(evaluation(2))
    sinks.media(2, "confusion", png(4, 3))
    sinks.media(2, "sample", "a text")
    sinks.finish("stopped")
    client, run = the_run(store, "other")
    assert run.info.status == "KILLED"
    assert run.data.tags["a"] == run.data.tags["b"] == "true"
    paths = {
        each.path
        for name in ("confusion", "sample")
        for each in client.list_artifacts(run.info.run_id, f"media/{name}")
    }
    assert paths == {"media/confusion/step-000000002.png", "media/sample/step-000000002.txt"}


def test_no_password_of_a_uri_is_kept_or_shown(run_dir, store, capsys, monkeypatch):
    monkeypatch.setattr(mlflow_sink, "MlflowClient", lambda _: MlflowClient(store))
    start(run_dir, [step(1)], mlflow_uri="https://me:hunter2@mlflow.example.org")
    assert in_mlflow(store)
    assert "hunter2" not in capsys.readouterr().out
    assert not [path for path in run_dir.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]


def test_a_store_that_cannot_work_is_reported_once_and_ends_no_run(run_dir, store, capsys):
    start(run_dir, [step(1), step(2)], mlflow_uri="bogus://somewhere")
    assert capsys.readouterr().out.count("mlflow: ") == 1
    assert len(records(run_dir)) == 2


def test_a_driver_that_is_not_installed_is_one_line(run_dir, store, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    start(run_dir, [step(1)], mlflow_uri="postgresql+psycopg2://me:hunter2@127.0.0.1:1/db")
    text = capsys.readouterr()
    assert "psycopg2" in text.out
    assert "The run continues without it" in text.out
    assert "hunter2" not in text.out + text.err


def test_statistics_of_use_are_off_and_records_of_alembic_are_not_shown(run_dir, store):
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    start(run_dir, [step(1)])
    assert logging.getLogger("alembic").level == logging.WARNING


# -- a local database


def half_made(path):
    """Makes a database look like one whose creation was killed: a migration has added a table, and is not recorded."""
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DELETE FROM experiments")
        database.execute("UPDATE alembic_version SET version_num = '451aebb31d03'")
        database.execute("DROP TABLE registered_model_aliases")


def test_a_database_whose_creation_was_killed_is_set_aside_and_a_new_one_is_created(
    run_dir, store, tmp_path, empty_store, capsys, monkeypatch
):
    monkeypatch.setattr(mlflow_sink, "ABANDONED_SECONDS", 0.01)
    monkeypatch.setattr(mlflow_sink, "_create", lambda path: shutil.copy(empty_store, path))  # in place of seconds
    half_made(tmp_path / "mlflow.db")
    content = (tmp_path / "mlflow.db").read_bytes()
    start(run_dir, [step(1)])
    (aside,) = tmp_path.glob("mlflow.db.incomplete-*")
    assert aside.name in capsys.readouterr().out
    assert aside.read_bytes() == content
    assert in_mlflow(store) == in_file(run_dir)


def test_a_database_that_another_program_is_creating_is_waited_for(
    run_dir, store, tmp_path, empty_store, capsys, monkeypatch
):
    half_made(tmp_path / "mlflow.db")

    def create(_):
        shutil.copy(empty_store, tmp_path / "mlflow.db")

    monkeypatch.setattr(mlflow_sink, "time", SimpleNamespace(sleep=create))
    start(run_dir, [step(1)])
    assert not list(tmp_path.glob("mlflow.db.incomplete-*"))
    assert in_mlflow(store) == in_file(run_dir)


def test_a_creation_that_is_interrupted_leaves_no_database(run_dir, store, tmp_path, capsys, monkeypatch):
    (tmp_path / "mlflow.db").unlink()

    def interrupted(uri):
        Path(uri.removeprefix("sqlite:///")).write_bytes(b"half a database")
        raise SystemExit("killed")

    monkeypatch.setattr(mlflow_sink, "MlflowClient", interrupted)
    start(run_dir, [step(1)])
    assert not (tmp_path / "mlflow.db").exists()
    assert "mlflow: killed. The run continues without it" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"no database at all" * 100, b"SQLite format 3\0" + bytes(5000)])
def test_a_file_that_is_no_database_is_named_with_the_remedy_and_kept(run_dir, store, tmp_path, capsys, content):
    (tmp_path / "mlflow.db").write_bytes(content)
    start(run_dir, [step(1)])
    text = capsys.readouterr()
    assert str(tmp_path / "mlflow.db") in text.out
    assert "tracker.mlflow_uri" in text.out
    assert "Traceback" not in text.out + text.err
    assert (tmp_path / "mlflow.db").read_bytes() == content


def test_a_folder_that_cannot_have_a_database_is_named_with_the_remedy(run_dir, store, tmp_path, capsys):
    (tmp_path / "file").touch()
    start(run_dir, [step(1)], mlflow_uri=f"sqlite:///{tmp_path / 'file' / 'mlflow.db'}")
    text = capsys.readouterr()
    assert str(tmp_path / "file" / "mlflow.db") in text.out
    assert "tracker.mlflow_uri" in text.out
    assert "Traceback" not in text.out + text.err


ONE_RUN = """
import sys
from pathlib import Path
from dtrain.config.schema import TrackerConfig
from dtrain.tracking import build_sinks
run = Path(sys.argv[1])
run.mkdir(exist_ok=True)
sinks = build_sinks(TrackerConfig(name="mlflow"), run, run.name, {}, 0)
sinks.log({"step": 1, "time": 1.0, "train/loss": 0.5})
sinks.finish("finished")
"""


def a_run(folder, name):
    """A process that is one run, in a folder where the database is."""
    return subprocess.Popen([sys.executable, "-c", ONE_RUN, name], cwd=folder, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def nothing(tmp_path, monkeypatch):
    """A folder without a database."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "nothing").mkdir()
    return tmp_path / "nothing"


@pytest.mark.slow
def test_runs_that_start_at_the_same_time_in_an_empty_folder_are_all_in_the_database(nothing):
    runs = [a_run(nothing, f"run-{number}") for number in range(3)]
    assert ["" if "Traceback" not in (text := run.communicate()[1]) else text for run in runs] == ["", "", ""]
    client = MlflowClient(f"sqlite:///{nothing / 'mlflow.db'}")
    found = client.search_runs([client.get_experiment_by_name("dtrain").experiment_id])
    assert sorted(run.info.run_name for run in found) == ["run-0", "run-1", "run-2"]
    assert {run.info.status for run in found} == {"FINISHED"}


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_creates_the_database_does_not_break_later_ones(nothing):
    killed = a_run(nothing, "killed")
    while not (nothing / "mlflow.db.lock").exists():
        time.sleep(0.01)
    time.sleep(0.5)
    killed.kill()
    killed.communicate()
    later = a_run(nothing, "later")
    assert "Traceback" not in later.communicate()[1]
    client = MlflowClient(f"sqlite:///{nothing / 'mlflow.db'}")
    found = client.search_runs([client.get_experiment_by_name("dtrain").experiment_id])
    assert [run.info.status for run in found if run.info.run_name == "later"] == ["FINISHED"]


# -- a real server


class Server:
    """``mlflow server`` on this machine."""

    def __init__(self, folder, empty_store):
        self._folder = folder
        folder.mkdir()
        shutil.copy(empty_store, folder / "mlflow.db")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self._port}"

    def start(self):
        command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={self._port}", "--workers=1"]
        command += [
            f"--backend-store-uri=sqlite:///{self._folder / 'mlflow.db'}",
            f"--artifacts-destination={self._folder}",
        ]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, cwd=self._folder)
        deadline = time.monotonic() + 600
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self._port), timeout=1):
                    return
            except OSError:
                assert time.monotonic() < deadline
                assert self._process.poll() is None, (self._folder / "log").read_text()
                time.sleep(0.1)

    def kill(self):
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture
def server(tmp_path, empty_store, store):
    server = Server(tmp_path / "server", empty_store)
    server.start()
    yield server
    server.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_that_is_killed_and_started_again_gets_every_record(run_dir, server, capsys, monkeypatch):
    monkeypatch.setattr(mlflow_sink, "RETRY_SECONDS", 0.2)
    sinks = build_sinks(TrackerConfig(name="mlflow", mlflow_uri=server.uri), run_dir, "digits-12", CONFIG, 0)
    for number in range(1, 6):
        sinks.log(step(number))
    sinks.media(5, "confusion", png(4, 3))
    while not in_mlflow_or_nothing(server.uri).get(("train/loss", 5)):
        time.sleep(0.1)
    server.kill()
    began = time.monotonic()
    for number in range(6, 11):
        sinks.log(step(number))
    assert time.monotonic() - began < 1
    time.sleep(2)
    server.start()
    sinks.log(evaluation(10))
    sinks.finish("finished")
    assert in_mlflow(server.uri) == in_file(run_dir)
    assert the_run(server.uri)[1].info.status == "FINISHED"
    assert capsys.readouterr().out.count("mlflow: no answer; trying again") == 1


def in_mlflow_or_nothing(uri):
    try:
        return in_mlflow(uri)
    except (AttributeError, ValueError):  # no experiment or no run yet
        return {}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_that_is_away_is_reported_once_delays_nothing_and_gets_the_records_later(
    run_dir, tmp_path, empty_store, store, capsys, monkeypatch
):
    monkeypatch.setattr(mlflow_sink, "RETRY_SECONDS", 0.2)
    monkeypatch.setattr("dtrain.tracking.sinks.OPEN_TIMEOUT", 0.1)
    monkeypatch.setattr("dtrain.tracking.sinks.FINISH_TIMEOUT", 1.0)
    server = Server(tmp_path / "server", empty_store)
    start(run_dir, [step(1), step(2)], mlflow_uri=server.uri)
    shown = capsys.readouterr().out
    assert shown.count("mlflow: no answer") == shown.count("mlflow: did not end in time") == 1
    server.start()
    try:
        monkeypatch.setattr("dtrain.tracking.sinks.FINISH_TIMEOUT", 60.0)
        start(run_dir, [step(3)], resumed=2, mlflow_uri=server.uri)
        found = {}
        client = MlflowClient(server.uri)
        for run in client.search_runs([client.get_experiment_by_name("dtrain").experiment_id]):
            for each in client.get_metric_history(run.info.run_id, "train/loss"):
                found.setdefault(run.info.run_id, []).append(each.step)
        kept = json.loads((run_dir / "mlflow" / "run.json").read_text())["run_id"]
        assert sorted(found[kept]) == [1, 2, 3]
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_training_run_that_is_killed_and_resumed_is_one_run_of_mlflow(run_dir, store):
    quick = ("experiment=digits", f"run.dir={run_dir}", "tracker=mlflow", "train.log_every=1", "train.eval_every=5")
    quick += ("data.num_workers=0", "model.width=4", "train.max_epochs=null", "train.max_steps=10")
    assert torchrun(2, *quick, "checkpoint.every_steps=3", faulty("kill@rank=0,step=9")).returncode != 0
    done = torchrun(2, *quick)
    assert done.returncode == 0, done.stderr
    found, expected = in_mlflow(store), in_file(run_dir)
    repeated = in_file(run_dir, "cut-metrics.jsonl")  # of these MLflow keeps the first values
    assert repeated
    assert found.keys() == expected.keys()
    for key, values in found.items():
        assert values in (expected[key], repeated.get(key)), key
    client, run = the_run(store)
    assert (run.info.status, run.data.params["optimizer.lr"]) == ("FINISHED", "0.003")
    assert client.list_artifacts(run.info.run_id, "media/confusion")

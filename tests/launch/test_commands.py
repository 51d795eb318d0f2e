"""Commands for runs on this machine; those for SLURM jobs are tested in test_slurm.py."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtrain.launch import __main__ as launch
from dtrain.launch import commands
from dtrain.launch.commands import COMMANDS, newest_log, status_table
from dtrain.runs.history import History
from dtrain.runs.run_dir import is_trained, write_status
from tests.refusals import assert_refused
from tests.whole_runs import status, train_on


def make_run(run_dir: Path, state: str | None, config: dict[str, Any], *records: dict[str, float]) -> Path:
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    if state:
        reason = None if state == "finished" else "SIGTERM"
        write_status(run_dir, state, int(records[-1]["step"]) if records else 0, reason, last_step=40)
    return run_dir


@contextmanager
def trained(run_dir: Path) -> Iterator[None]:
    with (run_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_stop_writes_the_stop_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "a", "running", {})
    with trained(run):
        assert launch.main(["stop", str(run)]) == 0
    assert (run / "STOP").exists()
    assert f"{run}: the run will save and stop" in capsys.readouterr().out


def test_stop_of_a_run_without_a_process_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "a", "running", {})
    assert launch.main(["stop", str(run)]) == launch.FAILED
    assert f"{run}: no process trains this run" in capsys.readouterr().err
    assert not (run / "STOP").exists()


def test_status_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "a", "finished", {}, {"step": 40, "train/loss": 0.5})
    assert launch.main(["status", str(run)]) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert (*row[:2], *row[3:]) == ("finished", "40/40", "s", "a", "0.5")


def test_status_says_how_many_parameters_are_trained(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, "finished", {}, {"step": 40}) for name in "abc"]
    for run, trained in zip(runs, (5130, 11_181_642), strict=False):  # of the third it is not known
        write_status(run, "finished", 40, parameters=11_181_642, trained_parameters=trained)
    assert [line.rpartition("  ")[2] for line in status_table(runs, 60).splitlines()[:4]] == [
        "parameters",
        "5,130 of 11,181,642 trained",
        "11,181,642",
        "-",
    ]


def test_files_beside_the_runs_are_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "a", "finished", {}, {"step": 40, "train/loss": 0.5})
    (tmp_path / "report.html").touch()
    assert launch.main(["status", str(run), str(tmp_path / "report.html")]) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert (*row[:2], *row[3:]) == ("finished", "40/40", "s", "a", "0.5")


def test_a_misspelt_command_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["statu", "runs/1"]) == launch.FAILED
    assert "there is no command 'statu'. Did you mean 'status'?" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert launch.main([command]) == launch.FAILED
    assert f"{command}: give the directory of a run" in capsys.readouterr().err
    assert launch.main([command, str(tmp_path / "nowhere")]) == launch.FAILED
    assert f"{command}: {tmp_path / 'nowhere'} is not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_a_directory_without_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert launch.main([command, str(tmp_path)]) == launch.FAILED
    assert str(tmp_path) in capsys.readouterr().err


def test_the_log_is_that_of_the_newest_job_or_the_metrics_or_that_of_rank_0(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank-00000.log").touch()
    assert newest_log(tmp_path) == logs / "rank-00000.log"
    (tmp_path / "metrics.jsonl").touch()
    assert newest_log(tmp_path) == tmp_path / "metrics.jsonl"
    (logs / "slurm-12.out").touch()
    (logs / "slurm-9.out").touch()
    (tmp_path / ".job").write_text("12\n")
    assert newest_log(tmp_path) == logs / "slurm-12.out"


RECORD = {"step": 10, "time": 1.7e9, "epoch": 0.4454, "train/loss": 0.123456789012345}


def test_tail_of_a_finished_run_prints_readable_lines_and_how_it_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = {"step": 40, "time": 1.7e9, "eval/accuracy": 0.987654321098765}
    run = make_run(tmp_path / "a", "failed", {}, RECORD, evaluation)
    assert launch.main(["tail", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"==> {run / 'metrics.jsonl'}",
        "step 10/40  epoch 0.45  loss 0.1235",
        "eval 40/40  accuracy 0.9877",
        f"==> failed: SIGTERM, step 40/40: {run}",
    ]


def test_tail_follows_a_run_until_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "a", "running", {}, RECORD, RECORD | {"step": 20})
    pauses, sleep = list[float](), time.sleep

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        sleep(0.01)

    monkeypatch.setattr(time, "sleep", pause)

    def until_it_has_looked() -> None:
        before = len(pauses)
        while len(pauses) < before + 2:
            sleep(0.01)

    def train() -> None:
        with trained(run):
            until_it_has_looked()
            # The run was resumed from step 10 and has removed the record after it.
            (run / "metrics.jsonl").write_text(json.dumps(RECORD) + "\n")
            until_it_has_looked()
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(RECORD | {"step": 30, "train/loss": None}) + "\n")
            write_status(run, "finished", 30, last_step=40)

    with ThreadPoolExecutor() as pool:
        training = pool.submit(train)
        assert launch.main(["tail", str(run)]) == 0
        training.result()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:4]] == ["10/40", "20/40", "30/40"]
    assert lines[4:] == [f"==> finished, step 30/40: {run}"]


def test_resume_refuses_a_run_of_the_users_batch_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "a", "stopped", {}, {"step": 3})
    (run / ".job").write_text("12\n")
    assert launch.main(["resume", str(run)]) == launch.FAILED
    assert f"RUN_DIR={run} sbatch slurm/..." in capsys.readouterr().err


def test_resume_refuses_a_batch_script_that_dtrain_did_not_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "a", "stopped", {}, {"step": 3})
    (run / "job.sbatch").write_text("#!/bin/bash\nrm -r everything\n")
    assert launch.main(["resume", str(run)]) == launch.FAILED
    assert_refused(capsys.readouterr().err, run / "job.sbatch", "", "--trust")


@pytest.mark.slow
def test_a_run_is_resumed_as_it_was_started(tmp_path: Path, digits: Path) -> None:
    run = tmp_path / "it's a run"
    quoted = str(run).replace("'", "\\'")
    train_on(1, Path(f"'{quoted}'"), "train.max_steps=4", "optimizer.lr=0.01")
    write_status(run, "stopped", 4)
    overrides = (run / "overrides.yaml").read_text()
    (run / "overrides.yaml").write_text(overrides.replace("train.max_steps=4", "train.max_steps=6"))
    assert launch.main(["resume", str(run)]) == launch.FAILED  # edited, so it may be somebody else's
    assert launch.main(["resume", "--trust", str(run)]) == 0
    assert status(run)["step"] == 6
    assert "lr: 0.01" in (run / "config.yaml").read_text()


# -- the table of `status`


def test_the_table_shows_varied_settings_and_last_metrics(tmp_path: Path) -> None:
    first = make_run(
        tmp_path / "a",
        "finished",
        {"optimizer": {"lr": 0.1}, "launch": {"time": "1"}},
        {"step": 10, "train/loss": 2.0},
        {"step": 40, "train/loss": 0.123456, "eval/accuracy": 0.5},
    )
    second = make_run(
        tmp_path / "bcd", "stopped", {"optimizer": {"lr": 0.3}, "launch": {"time": "2"}}, {"step": 10, "train/loss": 3}
    )
    assert re.sub(r"\d s", "0 s", status_table([first, second], 80)).splitlines() == [
        "state     step   age  run   lr  train/loss  eval/accuracy",
        "finished  40/40  0 s  a    0.1      0.1235            0.5",
        "stopped   10/40  0 s  bcd  0.3           3              -",
        "",
        "bcd: stopped: SIGTERM",
    ]
    assert status_table([first, second], 50).splitlines()[0] == "state     step   age  run   lr  train/loss"
    assert "not shown in 50 columns: eval/accuracy" in status_table([first, second], 50)


def test_many_settings_and_long_reasons_keep_the_table_readable(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / name, "stopped", {"data": {f"key{number}": f"{name}{number}" for number in range(50)}})
        for name in "ab"
    ]
    for run in runs:
        write_status(run, "failed", 0, "long " * 100)
    table, notes = status_table(runs, 80).split("\n\n")
    assert max(map(len, table.splitlines())) <= 80
    assert "b: failed: long" in notes


def test_a_directory_of_runs_lists_its_runs(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    for name in "ab":
        make_run(tmp_path / "sweep" / name, "finished", {}, {"step": 40})
    assert [line.split()[-1] for line in status_table([tmp_path], 80).splitlines()[:3]] == ["train/loss", "-", "-"]


def test_a_run_that_has_not_started_is_listed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", None, {"run": {"seed": 1}})
    assert status_table([run], 80).splitlines()[1].split() == ["not", "started", "-", "-", "a", "-"]


def test_a_killed_run_differs_from_a_running_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", "running", {}, {"step": 3, "train/loss": 1.0})
    (run / ".lock").touch()
    assert not is_trained(run)
    assert "killed" in status_table([run], 80)
    with trained(run):
        assert is_trained(run)
        assert "running" in status_table([run], 80)
    assert not is_trained(run)


def test_the_step_of_a_running_run_is_its_newest_logged_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", "running", {}, {"step": 3})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7}\n')
    assert "7/40" in status_table([run], 80)


def test_control_characters_in_the_files_of_a_run_are_not_printed(tmp_path: Path) -> None:
    bell, red = "\a", "\x1b[31m"
    runs = [
        make_run(tmp_path / f"{name}{red}", None, {f"task{red}": f"{name}{bell}"}, {"step": 1, f"eval/a{bell}": 1.0})
        for name in "ab"
    ]
    for run in runs:
        write_status(run, "failed", 1, f"{red}all of it\rgone")
    text = status_table(runs, 80)
    assert all(line.isprintable() for line in text.splitlines())
    assert "failed: ?[31mall of it" in text
    assert len(text.splitlines()) == 6


DAMAGES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "binary": lambda path: path.write_bytes(b"\xff\xfe\0\1"),
    "nowhere": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "empty": Path.touch,
    "huge": lambda path: (path.touch(), os.truncate(path, 2**32)),
}


def test_each_damaged_directory_is_a_row_and_none_blocks_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_SECONDS_TO_START", -60.0)  # tail does not wait for a start
    names = [".job", ".lock", "status.json", "config.yaml", "metrics.jsonl", "logs/slurm-12.out", "logs", "search.json"]
    runs = []
    for name, (kind, damage) in itertools.product(names, DAMAGES.items()):
        if (name, kind) == ("metrics.jsonl", "huge"):  # it is read
            continue
        run = make_run(tmp_path / f"{name.strip('.').replace('/', '-')}-{kind}", "finished", {}, {"step": 3})
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).unlink(missing_ok=True)
        damage(run / name)
        runs.append(run)
    assert launch.main(["status", str(tmp_path)]) == 0
    table = capsys.readouterr().out.partition("\n\n")[0]
    assert [run.name for run in runs if table.count(f" {run.name} ") != 1] == []
    for command, run in itertools.product(("tail", "stop"), runs):
        launch.main([command, str(run)])
        out, error = capsys.readouterr()
        assert out or error.startswith("dtrain: error: ")


@pytest.mark.parametrize("name", ["step", "last_step", "time", "restarts", "lost_seconds"])
@pytest.mark.parametrize("value", ["abc", [1], {"a": 1}, -5, 10**400, True])
def test_a_wrong_number_in_a_status_is_left_out(tmp_path: Path, name: str, value: Any) -> None:
    run = make_run(tmp_path / "a", "failed", {}, {"step": 3})
    write_status(run, "failed", 3, "why")
    path = run / "status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    table, notes = status_table([run], 80).split("\n\n")
    assert table.splitlines()[1].split()[0] == "failed"
    assert notes == "a: failed: why\n"
    assert any(name in gap for gap in History.read(run, "a").gaps)


def test_numbers_of_a_hundred_digits_keep_the_table_readable(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", "running", {}, {"step": 1e99})
    assert status_table([run], 80).splitlines()[1].split()[1] == "1e+99/40"


def test_a_directory_without_a_run_does_not_hide_the_runs_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "a", "finished", {}, {"step": 40})
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").symlink_to("nowhere")
    assert launch.main(["status", *map(str, sorted(tmp_path.iterdir()))]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].split()[0] == "finished"
    assert "empty: " in out
    assert launch.main(["status", str(run), str(tmp_path / "misspelt")]) == launch.FAILED


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run"):
        status_table([tmp_path], 80)

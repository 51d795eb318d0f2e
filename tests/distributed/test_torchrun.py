"""What is on the terminal when a job under torchrun ends: dtrain's message last, and not torchrun's report."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from dtrain.command_line import run
from dtrain.data.loading.batch import Batch
from dtrain.distributed import torchrun as torchrun_module
from dtrain.errors import ConfigError, PeerFailed
from dtrain.tasks.classification import Classification
from dtrain.training.task import Output
from tests.forked_python import forked_python
from tests.whole_runs import ROOT, status

DTRAIN = ["torchrun", "--standalone", "-m", "dtrain.train", "experiment=digits"]


# -- real jobs


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment in which the entry points of pyproject.toml are installed, also where an older version is."""
    declared = re.search(r'"torchrun\.handlers"\]\n([\w-]+) = "(.*)"', (ROOT / "pyproject.toml").read_text())
    assert declared is not None
    info = tmp_path / "site" / "entry_points_of_dtrain-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: entry-points-of-dtrain\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[torchrun.handlers]\n{declared[1]} = {declared[2]}\n")
    path = os.pathsep.join([str(tmp_path / "site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def start(environment: dict[str, str], *arguments: object) -> subprocess.Popen[str]:
    """torchrun with two ranks; the standard error of all processes goes to one pipe, as to a terminal."""
    command = [forked_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def failed(environment: dict[str, str], *arguments: object) -> list[str]:
    """The lines of standard error of a job that fails."""
    job = start(environment, *arguments)
    try:
        error = job.communicate(timeout=120)[1]
    finally:
        job.kill()
    assert job.returncode == 1, error
    assert "ChildFailedError" not in error
    lines = [line for line in error.splitlines() if line.strip()]
    assert not [line for line in lines if "torch/distributed/elastic" in line and "failed (exitcode: -9)" not in line]
    return lines


def training(run_dir: Path, *overrides: str) -> list[str]:
    return ["-m", "dtrain.train", "experiment=digits", "tracker=none", f"run.dir={run_dir}", *overrides]


@pytest.mark.slow
def test_a_wrong_value_ends_the_job_with_one_line(installed: dict[str, str], tmp_path: Path) -> None:
    (line,) = failed(installed, *training(tmp_path / "run", "train.log_every=often"))
    assert line.startswith("dtrain: error: train.log_every: ")
    assert "often" in line


@pytest.mark.slow
def test_an_error_found_by_the_ranks_is_the_last_line(installed: dict[str, str], tmp_path: Path) -> None:
    lines = failed(installed, *training(tmp_path / "run", "data.train=/nowhere/*.tar"))
    assert lines[-1].startswith("dtrain: error: ")
    assert "/nowhere/*.tar" in lines[-1]
    assert len(lines) <= 2


class FailsOnRankOne(Classification):
    """Ends rank 1 in one of its first steps, as the variable ``END`` says."""

    calls = 0

    def __call__(self, model: torch.nn.Module, batch: Batch) -> Output:
        self.calls += 1  # the first are those of a check of the task
        if self.calls > 6 and os.environ["RANK"] == "1":
            if os.environ["END"] == "raise":
                raise ZeroDivisionError("a bug of the user's")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(model, batch)


TASK = f"task._target_={__name__}.FailsOnRankOne"


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_job_with_its_traceback(installed: dict[str, str], tmp_path: Path) -> None:
    lines = failed(installed | {"END": "raise"}, *training(tmp_path / "run", TASK))
    traceback = lines[next(at for at, line in enumerate(lines) if line.startswith("dtrain: rank 1 failed: task ")) :]
    # rank 0 says where the run is; its line may come before or after the traceback
    own = [line for line in traceback if not line.startswith("dtrain: failed at step")]
    assert own[-1] == "ZeroDivisionError: a bug of the user's"
    assert sum(line.startswith("Traceback") for line in lines) == 1


@pytest.mark.slow
def test_a_killed_rank_is_named_in_the_last_line(installed: dict[str, str], tmp_path: Path) -> None:
    lines = failed(installed | {"END": "kill"}, *training(tmp_path / "run", TASK))
    assert lines[-1].startswith("dtrain: error: rank 1 was killed by SIGKILL")
    assert len(lines) < 6


@pytest.mark.slow
def test_ctrl_c_saves_and_ends_without_a_traceback(installed: dict[str, str], tmp_path: Path) -> None:
    """``dtrain train --nproc`` is torchrun, which starts each rank in a session of its own: Ctrl-C reaches it alone."""
    arguments = training(tmp_path / "run", "train.max_epochs=10000")
    own = [sys.executable, "-m", "dtrain", "train", "--nproc", "2", *arguments[2:]]
    job = subprocess.Popen(own, env=installed, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 100
        while not (tmp_path / "run" / "status.json").exists() and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        job.send_signal(signal.SIGINT)
        error = job.communicate(timeout=100)[1]  # returns when no process holds the pipe, so none is left
    finally:
        job.kill()
    assert job.returncode == 1  # as without dtrain's hook: torchrun was signalled
    assert "Traceback" not in error
    assert "torch/distributed" not in error
    assert status(tmp_path / "run")["state"] == "stopped", error


# -- the decisions


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], Path]:
    """Makes this process a rank of torchrun; returns its error file."""

    def become(number: int) -> Path:
        file = tmp_path / f"error-{number}.json"
        monkeypatch.setenv("RANK", str(number))
        monkeypatch.setenv("LOCAL_RANK", str(number))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        return file

    return become


def failure(number: int, code: int, file: object = "") -> ProcessFailure:
    return ProcessFailure(local_rank=number, pid=4000 + number, exitcode=code, error_file=str(file))


def last_message(*failures: ProcessFailure, killed: frozenset[int] = frozenset()) -> str | None:
    error = ChildFailedError("dtrain.train", {one.local_rank: one for one in failures})
    return torchrun_module._last_message("ChildFailedError", error, set(killed))


def raising(error: Exception) -> None:
    def main(composed: Any) -> None:
        raise error

    with pytest.raises(SystemExit):
        run(main, ["experiment=digits"])


def test_a_message_that_rank_0_has_shown_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, rank: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", DTRAIN)
    files = [rank(1), rank(0)]
    for number in (1, 0):
        rank(number)
        raising(ConfigError("run.name: got 'a b'. Use letters."))
    assert capsys.readouterr().err == "dtrain: error: run.name: got 'a b'. Use letters.\n"
    both = [failure(1, 1, files[0]), failure(0, 1, files[1])]
    assert last_message(*both) == ""
    monkeypatch.setattr(sys, "argv", [DTRAIN[0], "--redirects=3", *DTRAIN[1:]])
    assert last_message(*both) == "dtrain: error: run.name: got 'a b'. Use letters."  # it went to a file


def test_a_message_is_shown_if_torchrun_ended_rank_0_before_it_could(
    monkeypatch: pytest.MonkeyPatch, rank: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", DTRAIN)
    file = rank(1)
    raising(ConfigError("run.name: got 'a b'. Use letters."))
    assert capsys.readouterr().err == ""
    assert last_message(failure(0, -15), failure(1, 1, file)) == "dtrain: error: run.name: got 'a b'. Use letters."


def test_the_other_ranks_say_nothing_after_the_message_of_the_one_that_failed(
    monkeypatch: pytest.MonkeyPatch, rank: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", DTRAIN)
    monkeypatch.setenv(torchrun_module._QUIET, "1")
    file = rank(0)
    raising(PeerFailed("rank 9 failed: a full disk"))
    assert capsys.readouterr().err == ""
    # on the machine of rank 9 its own message is shown; here this one
    assert last_message(failure(0, 1, file)) == "dtrain: rank 0 stops: rank 9 failed: a full disk"


@pytest.mark.parametrize(
    ("code", "parts"),
    [(-9, ["rank 1", "SIGKILL", "dmesg"]), (-7, ["rank 1", "SIGBUS", "/dev/shm"]), (3, ["rank 1", "exit code 3"])],
)
def test_a_rank_that_explained_nothing_is_named(
    monkeypatch: pytest.MonkeyPatch, rank: Callable[[int], Path], code: int, parts: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", DTRAIN)
    file = rank(0)
    torchrun_module.record_failure("dtrain: error: another rank is gone", shown=True)
    message = last_message(failure(0, 1, file), failure(1, code), failure(2, -15))
    assert message is not None
    assert all(part in message for part in parts)
    assert len(message.splitlines()) == 1


def test_a_rank_that_torchrun_killed_is_not_the_cause(
    monkeypatch: pytest.MonkeyPatch, rank: Callable[[int], Path]
) -> None:
    monkeypatch.setattr(sys, "argv", DTRAIN)
    file = rank(0)
    torchrun_module.record_failure("dtrain: error: a full disk", shown=True)
    assert last_message(failure(0, 1, file), failure(1, -9), killed=frozenset({4001})) == ""


def test_torchruns_own_report_has_the_message_too(rank: Callable[[int], Path]) -> None:
    """Without the entry point, and in the event that torchrun writes for its caller."""
    file = rank(1)
    torchrun_module.record_failure("dtrain: error: a full disk", shown=False)
    assert "dtrain: error: a full disk" in str(ChildFailedError("dtrain.train", {1: failure(1, 1, file)}))
    assert json.loads(file.read_text())["message"]["message"] == "dtrain: error: a full disk"


# -- other programs


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Whether nothing of this process was changed."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv(torchrun_module._QUIET, "")
    monkeypatch.delenv(torchrun_module._QUIET)
    before = sys.excepthook
    loggers = [logging.getLogger(name) for name in torchrun_module._ANNOUNCEMENTS]
    for logger in loggers:
        monkeypatch.setattr(logger, "filters", [])
    # Its thread keeps the frames of the main thread, and so the tensors of later tests.
    monkeypatch.setattr(torchrun_module, "end_if_stuck", lambda: None)
    return lambda: (
        sys.excepthook is before
        and torchrun_module._QUIET not in os.environ
        and not any(logger.filters for logger in loggers)
    )


@pytest.mark.parametrize(
    "arguments", [["torchrun", "-m", "other.train"], ["torchrun", "train.py", "dtrain.train"], ["dtrain/train.py"]]
)
def test_jobs_of_other_programs_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, untouched: Callable[[], bool], arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", arguments)
    torchrun_module.entry_point()
    assert untouched()
    monkeypatch.setattr(sys, "argv", DTRAIN)
    torchrun_module.entry_point()
    assert not untouched()


def test_another_torchrun_shows_its_own_report(monkeypatch: pytest.MonkeyPatch, untouched: Callable[[], bool]) -> None:
    class ChildFailedError(Exception):
        """Without the attributes that torch 2.13 has."""

    shown: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(kind))
    torchrun_module.quiet_torchrun()
    for kind in (ChildFailedError, ValueError):
        sys.excepthook(kind, kind(), None)
    assert shown == [ChildFailedError, ValueError]


def test_the_name_of_the_entry_point_is_no_rendezvous_backend() -> None:
    class Parameters:
        backend = "dtrain-error-messages"

    with pytest.raises(ValueError, match="--rdzv-backend=c10d"):
        torchrun_module.entry_point()(Parameters)


def test_torchruns_announcements_are_dropped_and_kills_are_not(
    monkeypatch: pytest.MonkeyPatch, untouched: Callable[[], bool], caplog: pytest.LogCaptureFixture
) -> None:
    torchrun_module.quiet_torchrun()
    log = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    # Loggers of torch 2.9 do not propagate, those of newer ones do.
    monkeypatch.setattr(log, "propagate", False)
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    log.warning("Sending process %s closing signal %s", 7, "SIGTERM")
    log.error("failed (exitcode: %s) local_rank: %s", 1, 0)
    log.error("failed (exitcode: %s) local_rank: %s", -9, 0)
    log.error("something new")
    assert [record.getMessage() for record in caplog.records] == [
        "failed (exitcode: -9) local_rank: 0",
        "something new",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        "sys.argv = ['torchrun', '-m', 'dtrain.train']; torchrun_module.entry_point()",
        "torch.distributed.run.main = lambda: None; command.main(['train', '--nproc=2'])",
    ],
    ids=["torchrun", "dtrain"],
)
def test_the_store_of_torchrun_may_have_connections_to_many_ranks(start: str) -> None:
    code = f"""
import resource, sys
import torch.distributed.run
from dtrain import __main__ as command
from dtrain.distributed import torchrun as torchrun_module
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
{start}
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""
    subprocess.run([sys.executable, "-c", code], check=True)

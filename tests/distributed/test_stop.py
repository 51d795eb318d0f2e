from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist

from dtrain.distributed import stop as module
from dtrain.distributed.stop import Limit, StopRequests, TimeLimit, slurm_seconds_left
from dtrain.errors import ConfigError
from tests.ranks import run_ranks
from tests.refusals import refused

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2]


def send(*signals: signal.Signals) -> None:
    for number in signals:
        os.kill(os.getpid(), number)


def in_a_rank(work: Callable[[], Any]) -> Any:
    """In a forked process with a process group, so that no signal can hit pytest."""

    def rank(number: int) -> Any:
        return work()

    return run_ranks(1, rank)[0]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_sets_a_flag_and_nothing_else(number: signal.Signals) -> None:
    def work() -> list[str | None]:
        with StopRequests(None) as stop:
            before = stop.reason
            send(number)
            return [before, stop.reason]

    assert in_a_rank(work) == [None, number.name]


def test_the_first_reason_counts() -> None:
    def work() -> str | None:
        with StopRequests(None) as stop:
            send(signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
            return stop.reason

    assert in_a_rank(work) == "SIGUSR1"


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ([signal.SIGINT, signal.SIGINT], 130),
        ([signal.SIGINT, signal.SIGUSR1, signal.SIGINT], 130),
        ([signal.SIGUSR1, signal.SIGINT, signal.SIGINT], 130),
        ([signal.SIGINT, signal.SIGTERM], 143),
        ([signal.SIGTERM, signal.SIGINT, signal.SIGINT], 130),
        ([signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGUSR2], 0),
    ],
    ids=lambda value: "+".join(number.name for number in value) if isinstance(value, list) else str(value),
)
def test_the_first_sigint_requests_a_stop_and_the_next_one_ends_at_once(
    signals: list[signal.Signals], code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException), StopRequests(None):
            send(*signals)
            os._exit(0)
        os._exit(99)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == code
    assert ("after SIGINT: ending at once" in capfd.readouterr().err) == (code != 0)


WAITS = """
import threading
import time
from dtrain.distributed.stop import StopRequests
with StopRequests(None) as stop:
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
"""


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_real_process_with_130() -> None:
    process = subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert b"ending at once" in process.communicate(timeout=250)[1]
        assert process.returncode == 130
    finally:
        process.kill()


def test_a_forked_child_ignores_what_its_parent_listens_to() -> None:
    def work() -> list[str | None]:
        with StopRequests(None) as stop:
            child = os.fork()
            if child == 0:
                send(*SIGNALS, signal.SIGINT, signal.SIGTERM)
                os._exit(42 if stop.reason is None else 43)
            _, status = os.waitpid(child, 0)
            return [str(os.waitstatus_to_exitcode(status)), stop.reason]

    assert in_a_rank(work) == ["42", None]


def test_previous_handlers_are_restored_except_that_of_sigterm_after_an_error() -> None:
    def work() -> bool:
        def mine(number: int, frame: FrameType | None) -> None: ...

        handlers: list[Any] = [mine, signal.SIG_IGN, signal.SIG_DFL, mine]
        for number, handler in zip(SIGNALS, handlers, strict=True):
            signal.signal(number, handler)
        with StopRequests(None):
            assert not {signal.getsignal(number) for number in SIGNALS} & set(handlers)
        assert [signal.getsignal(number) for number in SIGNALS] == handlers
        with contextlib.suppress(ZeroDivisionError), StopRequests(None):
            raise ZeroDivisionError
        return [signal.getsignal(number) for number in SIGNALS[1:]] == handlers[1:]

    assert in_a_rank(work)


def test_term_after_an_error_does_not_cut_off_what_is_written_in_the_background(tmp_path: Path) -> None:
    def work() -> None:
        termed = threading.Event()

        def write() -> None:
            termed.wait(30)
            (tmp_path / "checkpoint").touch()

        with contextlib.suppress(ZeroDivisionError), StopRequests(None):
            writer = threading.Thread(target=write)
            writer.start()
            raise ZeroDivisionError
        dist.destroy_process_group()
        send(signal.SIGTERM)
        termed.set()
        writer.join()

    in_a_rank(work)
    assert (tmp_path / "checkpoint").exists()


def test_a_handler_that_was_not_installed_from_python_is_replaced() -> None:
    def work() -> bool:
        import faulthandler

        faulthandler.register(signal.SIGUSR2)  # installs a handler of C's
        with StopRequests(None) as stop:
            send(signal.SIGUSR2)
            return stop.reason == "SIGUSR2"

    assert in_a_rank(work)


# -- the STOP file


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that stands until the test moves it: ``clock[0]`` is the time."""
    now = [5.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    yield now
    monkeypatch.undo()


def test_the_stop_file_is_checked_at_most_once_a_second(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def exists(path: Path) -> bool:
        looks.append(clock[0])
        return False

    monkeypatch.setattr(module.os.path, "exists", exists)
    stop = StopRequests(tmp_path / "STOP")
    for clock[0] in (5.0, 5.1, 5.9, 6.0, 6.1, 6.99, 7.5, 8.4, 8.5):
        assert stop.reason is None
    assert looks == [5.0, 6.0, 7.5, 8.5]


def test_the_stop_file_is_a_reason_until_it_is_consumed_and_only_on_the_rank_that_looks(
    tmp_path: Path, clock: list[float]
) -> None:
    path = tmp_path / "STOP"
    stop, other = StopRequests(path), StopRequests(None)
    assert stop.reason is None
    path.touch()
    clock[0] += 1
    assert stop.reason == "STOP file"
    assert other.reason is None
    other.consume()
    assert path.exists()
    stop.consume()
    assert not path.exists()
    assert stop.reason == "STOP file"
    stop.consume()
    assert StopRequests(path).reason is None


def test_a_stop_file_that_cannot_be_deleted_is_reported_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "STOP").mkdir()
    stop = StopRequests(tmp_path / "STOP")
    assert stop.reason == "STOP file"
    stop.consume()
    assert "Delete it by hand" in capsys.readouterr().err


# -- before torchrun's SIGKILL


@pytest.mark.parametrize("agreed", [False, True])
def test_a_rank_that_has_not_agreed_to_stop_reports_before_torchrun_kills_it(
    agreed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(module._REPORT_BEFORE_KILL))  # at once, that is

    def work() -> list[str]:
        messages: list[str] = []
        with StopRequests(None, stuck=messages.append) as stop:
            if agreed:
                stop.consume()
            send(signal.SIGTERM)
            looking_on = [thread for thread in threading.enumerate() if thread.name == "stop"]
            if not agreed:
                for thread in looking_on:
                    thread.join()
        for thread in looking_on:
            thread.join()
        return messages

    messages = in_a_rank(work)
    assert bool(messages) != agreed
    assert all("asked to stop, but the ranks did not agree within" in text for text in messages)


@pytest.mark.parametrize(("until_kill", "waits"), [(30.0, 25.0), (5.0, 0.0), (1.0, 0.0)])
def test_the_report_begins_some_seconds_before_the_kill(until_kill: float, waits: float) -> None:
    waited: list[float] = []

    class Never(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            waited.append(timeout)
            return False

    messages: list[str] = []
    stop = StopRequests(None, stuck=messages.append)
    stop._ended = Never()
    stop._watch(until_kill)
    assert waited == [waits]
    assert len(messages) == 1


def test_nothing_is_reported_after_the_training_has_ended() -> None:
    messages: list[str] = []
    stop = StopRequests(None, stuck=messages.append)
    stop.__exit__(None, None, None)  # without its beginning, which would replace pytest's handlers
    stop._watch(module._REPORT_BEFORE_KILL + 10)
    assert messages == []


def test_only_torchrun_is_known_to_kill() -> None:
    assert module.seconds_until_kill({}) is None
    assert module.seconds_until_kill({"TORCHELASTIC_RUN_ID": "one"}) == 30
    assert module.seconds_until_kill({"TORCHELASTIC_RUN_ID": "one", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}) == 7


# -- time limits


def test_a_limit_is_noticed_as_early_as_the_longest_look_and_the_save_need() -> None:
    limit = TimeLimit(Limit("far", 1000.0), Limit("near", 100.0))
    seconds = [0.0]
    limit.save_seconds = lambda: seconds[0]
    assert [limit.reached(now) for now in (0.0, 10.0, 40.0, 45.0)] == [None] * 4  # the longest gap is 30
    assert limit.reached(69.0) is None
    assert limit.reached(70.0) == "near"
    seconds[0] = 10.0
    assert limit.reached(61.0) == "near"
    assert limit.reached(59.0) is None


def test_max_hours_is_a_reason_to_stop_on_rank_zero_alone() -> None:
    environment: dict[str, str] = {}
    first, other = (TimeLimit.from_config(1e-9, rank, environment) for rank in (0, 1))
    assert StopRequests(None, time_limit=first).reason == "run.max_hours=1e-09"
    assert StopRequests(None, time_limit=other).reason is None
    assert StopRequests(None, time_limit=TimeLimit.from_config(1.0, 0, environment)).reason is None


@pytest.mark.parametrize(("left", "until"), [(7200.0, 7140.0), (600.0, 540.0), (100.0, 90.0)])
def test_of_an_allocation_some_time_is_kept_for_the_end_of_the_processes(
    left: float, until: float, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "slurm_seconds_left", lambda environment: left)
    start = clock[0]
    for early, reason in ((0.001, None), (0.0, "end of the SLURM allocation")):
        assert TimeLimit.from_config(None, 0, {}).reached(start + until - early) == reason


def test_a_wrong_time_limit_is_refused() -> None:
    with refused(ConfigError, "run.max_hours", "got 0", "want"):
        TimeLimit.from_config(0, 1, {})


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        ("7:05", 425),
        ("1:00:00", 3600),
        ("2-03:04:05", 2 * 86400 + 3 * 3600 + 245),
        ("0:09", 9),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("", None),
    ],
)
def test_slurm_is_asked_for_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, seconds: float | None
) -> None:
    a_squeue(tmp_path, f"echo '{answer}'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert slurm_seconds_left({"SLURM_JOB_ID": "17"}) == seconds
    assert (tmp_path / "asked").read_text().split() == ["--noheader", "--jobs", "17", "--format=%L"]


def test_an_array_element_asks_for_itself_and_not_for_the_whole_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_squeue(tmp_path, "echo 1:00")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job = {"SLURM_JOB_ID": "17", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}
    assert slurm_seconds_left(job) == 60
    assert "17_3" in (tmp_path / "asked").read_text()


def test_no_limit_is_set_if_slurm_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_squeue(tmp_path, "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert slurm_seconds_left({"SLURM_JOB_ID": "17"}) is None
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert slurm_seconds_left({"SLURM_JOB_ID": "17"}) is None


def test_squeue_is_not_called_outside_of_a_job_or_if_the_end_is_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nobody(*args: object, **kwargs: object) -> None:
        raise AssertionError("squeue was asked")

    monkeypatch.setattr(subprocess, "run", nobody)
    left = slurm_seconds_left({"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": str(int(time.time()) + 3600)})
    assert left == pytest.approx(3600, abs=60)
    assert slurm_seconds_left({}) is None


def a_squeue(folder: Path, answers: str) -> None:
    """An executable in the place of SLURM's, which notes how it was called."""
    script = folder / "squeue"
    script.write_text(f'#!/bin/sh\necho "$@" > {folder}/asked\n{answers}\n')
    script.chmod(0o755)

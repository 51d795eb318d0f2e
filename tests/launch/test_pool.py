"""The pool with starts that are not processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dtrain.launch import pool
from dtrain.launch.job import FAILED, FINISHED, STOPPED, Job, JobResult
from dtrain.launch.pool import Pool, Screen
from tests.launch.compose import sweep


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_POLL", 0.0)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> list[Job]:
    return sweep("experiment=digits", f"run.dir={tmp_path_factory.mktemp('runs') / 'r'}", "optimizer.lr=1,2,3")


class Counted:
    """A start that ends after ``polls`` polls, or when it is asked to stop."""

    def __init__(self, job: Job, polls: int, result: JobResult) -> None:
        self.job, self._polls, self._result = job, polls, result
        self.calls: list[str] = []

    def result(self) -> JobResult | None:
        self._polls -= 1
        if self._polls > 0:
            return None
        return JobResult("stopped", STOPPED) if self.calls else self._result

    def stop(self) -> None:
        self.calls.append("stop")

    def kill(self) -> None:
        self.calls.append("kill")


@pytest.mark.slow
def test_at_most_size_starts_at_a_time_each_in_its_own_slot(jobs: list[Job]) -> None:
    slots: dict[str, int] = {}

    def start(job: Job, slot: int) -> Counted:
        slots[job.name] = slot
        return Counted(job, 2 if slot else 4, JobResult("failed", FAILED, "why"))

    with Pool(2, start) as running:
        running.start(jobs[0])
        running.start(jobs[1])
        assert not running.has_room
        assert running.wait() == []
        ((job, result, _),) = running.wait()
        assert (job, result.reason) == (jobs[1], "why")
        running.start(jobs[2])
        assert slots == {jobs[0].name: 0, jobs[1].name: 1, jobs[2].name: 1}
        while running.starts:
            running.wait()


def test_the_first_signal_stops_all_and_the_second_kills(jobs: list[Job], capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with Pool(2, lambda job, slot: Counted(job, 5, JobResult("finished", FINISHED))) as running:
        starts = [running.start(job) for job in jobs[:2]]
        os.kill(os.getpid(), signal.SIGINT)
        assert running.stopping
        running.wait()
        assert [start.calls for start in starts] == [["stop"], ["stop"]]  # type: ignore[attr-defined]
        os.kill(os.getpid(), signal.SIGUSR1)  # only SIGINT and SIGTERM end a run without a save
        running.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        running.wait()
        running.wait()
        assert [start.calls.count("kill") for start in starts] == [1, 1]  # type: ignore[attr-defined]
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr().err.count("dtrain: ") == 2


def test_an_error_in_the_block_stops_the_starts(jobs: list[Job]) -> None:
    started: list[Counted] = []

    def start(job: Job, slot: int) -> Counted:
        started.append(Counted(job, 3, JobResult("finished", FINISHED)))
        return started[-1]

    def fail() -> None:
        with Pool(1, start) as running:
            running.start(jobs[0])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert started[0].calls


@pytest.fixture
def metrics(jobs: list[Job]) -> Path:
    jobs[0].spec.dir.mkdir(exist_ok=True)
    path = jobs[0].spec.dir / "metrics.jsonl"
    path.unlink(missing_ok=True)
    return path


def test_the_screen_counts_what_is_done_and_has_no_line_without_a_terminal(
    jobs: list[Job], metrics: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Screen(5, done=2)
    screen.note("a: started")
    screen.note("a: finished", 1)
    metrics.write_text('{"step": 3}\n{"step": 40}\n')
    screen.show([Counted(jobs[0], 1, JobResult("finished", FINISHED))])
    screen.close()
    assert capsys.readouterr().err == "dtrain: a: started\ndtrain: a: finished  (3 of 5 done)\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [(None, "starting"), ("", "starting"), ('{"step": 3}\n{"step": 40}\n', "step 40"), ("[]\n", "...")],
)
def test_the_step_of_a_run_is_that_of_its_last_record(metrics: Path, text: str | None, shown: str) -> None:
    if text is not None:
        metrics.write_text(text)
    assert pool._step(metrics.parent) == shown

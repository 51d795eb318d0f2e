"""Searches with runs that are not trained: each of their polls writes a line of metrics. The last test trains."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fault_hook import faulty
from dtrain.config.schema import SearchConfig
from dtrain.errors import ConfigError
from dtrain.launch import __main__ as launch
from dtrain.launch import pool, search_journal
from dtrain.launch import search as searching
from dtrain.launch.job import FAILED, FINISHED, STOPPED, Job, JobResult
from dtrain.launch.pool import Screen
from dtrain.launch.search import MetricReader
from dtrain.launch.search_journal import search_lock
from dtrain.launch.search_space import CommandLine, distribution
from dtrain.report.search import SearchRecord
from dtrain.runs.run_dir import save_run, write_status
from tests.launch.compose import single
from tests.refusals import assert_refused, refused
from tests.whole_runs import status

optuna = pytest.importorskip("optuna", reason="a search needs Optuna: pip install 'dtrain[optuna]'")
LR = "optimizer.lr=interval(0.0,1.0)"
BASE = ("experiment=digits", "tracker=none")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pool, "_POLL", 0.0)
    return tmp_path


class Fake:
    """A run of five steps, one per poll, whose accuracy is ``step * lr``."""

    started: list[Job]

    def __init__(self, job: Job) -> None:
        self.job = job
        self.asked = False
        save_run(job.spec)
        path = job.spec.dir / "metrics.jsonl"
        self.step = len(path.read_text().splitlines()) if path.exists() else 0
        write_status(job.spec.dir, "running", self.step)

    def result(self) -> JobResult | None:
        lr = float(self.job.spec.config["optimizer"]["lr"])
        if self.asked:
            write_status(self.job.spec.dir, "stopped", self.step)
            return JobResult("stopped", STOPPED)
        self.step += 1
        with (self.job.spec.dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.step, "eval/accuracy": self.step * lr, "eval/loss": 1 - lr}) + "\n")
        if self.step < 5:
            return None
        write_status(self.job.spec.dir, "finished", self.step)
        return JobResult("finished", FINISHED)

    def stop(self) -> None:
        self.asked = True

    def kill(self) -> None: ...


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that were started, by a launcher of fake runs."""
    jobs: list[Job] = []

    class Launcher:
        make: Callable[[Job], Any] = staticmethod(Fake)

        def check(self, jobs: Sequence[Job]) -> None: ...
        def describe(self, jobs: Sequence[Job]) -> str:
            return ""

        def launch(self, jobs: Sequence[Job]) -> list[JobResult]:
            return []

        def starter(self, running: int, screen: Screen | None) -> Callable[[Job, int], Any]:
            def start(job: Job, slot: int) -> Any:
                jobs.append(job)
                return Launcher.make(job)

            return start

    monkeypatch.setitem(launch.LAUNCHERS, "local", Launcher())
    monkeypatch.setattr(searching, "Fake", Launcher, raising=False)
    return jobs


def run_search(*arguments: str, trials: int = 4, to: str = "s", metric: str = "eval/accuracy") -> int:
    settings = (f"launch.search.trials={trials}", f"launch.search.metric={metric}", f"run.dir={to}")
    return launch.main([*BASE, *settings, *arguments])


def found(folder: Path) -> SearchRecord:
    search = SearchRecord.read(folder, gaps := [])
    assert search is not None, gaps
    return search


# -- whole searches


def test_a_search_ends_with_a_table_and_the_command_of_the_best(
    place: Path, started: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_search(LR, trials=2) == FINISHED
    out, _ = capsys.readouterr()
    search = found(place / "s")
    assert [trial.state for trial in search.trials] == ["finished"] * 2
    # The last accuracy is five times the learning rate.
    rates = [float(trial.values["optimizer.lr"]) for trial in search.trials]
    assert [trial.value for trial in search.trials] == pytest.approx([5 * rate for rate in rates])
    best = max(search.trials, key=lambda trial: trial.value)
    assert search.best == best
    assert sum(line.strip().startswith("best ") for line in out.splitlines()) == 1
    assert all((place / "s" / trial.run / "config.yaml").exists() for trial in search.trials)
    command = next(line for line in out.splitlines() if line.startswith("its values again:")).partition(
        "dtrain launch "
    )[2]
    assert f"optimizer.lr={best.values['optimizer.lr']}" in shlex.split(command)
    assert "launch.search" not in command


@pytest.mark.slow
def test_a_search_that_was_stopped_continues_its_trials_and_repeats_none(place: Path, started: list[Job]) -> None:
    runs: list[Fake] = []

    def make(job: Job) -> Fake:
        runs.append(Fake(job))
        if len(runs) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return runs[-1]

    searching.Fake.make = staticmethod(make)  # type: ignore[attr-defined]
    assert run_search(LR, "launch.max_running=2", trials=5) == STOPPED
    assert [trial.state for trial in found(place / "s").trials] == ["finished"] * 2 + ["stopped"] * 2
    first = [job.spec.dir for job in started]
    started.clear()
    assert run_search(LR, "launch.max_running=2", trials=5) == FINISHED
    search = found(place / "s")
    assert [trial.state for trial in search.trials] == ["finished"] * 5
    assert [job.spec.dir for job in started[:2]] == first[2:]
    assert len({trial.run for trial in search.trials}) == len(started) + 2 == 5
    assert all(
        len((place / "s" / trial.run / "metrics.jsonl").read_text().splitlines()) == 5 for trial in search.trials
    )
    started.clear()
    assert run_search(LR, trials=5) == FINISHED
    assert started == []


@pytest.mark.slow
def test_suggestions_do_not_depend_on_restarts(place: Path, started: list[Job]) -> None:
    assert run_search(LR, trials=3) == FINISHED
    assert run_search(LR, trials=1, to="t") == FINISHED
    assert run_search(LR, trials=3, to="t") == FINISHED
    one, other = ([trial.values for trial in found(place / name).trials] for name in "st")
    assert one == other
    assert len({float(values["optimizer.lr"]) for values in one}) == 3


@pytest.mark.slow
def test_a_pruned_trial_is_stopped_and_keeps_its_last_value(
    place: Path, started: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "_pruner", lambda name: optuna.pruners.MedianPruner(n_startup_trials=1))
    assert run_search(LR, "launch.search.pruner=median") == FINISHED
    first, *others = found(place / "s").trials
    assert {trial.state for trial in others} == {"finished", "pruned"}
    for trial in (trial for trial in others if trial.state == "pruned"):
        assert status(place / "s" / trial.run)["state"] == "stopped"
        rate = float(trial.values["optimizer.lr"])
        assert rate < max(float(other.values["optimizer.lr"]) for other in (first, *others[: trial.number - 1]))
        assert trial.value == pytest.approx(rate)  # that of the first step, at which it was stopped


@pytest.mark.slow
def test_a_failed_trial_does_not_end_the_search_and_three_in_a_row_do(
    place: Path, started: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(Fake):
        def result(self) -> JobResult | None:
            if len(started) in (1, 3, 4, 5):
                return JobResult("failed", FAILED, "step 3: out of memory")
            return super().result()

    searching.Fake.make = staticmethod(Failing)  # type: ignore[attr-defined]
    assert run_search(LR, trials=9) == FAILED
    assert [trial.state for trial in found(place / "s").trials] == ["failed", "finished", "failed", "failed", "failed"]
    out, error = capsys.readouterr()
    assert "out of memory" in out
    assert "launch.search.max_failures" in error


@pytest.mark.slow
def test_values_that_the_config_refuses_are_a_failed_trial(place: Path, started: list[Job]) -> None:
    assert run_search(LR, "train.max_steps=choice(3,abc)", "launch.search.max_failures=9") == FINISHED
    trials = found(place / "s").trials
    assert {trial.state for trial in trials if trial.values["train.max_steps"] == "abc"} == {"failed"}
    assert all("train.max_steps" in trial.reason for trial in trials if trial.state == "failed")
    assert {trial.state for trial in trials} == {"finished", "failed"}


@pytest.mark.slow
def test_equal_values_share_a_run(place: Path, started: list[Job]) -> None:
    assert run_search("optimizer.lr=0.1,0.2", "launch.max_running=3", trials=3) == FINISHED
    assert len({trial.run for trial in found(place / "s").trials}) == len(started) == 2


def test_a_run_without_the_metric_is_a_failed_trial(place: Path, started: list[Job]) -> None:
    assert (
        run_search(LR, "launch.search.direction=maximize", "launch.search.max_failures=1", metric="eval/f1") == FAILED
    )
    trials = found(place / "s").trials
    assert [trial.state for trial in trials] == ["failed"]
    assert "eval/accuracy, eval/loss" in trials[0].reason


def test_a_dry_run_of_a_search_writes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_search(LR, "launch.dry_run=true") == FINISHED
    assert f"in {place / 's'}" in capsys.readouterr().out
    assert list(place.iterdir()) == []


@pytest.mark.slow
def test_the_default_directory_depends_on_what_is_searched_but_not_on_how_long(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def folder(*arguments: str) -> str:
        assert launch.main(["experiment=digits", "launch.dry_run=true", *arguments]) == FINISHED
        return re.search(r"trials in (\S+);", capsys.readouterr().out)[1]  # type: ignore[index]

    first = folder(LR, "launch.search.trials=3")
    assert Path(first).parent == place / "runs"
    assert Path(first).name.startswith("digits-search-")
    assert folder(LR, "launch.search.trials=30", "launch.max_running=2", "-m") == first
    assert folder(LR, "launch.search.trials=3", "model.width=8") != first
    assert folder(LR, "launch.search.trials=3", "run.name=mine") == str(place / "runs" / "mine")


# -- the space


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("1,2", optuna.distributions.CategoricalDistribution(["1", "2"])),
        ("choice([1,2],a)", optuna.distributions.CategoricalDistribution(["[1,2]", "a"])),
        ("interval(1,8)", optuna.distributions.FloatDistribution(1, 8)),
        ("int(interval(1,8))", optuna.distributions.IntDistribution(1, 8)),
        ("tag(log,interval(1e-4,1e-1))", optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True)),
        ("range(1,10,3)", optuna.distributions.IntDistribution(1, 7, step=3)),
        ("range(0.5,2,0.5)", optuna.distributions.FloatDistribution(0.5, 1.5, step=0.5)),
        ("tag(log,range(1,9))", optuna.distributions.IntDistribution(1, 8, log=True)),
    ],
)
def test_hydras_sweeps_are_distributions(typed: str, expected: Any) -> None:
    line = CommandLine.parse(["experiment=digits", f"+model.a={typed}", "-m", "--config-dir", "mine"])
    assert distribution(line.space["+model.a"]) == expected
    assert line.texts == {"model.a": typed}
    assert (line.options, line.fixed) == (["--config-dir", "mine"], ["experiment=digits"])


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("model.width=8", ("launch.search.trials", "no key to search", "interval(")),
        ("model=glob(*)", ("model=glob(*)", "choice(a,b,c)")),
        ("optimizer.lr=shuffle(1,2)", ("shuffle", "choice(a,b,c)")),
        ("optimizer.lr=tag(many,interval(1,2))", ("many", "want log")),
        ("optimizer.lr=interval(2,1)", ("optimizer.lr=interval(2,1)", "2.0 to 1.0", "smaller")),
        ("optimizer.lr=range(2,1)", ("optimizer.lr=range(2,1)", "2 to 2", "smaller")),
        ("optimizer.lr=tag(log,interval(0,1))", ("optimizer.lr", "0.0", "more than 0")),
        ("optimizer.lr=tag(log,range(1,9,2))", ("optimizer.lr", "tag(log,interval(")),
        ("optimizer.lr=1,2,1", ("optimizer.lr=1,2,1", "more than once", "Remove")),
        ("optimizer.lr=interval(1", ("optimizer.lr", "Quote")),
    ],
)
def test_a_wrong_space_is_refused(override: str, names: tuple[str, ...]) -> None:
    with refused(ConfigError, *names):
        CommandLine.parse(["experiment=digits", "launch.search.trials=2", override])


@pytest.fixture(scope="module")
def base() -> Job:
    return single("experiment=digits")


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"trials": 0}, ("launch.search.trials", "got 0", "at least 1")),
        ({"max_failures": 0}, ("launch.search.max_failures", "got 0", "at least 1")),
        ({"seed": -1}, ("launch.search.seed", "got -1", "at least 0")),
        ({"sampler": "tpf"}, ("launch.search.sampler", "'tpf'", "'tpe'")),
        ({"pruner": "medain"}, ("launch.search.pruner", "'medain'", "'median'")),
        ({"direction": "max"}, ("launch.search.direction", "'max'", "maximize")),
        ({"metric": "train/loss"}, ("launch.search.metric", "train/loss", "eval/loss")),
        ({"metric": "eval/quality"}, ("launch.search.direction", "eval/quality", "maximize or minimize")),
    ],
)
def test_wrong_settings_are_refused(base: Job, settings: dict[str, Any], names: tuple[str, ...]) -> None:
    search = SearchConfig(**{"trials": 2, **settings})
    with refused(ConfigError, *names):
        searching._checked(replace(base, launch=replace(base.launch, search=search)))


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("data.eval=null", ("launch.search.metric", "eval/loss", "data.eval")),
        ("launch.nodes=2", ("launch.nodes", "got 2", "launch=slurm")),
        ("model.widht=3", ("widht",)),
    ],
)
def test_a_refused_search_writes_nothing(
    place: Path, capsys: pytest.CaptureFixture[str], override: str, names: tuple[str, ...]
) -> None:
    try:
        code = launch.main(["experiment=digits", "launch.search.trials=2", LR, override])
    except SystemExit as error:
        code = int(error.code or 0)
    assert code not in (FINISHED, STOPPED)
    message = capsys.readouterr().err
    assert [name for name in names if name not in message] == [], message
    assert list(place.iterdir()) == []


def test_a_search_in_the_directory_of_another_is_refused(place: Path, started: list[Job], capsys: Any) -> None:
    assert run_search(LR, trials=1) == FINISHED
    before = (place / "s" / "search.json").read_text()
    assert run_search("optimizer.lr=interval(0,2)", trials=1) == FAILED
    error = capsys.readouterr().err
    assert f"run.dir: {place / 's'} holds a different search" in error
    assert '"interval(0.0,1.0)"} -> {"optimizer.lr": "interval(0,2)"}' in error
    assert (place / "s" / "search.json").read_text() == before


@pytest.mark.slow
def test_a_second_process_of_a_search_is_refused(place: Path, started: list[Job], capsys: Any) -> None:
    with search_lock(place / "s"):
        assert run_search(LR) == FAILED
    assert f"another process runs the search in {place / 's'}" in capsys.readouterr().err


def test_a_journal_that_was_cut_short_is_continued(place: Path, started: list[Job]) -> None:
    assert run_search(LR, trials=1) == FINISHED
    journal = place / "s" / "journal.log"
    with journal.open("ab") as file:  # a full disk, or a power cut
        file.write(journal.read_bytes().splitlines()[-1][:20])
    assert run_search(LR, trials=2) == FINISHED
    assert run_search(LR, trials=3) == FINISHED
    assert [trial.state for trial in found(place / "s").trials] == ["finished"] * 3


TWO_KEYS = ("optimizer.lr=interval(0.0,1.0)", "optimizer.weight_decay=tag(log,interval(1e-4,1e-1))")


def trials_after_cuts(place: Path, sampler: str, trials: int, cuts: Callable[[list[bytes]], list[int]]) -> None:
    keys = (*TWO_KEYS, f"launch.search.sampler={sampler}")
    assert run_search(*keys, trials=trials) == FINISHED
    expected = [(trial.state, trial.values, trial.value) for trial in found(place / "s").trials]
    lines = (place / "s" / "journal.log").read_bytes().splitlines(keepends=True)
    assert len({repr(values) for _, values, _ in expected}) == trials
    for cut in cuts(lines):
        shutil.rmtree(place / "t", ignore_errors=True)
        shutil.copytree(place / "s", place / "t")
        (place / "t" / "journal.log").write_bytes(b"".join(lines[:cut]))
        (place / "t" / "search.json").unlink()
        assert run_search(*keys, trials=trials, to="t") == FINISHED
        assert [(trial.state, trial.values, trial.value) for trial in found(place / "t").trials] == expected, cut


@pytest.mark.slow
def test_a_search_that_was_killed_while_it_asked_for_a_trial_continues_with_the_same_values(
    place: Path, started: list[Job]
) -> None:
    def cuts(lines: list[bytes]) -> list[int]:
        created = [number for number, line in enumerate(lines, 1) if b'"op_code":4' in line]
        return [created[-1], created[-1] + 1]  # before its first and before its second value

    trials_after_cuts(place, "random", 3, cuts)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_journal_that_ends_after_any_line_continues_to_the_same_trials(
    place: Path, started: list[Job], sampler: str
) -> None:
    # The first ten trials of TPE are random.
    trials, last = (11, 5) if sampler == "tpe" else (2, 100)
    trials_after_cuts(place, sampler, trials, lambda lines: list(range(len(lines)))[-last:])


@pytest.mark.slow
def test_lines_that_are_twice_or_not_at_all_in_a_journal_do_not_end_the_search(
    place: Path, started: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_search(*TWO_KEYS, trials=2) == FINISHED
    search, journal = found(place / "s"), place / "s" / "journal.log"
    lines = journal.read_bytes().splitlines(keepends=True)
    created = next(number for number, line in enumerate(lines) if b'"op_code":4' in line)
    journal.write_bytes(b"".join([*lines[:created], lines[created], *lines[created:]]))
    assert run_search(*TWO_KEYS, trials=3) == FINISHED
    assert [trial.values for trial in found(place / "s").trials[:2]] == [trial.values for trial in search.trials]
    assert len(found(place / "s").trials) == 3
    capsys.readouterr()
    # A finished trial has no first value: it is not invented, and the table is shown without it.
    journal.write_bytes(b"".join([*lines[: created + 1], *lines[created + 2 :]]))
    assert run_search(*TWO_KEYS, trials=2) == FINISHED
    assert [len(trial.values) for trial in found(place / "s").trials] == [1, 2]
    best = max(search.trials, key=lambda trial: trial.value)
    assert ("its values again" in capsys.readouterr().out) == (best.number == 1)


@pytest.mark.slow
@pytest.mark.parametrize("content", [None, b"", b"[]\n", b'{"definition": 1}\n'])
def test_the_journal_says_what_the_search_is(
    place: Path, started: list[Job], capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    assert run_search(LR, trials=1) == FINISHED
    copy = place / "s" / "search.json"
    before = json.loads(copy.read_text())
    copy.unlink()
    if content is not None:
        copy.write_bytes(content)
    assert run_search("optimizer.lr=interval(0,0.001)", trials=2) == FAILED
    assert_refused(capsys.readouterr().err, "run.dir", '"interval(0.0,1.0)"} -> {"optimizer.lr": "interval(0,0.001)"}')
    assert run_search(LR, trials=1) == FINISHED
    assert json.loads(copy.read_text()) == before


def test_a_lock_that_a_killed_process_left_in_the_journal_is_broken(
    place: Path, started: list[Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_search(LR, trials=1) == FINISHED
    lock = place / "s" / "journal.log.lock"
    for age, waits in ((60.0, False), (-60.0, True)):  # the clock of a file server may be ahead
        monkeypatch.setattr(search_journal, "_STALE", 0.3 if waits else 30.0)
        lock.symlink_to("journal.log")
        os.utime(lock, (time.time() - age,) * 2, follow_symlinks=False)
        assert run_search(LR, trials=1) == FINISHED
        assert not lock.is_symlink()
        assert f"{lock}: deleted" in capsys.readouterr().err


@pytest.mark.slow
def test_failures_that_are_not_in_a_row_do_not_end_a_search(place: Path, started: list[Job]) -> None:
    class Alternating(Fake):
        def result(self) -> JobResult | None:
            return JobResult("failed", FAILED, "no") if len(started) % 2 else super().result()

    searching.Fake.make = staticmethod(Alternating)  # type: ignore[attr-defined]
    assert run_search(LR, "launch.search.max_failures=2", trials=4) == FINISHED
    assert [trial.state for trial in found(place / "s").trials] == ["failed", "finished"] * 2


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("journal.log", b""),
        ("journal.log", b"{}\n"),
        ("journal.log", b"[]\n"),
        ("journal.log", b'{"op_code": 99}\n'),
        ("search.json", b""),
        ("search.json", b"{}\n"),
        ("search.json", b"[]\n"),
        ("search.json", b'{"definition": 1}\n'),
    ],
)
def test_a_damaged_file_of_a_search_is_refused(
    place: Path, started: list[Job], capsys: Any, name: str, content: bytes
) -> None:
    (place / "s").mkdir()
    (place / "s" / name).write_bytes(content)
    code = run_search(LR, trials=1)
    if name == "journal.log" and not content:  # as Optuna makes it
        assert code == FINISHED
        return
    assert code == FAILED
    assert_refused(capsys.readouterr().err, "run.dir", place / "s", "a different run.dir")
    assert started == []
    assert (place / "s" / name).read_bytes() == content


def test_a_trial_whose_run_another_process_trains_is_not_failed(
    place: Path, started: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused(Fake):
        def result(self) -> JobResult:
            return JobResult("failed", FAILED)

    launcher = searching.Fake  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        # The process of an earlier command, which was killed before its run had a lock.
        patch.setattr(launcher, "make", Refused)
        patch.setattr(searching, "is_trained", lambda run_dir, **options: bool(started))
        assert run_search(LR, trials=1) == STOPPED
    assert [trial.state for trial in found(place / "s").trials] == ["stopped"]
    assert run_search(LR, trials=1) == FINISHED


@pytest.mark.parametrize(
    ("searched", "text"),
    [
        (LR, "{_target_: os.system}"),
        pytest.param(LR, "${oc.env:HOME}", marks=pytest.mark.slow),
        pytest.param("optimizer.lr=0.1,0.2", "{_target_: os.system}", marks=pytest.mark.slow),
        ("optimizer.lr=0.1,0.2", "${oc.env:HOME}"),
    ],
)
def test_a_journal_of_somebody_else_cannot_add_texts_to_the_command_line(
    place: Path, started: list[Job], capsys: Any, searched: str, text: str
) -> None:
    assert run_search(searched, trials=1) == FINISHED
    journal = place / "s" / "journal.log"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    for line in lines:
        if "param_name" in line:  # the first trial, without its result
            forged = optuna.distributions.distribution_to_json(optuna.distributions.CategoricalDistribution([text]))
            line |= {"param_value_internal": 0, "distribution": forged}
    journal.write_text("".join(f"{json.dumps(line)}\n" for line in lines if "values" not in line))
    started.clear()
    assert run_search(searched, trials=1) == FAILED
    assert_refused(capsys.readouterr().err, "run.dir", place / "s", "a different run.dir", "optimizer.lr", repr(text))
    assert started == []


def test_a_search_in_a_preset_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "mine" / "launch").mkdir(parents=True)
    (place / "mine" / "launch" / "many.yaml").write_text("name: local\nsearch: {trials: 3}\n")
    assert launch.main(["--config-dir", "mine", "launch=many", "experiment=digits"]) == FAILED
    error = capsys.readouterr().err
    assert "launch.search.trials: got 3" in error
    assert "command line" in error


# -- the metric


def test_the_metric_is_read_while_it_is_written_and_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = MetricReader(tmp_path, "eval/loss")
    reader.update()
    path.write_text('{"step": 1, "eval/loss": 3.0}\nnot a record\n[]\n{"step": 2, "eval/lo')
    reader.update()
    assert reader.values == {1: 3.0}
    with path.open("a") as file:
        file.write('ss": 1.0}\n{"step": 3, "eval/loss": 2.0}\n{"step": 4, "train/loss": 0.0}\n')
    reader.update()
    assert reader.values == {1: 3.0, 2: 1.0, 3: 2.0}
    assert reader.objective(best=False, largest=False) == 2.0
    assert reader.objective(best=True, largest=False) == 1.0
    assert reader.objective(best=True, largest=True) == 3.0
    path.write_text('{"step": 1, "eval/loss": 3.0}\n')  # a resumed run truncates the file to its checkpoint
    reader.update()
    assert reader.values == {1: 3.0}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_a_search_of_real_runs_is_stopped_and_resumed(tmp_path: Path, digits: Path) -> None:
    command = ["launch.max_running=2", "train.max_steps=30", "train.eval_every=10", "train.log_every=1"]
    # The interruption meets a run that pauses in its training, on any machine.
    command += ["optimizer.lr=tag(log,interval(1e-4,1e-1))", "model.width=4,8", faulty("slow@step=10,seconds=4")]

    def interrupt() -> None:
        while not list((tmp_path / "s").glob("*/faults/slow-*")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert run_search(*command) == STOPPED
    first = found(tmp_path / "s")
    assert {trial.state for trial in first.trials} & {"stopped"}
    assert run_search(*command) == FINISHED
    search = found(tmp_path / "s")
    assert [trial.state for trial in search.trials] == ["finished"] * 4
    assert search.trials[0].values == first.trials[0].values
    for trial in search.trials:
        steps = [
            json.loads(line)["step"] for line in (tmp_path / "s" / trial.run / "metrics.jsonl").read_text().splitlines()
        ]
        assert steps[-1] == 30
        assert (tmp_path / "s" / trial.run / "logs" / "output.log").exists()

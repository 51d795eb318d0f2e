from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.fault_hook import faulty
from dtrain.distributed.lock import read_holder
from dtrain.errors import ConfigError
from dtrain.launch import __main__ as launch
from dtrain.launch import local, pool
from dtrain.launch.job import FAILED, FINISHED, STOPPED, Job, JobResult
from dtrain.launch.local import LocalStart
from dtrain.runs.run_spec import RunSpec
from tests.launch.compose import single
from tests.launch.processes import rank_processes
from tests.refusals import refused
from tests.whole_runs import metrics, status, train_on

LONG = ("train.max_epochs=300",)  # the tests stop it long before; bounded in case that fails
QUICK = ("experiment=digits", "tracker=none", "train.log_every=1")


def launch_run(run_dir: Path, *arguments: str) -> int:
    return launch.main([*QUICK, f"run.dir={run_dir}", *arguments])


def when_training(run_dir: Path, act: Callable[[], None]) -> None:
    """Calls ``act`` once the run has begun its steps."""

    def wait() -> None:
        while not (run_dir / "status.json").exists():
            time.sleep(0.01)
        act()

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_a_launched_run_has_the_losses_of_a_run_under_torchrun(tmp_path: Path, digits: Path) -> None:
    assert launch_run(tmp_path / "a", "launch.processes_per_node=2", "train.max_steps=8") == 0
    assert status(tmp_path / "a")["state"] == "finished"
    assert (tmp_path / "a" / "logs" / "rank-00001.log").exists()
    train_on(2, tmp_path / "b", "train.max_steps=8")
    assert metrics(tmp_path / "a") == pytest.approx(metrics(tmp_path / "b"), rel=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_a_stop_file_stops_and_the_same_command_resumes(tmp_path: Path, digits: Path) -> None:
    when_training(tmp_path, (tmp_path / "STOP").touch)
    assert launch_run(tmp_path, *LONG) == STOPPED
    step = status(tmp_path)["step"]
    assert launch_run(tmp_path, *LONG, f"train.max_steps={step + 3}") == 0
    assert status(tmp_path)["step"] == step + 3


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_a_failure_shows_the_ranks_own_traceback_first(
    tmp_path: Path, digits: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch_run(tmp_path, faulty("crash@step=2")) == FAILED
    error = capfd.readouterr().err
    assert "Traceback" in error
    assert error.index("dtrain: rank 0 failed") < error.index("dtrain: error: ")
    assert f"Logs of the ranks: {tmp_path / 'logs'}" in error.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_a_run_that_is_refused_explains_itself_once_and_leaves_nothing(
    tmp_path: Path, digits: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch_run(tmp_path / "r", f"data.train={tmp_path}/no.tar") == FAILED
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("dtrain: error: ")]
    assert len(lines) == 1
    assert lines[0].startswith("dtrain: error: data.train: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_killed_rank_is_a_failure(tmp_path: Path, digits: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def kill() -> None:
        os.kill(rank_processes(str(tmp_path))[0], signal.SIGKILL)

    when_training(tmp_path, kill)
    assert launch_run(tmp_path, "launch.processes_per_node=2", *LONG) == FAILED
    assert "dtrain: error:" in capfd.readouterr().err.splitlines()[-1]


def test_omp_num_threads_is_kept_or_divides_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    job = single("experiment=digits", "launch.processes_per_node=5")
    assert local.describe([job]).startswith("OMP_NUM_THREADS=2 ")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert local.describe([job]).startswith("OMP_NUM_THREADS=7 ")


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_there_is_one_process_without_gpus() -> None:
    assert local.processes(single("experiment=digits"), local.shares(1)[0]) == 1


@pytest.mark.usefixtures("four_gpus")
def test_there_is_one_process_for_each_gpu() -> None:
    assert local.processes(single("experiment=digits"), local.shares(1)[0]) == 4
    assert local.processes(single("experiment=digits"), local.shares(2)[1]) == 2
    with refused(ConfigError, "5 processes", "4 GPUs"):
        local.check([single("experiment=digits", "launch.processes_per_node=5")])


# -- several at a time


@pytest.mark.usefixtures("four_gpus")
def test_cores_and_gpus_are_divided_among_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    three = local.shares(3)
    assert [share.gpus for share in three] == [("0",), ("1",), ("2",)]
    assert [share.cores for share in three] == [(0, 1), (2, 3, 4), (5, 6, 7)]
    assert str(three[1]) == "3 cores and 1 GPU"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d")
    assert [share.gpus for share in local.shares(2)] == [("GPU-a", "GPU-b"), ("GPU-c", "GPU-d")]
    assert local.shares(16)[3].cores == tuple(range(8))


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(("running", "more"), [("5", ()), ("3", ("launch.processes_per_node=2",))])
def test_more_runs_than_gpus_are_refused(running: str, more: tuple[str, ...]) -> None:
    most = "at most 2" if more else "at most 4"
    with refused(ConfigError, "launch.max_running", f"{running} runs", most, "4"):
        local.check([single("experiment=digits", f"launch.max_running={running}", *more)])


# A run without torch: "fails" and "refused" end with an error, others finish, or stop on request.
_RUN = """
import fcntl, json, os, pathlib, sys, time
run_dir, kind = pathlib.Path(sys.argv[1]), sys.argv[2]
print("cores", len(os.sched_getaffinity(0)), "threads", os.environ["OMP_NUM_THREADS"], flush=True)
if kind == "refused":
    sys.exit("dtrain: error: model.width: wrong")
def status(state, reason=None):
    (run_dir / "status.json.staged").write_text(json.dumps({"state": state, "step": 3, "reason": reason, "time": time.time()}))
    (run_dir / "status.json.staged").rename(run_dir / "status.json")
(run_dir / "logs").mkdir(parents=True, exist_ok=True)
lock = (run_dir / ".lock").open("a")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit("dtrain: error: run.dir: in use by another job")
lock.truncate(0)
lock.write(json.dumps({"pid": os.getpid(), "host": "here", "since": "now", "start": os.environ.get("DTRAIN_START_ID")}))
lock.flush()
status("running")
while kind == "slow" and not (run_dir / "go").exists():
    time.sleep(0.01)
while kind == "waits" and not (run_dir / "STOP").exists():
    time.sleep(0.01)
(run_dir / "at").write_text(str(time.time()))
time.sleep(0.05)
print("the end", flush=True)
status({"waits": "stopped", "fails": "failed"}.get(kind, "finished"), "it burst" if kind == "fails" else None)
"""


@pytest.fixture
def small_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts small scripts instead of trainings; their kind is ``tracker.project``."""

    def command(job: Job, share: local.MachineShare, *options: str) -> list[str]:
        return [sys.executable, "-c", _RUN, str(job.spec.dir), job.spec.config["tracker"]["project"]]

    monkeypatch.setattr(local, "command", command)
    monkeypatch.setattr(pool, "_POLL", 0.01)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)


def sweep_of(*kinds: str, running: int = 2) -> int:
    return launch.main(
        [*QUICK, "run.dir=r", "-m", f"tracker.project={','.join(kinds)}", f"launch.max_running={running}"]
    )


@pytest.mark.usefixtures("small_runs")
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_to_the_launcher_stops_the_run(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.signal(number, signal.default_int_handler)  # nohup pytest ignores SIGHUP
    try:
        when_training(tmp_path / "r", lambda: os.kill(os.getpid(), number))
        assert launch_run(tmp_path / "r", "tracker.project=waits") == STOPPED
        assert status(tmp_path / "r")["state"] == "stopped"
        assert not (tmp_path / "r" / "STOP").exists()
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


@pytest.mark.slow
@pytest.mark.usefixtures("small_runs")
def test_a_sweep_runs_its_jobs_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep_of("a", "b", running=1) == 0
    first, second = (tmp_path / f"r-tracker.project={kind}" for kind in "ab")
    assert float((second / "at").read_text()) > status(first)["time"]
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[-2:]] == [
        ["tracker.project=a", "finished"],
        ["tracker.project=b", "finished"],
    ]


@pytest.mark.usefixtures("small_runs")
def test_a_stop_request_ends_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    when_training(tmp_path / "r-run.seed=1", lambda: os.kill(os.getpid(), signal.SIGINT))
    assert launch_run(tmp_path / "r", "tracker.project=waits", "--multirun", "run.seed=1,2") == STOPPED
    assert not (tmp_path / "r-run.seed=2").exists()
    assert "not started" in capsys.readouterr().out


@pytest.mark.usefixtures("small_runs")
def test_two_runs_at_a_time_write_to_files_and_a_failure_does_not_stop_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sweep_of("a", "fails", "refused", "b") == FAILED
    table, lines = capfd.readouterr()
    assert [line.split()[1] for line in table.splitlines()[1:]] == ["finished", "failed", "failed", "finished"]
    for kind in ("a", "b", "fails"):
        log = (tmp_path / f"r-tracker.project={kind}" / "logs" / "output.log").read_text()
        cores = len(os.sched_getaffinity(0))
        assert f"cores {max(1, cores // 2)} " in log
        assert "the end" in log
        assert "the end" not in lines
    assert f"tracker.project=fails failed: step 3: it burst. Its output: {tmp_path}" in lines
    # The run that was refused left nothing, and its message is shown.
    assert not (tmp_path / "r-tracker.project=refused").exists()
    assert sorted(path.name for path in tmp_path.iterdir() if "refused" in path.name) == []
    assert "tracker.project=refused failed: model.width: wrong" in lines
    assert "4 of 4 done" in lines
    starts = [float((tmp_path / f"r-tracker.project={kind}" / "at").read_text()) for kind in ("a", "fails", "b")]
    assert starts[2] > max(min(starts[:2]), 0)


@pytest.mark.slow
@pytest.mark.usefixtures("small_runs")
def test_ctrl_c_stops_all_runs_of_a_sweep(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dirs = [tmp_path / f"r-run.seed={seed}" for seed in (1, 2)]

    def interrupt() -> None:
        while not all((run_dir / "status.json").exists() for run_dir in run_dirs):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    command = [*QUICK, "run.dir=r", "-m", "run.seed=1,2,3", "tracker.project=waits", "launch.max_running=2"]
    assert launch.main(command) == STOPPED
    table, messages = capfd.readouterr()
    assert [line.split(maxsplit=1)[1].split("  ")[0] for line in table.splitlines()[1:]] == ["stopped"] * 2 + [
        "not started"
    ]
    assert not (tmp_path / "r-run.seed=3").exists()
    compare = messages.splitlines()[-1]
    assert "dtrain launch status" in compare
    assert "run.seed=3" not in compare
    assert not any((run_dir / "STOP").exists() for run_dir in run_dirs)


@pytest.mark.usefixtures("four_gpus")
def test_a_run_gets_the_gpus_of_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environments: list[dict[str, str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, env, **options: environments.append(env))
    for gpus, is_all in ((("GPU-c", "GPU-d"), False), (("0", "1", "2", "3"), True)):
        share = local.MachineShare((0,), gpus, is_all)
        LocalStart(single("experiment=digits", f"run.dir={tmp_path / 'r'}"), share, to_file=False, note=print)
    assert [environment.get("CUDA_VISIBLE_DEVICES") for environment in environments] == ["GPU-c,GPU-d", None]


# -- runs that another command trains


@pytest.fixture
def slow(tmp_path: Path, small_runs: None) -> Job:
    """A run that ends when its directory has a file ``go``."""
    return single(*QUICK, f"run.dir={tmp_path / 'r'}", "tracker.project=slow")


@pytest.fixture
def start(slow: Job) -> Iterator[Callable[[], LocalStart]]:
    """Makes starts of the run ``slow``, each as a launcher of its own does."""
    starts: list[LocalStart] = []

    def make() -> LocalStart:
        starts.append(LocalStart(slow, local.shares(1)[0], to_file=True, note=lambda text: sys.stderr.write(text)))
        return starts[-1]

    yield make
    for process in (start._process for start in starts):
        if process is not None:
            process.kill()
            process.wait()


def result_of(start: LocalStart) -> JobResult:
    while (result := start.result()) is None:
        time.sleep(0.01)
    return result


def begun(run_dir: Path) -> None:
    while not (run_dir / "status.json").exists():
        time.sleep(0.01)


def test_a_run_that_outlived_its_launcher_is_taken_over(
    slow: Job, start: Callable[[], LocalStart], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = slow.spec.dir
    first = start()
    begun(run_dir)
    # Its launcher was killed before it moved the output into the directory of the run.
    assert not (run_dir / local.OUTPUT).exists()
    second = start()
    assert second._process is None
    assert second.result() is None
    assert f"process {read_holder(run_dir)['pid']} on here" in capsys.readouterr().err
    (run_dir / "go").touch()
    assert result_of(second) == JobResult("finished", FINISHED)
    assert result_of(first) == JobResult("finished", FINISHED)
    assert "the end" in (run_dir / local.OUTPUT).read_text()
    assert list(run_dir.parent.glob(".*")) == []


def test_a_run_that_was_taken_over_and_is_killed_has_failed(slow: Job, start: Callable[[], LocalStart]) -> None:
    first = start()
    begun(slow.spec.dir)
    second = start()
    assert first._process is not None
    first._process.kill()
    first._process.wait()
    result = result_of(second)
    assert (result.code, "killed" in str(result.reason)) == (FAILED, True)


def test_of_two_starts_at_once_one_trains_and_the_other_waits_for_it(
    slow: Job, start: Callable[[], LocalStart], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start()
    begun(slow.spec.dir)
    with monkeypatch.context() as patch:
        patch.setattr(local, "is_trained", lambda run_dir, **options: False)  # as before the first one has the lock
        second = start()
    assert second._process is not None
    second._process.wait()
    assert second.result() is None
    assert first.result() is None
    (slow.spec.dir / "go").touch()
    assert [result_of(one).state for one in (first, second)] == ["finished"] * 2
    log = (slow.spec.dir / local.OUTPUT).read_text()
    assert "the end" in log
    assert not any(line.startswith("dtrain: error") for line in log.splitlines())
    assert list(slow.spec.dir.parent.glob(".*")) == []


def test_a_run_that_another_command_trains_with_other_settings_is_refused(
    slow: Job, start: Callable[[], LocalStart], monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    begun(slow.spec.dir)
    monkeypatch.setattr(RunSpec, "changes", lambda run: ["train.max_steps: 3 -> 4"])
    result = result_of(start())
    assert (result.code, result.reason) == (FAILED, "run.dir: in use by another job")


def test_the_second_signal_leaves_a_run_that_was_taken_over(slow: Job, start: Callable[[], LocalStart]) -> None:
    start()
    begun(slow.spec.dir)
    second = start()
    second.stop()
    second.kill()
    assert result_of(second).code == STOPPED
    assert (slow.spec.dir / "STOP").exists()  # it still trains, and reads the file


def test_the_output_of_a_refused_start_is_deleted_by_the_next_one(slow: Job, start: Callable[[], LocalStart]) -> None:
    old = slow.spec.dir.with_name(f".r.{'0' * 32}.output")
    others = [slow.spec.dir.with_name(name) for name in (f".r.1.{'0' * 32}.output", ".r.mine.output")]
    for path in (old, *others):
        path.touch()
    start()
    assert [path.exists() for path in (old, *others)] == [False, True, True]


def test_several_nodes_are_refused() -> None:
    with refused(ConfigError, "launch.nodes", "got 2", "launch=slurm"):
        local.check([single("experiment=digits", "launch.nodes=2")])


def test_only_one_digit_ranks_are_passed_to_tee() -> None:
    """torchrun parses one digit."""
    line = local.command(single("experiment=digits", "launch.processes_per_node=16"), local.shares(1)[0])
    assert "--tee=" + ",".join(f"{rank}:1" for rank in range(1, 10)) in line

"""Runs on this machine, under torchrun as a child process.

A run is stopped with a file ``STOP`` in its directory, not with a signal: torchrun 2.9 does not forward SIGUSR1, and
30 seconds after it forwards any signal it kills ranks that are still saving. With the file, the ranks agree on a step,
save and exit by themselves, and then torchrun exits, too.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from dtrain.config.errors import ConfigError, as_config_error
from dtrain.distributed.world import choose_device, process_cpu_count
from dtrain.launching.job import FAILED, STOPPED, Job, JobResult, StatusJudge

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def check(jobs: Sequence[Job]) -> None:
    """Refuses jobs that cannot run on this machine.

    Raises:
        ConfigError: If a job has several nodes, or more processes than this machine has GPUs.
    """
    for job in jobs:
        if job.launch.nodes != 1:
            raise ConfigError(
                f"launch.nodes: got {job.launch.nodes}, but launch=local starts processes on this machine only. "
                "Set launch=slurm, or start torchrun on each node."
            )
        wanted = processes(job)
        choose_device(wanted - 1, wanted, _gpus())


def describe(jobs: Sequence[Job]) -> str:
    """The shell commands that ``launch`` would run."""
    return "".join(f"OMP_NUM_THREADS={_threads(processes(job))} {shlex.join(command(job))}\n" for job in jobs)


def launch(jobs: Sequence[Job]) -> list[JobResult]:
    """Runs the jobs one after the other. A stop request stops the current job, and later jobs are not started."""
    results: list[JobResult] = []
    for job in jobs:
        if any(result.code == STOPPED for result in results):
            results.append(JobResult("not started", STOPPED))
        else:
            results.append(_train(job))
    return results


def processes(job: Job) -> int:
    """Number of processes: ``launch.processes_per_node``, by default one for each GPU, or one without GPUs."""
    return job.launch.processes_per_node or _gpus() or 1


def command(job: Job) -> list[str]:
    """The torchrun command of a job, with the current Python interpreter."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes(job)}"),
        # 0 is the default, but PET_MAX_RESTARTS in the environment could change it.
        *("--max-restarts=0", f"--log-dir={_logs(job) / 'torchrun'}", *_tee(processes(job))),
        *("-m", "dtrain.train", *job.arguments),
    ]


def _train(job: Job) -> JobResult:
    judge = StatusJudge(job.run.dir)
    with as_config_error("run.dir"):
        _logs(job).mkdir(parents=True, exist_ok=True)
    sys.stderr.write(describe([job]))
    sys.stderr.flush()
    environment = os.environ | {"OMP_NUM_THREADS": _threads(processes(job))}
    with _Torchrun(command(job), environment, job.run.dir / "STOP") as torchrun:
        code = torchrun.wait()
    result, reason = judge(code)
    if result.code == FAILED:
        sys.stderr.write(f"dtrain: error: {job.run.name} failed, {reason}. Logs of the ranks: {_logs(job)}\n")
    return result


class _Torchrun:
    """A torchrun process that does not get the signals of the terminal.

    The first signal to this process asks the run to save and stop. A second SIGINT or SIGTERM terminates torchrun, which
    forwards SIGTERM to the ranks and kills them after 30 s.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], stop_file: Path) -> None:
        self._command = command
        self._environment = environment
        self._stop_file = stop_file
        self._stop_requested = False
        self._process: subprocess.Popen[bytes] | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Torchrun:
        for number in _SIGNALS:
            # nohup ignores SIGHUP so that the run outlives the terminal.
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._previous_handlers[number] = signal.signal(number, self._on_signal)
        # In a new session, because Ctrl-C signals every process of the terminal, and torchrun would exit at once.
        self._process = subprocess.Popen(self._command, env=self._environment, start_new_session=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        if self._stop_requested:
            # The run may have ended before it read the request, which must not stop the next start.
            self._stop_file.unlink(missing_ok=True)

    def wait(self) -> int:
        """Waits for torchrun; returns its exit code."""
        assert self._process is not None
        return self._process.wait()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not self._stop_requested:
            self._stop_requested = True
            self._stop_file.touch()
            text = (
                f"{name}: the run will save and stop; a second signal ends it within 30 s without waiting for the save"
            )
        elif number in (signal.SIGINT, signal.SIGTERM) and self._process is not None:
            self._process.terminate()
            text = f"{name} again: ending the run"
        else:
            return
        # os.write, because the interrupted code may be inside a write to sys.stderr.
        os.write(2, f"dtrain: {text}\n".encode())


def _logs(job: Job) -> Path:
    return job.run.dir / "logs"


def _tee(processes: int) -> list[str]:
    # Rank 0 writes to the terminal directly, for its progress line. Standard error of all ranks stays on the terminal:
    # through a log file, a traceback would appear after the error report of torchrun. torchrun parses one-digit ranks only.
    ranks = ",".join(f"{rank}:1" for rank in range(1, min(processes, 10)))
    return [f"--tee={ranks}"] if ranks else []


def _threads(processes: int) -> str:
    """``OMP_NUM_THREADS`` of each process: as in the environment, else cores / processes. torchrun would set 1."""
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, process_cpu_count() // processes))


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0

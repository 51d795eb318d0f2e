"""Runs on this machine, under torchrun as a child process.

A stop is asked for with a STOP file in the run directory, not with a signal: torchrun up to 2.9 cannot be told to pass
SIGUSR1 on, and whatever signal it passes on, it kills ranks that are still saving half a minute later. Once the ranks
have agreed, saved and ended by themselves, torchrun simply ends, too.
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

from dtrain.config.errors import ConfigError, users_to_fix
from dtrain.distributed.world import choose_device
from dtrain.launching.outcome import FAILED, STOPPED, Outcome, Verdict
from dtrain.launching.point import Point

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def check(points: Sequence[Point]) -> None:
    """Refuses what cannot work on this machine.

    Raises:
        ConfigError: If several nodes are asked for, or more processes than there are GPUs.
    """
    for point in points:
        if point.launch.nodes != 1:
            raise ConfigError(
                f"launch.nodes: got {point.launch.nodes}, but launch=local starts processes on this machine only. "
                "Set launch=slurm, or start torchrun on each node."
            )
        wanted = processes(point)
        choose_device(wanted - 1, wanted, _gpus())


def describe(points: Sequence[Point]) -> str:
    """The commands that would be run, for a shell."""
    return "".join(f"OMP_NUM_THREADS={_threads(processes(point))} {shlex.join(command(point))}\n" for point in points)


def launch(points: Sequence[Point]) -> list[Outcome]:
    """Trains the points one after the other; a stop request stops the one that runs, and no further one is started."""
    outcomes: list[Outcome] = []
    for point in points:
        if any(outcome.code == STOPPED for outcome in outcomes):
            outcomes.append(Outcome("not started", STOPPED))
        else:
            outcomes.append(_train(point))
    return outcomes


def processes(point: Point) -> int:
    """How many processes to start: as given, else one for each GPU, or one on a machine without."""
    return point.launch.processes_per_node or _gpus() or 1


def command(point: Point) -> list[str]:
    """The torchrun line of a point, with this interpreter."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes(point)}"),
        # None is the default, but the environment could say otherwise (PET_MAX_RESTARTS).
        *("--max-restarts=0", f"--log-dir={_logs(point) / 'torchrun'}", *_tee(processes(point))),
        *("-m", "dtrain.train", *point.arguments),
    ]


def _train(point: Point) -> Outcome:
    verdict = Verdict(point.run.dir)
    with users_to_fix("run.dir"):
        _logs(point).mkdir(parents=True, exist_ok=True)
    sys.stderr.write(describe([point]))
    sys.stderr.flush()
    environment = os.environ | {"OMP_NUM_THREADS": _threads(processes(point))}
    with _Agent(command(point), environment, point.run.dir / "STOP") as agent:
        agent.wait()
    outcome, why = verdict()
    if outcome.code == FAILED:
        sys.stderr.write(f"dtrain: error: {point.run.name} failed, {why}. What each rank says: {_logs(point)}\n")
    return outcome


class _Agent:
    """torchrun, out of the reach of the terminal's signals; those to this process become a request to stop.

    The first signal of any kind asks the run to save and stop. A second SIGINT or SIGTERM ends it: torchrun passes
    SIGTERM on, and kills what is left after its own time-out, 30 s.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], stop_file: Path) -> None:
        self._command = command
        self._environment = environment
        self._stop_file = stop_file
        self._asked = False
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Agent:
        for number in _SIGNALS:
            # nohup's wish that the run outlives the terminal.
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._note)
        # A session of its own: Ctrl-C reaches every process of the terminal's, and torchrun would end at once.
        self._process = subprocess.Popen(self._command, env=self._environment, start_new_session=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._asked:
            # The run may have ended before it saw the request; the next start must not stop for it.
            self._stop_file.unlink(missing_ok=True)

    def wait(self) -> int:
        """torchrun's exit code, once it has ended."""
        assert self._process is not None
        return self._process.wait()

    def _note(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not self._asked:
            self._asked = True
            self._stop_file.touch()
            text = f"{name}: asking the run to save and stop; once more, and torchrun ends it within half a minute"
        elif number in (signal.SIGINT, signal.SIGTERM) and self._process is not None:
            self._process.terminate()
            text = f"{name} again: ending the run"
        else:
            return
        # Not sys.stderr, which the interrupted code may be in the middle of writing to.
        os.write(2, f"dtrain: {text}\n".encode())


def _logs(point: Point) -> Path:
    return point.run.dir / "logs"


def _tee(processes: int) -> list[str]:
    # Rank 0 keeps the terminal, for its progress line. Standard error is everybody's: through a file, a traceback would
    # arrive after torchrun's own report. torchrun reads ranks of one digit only.
    ranks = ",".join(f"{rank}:1" for rank in range(1, min(processes, 10)))
    return [f"--tee={ranks}"] if ranks else []


def _threads(processes: int) -> str:
    """``OMP_NUM_THREADS`` of each process: the user's, else its share of the cores; torchrun would set 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // processes))


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0

"""Commands of the GPU session: each ends in time, together with everything that it started.

* A *bench* runs the commands of one part of the session until the part's deadline.
* torchrun starts its ranks in sessions of their own, so killing torchrun leaves them running. On Linux this process adopts
  such orphans (``adopt_orphans``) and kills them when their command is over.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from benchmarks import harness

ROOT = Path(__file__).resolve().parents[1]
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LAST_LINES = 25
_LEAST_SECONDS = 3.0  # the imports alone take this long


class Failed(Exception):
    """A command ended with an exit code other than 0; the message has its last lines."""


class OutOfTime(Exception):
    """A command was killed at its deadline; the message has its last lines."""


class Skipped(Exception):
    """A part cannot run here; the message has the reason."""


class NoTimeLeft(Exception):
    """The deadline of a part passed before it could start a command."""


class Bench:
    """Runs the commands of one part.

    Args:
        folder: For its runs; made when needed.
        out: Folder of the session's results.
        deadline: On the monotonic clock.
        quick: Whether everything is small.
    """

    def __init__(self, folder: Path, out: Path, deadline: float, *, quick: bool) -> None:
        self.folder = folder
        self.out = out.resolve()
        self.quick = quick
        self.gpus = torch.cuda.device_count()
        self.commands: list[str] = []  # for the page
        self._deadline = deadline

    @property
    def ranks(self) -> int:
        """Number of processes that use the whole machine."""
        return self.gpus or 2

    @property
    def has_large_gpu(self) -> bool:
        """Whether the first GPU has memory for large batches."""
        return self.gpus > 0 and torch.cuda.get_device_properties(0).total_memory > 40 * 2**30

    def python(self, *arguments: str | Path, ranks: int = 1, **environment: str) -> None:
        """Runs Python, under torchrun if there are several ranks; ``environment`` is added to that of this process.

        Raises:
            Failed: If it fails.
            OutOfTime: If it does not end in time.
            NoTimeLeft: If there was no time to start it.
        """
        seconds = self._deadline - time.monotonic()
        if seconds < _LEAST_SECONDS:
            raise NoTimeLeft(f"its time was used up after {len(self.commands)} commands")
        command = harness.python(*arguments, ranks=ranks)
        self.commands.append(shlex.join(["python", *command[1:]]).replace(str(self.folder), "RUNS"))
        self.folder.mkdir(parents=True, exist_ok=True)
        run_in_time(command, seconds=seconds, cwd=ROOT, environment={"OMP_NUM_THREADS": "1"} | os.environ | environment)

    def train(self, name: str, *overrides: str, ranks: int = 1, **environment: str) -> harness.Run:
        """Trains in ``folder/name``; arguments and errors as of ``python``."""
        run = harness.Run(self.folder / name)
        words = harness.train_overrides(run.run_dir, [*overrides, "checkpoint.keep_last=1"])
        self.python("-m", "dtrain.train", *words, ranks=ranks, **environment)
        return run


def adopt_orphans() -> None:
    """Makes this process the parent of processes whose own parent ends (on Linux; elsewhere they are left alone)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_in_time(command: Sequence[str], *, seconds: float, cwd: Path, environment: Mapping[str, str]) -> str:
    """Runs a command; when it is over, kills every process that it started. Returns its standard output and error.

    Raises:
        Failed: If it fails.
        OutOfTime: If it takes longer than ``seconds``.
    """
    others = harness.children(os.getpid())
    with tempfile.TemporaryFile() as output:  # not a pipe: a process that outlives the command would keep it open
        process = subprocess.Popen(
            command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill(process, others)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if code is None:
        raise OutOfTime(f"killed after {seconds:.0f} s, when its time was up\n{_last_lines(text)}")
    if code != 0:
        raise Failed(f"exit code {code}\n{_last_lines(text)}")
    return text


def _last_lines(text: str) -> str:
    # torchrun ends with a long report on the failed rank, whose own message stands before it.
    before, _, _ = text.partition("torch/distributed/elastic/")
    return "\n".join((before.rpartition("\n")[0] or text).splitlines()[-_LAST_LINES:])


def _kill(process: subprocess.Popen[bytes], others: set[int]) -> None:
    process.kill()
    process.wait()
    # The children of a killed process become ours, so the next round finds them.
    while pids := harness.children(os.getpid()) - others:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)

"""A command in a process of its own that ends in time, and takes with it whatever it has started."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LAST_LINES = 25
_TORCHRUN = "torch/distributed/elastic/"


class Failed(Exception):
    """The command ended with another code than 0; the message has its last lines."""


class OutOfTime(Exception):
    """It was ended; the message has its last lines."""


def adopt_orphans() -> None:
    """From now on, what a child has started becomes this process's when that child ends: torchrun's ranks, for example, which
    have sessions of their own. On Linux; elsewhere they are left alone.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run(command: Sequence[str], *, seconds: float, cwd: Path, environment: Mapping[str, str]) -> str:
    """Runs a command, and ends all that it has started when it is over.

    Args:
        command: Program and arguments.
        seconds: It may take.
        cwd: Its directory.
        environment: All of it.

    Returns:
        What it has written to its standard output and error.

    Raises:
        Failed: If it fails.
        OutOfTime: If it takes longer.
    """
    others = _children(os.getpid())
    with tempfile.TemporaryFile() as output:  # no pipe: whoever holds its other end could keep us waiting
        process = subprocess.Popen(
            command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process, others)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if code is None:
        raise OutOfTime(f"ended after {seconds:.0f} s, when its time was up\n{_end_of(text)}")
    if code != 0:
        raise Failed(f"exit code {code}\n{_end_of(text)}")
    return text


def _end_of(text: str) -> str:
    said, _, _ = text.partition(_TORCHRUN)  # at its end torchrun tells at length that a rank failed, which has said why
    return "\n".join((said.rpartition("\n")[0] or text).splitlines()[-_LAST_LINES:])


def _end(process: subprocess.Popen[bytes], others: set[int]) -> None:
    """Ends a child, and all children of this process but ``others``."""
    process.kill()
    process.wait()
    # Killed parents hand their children over to this process, which finds them in the next round.
    while left := _children(os.getpid()) - others:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            os.waitpid(pid, 0)


def _children(pid: int) -> set[int]:
    """Of a process; none where there is no /proc."""
    found: set[int] = set()
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            found |= {int(child) for child in (thread / "children").read_text().split()}
    return found

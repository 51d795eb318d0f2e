"""Ends torchrun on a machine that has lost the others: without this it keeps its node for a quarter of an hour.

torchrun asks the store of the job, which is on one of the machines, continuously and before it ends. torch's calls have no time
limit (2.9 to 2.13): if that machine or the network to it is lost, a call returns when TCP gives up. The ranks have ended long
before (``dtrain.distributed.hang``).

Imports nothing of dtrain or torch: the torchrun process of every job on the machine loads this file.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

# Seconds in one call after the last rank has ended. While others still work, torchrun waits for 300 s at its exit barrier.
_STUCK, _AT_BARRIER = 40.0, 345.0
_POLL = 1.0


def end_if_stuck() -> None:
    """Ends this process, a torchrun, once its ranks have ended and its main thread stays in one call; Linux only."""
    if sys.platform == "linux":
        threading.Thread(target=_watch, name="torchrun", daemon=True).start()


def main_frame() -> FrameType | None:
    """What the main thread executes, for another thread."""
    ident = threading.main_thread().ident
    if ident is None:
        return None
    # A garbage collection inside sys._current_frames can deadlock the process: github.com/python/cpython/issues/106883,
    # fixed in later patch releases only.
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(ident)
    finally:
        if collects:
            gc.enable()


def _watch() -> None:
    had_ranks, since, last = False, time.monotonic(), None
    while True:
        time.sleep(_POLL)
        frame = main_frame()
        is_training = any(_is_rank(child) for child in _children())
        had_ranks |= is_training
        # The frame itself is kept: another call at the same place has a different one.
        if is_training or not had_ranks or last is None or frame is not last[0] or frame.f_lasti != last[1]:
            since = time.monotonic()
            last = (frame, frame.f_lasti) if frame is not None else None
        elif (stuck := time.monotonic() - since) > (_AT_BARRIER if _is_at_barrier(frame) else _STUCK):
            failed = any(_exit_code(child) for child in _children()) or not list(_children())
            sys.stderr.write(
                f"dtrain: torchrun on {socket.gethostname()} ends: its ranks have ended, and the store of the job has not "
                f"answered for {stuck:.0f} s. Is a machine down, or the network?\n"
            )
            sys.stderr.flush()
            os._exit(int(failed))


def _children() -> Iterator[int]:
    """The processes that this one has started and not yet read the exit code of."""
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has just ended
            yield from map(int, path.read_text().split())


def _is_rank(pid: int) -> bool:
    """Whether it runs as a rank: a process that has ended has no environment."""
    try:
        return b"\0LOCAL_RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _exit_code(pid: int) -> int:
    """Its exit code or signal; torchrun can still read it."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:
        return 1
    return ended.si_status if ended is not None else 0


def _is_at_barrier(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "_exit_barrier":
            return True
        frame = frame.f_back
    return False

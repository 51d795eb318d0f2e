"""Ends a process when its parent has ended, or from a thread while the main thread is stuck.

* A rank whose torchrun was killed must not write into a run that has been started again, and the worker processes of its
  loader must not outlive it.
* A call in C code cannot be interrupted. What waits for another machine is called in a thread that can be abandoned
  (``in_time``), or a thread ends the process if it takes too long (``exit_unless``). Both need the interpreter lock;
  ``exit_if_lock_is_held`` covers C code that never releases it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from dtrain.distributed.torchrun import record_failure

T = TypeVar("T")
#: Seconds that a failed rank has to close its loaders, tracker and process group, and for threads of user code.
CLEANUP = 30.0
#: Name of the thread that writes a checkpoint.
CHECKPOINT_WRITER = "checkpoint"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_SECONDS = 1.0
# Background writers, for example of a checkpoint, get this many seconds: less than torchrun's 30 s before SIGKILL.
_WRITER_SECONDS = 20.0


def exit_now(code: int, message: str = "", *, shown: bool = True) -> None:
    """Ends this process from any thread, once its background writers are done. No ``finally`` block runs.

    Args:
        code: Exit code of the process.
        message: The reason, for torchrun; ``""`` if the caller has shown it.
        shown: Whether the caller has shown it.
    """
    exit_within(_WRITER_SECONDS, code)  # also if a write below blocks
    record_failure(message, shown)
    deadline = time.monotonic() + _WRITER_SECONDS
    for thread in threading.enumerate():
        if not thread.daemon and thread not in (threading.main_thread(), threading.current_thread()):
            thread.join(max(0.0, deadline - time.monotonic()))
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the reader of a pipe is gone
            stream.flush()
    os._exit(code)


def exit_within(seconds: float, code: int) -> None:
    """Ends this process after ``seconds``, regardless of its other threads."""

    def end() -> None:
        time.sleep(seconds)
        os._exit(code)

    with suppress(RuntimeError):  # at interpreter shutdown no thread can start
        threading.Thread(target=end, name="exit", daemon=True).start()


def exit_unless(done: threading.Event, seconds: float, message: str) -> None:
    """Shows ``message`` and ends this process with code 1 after ``seconds``, unless ``done`` is set before."""

    def end() -> None:
        if not done.wait(seconds):
            exit_within(_WRITER_SECONDS, 1)  # also if writing to standard error blocks
            sys.stderr.write(f"{message}\n")
            exit_now(1, message)

    with suppress(RuntimeError):  # at interpreter shutdown no thread can start
        threading.Thread(target=end, name="time limit", daemon=True).start()


def exit_without_threads(seconds: float, code: int) -> None:
    """Ends this process with ``code`` after ``seconds``, during which the interpreter waits for threads that are not daemons.

    A thread of user code that never ends would keep a failed process, and its GPU, for ever. A checkpoint is written before.
    """

    def end() -> None:
        time.sleep(seconds)
        for thread in threading.enumerate():
            if thread.name == CHECKPOINT_WRITER:
                thread.join()
        left = [it.name for it in threading.enumerate() if not it.daemon and it is not threading.main_thread()]
        if not left:
            return
        sys.stderr.write(
            f"dtrain: these threads have not ended in {seconds:g} s, the process ends: {', '.join(left)}\n"
        )
        exit_within(_WRITER_SECONDS, code)  # also if writing to a stream blocks
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)

    with suppress(RuntimeError):
        threading.Thread(target=end, name="exit", daemon=True).start()


def exit_if_lock_is_held(seconds: float) -> None:
    """Ends this process with code 1 if nothing calls this function again for ``seconds``; shows the stacks of its threads.

    No thread of Python can do that while C code holds the interpreter lock. Time in which the process is suspended counts.
    Uses ``faulthandler.dump_traceback_later``, of which a process has one.
    """
    with suppress(RuntimeError, OSError, ValueError):  # standard error is closed
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)


def in_time(function: Callable[[], T], seconds: float) -> T:
    """Calls ``function`` in a thread, which is abandoned after ``seconds``, and returns its result.

    Raises:
        TimeoutError: If it takes longer; the argument is the thread.
        Exception: Whatever ``function`` raises.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def call() -> None:
        try:
            results.append(function())
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=call, name="in time", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(thread)
    return results[0]


def exit_with_torchrun(environment: Mapping[str, str] = os.environ) -> None:
    """Makes this process end when torchrun, its parent, ends. Does nothing without torchrun.

    torchrun ends its ranks itself unless it is killed. For that case the kernel kills this process on Linux; elsewhere
    a thread polls the parent every second.

    Args:
        environment: Has ``TORCHELASTIC_RUN_ID`` under torchrun.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return
    parent = os.getppid()
    if parent == 1 and not _init_may_be_torchrun():  # torchrun was killed while this process was still importing
        os._exit(1)
    if kill_with_parent():
        if os.getppid() != parent:  # it was killed just before the call
            os._exit(1)
        return
    exit_with_parent(parent)


def kill_with_parent() -> bool:
    """Makes the kernel kill this process when the thread that started it ends, even while this process is stopped.

    Returns:
        Whether the kernel will do so: only on Linux.
    """
    return sys.platform == "linux" and bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0)


def exit_with_parent(pid: int) -> None:
    """Makes this process end within seconds after process ``pid`` has ended, even if that was before this call.

    torch's own watchdog of a loader worker watches the process that is the parent when the watchdog starts. If the trainer
    is killed while it starts workers, that is a different process, and the workers would never end.
    """
    threading.Thread(target=_exit_after, args=(pid,), name="exit with parent", daemon=True).start()


def _init_may_be_torchrun() -> bool:
    """Whether process 1 runs Python, as in a container that was started with torchrun."""
    try:
        return b"python" in Path("/proc/1/cmdline").read_bytes()
    except OSError:  # not Linux
        return False


def _exit_after(pid: int) -> None:
    while _is_running(pid):
        time.sleep(_POLL_SECONDS)
    os._exit(1)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:  # it has ended, or its number now belongs to another user's process
        return False
    # A process stays a zombie until its parent reads its exit code, and process 1 of some containers never does.
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:  # not Linux
        return True

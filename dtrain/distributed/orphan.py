"""No orphans: a rank whose torchrun died ends at once, so that it cannot write into a run that was started again; and a
loader's worker ends with its rank."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LOOK_EVERY = 1.0


def end_with_torchrun(environment: Mapping[str, str] = os.environ) -> None:
    """From now on this process is killed when its parent ends, if that is torchrun; other parents may leave it alone.

    torchrun ends its ranks itself unless it is killed. On Linux the kernel does it then, else a thread that looks for the
    parent every second.

    Args:
        environment: In which torchrun names itself.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return
    parent = os.getppid()
    if parent == 1 and not _first_process_is_python():  # torchrun died while this process was still importing
        os._exit(1)
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0:
        if os.getppid() != parent:  # it died just before the kernel was asked
            os._exit(1)
        return
    end_with(parent)


def _first_process_is_python() -> bool:
    """Whether process 1 may be torchrun, as in a container that was started with it."""
    try:
        return b"python" in Path("/proc/1/cmdline").read_bytes()
    except OSError:  # no Linux
        return False


def end_with(pid: int) -> None:
    """From now on a thread ends this process within seconds after that one has ended, which may be the case already.

    torch's own watch of a loader's worker takes whoever is its parent when it begins to look for the trainer: a trainer that is
    killed while it starts workers leaves them behind for ever.
    """
    threading.Thread(target=_follow, args=(pid,), name="orphan", daemon=True).start()


def _follow(pid: int) -> None:
    while _is_running(pid):
        time.sleep(_LOOK_EVERY)
    os._exit(1)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:  # gone, or somebody else's by now
        return False
    # It stays a zombie while whoever started it does not ask how it ended, as some first processes of containers never do.
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:  # no Linux
        return True

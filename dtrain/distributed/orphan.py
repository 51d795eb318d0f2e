"""No orphans: a rank whose torchrun died ends at once, so that it cannot write into a run that was started again."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping

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
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0:
        if os.getppid() != parent:  # it died just before the kernel was asked
            os._exit(1)
        return
    threading.Thread(target=_follow, args=(parent,), name="orphan", daemon=True).start()


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY)
    os.write(2, b"dtrain: ending at once because torchrun is gone\n")
    os._exit(1)

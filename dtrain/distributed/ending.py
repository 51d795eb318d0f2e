"""Ending a process whose main thread cannot be asked to: it may be stuck in a collective, or in somebody else's code."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress

# What is being written in the background, such as a checkpoint, gets so long: less than torchrun's 30 s before SIGKILL.
_PATIENCE = 20.0


def end_process(code: int) -> None:
    """Ends this process from any thread, after its background writers; no ``finally`` runs, nothing is joined or closed."""
    deadline = time.monotonic() + _PATIENCE
    for thread in threading.enumerate():
        if not thread.daemon and thread not in (threading.main_thread(), threading.current_thread()):
            thread.join(max(0.0, deadline - time.monotonic()))
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # whoever read it is gone
            stream.flush()
    os._exit(code)

"""What torchrun shows when a rank fails: the message of dtrain, instead of torchrun's report of about 35 lines around it.

* A rank writes its message to torchrun's error file (``record_failure``), together with whether it has shown it.
* ``quiet_torchrun`` runs in the torchrun process of a job of dtrain. When a rank has failed, it prints nothing if a rank
  has shown its message, else the message in the error file, or one line about a rank that was killed.

torchrun has no option for its report. But it loads the entry points of the group ``torchrun.handlers``, which are meant
for rendezvous backends, before it starts ranks, and ``pyproject.toml`` names ``entry_point`` there. That needs no process
that waits for torchrun's end, and no change to the command. Everything here that depends on torchrun is looked up when it
is needed: with a version that works differently, or without the entry point (a checkout that is only on ``PYTHONPATH``),
torchrun's own report is shown, and contains the message too.

Imports nothing heavy: the torchrun process of every job on the machine loads this file.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from dtrain.distributed.torchrun_end import end_if_stuck
from dtrain.errors import EXIT_USAGE

_MODULES = {"dtrain", *(f"dtrain.{name}" for name in ("train", "evaluate", "export", "doctor", "replay"))}
_KEY = "dtrain"  # of our part of the error file
_QUIET = "DTRAIN_TORCHRUN_QUIET"  # set in the environment of the ranks

_ELASTIC = "torch.distributed.elastic"
_UNABLE = "Unable to shutdown process"
#: By logger: beginnings of the messages that only announce the report, or the end of the other ranks.
_ANNOUNCEMENTS = {
    f"{_ELASTIC}.multiprocessing.api": ("Sending process", "failed (exitcode"),
    f"{_ELASTIC}.agent.server.api": ("Received %s death signal",),
    f"{_ELASTIC}.multiprocessing.errors.error_handler": ("no error file defined for parent",),
}


# -- in a rank


def launched_rank() -> int:
    """This process's rank as the launcher set it; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def record_failure(message: str, shown: bool) -> None:
    """Writes the reason why this rank fails to torchrun's error file. Does nothing without torchrun.

    Args:
        message: As on the terminal.
        shown: Whether this rank has written it to standard error.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    details = {"py_callstack": message, "timestamp": str(int(time.time()))}
    content = {"message": {"message": message, "extraInfo": details}, _KEY: {"message": message, "shown": shown}}
    # Aside and renamed: torchrun may end this rank meanwhile, and half a file would make torchrun fail.
    with suppress(OSError):  # the message was shown, or another rank shows it
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(f"{path}.new", path)


def torchrun_is_quiet() -> bool:
    """Whether the torchrun of this rank prints messages that no rank has shown."""
    return _QUIET in os.environ


# -- in torchrun


def entry_point() -> Callable[[Any], Any]:
    """Called by torchrun as the entry point ``torchrun.handlers``; returns a backend that cannot be used."""
    if _is_job_of_dtrain(sys.argv[1:]):
        prepare_torchrun()
    return _refuse_rendezvous


def prepare_torchrun() -> None:
    """Makes this process, a torchrun, end with dtrain's messages, accept many ranks, and not wait for lost machines."""
    quiet_torchrun()
    allow_open_files()
    end_if_stuck()


def quiet_torchrun() -> None:
    """Makes torchrun, in this process, end with the message of the rank that failed instead of its own report."""
    killed_by_torchrun: set[int] = set()

    def is_shown(record: logging.LogRecord) -> bool:
        text, arguments = str(record.msg), record.args if isinstance(record.args, tuple) else ()
        if text.startswith(_UNABLE) and arguments and isinstance(arguments[0], int):
            killed_by_torchrun.add(arguments[0])
        if not text.startswith(_ANNOUNCEMENTS[record.name]):
            return True
        # With --max-restarts, nothing else says that a rank was killed.
        code = arguments[0] if "exitcode" in text and arguments else 0
        return isinstance(code, int) and code < 0 and code != -signal.SIGTERM

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            text = _last_message(kind.__name__, error, killed_by_torchrun)
        except Exception:  # noqa: BLE001 - a different version of torchrun: its own report is better than none
            previous(kind, error, trace)
            return
        if text is None:
            previous(kind, error, trace)
        elif text:
            sys.stderr.write(f"{text}\n")

    previous = sys.excepthook
    sys.excepthook = show
    for name in _ANNOUNCEMENTS:
        logging.getLogger(name).addFilter(is_shown)
    os.environ[_QUIET] = "1"


def allow_open_files() -> None:
    """Raises this process's limit of open files as far as possible: torchrun's store has two connections to each rank."""
    with suppress(OSError, ValueError):  # macOS has no limit, but does not accept that as a limit
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _last_message(kind: str, error: Any, killed_by_torchrun: set[int]) -> str | None:
    """The last message of the job; ``""`` if it was shown; None to show torchrun's report."""
    if kind in ("SignalException", "KeyboardInterrupt"):  # the ranks have said how they ended
        return ""
    if kind != "ChildFailedError":
        return None
    failures: dict[int, Any] = error.failures
    unexplained = [
        _explain_end(rank, failure.exitcode, failure.pid)
        for rank, failure in failures.items()
        # torchrun ends the other ranks with SIGTERM, then with SIGKILL. Codes 1 and 2 are dtrain's own, and Python's.
        if failure.exitcode not in (-signal.SIGTERM, 1, EXIT_USAGE) and failure.pid not in killed_by_torchrun
    ]
    if unexplained:
        return "\n".join(unexplained)
    recorded = [failure.error_file_data[_KEY] for failure in failures.values() if _KEY in failure.error_file_data]
    if any(one["shown"] for one in recorded) and not _hides_output(sys.argv[1:]):
        return ""
    if recorded:  # the other ranks failed before rank 0 did, and torchrun ended it
        return str(min(recorded, key=lambda one: not one["shown"])["message"])
    rank, first = error.get_first_failure()
    # argparse and ``command_line`` have explained wrong usage, on every rank or on rank 0.
    return "" if first.exitcode == EXIT_USAGE else _explain_end(rank, first.exitcode, first.pid)


def _explain_end(rank: int, code: int, pid: int) -> str:
    """The message for a rank that has recorded no failure."""
    if code >= 0:
        return f"dtrain: error: rank {rank} ended with exit code {code} (process {pid}). Its output is above."
    remedy = _REMEDIES.get(-code, "Its output is above.")
    return f"dtrain: error: rank {rank} was killed by {signal.Signals(-code).name} (process {pid}). {remedy}"


_REMEDIES: dict[int, str] = {
    signal.SIGKILL: "If nobody has killed it, this machine ran out of memory: see dmesg.",
    signal.SIGBUS: "If it is a full /dev/shm, use fewer workers or a larger one (docker: --shm-size=8g).",
    signal.SIGSEGV: "The stack of its threads is above.",
}


def _is_job_of_dtrain(arguments: Sequence[str]) -> bool:
    """Whether torchrun's command line has ``-m dtrain.train``, ``-m dtrain`` or another entry point with several ranks."""
    return not {"-m", "--module"}.isdisjoint(arguments) and not _MODULES.isdisjoint(arguments)


def _hides_output(arguments: Sequence[str]) -> bool:
    """Whether torchrun's command line keeps output of ranks from the terminal."""
    options = itertools.takewhile(lambda text: text not in _MODULES, arguments)
    return any(
        text.startswith(("-r", "--redirects", "--local-ranks-filter", "--local_ranks_filter")) for text in options
    )


def _refuse_rendezvous(parameters: Any) -> Any:
    raise ValueError(
        f"--rdzv-backend={parameters.backend}: not a rendezvous backend. It is how dtrain shortens torchrun's report of "
        "an error. Use --standalone, or --rdzv-backend=c10d."
    )

"""Files of a run directory besides metrics and checkpoints: status.json and the ranks' logs; and safe reading of any file.

* ``status.json`` has the state of the run. Batch scripts and the launcher read it instead of the exit code, because
  torchrun turns every non-zero exit code of a worker into 1. Only rank 0 writes it.
* ``logs/rank-00000.log`` has the messages of one rank, over all restarts. Until a run starts, and its directory may be
  changed, they are kept in memory.
* A run directory may belong to another user, so only regular files are read, and a bounded amount of each.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, BinaryIO

from dtrain.config.errors import PeerFailed, in_brief, without_url_secrets
from dtrain.distributed.atomic import replace_file

#: ``running`` is also the state of a run that was killed: compare ``time``, or call :func:`is_trained`.
STATES = ("running", "finished", "stopped", "failed")
#: Bytes of a line that are read; a record has about a thousand.
LONGEST_LINE = 2**20
_KEPT_MESSAGES = 1000
logger = logging.getLogger("dtrain")


# -- status.json


def write_status(run_dir: Path, state: str, step: int, reason: str | None = None, **extra: Any) -> None:
    """Replaces ``run_dir/status.json``.

    Args:
        run_dir: The run's directory; it exists.
        state: One of :data:`STATES`. ``stopped`` means on request, and that the run can be resumed.
        step: Attempted optimizer steps.
        reason: A sentence for a person: why the run stopped or failed.
        extra: Further entries; JSON can represent them.

    Raises:
        ValueError: If ``state`` is not one of :data:`STATES`.
        OSError: On a write failure; the old file is kept.
    """
    if state not in STATES:
        raise ValueError(f"status: got state {state!r}; known are {', '.join(STATES)}.")
    status = {"state": state, "step": step, "reason": reason, "time": time.time(), **extra}
    with replace_file(run_dir / "status.json") as file:
        file.write(json.dumps(status, indent=2, allow_nan=False).encode() + b"\n")


def read_status(run_dir: Path) -> dict[str, Any] | None:
    """The content of ``run_dir/status.json``; None if there is none.

    Raises:
        ValueError: If the file is not a status. dtrain replaces it atomically, so another program wrote it.
    """
    path = run_dir / "status.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        status = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}). Delete it; the run writes a new one.") from error
    if not isinstance(status, dict) or status.get("state") not in STATES:
        raise ValueError(f"{path}: no 'state' among {', '.join(STATES)}. Delete it; the run writes a new one.")
    return status


def is_trained(run_dir: Path) -> bool:
    """Whether a process is training the run. A killed one leaves the state ``running``, but not the run's lock."""
    path = run_dir / ".lock"
    if not is_plain(path):
        return False
    try:
        with path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # locked; or the file system has no locks, and only the state is known
        return True
    return False


# -- failures and logs of the ranks


class FailureRecord:
    """Writes status.json when the run fails after its start. Before ``starts`` is called it writes nothing.

    Args:
        run_dir: The run's directory.
        rank: This process; rank 0 writes status.json.

    Attributes:
        on_failure: Called with the reason on rank 0, after status.json is written.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self.step: Callable[[], int] | None = None
        self._extra: Callable[[], dict[str, Any]] = dict
        self.on_failure: Callable[[str], None] = lambda reason: None

    def starts(self, rank: int, step: Callable[[], int], extra: Callable[[], dict[str, Any]] = dict) -> None:
        """The run starts.

        Args:
            rank: This process; another one than before if the run continues without a lost rank.
            step: Returns the attempted steps so far.
            extra: Returns further entries of status.json.
        """
        self._rank, self.step, self._extra = rank, step, extra

    def write(self, reason: str) -> None:
        """Sets the state ``failed`` and calls ``on_failure``. A write failure is printed and does not hide the reason."""
        if self.step is None or self._rank != 0:
            return
        reason = without_url_secrets(reason)  # it is sent to trackers
        try:
            write_status(self._run_dir, "failed", self.step(), reason, **self._extra())
        except OSError as error:
            sys.stderr.write(f"dtrain: status.json could not be written ({error}).\n")
        sys.stderr.write(f"dtrain: failed at step {self.step()} ({in_brief(reason)}): {self._run_dir}\n")
        self.on_failure(reason)


@contextmanager
def failures_recorded(run_dir: Path, rank: int) -> Iterator[FailureRecord]:
    """Logs an exception that leaves the block and sets the state ``failed`` on rank 0.

    Messages to the ``dtrain`` logger go to the log that ``open_rank_log`` opens in the block, also those before; without it
    they are dropped. Enter it before the process group, which replaces the error of a broken connection with the error of the
    failed rank.
    """
    record = FailureRecord(run_dir, rank)
    _log_to(MemoryHandler(_KEPT_MESSAGES, flushLevel=logging.CRITICAL + 1))
    try:
        yield record
        close_rank_log()
    except BaseException as error:
        if record.step is not None:
            logger.exception("failed after step %d", record.step())
        record.write(
            str(error) if isinstance(error, PeerFailed) else f"rank {rank} failed: {type(error).__name__}: {error}"
        )
        raise


def open_rank_log(run_dir: Path, rank: int) -> None:
    """Makes the ``dtrain`` logger append to ``logs/rank-00000.log``, and write nowhere else. The folder exists.

    Raises:
        OSError: If the file cannot be written.
    """
    file = logging.FileHandler(run_dir / "logs" / f"rank-{rank:05d}.log", encoding="utf-8")
    file.setFormatter(_WithoutSecrets("%(asctime)s %(levelname)s %(message)s"))
    for handler in logger.handlers:
        if isinstance(handler, MemoryHandler):
            handler.setTarget(file)
    _log_to(file)


def close_rank_log() -> None:
    """Closes the file, if one is open."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


def _log_to(handler: logging.Handler) -> None:
    close_rank_log()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


class _WithoutSecrets(logging.Formatter):
    """Hides secrets of URLs, which errors of storage libraries contain; in tracebacks too."""

    def format(self, record: logging.LogRecord) -> str:
        return without_url_secrets(super().format(record))


# -- reading directories of other users


def is_plain(path: Path) -> bool:
    """Whether this is a regular file, and not a symbolic link, or a pipe, which would block its reader."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def may_be_read(path: Path, gaps: list[str], absent: str, most: int | None = None) -> bool:
    """Whether this is a regular file of acceptable size; otherwise appends the reason to ``gaps``.

    Args:
        path: The file.
        gaps: Sentences about what is missing or damaged.
        absent: The reason if the file does not exist.
        most: Largest size in bytes.
    """
    if not os.path.lexists(path):
        gaps.append(absent)
    elif not is_plain(path):
        gaps.append(f"{path.name} is a link or not a regular file, so it is not read")
    elif most is not None and path.stat().st_size > most:
        gaps.append(f"{path.name} is larger than {most:,} bytes, so dtrain did not write it, and it is not read")
    else:
        return True
    return False


def plain_files(folder: Path, pattern: str, gaps: list[str]) -> list[Path]:
    """The readable regular files of a folder, sorted by name; appends the unreadable ones to ``gaps``.

    Args:
        folder: Nothing is found in a symbolic link, or if it does not exist.
        pattern: A glob.
        gaps: Sentences about what is missing or damaged.
    """
    if folder.is_symlink() or not folder.is_dir():
        return []
    if not os.access(folder, os.R_OK | os.X_OK):
        gaps.append(f"{folder.name} may not be read by this user")
        return []
    found = sorted(path for path in folder.glob(pattern) if is_plain(path))
    gaps += [
        f"{folder.name}/{path.name} may not be read by this user" for path in found if not os.access(path, os.R_OK)
    ]
    return [path for path in found if os.access(path, os.R_OK)]


def bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; of a line longer than ``LONGEST_LINE``, its beginning without an end of line."""
    while line := file.readline(LONGEST_LINE):
        yield line
        while len(line) == LONGEST_LINE and not line.endswith(b"\n"):  # skip the rest of it
            line = file.readline(LONGEST_LINE)


def tail(path: Path, most: int) -> str:
    """The last ``most`` bytes of a text file, from the beginning of a line."""
    with path.open("rb") as file:
        skipped = max(0, path.stat().st_size - most)
        file.seek(skipped)
        text = file.read(most).decode("utf-8", errors="replace")
    return text.partition("\n")[2] if skipped else text


def folders_below(folder: Path, depth: int) -> Iterator[Path]:
    """The folders below ``folder``, at most ``depth`` levels down, sorted; symbolic links are not followed."""
    if depth == 0 or folder.is_symlink() or not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK):
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield path
            yield from folders_below(path, depth - 1)

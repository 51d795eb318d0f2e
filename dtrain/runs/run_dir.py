"""Files of a run directory besides metrics and checkpoints: config, status.json, the ranks' logs; safe reading of any file.

* ``status.json`` has the state of the run. Batch scripts and the launcher read it instead of the exit code, because
  torchrun turns every non-zero exit code of a worker into 1. Rank 0 writes it; if rank 0 was killed, a different rank writes
  ``failed``. Training does not depend on it: a damaged file does not stop a run.
* ``logs/rank-00000.log`` has the messages of one rank, over all restarts. Until a run starts, and its directory may be
  changed, they are kept in memory.
* A run directory may belong to another user, so only regular files are read, and a bounded amount of each.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from dtrain.errors import PeerFailed, as_config_error, in_brief, printable, without_secrets_in
from dtrain.files import open_regular, open_to_append, replace_file, try_lock, yaml_bytes
from dtrain.runs.excluded import keep_copy

if TYPE_CHECKING:  # it imports Hydra, which the report does not need
    from dtrain.runs.run_spec import RunSpec

#: ``running`` is also the state of a run that was killed: compare ``time``, or call ``is_trained``.
STATES = ("running", "finished", "stopped", "failed")
#: Bytes of a line that are read; a record has about a thousand.
LONGEST_LINE = 2**20
_KEPT_MESSAGES = 1000
_GIT_SECONDS = 10.0  # git may have to read every file of a checkout on a slow disk
_RANK_0_SECONDS = 2.0  # to end, for a rank 0 that was killed
_MOST_STATUS = 2**20  # bytes; a status has a few hundred
#: Entries of a status that are numbers of at least 0, if they are there.
NUMBERS = (
    *("step", "last_step", "time", "restarts", "lost_seconds", "down_seconds", "trained_seconds"),
    *("parameters", "trained_parameters"),
)
# Everything that a run writes, except what belongs to the job that is running now: its lock, its output and its presets.
_RECORDS = (
    *("config.yaml", "overrides.yaml", "status.json", "metrics.jsonl", "cut-metrics.jsonl", "report.html"),
    *("starts.jsonl", "steps.bin", "exclude-*.txt", "bad-shards.json"),
    *("checkpoints", "media", "cut-media", "wandb", "tensorboard", "evaluations", "profile", "faults"),
    *("logs/rank-*.log", "logs/*-rank-*"),
)
logger = logging.getLogger("dtrain")


# -- config, and the records of earlier starts


def save_run(spec: RunSpec) -> None:
    """On rank 0: writes ``config.yaml`` (resolved, without secrets), ``overrides.yaml`` (the command line), excluded keys.

    Raises:
        ConfigError: If they cannot be written.
    """
    with as_config_error(f"run.dir: {spec.dir} cannot be written, choose a different one"):
        (spec.dir / "logs").mkdir(parents=True, exist_ok=True)
        if spec.excluded:
            keep_copy(spec.dir, spec.excluded)
        for name, content in spec.files().items():
            text = yaml_bytes(content)
            # Before the file is replaced: a start that is killed between the two must find a run of this user.
            spec.mark_started(name, text)
            with replace_file(spec.dir / name) as file:
                file.write(text)


def move_records_aside(run_dir: Path) -> Path:
    """Moves all records of a run into ``moved-aside/<date and time>`` in its directory, which is a run directory then.

    Raises:
        OSError: If one cannot be moved. The next call moves the others, into another folder.
    """
    folder = run_dir / "moved-aside" / time.strftime("%Y-%m-%d-%H%M%S")
    while folder.exists():  # the last start was in the same second
        folder = folder.with_name(f"{folder.name}-again")
    (folder / "logs").mkdir(parents=True)
    for path in [path for pattern in _RECORDS for path in sorted(run_dir.glob(pattern))]:
        target = folder / path.relative_to(run_dir)
        if path.is_symlink():  # a relative link would lead elsewhere from there
            target.symlink_to(path.resolve())
            path.unlink()
        else:
            os.rename(path, target)
    return folder


def retained_steps(
    steps: Iterable[int], saved: int, keep_last: int, keep_every: int | None, best: int | None
) -> set[int]:
    """Steps of the checkpoints that a run keeps, in its directory and in a mirror.

    Args:
        steps: Of all checkpoints.
        saved: The newest one. Later ones were broken, and the run resumed from an earlier one.
        keep_last: ``checkpoint.keep_last``.
        keep_every: ``checkpoint.keep_every``.
        best: Of the best one; None without one.
    """
    until = sorted(step for step in steps if step <= saved)
    every = {step for step in until if keep_every is not None and step % keep_every == 0}
    return {*until[-keep_last:], *every, *(step for step in until if step == best)}


def code_commits() -> dict[str, str]:
    """Name of each git checkout of dtrain and of the working directory to its commit, with ``-dirty`` if it was changed."""
    found = {}
    for folder in (Path(__file__).parent, Path.cwd()):
        checkout = git_output(folder, "rev-parse", "--show-toplevel")
        commit = git_output(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
        if checkout and commit:
            found[Path(checkout).name] = commit
    return found


def git_output(folder: Path, *arguments: str) -> str | None:
    """Output of git; None if git is not installed or slow, or the folder is not a checkout that this user may read."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # names of files and branches are arbitrary bytes
            check=True,
            timeout=_GIT_SECONDS,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},  # read-only
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


# -- status.json


def write_status(run_dir: Path, state: str, step: int, reason: str | None = None, **extra: Any) -> None:
    """Replaces ``run_dir/status.json``.

    Args:
        run_dir: The run's directory; it exists.
        state: One of ``STATES``. ``stopped`` means on request, and that the run can be resumed.
        step: Attempted optimizer steps.
        reason: A sentence for a person: why the run stopped or failed.
        extra: Further entries; JSON can represent them.

    Raises:
        ValueError: If ``state`` is not one of ``STATES``.
        OSError: On a write failure; the old file is kept.
    """
    if state not in STATES:
        raise ValueError(f"status: got state {state!r}; known are {', '.join(STATES)}.")
    status = {"state": state, "step": step, "reason": reason, "time": time.time(), **extra}
    path = run_dir / "status.json"
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(f"status.json.folder-{time.time_ns()}"))  # a file cannot replace it
    with replace_file(path) as file:
        file.write(json.dumps(status, indent=2, allow_nan=False).encode() + b"\n")


def read_status(run_dir: Path) -> dict[str, Any] | None:
    """The content of ``run_dir/status.json``; None if there is none.

    Raises:
        ValueError: If the file is damaged: it cannot be read, or is not a status.
    """
    path = run_dir / "status.json"
    try:
        with open_regular(path) as file:
            text = file.read(_MOST_STATUS)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error})") from error
    try:
        status = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    if not isinstance(status, dict) or status.get("state") not in STATES:
        raise ValueError(f"{path} has no 'state' among {', '.join(STATES)}")
    return status


def status_or_none(run_dir: Path, problems: list[str] | None = None) -> dict[str, Any] | None:
    """As ``read_status``, but None for a damaged file, also one with wrong numbers; appends a line to ``problems``."""
    try:
        status = read_status(run_dir)
        for name in NUMBERS:
            value = (status or {}).get(name, 0)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ValueError(f"{run_dir / 'status.json'} has {value!r} for {name}, want a number of at least 0")
        return status
    except ValueError as error:
        if problems is not None:
            problems.append(f"{error}. It is not used: restarts and lost time are counted from 0 again.")
        return None


def is_trained(run_dir: Path, *, without_locks: bool = True) -> bool:
    """Whether a process is training the run. A killed one leaves the state ``running``, but not the run's lock.

    Args:
        run_dir: The run's directory.
        without_locks: The answer where only the state is known, as on a file system without locks.
    """
    path = run_dir / ".lock"
    if not is_plain(path):
        return False
    try:
        with path.open() as lock:
            return not try_lock(lock, shared=True, without_locks=not without_locks)
    except FileNotFoundError:
        return False
    except OSError:  # such as a file that may not be read
        return without_locks


# -- failures and logs of the ranks


class FailureRecord:
    """Writes status.json when the run fails after its start. Before ``run_started`` is called it writes nothing.

    Args:
        run_dir: The run's directory.
        rank: This process; rank 0 writes status.json. The others do so if rank 0 was killed.

    Attributes:
        rank: This process.
        on_failure: Called with the reason on rank 0, after status.json is written.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._run_dir = run_dir
        self.rank = rank
        self.step: Callable[[], int] | None = None
        self._extra: Callable[[], dict[str, Any]] = dict
        self.on_failure: Callable[[str], None] = lambda reason: None

    def run_started(self, rank: int, step: Callable[[], int], extra: Callable[[], dict[str, Any]] = dict) -> None:
        """The run starts.

        Args:
            rank: This process; a different number than before if the run continues without a lost rank.
            step: Returns the attempted steps so far.
            extra: Returns further entries of status.json.
        """
        self.rank, self.step, self._extra = rank, step, extra

    def write(self, reason: str) -> None:
        """Sets the state ``failed``, prints that, and calls ``on_failure``. A failed write does not hide the reason."""
        if line := self._written(reason):
            sys.stderr.write(f"{line}\n")
            self.on_failure(without_secrets_in(reason))

    def write_for(self, error: BaseException, reason: str) -> None:
        """As ``write``, but leaves the line to whoever shows the error, as the last line of the output."""
        if line := self._written(reason):
            with suppress(AttributeError):  # of an exception with slots
                error.last_line = line  # type: ignore[attr-defined]
            self.on_failure(without_secrets_in(reason))

    def _written(self, reason: str) -> str:
        """The line about the failure; ``""`` on other ranks than 0, and before the start."""
        if self.step is None:
            return ""
        if self.rank != 0:
            self._write_for_rank_0(reason)
            return ""
        reason = without_secrets_in(reason)  # it is sent to trackers
        try:
            write_status(self._run_dir, "failed", self.step(), reason, **self._extra())
        except OSError as error:
            sys.stderr.write(f"dtrain: status.json could not be written ({error}).\n")
        return f"dtrain: failed at step {self.step()} ({printable(in_brief(reason))}): {self._run_dir}"

    def _write_for_rank_0(self, reason: str) -> None:
        """Sets the state ``failed`` if rank 0 was killed: it has left the state ``running``, but no lock."""
        assert self.step is not None
        deadline = time.monotonic() + _RANK_0_SECONDS
        while (status_or_none(self._run_dir) or {}).get("state") == "running" and is_plain(self._run_dir / ".lock"):
            # With the lock, so that neither another rank nor the next start of the run writes at the same time.
            with suppress(OSError), (self._run_dir / ".lock").open("rb+") as lock:
                if try_lock(lock, without_locks=False):
                    if (status_or_none(self._run_dir) or {}).get("state") == "running":
                        write_status(self._run_dir, "failed", self.step(), without_secrets_in(reason), **self._extra())
                    return
            if time.monotonic() > deadline:  # rank 0 is alive, and writes it; or the file system has no locks
                return
            time.sleep(0.1)


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
        if isinstance(error, PeerFailed):
            if record.rank == 0:  # the rank that failed first looks after a rank 0 that was killed
                record.write_for(error, str(error))
        elif isinstance(error, Exception):
            record.write_for(error, f"rank {rank} failed: {type(error).__name__}: {error}")
        else:  # nobody shows the end of an interpreter
            record.write(f"rank {rank} failed: {type(error).__name__}: {error}")
        raise


def open_rank_log(run_dir: Path, rank: int) -> None:
    """Makes the ``dtrain`` logger append to ``logs/rank-00000.log``, and write nowhere else.

    Raises:
        ConfigError: If the file cannot be written.
    """
    with as_config_error("run.dir"):
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)  # of a machine with a run directory of its own
        file = _RankLog(run_dir / "logs" / f"rank-{rank:05d}.log")
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


# Python 3.10 refuses the type argument at run time.
class _RankLog(logging.StreamHandler):  # type: ignore[type-arg]
    """Appends to a file. The first failed write, such as on a full disk, is one line on standard error; no further ones are."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.TextIOWrapper(open_to_append(path), encoding="utf-8", errors="backslashreplace"))
        self._path = path
        self._is_reported = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._is_reported:
            self._is_reported = True
            sys.stderr.write(f"dtrain: WARNING: {self._path} cannot be written ({sys.exc_info()[1]}).\n")

    def close(self) -> None:
        with suppress(OSError):  # what could not be written was reported
            self.stream.close()
        super().close()


class _WithoutSecrets(logging.Formatter):
    """Hides secrets, which errors of storage libraries contain; in tracebacks too."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets_in(super().format(record))


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
    with open_regular(path) as file:
        skipped = max(0, os.fstat(file.fileno()).st_size - most)
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

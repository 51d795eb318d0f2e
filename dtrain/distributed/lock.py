"""One job per run directory: a lock that the operating system releases when its holder ends; and locks of other files.

The lock of a run is ``flock`` on ``<run.dir>/.lock``, so a killed job leaves no lock behind. The content of the file is only
for the message. The wait for a lock of another host is longer, because an NFS server needs time to notice that a node is gone.

A start that is refused must leave no trace. So the directory of an earlier start is locked before it is read, without changing
it; a new directory is made only when the run starts.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from dtrain.distributed.collectives import from_rank0
from dtrain.distributed.world import World
from dtrain.errors import ConfigError, as_config_error
from dtrain.files import NO_LOCKS, open_regular, open_to_append

# Seconds. A killed trainer's children end within seconds; an NFS server drops a dead client's locks after its lease,
# often 90 s.
_WAIT_HERE, _WAIT_ELSEWHERE = 15.0, 120.0
#: Environment variable with the id of a start, by which a launcher recognises its own start as the holder of the lock.
START_ID = "DTRAIN_START_ID"
_MOST_HOLDER = 4096  # bytes; a holder has about a hundred


@contextmanager
def run_lock(lock: RunLock) -> Iterator[Callable[[], None]]:
    """Collective. Rank 0 locks the run directory against other jobs, and changes nothing in it.

    Args:
        lock: Of this process; it is opened on rank 0 only.

    Yields:
        A collective function to call before the first change: it makes the directory, if it does not exist, and locks it.

    Raises:
        ConfigError: On every rank, if another job holds the lock or the directory cannot be written; also by the function.
    """
    from_rank0(lock.acquire)
    try:
        yield lambda: from_rank0(lock.claim)
    except BaseException:
        # Once the run has started, a checkpoint may still be being written, and the lock ends with the process anyway.
        if not lock.claimed:
            lock.release()
        raise
    lock.release()


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Waits until no other process holds the lock ``path``, and holds it. On a file system without locks, it does nothing.

    The file is created if it does not exist, and is not deleted: another process may be waiting for it.

    Raises:
        OSError: If it cannot be created, or is not a regular file.
    """
    with open_to_append(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        try:
            yield
        finally:
            # Closing is not enough: a process that was forked in the meantime has the file open too.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


class RunLock:
    """Locks a run directory against other jobs until this process ends.

    Args:
        run_dir: The run's directory.
        note: Called with a message before a wait for the lock, and on a file system without locks.

    Attributes:
        claimed: Whether ``claim`` was called.
    """

    def __init__(self, run_dir: Path, note: Callable[[str], None]) -> None:
        self._dir = run_dir
        self._path = run_dir / ".lock"
        self._note = note
        self._file: BinaryIO | None = None
        self._found: object = None
        self.claimed = False

    def acquire(self) -> None:
        """Locks the directory if it has a lock file (as every started run has) and is not locked yet. Writes nothing.

        Raises:
            ConfigError: If another job still holds the lock after the wait, naming its process, host and start; or if the
                directory could not be made or written.
        """
        if self._file is not None:
            return
        with self._writable():
            _refuse_unwritable(self._dir)
            if os.path.lexists(self._path):
                self._lock()
            self._found = self._content()

    def claim(self) -> None:
        """Makes the directory if necessary, locks it if ``acquire`` did not, and writes who holds the lock.

        Raises:
            ConfigError: As ``acquire``; or if another job has started the run since then.
        """
        self.claimed = True
        with self._writable():
            self._dir.mkdir(parents=True, exist_ok=True)
            if self._file is None:
                self._lock()
                if self._content() != self._found:
                    self.release()
                    raise ConfigError(
                        f"run.dir: another job has started a run in {self._dir} just now. The same command again resumes that "
                        "run once it has ended; for a separate run use a different run.dir."
                    )
            assert self._file is not None
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            self._file.truncate(0)
            holder = {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "since": since,
                "start": os.environ.get(START_ID),
            }
            self._file.write(json.dumps(holder).encode())
            self._file.flush()

    def release(self) -> None:
        """Releases the lock."""
        if self._file is not None:
            self._file.close()

    @contextmanager
    def _writable(self) -> Iterator[None]:
        with as_config_error(f"run.dir: {self._dir} cannot be written, choose a different one"):
            yield

    def _content(self) -> object:
        """Something that changes with each start of the run: every start replaces its config."""
        try:
            status = (self._dir / "config.yaml").stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _lock(self) -> None:
        file = open_to_append(self._path)
        # A forked loader worker would hold the lock for some seconds after this process was killed.
        os.register_at_fork(after_in_child=file.close)
        started, is_noted = time.monotonic(), False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = read_holder(self._dir)
                process = f"process {holder.get('pid')} on {holder.get('host')}"
                waited = time.monotonic() - started
                if waited > (_WAIT_HERE if holder.get("host") == socket.gethostname() else _WAIT_ELSEWHERE):
                    file.close()
                    # A job that has not started to train yet holds the lock, but the file still names the job before it.
                    raise ConfigError(
                        f"run.dir: {self._dir} is in use by another job (last start: {process}, {holder.get('since')}). "
                        "Wait for it, stop it, or use a different run.dir."
                    ) from None
                if not is_noted:
                    self._note(f"waiting for another job to leave {self._dir} (last start: {process})")
                    is_noted = True
                time.sleep(0.5)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                self._note(f"{self._dir}: this file system has no locks; make sure that only one job uses the run")
                break
            else:
                break
        self._file = file


def read_holder(run_dir: Path) -> dict[str, Any]:
    """The process that locked a run directory last: its ``host``, ``pid``, ``since`` and ``start``; {} if that is not known."""
    try:
        with open_regular(run_dir / ".lock") as file:
            holder = json.loads(file.read(_MOST_HOLDER))
    except (OSError, ValueError, RecursionError):  # no run was started, or the holder is writing the file
        return {}
    return holder if isinstance(holder, dict) else {}


def has_own_run_dir(run_dir: Path, world: World) -> bool:
    """Collective. Whether this is the first rank of a machine whose run directory is not the one of rank 0.

    Call it after ``run_lock``'s function. Such a machine has no file system in common with rank 0's.
    """
    if world.size == world.local_size:
        return False
    holder = from_rank0(lambda: read_holder(run_dir))
    with suppress(OSError):
        os.listdir(run_dir)  # a network file system may answer for a single name from its cache
    return world.rank != 0 and world.local_rank == 0 and read_holder(run_dir) != holder


def _refuse_unwritable(folder: Path) -> None:
    """Raises an ``OSError`` if the folder cannot be made, or no file can be made in it; tries neither."""
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(existing))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(existing))

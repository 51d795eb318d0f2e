"""One job per run directory: a lock that the operating system releases when its holder ends.

The lock is ``flock`` on ``<run.dir>/.lock``, so a killed job leaves no lock behind. The content of the file is only for the
message. The wait for a lock of another host is longer, because an NFS server needs time to notice that a node is gone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dtrain.config.errors import ConfigError, as_config_error
from dtrain.distributed.collectives import from_rank0

# Seconds. A killed trainer's children end within seconds; an NFS server drops a dead client's locks after its lease,
# often 90 s.
_WAIT_HERE, _WAIT_ELSEWHERE = 15.0, 120.0


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Collective. Rank 0 makes the run directory and locks it against other jobs.

    Raises:
        ConfigError: On every rank, if another job holds the lock or the directory cannot be made.
    """
    held: list[RunLock] = []

    def acquire() -> None:
        with as_config_error(f"run.dir: {run_dir} cannot be written, choose another one"):
            run_dir.mkdir(parents=True, exist_ok=True)
            held.append(RunLock(run_dir, print))

    from_rank0(acquire)
    yield
    # Not after an error: a checkpoint may still be being written, and the lock ends with the process anyway.
    for lock in held:
        lock.release()


class RunLock:
    """Locks a run directory against other jobs until this process ends.

    Args:
        run_dir: The run's directory; it exists.
        note: Called with a message before a wait for the lock, and on a file system without locks.

    Raises:
        ConfigError: If another job still holds the lock after the wait; names its process, host and start.
    """

    def __init__(self, run_dir: Path, note: Callable[[str], None]) -> None:
        self._path = run_dir / ".lock"
        self._file = self._path.open("a+")
        # A forked loader worker would hold the lock for some seconds after this process was killed.
        os.register_at_fork(after_in_child=self._file.close)
        self._acquire(note)

    def release(self) -> None:
        """Releases the lock."""
        self._file.close()

    def _acquire(self, note: Callable[[str], None]) -> None:
        started, is_noted = time.monotonic(), False
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = self._holder()
                process = f"process {holder.get('pid')} on {holder.get('host')}"
                waited = time.monotonic() - started
                if waited > (_WAIT_HERE if holder.get("host") == socket.gethostname() else _WAIT_ELSEWHERE):
                    self._file.close()
                    raise ConfigError(
                        f"run.dir: {self._path.parent} is in use by {process}, started {holder.get('since')}. Wait for it, "
                        "stop it, or use another run.dir."
                    ) from None
                if not is_noted:
                    note(f"waiting for {process} to leave {self._path.parent}")
                    is_noted = True
                time.sleep(0.5)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
                note(f"{self._path.parent}: this file system has no locks; make sure that only one job uses the run")
                return
            else:
                self._file.truncate(0)
                since = time.strftime("%Y-%m-%d %H:%M:%S")
                self._file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}))
                self._file.flush()
                return

    def _holder(self) -> dict[str, object]:
        try:
            holder = json.loads(self._path.read_text())
        except (OSError, ValueError):  # the holder is writing it
            return {}
        return holder if isinstance(holder, dict) else {}

"""One job a run directory: a lock that ends with the process that holds it.

The lock is ``flock`` on a file, so a killed job leaves none behind; what the file says is for the message only. On NFS the
server needs a while to notice that a node is gone, which is why a lock of another host is waited for longer.
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

from dtrain.config.errors import ConfigError, users_to_fix
from dtrain.distributed.collectives import decided_by_rank_zero

# A killed trainer's children end within seconds; an NFS server drops a dead client's locks after its lease, often 90 s.
_WAIT_HERE, _WAIT_ELSEWHERE = 15.0, 120.0


@contextmanager
def run_locked(run_dir: Path) -> Iterator[None]:
    """Collective. Rank 0 makes the run directory and keeps other jobs out of it.

    Raises:
        ConfigError: On every rank, if another job has the run or the directory cannot be made.
    """
    held: list[RunLock] = []

    def acquire() -> None:
        with users_to_fix(f"run.dir: {run_dir} cannot be written, choose another one"):
            run_dir.mkdir(parents=True, exist_ok=True)
            held.append(RunLock(run_dir, print))

    decided_by_rank_zero(acquire)
    yield
    # Not after an error: a checkpoint may still be on its way to the disk, and the lock ends with the process anyway.
    for lock in held:
        lock.release()


class RunLock:
    """Keeps other jobs out of a run directory while this process lives.

    Args:
        run_dir: The run's directory; it exists.
        tell: Called with a sentence if the lock has to be waited for, or the file system has no locks.

    Raises:
        ConfigError: If another job has the run; says which.
    """

    def __init__(self, run_dir: Path, tell: Callable[[str], None]) -> None:
        self._path = run_dir / ".lock"
        self._file = self._path.open("a+")
        # A forked loader worker would hold the lock for some seconds after this process was killed.
        os.register_at_fork(after_in_child=self._file.close)
        self._acquire(tell)

    def release(self) -> None:
        """Lets other jobs in."""
        self._file.close()

    def _acquire(self, tell: Callable[[str], None]) -> None:
        started, told = time.monotonic(), False
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = self._holder()
                waited = time.monotonic() - started
                if waited > (_WAIT_HERE if holder.get("host") == socket.gethostname() else _WAIT_ELSEWHERE):
                    self._file.close()
                    raise ConfigError(
                        f"run.dir: {self._path.parent} is in use by process {holder.get('pid')} on "
                        f"{holder.get('host')}, started {holder.get('since')}. Wait for it, stop it, or use another "
                        "run.dir."
                    ) from None
                if not told:
                    tell(
                        f"waiting for process {holder.get('pid')} on {holder.get('host')} to leave {self._path.parent}"
                    )
                    told = True
                time.sleep(0.5)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
                tell(f"{self._path.parent}: this file system has no locks; take care that only one job uses the run")
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
        except (OSError, ValueError):  # it is being written
            return {}
        return holder if isinstance(holder, dict) else {}

"""Whether a folder lies on a disk of this machine or on a network."""

from __future__ import annotations

import functools
import os
from pathlib import Path

# fmt: off
_NETWORK = frozenset((
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "glusterfs", "gpfs", "ibrix", "lustre", "ncpfs", "nfs", "nfs4",
    "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs",
))
# fmt: on
_MOUNTS = Path("/proc/self/mountinfo")


@functools.lru_cache(maxsize=4096)
def is_network(folder: str | os.PathLike[str]) -> bool:
    """True if a folder lies on a network file system, or on one that a program provides (FUSE), as buckets are mounted.

    False where that cannot be known: there is no such folder, or the system has no ``/proc``.
    """
    try:
        kind = _file_system(os.stat(folder).st_dev)
    except OSError:
        return False
    return kind in _NETWORK or kind == "fuse" or kind.startswith("fuse.")


def file_system(folder: str | os.PathLike[str]) -> str:
    """The type of the file system of a folder, such as ``nfs4``; empty if it is not known."""
    return _file_system(os.stat(folder).st_dev)


def _file_system(device: int) -> str:
    """The type of the file system with this number, such as ``nfs4``; empty if it is not listed."""
    try:
        lines = _MOUNTS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        # man 5 proc_pid_mountinfo: "36 35 98:0 /root /mount/point options [optional fields] - type source options"
        mount, _, mounted = line.partition(" - ")
        if mount.split(" ", 3)[2] == number:
            return mounted.split(" ", 1)[0]
    return ""

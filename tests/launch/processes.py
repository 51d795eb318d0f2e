"""Finds the processes of a run in /proc."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def rank_processes(mark: str) -> list[int]:
    """Pids of the ranks whose command line contains ``mark``; without torchrun and the workers of the loader."""
    lines = {pid: _command(pid) for pid in map(int, filter(str.isdigit, os.listdir("/proc")))}
    torchruns = {pid for pid, line in lines.items() if "torch.distributed.run" in line and mark in line}
    return [pid for pid, line in lines.items() if mark in line and pid not in torchruns and _parent(pid) in torchruns]


def launcher_process(mark: str) -> int:
    """Pid of the ``dtrain.launch`` whose command line contains ``mark``; not of the srun that started it."""
    lines = {pid: _command(pid) for pid in map(int, filter(str.isdigit, os.listdir("/proc")))}
    (pid,) = (p for p, line in lines.items() if line.startswith(f"{sys.executable} -m dtrain.launch") and mark in line)
    return pid


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # it has ended
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0

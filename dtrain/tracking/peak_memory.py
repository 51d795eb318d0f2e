"""The most memory that this process held: on a GPU what torch's tensors did, else what was resident of the host's."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc_pid_clear_refs(5)
_UNIT = 1 if sys.platform == "darwin" else 1024


def forget_peak(device: torch.device) -> bool:
    """Begins anew with what is held now.

    Returns:
        False if the system cannot, as on a CPU only Linux can: the peak is that since the process began.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def peak_bytes(device: torch.device) -> int:
    """The peak since ``forget_peak``."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        # What getrusage says begins with the peak of the process that started this one.
        return proc_bytes(_STATUS, "VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT


def peak(device: torch.device) -> tuple[str, float]:
    """The name of the metric, ``memory/max_allocated_gib`` on a GPU, ``memory/max_resident_gib`` elsewhere, and its value."""
    name = "memory/max_allocated_gib" if device.type == "cuda" else "memory/max_resident_gib"
    return name, peak_bytes(device) / 2**30


def proc_bytes(file: Path, name: str) -> int:
    """A size that a file of Linux's ``/proc`` says in kB."""
    return next(int(line.split()[1]) * 1024 for line in file.read_text().splitlines() if line.startswith(f"{name}:"))

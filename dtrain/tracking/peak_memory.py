"""The most memory that this process held, by the name of its metric."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

_RESET = "5"  # forgets the peak of resident memory; see proc_pid_clear_refs(5)
_UNIT = 1 if sys.platform == "darwin" else 1024


def forget_peak(device: torch.device) -> None:
    """Begins anew. On a CPU only where Linux allows it; elsewhere the peak is that since the process began."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_RESET)


def peak(device: torch.device) -> tuple[str, float]:
    """``memory/max_allocated_gib``, what torch's tensors held on a GPU, or ``memory/max_resident_gib``, what the process
    held of the host's memory, and its value."""
    if device.type == "cuda":
        return "memory/max_allocated_gib", torch.cuda.max_memory_allocated(device) / 2**30
    return "memory/max_resident_gib", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT / 2**30

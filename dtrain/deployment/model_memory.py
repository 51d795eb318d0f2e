"""How much memory a model takes at most: on a GPU what torch's tensors hold, on a CPU weights and what calls add.

* On a GPU it is ``max_memory_allocated``: weights, activations and the workspaces of libraries.
* On a CPU it is the size of the weights, and by how much the resident memory of the process grows above its level after
  loading; or, where a runtime holds weights in a form of its own, by how much it grows above its level before. So what
  Python, torch and the model's code take themselves is left out, and what a library allocates for itself is in it. Only
  Linux tells.
"""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import torch

from dtrain.tracking.peak_memory import forget_peak, peak_bytes, proc_bytes

_STATUS, _MEMORY = Path("/proc/self/status"), Path("/proc/meminfo")


class ModelMemory:
    """The peak since ``reset``.

    Args:
        device: Where the model is, already loaded or to be loaded from now on.
        weights: Bytes of it that are there already.
    """

    def __init__(self, device: torch.device, weights: int) -> None:
        self._device = device
        self._elsewhere = 0
        self.reset()
        if device.type != "cuda":
            self._elsewhere = peak_bytes(device) - weights

    def give_back(self) -> None:
        """Returns to the system what allocators keep of earlier work, which would count as that of the next."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        elif hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc's
            libc.malloc_trim(0)

    def reset(self) -> None:
        """Begins anew, with what is held once allocators have given back what they keep."""
        self.give_back()
        self._told = forget_peak(self._device)

    def bytes(self) -> int | None:
        """The peak; None on a CPU whose system does not tell."""
        return max(peak_bytes(self._device) - self._elsewhere, 0) if self._told else None


def let_allocations_fail(limit: int | None) -> None:
    """Makes this process run out of memory like a GPU, with an error, instead of filling the machine's until the kernel
    ends some process. Does nothing where the system does not tell what is free.

    Args:
        limit: Bytes that it may take from here on; None: all that is free.
    """
    if not _MEMORY.exists():
        return
    free = proc_bytes(_MEMORY, "MemAvailable")
    now = proc_bytes(_STATUS, "VmData")
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    wanted = now + (free if limit is None else min(free, limit))
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))

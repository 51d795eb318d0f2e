"""Waits of the host for a GPU in the middle of a step, made to announce themselves (torch's sync debug mode).

dtrain's own step waits for nothing there if the optimizer is fused. A task that calls ``.item()``, or an optimizer that is
not fused, does: torch then warns and names the line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def host_syncs_announced(device: torch.device) -> Iterator[None]:
    """Inside, an operation that makes the host wait for ``device`` warns; on a CPU nothing ever does."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)

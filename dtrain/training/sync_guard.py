"""Waits of the host for a GPU in the middle of a step, made to announce themselves (torch's sync debug mode).

dtrain's own step waits for nothing there if the optimizer is fused. A task that calls ``.item()``, or an optimizer that is
not fused, does: torch then warns and names the line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_nothing: AbstractContextManager[None] = nullcontext()


def host_syncs_announced(device: torch.device) -> AbstractContextManager[None]:
    """Inside, an operation that makes the host wait for ``device`` warns; on a CPU nothing ever does."""
    return _announced() if device.type == "cuda" else _nothing


@contextmanager
def _announced() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)

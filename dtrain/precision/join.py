"""Uneven inputs in a hand-written loop: a rank that has run out of them goes on voting, so that the others can.

torch's ``Join`` lets such a rank repeat the collectives of DDP; those of a scaler it has to be told of::

    with Join([ddp, JoinedScaler(scaler)]):
        for batch in batches: ...

dtrain's own trainer needs none of it: its loader gives every rank the same number of steps and masks what is missing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook

from dtrain.precision.grad_scaler import CrossRankGradScaler


class JoinedScaler(Joinable):
    """Makes a scaler's steps part of ``torch.distributed.algorithms.Join``.

    Args:
        scaler: The scaler, over the same process group as the DDP model that is joined.
        optimizers: How many optimizers it steps between two updates.
    """

    def __init__(self, scaler: CrossRankGradScaler, optimizers: int = 1) -> None:
        super().__init__()
        self._scaler = scaler
        self._optimizers = optimizers

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank without inputs does in each iteration of the others."""
        return _Follow(self._scaler, self._optimizers)

    @property
    def join_device(self) -> torch.device:
        """Where ``Join``'s own messages lie."""
        return self._scaler.peers.device

    @property
    def join_process_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the scale."""
        return self._scaler.peers.group


class _Follow(JoinHook):
    def __init__(self, scaler: CrossRankGradScaler, optimizers: int) -> None:
        self._scaler = scaler
        self._optimizers = optimizers

    def main_hook(self) -> None:
        self._scaler.follow(self._optimizers)

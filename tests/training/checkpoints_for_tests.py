"""Checkpoints for tests."""

from __future__ import annotations

import torch

from dtrain.training.checkpoint.checkpoints import Checkpoint


def content(value: float, metrics: dict[str, float] | None = None, size: int = 5) -> Checkpoint:
    """A checkpoint whose tensors, of several dtypes, all hold ``value``."""
    tensors = {
        "model": {"weight": torch.full((size, 2), value), "steps": torch.tensor(int(value))},
        "optimizer": {"weight/momentum": torch.full((size, 2), value, dtype=torch.float64)},
    }
    return Checkpoint(tensors, {"value": value, "metrics": metrics or {}})

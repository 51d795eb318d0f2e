"""Precision: one policy object, the cross-rank gradient scaler, the vote."""

from dtrain.precision.grad_scaler import CrossRankGradScaler
from dtrain.precision.policy import Precision

__all__ = ["CrossRankGradScaler", "Precision"]

"""Optimizers that torch has not by itself, and groups of parameters; everything else comes in by `_target_`."""

from dtrain.optimizers.muon import MuonWithAdamW

__all__ = ["MuonWithAdamW"]

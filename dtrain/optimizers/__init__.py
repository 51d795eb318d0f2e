"""Optimizers that torch does not have, and parameter groups.

Any torch optimizer is used by naming it in ``optimizer._target_``.

Files: ``groups`` (parameter groups by name pattern), ``muon`` (Muon for matrices, AdamW for the rest).
"""

from dtrain.optimizers.muon import MuonWithAdamW

__all__ = ["MuonWithAdamW"]

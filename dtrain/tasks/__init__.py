"""Small reference tasks; everything else comes in by `_target_`."""

from dtrain.tasks.classification import Classification

__all__ = ["Classification"]

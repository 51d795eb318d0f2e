"""Small reference models; everything else comes in by `_target_`."""

from dtrain.models.small_cnn import SmallCNN

__all__ = ["SmallCNN"]

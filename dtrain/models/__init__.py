"""Small reference models; everything else comes in by `_target_`."""

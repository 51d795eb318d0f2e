"""Small reference tasks; everything else comes in by `_target_`."""

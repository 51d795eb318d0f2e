"""What ``python -m dtrain.pack`` makes shards of, and how they are written: planned first, then by several processes."""

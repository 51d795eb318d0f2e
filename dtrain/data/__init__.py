"""Data: every sample of an epoch exactly once, from plain tar shards, in the dtypes that the run's precision wants."""

from dtrain.data.batch import Batch
from dtrain.data.loader import ShardLoader

__all__ = ["Batch", "ShardLoader"]

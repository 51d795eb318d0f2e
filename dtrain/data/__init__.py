"""Data: every sample of an epoch exactly once, from plain tar shards, in the dtypes that the run's precision wants."""

from dtrain.data.batch import Batch
from dtrain.data.loader import ShardLoader
from dtrain.data.samples import Arrays, Generated

__all__ = ["Arrays", "Batch", "Generated", "ShardLoader"]

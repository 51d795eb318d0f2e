"""Data loading: every sample of an epoch exactly once, from plain tar shards, in the transfer dtypes of the run's precision.

``ShardLoader`` gives a rank its micro-batches; ``ShardDataset`` gives an ordinary DataLoader single samples. The packages in
reading order, each of which uses only those before it:

1. ``order``: which sample comes at which position: pure functions, without files.
2. ``fields``: the fields of a sample, and how their bytes are decoded.
3. ``shards``: tar files: patterns, indexes, local copies, URLs.
4. ``sources``: where samples come from: shards, arrays, mixtures.
5. ``loading``: samples to batches: the public loaders, worker processes, collation.

``augment`` and ``mixing`` change samples and batches, ``writer`` writes shards, ``digits`` makes an example data set.
"""

from dtrain.data.loading.batch import Batch, TransferOptions
from dtrain.data.loading.loader import ShardLoader
from dtrain.data.loading.sample_log import Limits
from dtrain.data.loading.shard_dataset import ShardDataset
from dtrain.data.loading.stream import Stream
from dtrain.data.loading.workers import WorkerOptions
from dtrain.data.order.growth import Growth
from dtrain.data.shards.bad_shards import BadShards
from dtrain.data.sources.datasets import Arrays, Generated
from dtrain.data.sources.mixture import Mixture
from dtrain.data.writer import write_shards

__all__ = [
    "Arrays",
    "BadShards",
    "Batch",
    "Generated",
    "Growth",
    "Limits",
    "Mixture",
    "ShardDataset",
    "ShardLoader",
    "Stream",
    "TransferOptions",
    "WorkerOptions",
    "write_shards",
]

"""Data loading: every sample of an epoch exactly once, from plain tar shards, in the transfer dtypes of the run's precision.

``ShardLoader`` gives a rank its micro-batches; ``ShardDataset`` gives an ordinary DataLoader single samples. The files in
reading order:

1. Batches: ``fields`` (the fields of a sample; ``parse_fields``: from a config), ``batch`` (a micro-batch, transfer dtypes,
   copies to the device).
2. Order: ``index`` (what the order knows of a source), ``order`` (a pure function from position to sample), ``position``
   (committed samples, state of a checkpoint), ``mixture_order`` and ``mixture_position`` (the same for several sources),
   ``randomness`` (seeding and permutations).
3. Loading: ``loader`` (the public class), ``workers`` (a rank's rows of a batch; processes), ``ipc`` (batches between
   processes), ``collate`` (builds one micro-batch), ``field_buffer`` (one field of its rows), ``sample_log`` (used and bad
   samples), ``shard_dataset`` (the public dataset of single samples).
4. Values: ``decode``, ``media`` (audio and video), ``tokenizers``, ``crop``, ``augment``, ``mixing``.
5. Sources: ``source`` (the interfaces), ``shard_source`` (tar shards), ``random_offset`` (rows of tokens that begin
   anywhere), ``datasets`` (arrays, functions, map-style datasets), ``mixture`` (several sources; ``mixture_collator``:
   their rows in one batch), ``stream`` (iterable datasets).
6. Tar shards: ``shards`` (patterns), ``tar`` (headers), ``shard_index`` and ``dataset_index`` (where members are),
   ``shard_file`` (files and URLs), ``http_ranges`` (bytes of one over HTTP), ``node_cache`` (local copies).
7. Writing: ``writer``, ``digits`` (an example).
"""

from dtrain.data.batch import Batch, TransferOptions
from dtrain.data.datasets import Arrays, Generated
from dtrain.data.loader import ShardLoader
from dtrain.data.mixture import Mixture
from dtrain.data.sample_log import Limits
from dtrain.data.shard_dataset import ShardDataset
from dtrain.data.stream import Stream
from dtrain.data.workers import WorkerOptions
from dtrain.data.writer import write_shards

__all__ = [
    "Arrays",
    "Batch",
    "Generated",
    "Limits",
    "Mixture",
    "ShardDataset",
    "ShardLoader",
    "Stream",
    "TransferOptions",
    "WorkerOptions",
    "write_shards",
]

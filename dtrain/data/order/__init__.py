"""Which sample comes at which position of an epoch: pure functions that know no file and no field.

Files in reading order:

* ``growth``: shards that join and leave between two starts.
* ``index``: the size and identity of a source.
* ``randomness``: seeding and permutations.
* ``run_shards``: all shards that a run has known since its first start.
* ``cut``: lanes, and how they continue after a change in mid-epoch.
* ``lines``: shuffled shards, and the cuts of an epoch into lanes.
* ``epoch_order``: from position to sample.
* ``position``: the committed samples of an epoch, which are the loader's state in a checkpoint.
* ``mixed_sources``, ``mixture_order``, ``mixture_position``: the same for several sources.
"""

"""Which sample comes at which position of an epoch: pure functions that know no file and no field.

Files in reading order:

* ``growth``: shards that join and leave between two starts.
* ``index``: what the order knows of a source: its size and identity.
* ``randomness``: seeding and permutations.
* ``run_shards``: the shards that a run has known.
* ``cut``: lanes, and how they continue after a change in mid-epoch.
* ``lines``: shuffled shards, and the cuts of an epoch.
* ``epoch_order``: from position to sample.
* ``position``: committed samples; the state in a checkpoint.
* ``mixed_sources``, ``mixture_order``, ``mixture_position``: the same for several sources.
"""

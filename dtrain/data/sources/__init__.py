"""Where samples come from.

Files in reading order:

* ``source``: the interfaces.
* ``shard_source``: tar shards; ``random_offset``: rows of tokens that begin anywhere in a text.
* ``shard_reader``: reads ranges of shards; ``prefetcher``: copies shards in advance.
* ``datasets``: arrays, functions, map-style datasets.
* ``mixture``: several sources as one.
* ``known_shards``: the shards of a resumed run, in the order of its saved state.
"""

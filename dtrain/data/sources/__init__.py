"""Where samples come from.

Files in reading order:

* ``source``: the interfaces.
* ``shard_source``: tar shards; ``random_offset``: rows of tokens that begin anywhere in a text.
* ``datasets``: arrays, functions, map-style datasets.
* ``mixture``: several sources as one.
* ``known_shards``: the shards of a resumed run, in the order of its saved state.
"""

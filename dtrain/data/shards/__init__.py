"""Shards: tar files, their indexes and local copies.

Files in reading order:

* ``patterns``: expands patterns of shards; ``lists``: lists of shards in files.
* ``tar``: tar headers.
* ``shard_index``: where the members of a shard are stored. ``dataset_index``: the same for all shards of a data set;
  ``index_builder`` builds its arrays.
* ``bad_shards``: damaged shards, refused or left out.
* ``shard_file``: local files and URLs; ``http_ranges``: bytes of a file over HTTP.
* ``node_cache``: local copies, shared by the processes of a node.
"""

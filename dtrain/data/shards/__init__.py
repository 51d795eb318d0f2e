"""Tar files.

Files in reading order:

* ``patterns``: patterns of shards to a list of them; ``lists``: such lists in files.
* ``tar``: headers.
* ``shard_index``, ``dataset_index``: where the members of a shard, and of a data set, lie.
* ``bad_shards``: damaged shards, refused or left out.
* ``shard_file``: local files and URLs; ``http_ranges``: bytes of a file over HTTP.
* ``node_cache``: local copies.
"""

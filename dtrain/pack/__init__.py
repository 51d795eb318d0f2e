"""Implementation of ``dtrain pack``: writes tar shards from images, arrays and text, indexes shards, and repairs them.

Files in reading order:

* ``command``: parts of all packing commands: splits, shard sizes, the preset that is written next to the shards.
* ``staging``: a dataset while it is being packed; interrupted commands resume, and shards appear only when all are written.
* ``pool``: packing in several processes.
* ``images``, ``arrays``, ``text``: one file for each kind of source. ``resizing``: smaller images, for ``--max-side``.
  ``documents``: finds texts and assigns them to splits; ``rows``: rows of tokens.
* ``indexing``: ``pack index``. ``repair``: ``pack repair``.
* ``shakespeare``: packs Tiny Shakespeare; ``standard_library``: packs the source of Python's standard library, a corpus that
  every machine has, for examples and tests.
"""

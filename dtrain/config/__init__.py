"""The config of a run: composed from the command line, checked, and saved in the run directory.

In reading order:

* ``schema``: every config key, its type, default and meaning.
* ``compose``: composes the config with Hydra and calls an entry point with it.
* ``meanings``: the meanings of keys, from the comments of the schema; the list of keys in ``dtrain train --help``.
* ``merge``: a preset or key that names a different class replaces the earlier node instead of being merged into it.
* ``explain``: clear messages for the errors that Hydra raises.
* ``instantiate``: builds objects from ``_target_`` nodes.
* ``partials``: functions with ``_partial_: true`` are called without Hydra's check of each call.
* ``directions``: whether a larger or a smaller value of a metric is better.
* ``metrics``: the metrics of ``train.metrics``.
"""

"""The config of a run: composed from the command line, checked, and saved in the run directory.

In reading order:

* ``schema``: every config key, its type, default and meaning.
* ``compose``: composes the config with Hydra and calls an entry point with it; exit codes; the option ``--json``.
* ``meanings``: the meanings of keys, from the comments of the schema; the keys in ``dtrain train --help``.
* ``merge``: presets and keys that name a different class replace the earlier node.
* ``explain``: clear messages for the errors that Hydra raises.
* ``instantiate``: objects from ``_target_`` nodes.
* ``directions``: whether a larger or a smaller value of a metric is better.
* ``metrics``: the metrics of ``train.metrics``.
"""

"""The config of a run: composed from the command line, checked, and saved in the run directory.

In reading order:

* ``schema``: every config key, its type, default and meaning.
* ``compose``: composes the config with Hydra and calls an entry point with it; exit codes; the option ``--json``.
* ``merge``: presets and keys that name another class replace the earlier node.
* ``explain``: clear messages for the errors that Hydra raises.
* ``torchrun_errors``: what torchrun shows when a rank fails; ``torchrun_end``: it ends though it has lost the other machines.
* ``run``: the run's name, its directory and saved config, which configs may resume it, and its command line.
* ``trust``: which files this user wrote, and what is used of those that another user wrote.
* ``bounded_files``: YAML and JSON files that another user may have written.
* ``directions``: whether a larger or a smaller value of a metric is better.
* ``instantiate``: objects from ``_target_`` nodes.
* ``errors``: errors that are shown without a traceback.
* ``cache_dir``: where rebuildable files are cached.
"""

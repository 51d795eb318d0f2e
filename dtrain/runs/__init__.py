"""What a run is on disk: its name and directory, the files in it, and who wrote them.

Files in reading order:

* ``run_spec``: name, directory and identity of a run.
* ``recompose``: composes a run's config again from its saved command line and additional overrides.
* ``run_dir``: config, ``status.json``, the ranks' logs, recording of failures, safe reading of run directories.
* ``records``: the record of one logged step, and ``metrics.jsonl``.
* ``starts``: the record of each start, and the votes of all steps, for replay and trace.
* ``excluded``: lists of samples that a training leaves out.
* ``mirror``: the copy of a run in a bucket; ``mirror_uploads``: the process that uploads it.
* ``history``: a run directory as data, for reports.
* ``evaluation_results``: results of ``dtrain evaluate`` as text, JSON and pictures.
* ``trust``: which runs this user made, and what is refused in runs of other users.
* ``hub``: models on the Hugging Face hub, their commits and downloads.

This package re-exports no names, because ``run_spec`` needs Hydra, which ``dtrain report`` does not load.
"""

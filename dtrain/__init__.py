"""dtrain: distributed PyTorch training from plain tar shards.

Start at ``train.py``, which is a run on one page. The layers, each of which imports only from those below it:

* ``__main__``: the console command.
* ``completion``: its completion scripts.
* ``train``, ``evaluate``, ``predict``: entry points that run a model.
* ``export``, ``doctor``, ``launch``, ``replay``, ``show``, ``tasks``, ``hooks``: models for inference; what limits a run;
  starting runs; recomputing steps; what a model will see; losses and metrics; code that is called at fixed points of a run.
* ``training``, ``report``, ``pack``: the loop, one optimizer step, checkpoints; runs as an HTML page; writing shards.
* ``data``, ``tracking``: every sample of an epoch exactly once, for any number of ranks and workers; trackers.
* ``command_line``: calls an entry point with its config, and shows its errors.
* ``runs``: a run on disk: its name, its directory, and whose it is.
* ``precision``, ``distributed``: dtypes, loss scaling and skipped steps; how ranks start, agree, stop and fail together.
* ``config``, ``models``, ``optimizers``: all keys, and objects from ``_target_``; reference models; further optimizers.
* ``files``, ``urls``, ``console``: atomic and bounded access to files; file systems behind URLs; what commands print with.
* ``errors``, ``extras``: errors that are shown without a traceback; packages that are installed on request.
"""

__version__ = "0.1.0"

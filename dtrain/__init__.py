"""dtrain: distributed PyTorch training from plain tar shards.

Start with ``train.py``, a whole training run on one page. The layers, each of which imports only from those below it:

* ``__main__``: the console command.
* ``completion``: its completion scripts.
* ``train``, ``evaluate``, ``predict``: entry points that run a model.
* ``export``: models for inference. ``doctor``: what limits a run. ``launch``: starting runs. ``replay``: recomputing steps.
  ``show``: what a model will see. ``tasks``: losses and metrics. ``hooks``: code that is called at fixed points of a run.
* ``training``: the loop, one optimizer step, checkpoints. ``report``: runs as an HTML page. ``pack``: writing shards.
* ``data``: every sample of an epoch exactly once, for any number of ranks and workers. ``tracking``: trackers.
* ``command_line``: calls an entry point with its config, and shows its errors.
* ``runs``: a run on disk: its name, its directory, and its owner.
* ``precision``: dtypes, loss scaling and skipped steps. ``distributed``: how ranks start, agree, stop and fail together.
* ``config``: all keys, and objects from ``_target_``. ``models``: reference models. ``optimizers``: additional optimizers.
* ``files``: atomic and bounded access to files. ``urls``: file systems behind URLs. ``console``: output of commands.
* ``errors``: errors that are shown without a traceback. ``extras``: optional packages.
"""

__version__ = "0.1.0"

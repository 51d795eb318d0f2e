"""Trackers: where the records and media of a run are shown. Only rank 0 writes shared files.

In reading order:

* ``sinks``: the destinations of records and media; sinks that run in a background thread.
* ``console_sink``, ``wandb_sink`` (with ``wandb_artifacts``), ``tensorboard_sink``, ``mlflow_sink``, ``trackio_sink``: the
  sinks besides ``metrics.jsonl``.
* ``provenance``: versions, the device and the git commit, for trackers.
"""

from dtrain.tracking.sinks import NullSinks, Sinks, build_sinks, describe_trackers, sends_alerts, tracker_mode

__all__ = [
    "NullSinks",
    "Sinks",
    "build_sinks",
    "describe_trackers",
    "sends_alerts",
    "tracker_mode",
]

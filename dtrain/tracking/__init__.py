"""Trackers: the terminal, ``metrics.jsonl``, wandb, TensorBoard, MLflow and Trackio. Only rank 0 writes shared files.

In reading order:

* ``sinks``: the interface of a *sink*, a destination of records and media; ``metrics.jsonl``; sinks in a background thread.
* ``console_sink``, ``wandb_sink`` (with ``wandb_artifacts``), ``tensorboard_sink``, ``mlflow_sink``, ``trackio_sink``: the
  other sinks.
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

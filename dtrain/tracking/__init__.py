"""Records of a run: metrics, status, media and logs, and the trackers that show them. Only rank 0 writes shared files.

In reading order:

* ``records``: the record of one logged step, and ``metrics.jsonl``.
* ``sinks``: the destinations of records and media; sinks that run in a background thread.
* ``console``, ``wandb_sink``, ``tensorboard_sink``, ``mlflow_sink``, ``trackio_sink``: the sinks besides ``metrics.jsonl``.
* ``provenance``: versions, the device and the git commit, for trackers.
* ``run_dir``: config, ``status.json``, the ranks' logs, recording of failures, safe reading of run directories.
* ``finding``: one line of a diagnosis, for ``dtrain.doctor`` and ``dtrain.report``.
* ``evaluation_results``: results of ``dtrain.evaluate`` as text, JSON and pictures.
* ``history``: a run directory as data, for reports.
"""

from dtrain.console import print_banner
from dtrain.tracking.run_dir import (
    FailureRecord,
    close_rank_log,
    failures_recorded,
    open_rank_log,
    read_status,
    save_run,
    write_status,
)
from dtrain.tracking.sinks import NullSinks, Sinks, build_sinks, sends_alerts, tracker_mode

__all__ = [
    "FailureRecord",
    "NullSinks",
    "Sinks",
    "build_sinks",
    "close_rank_log",
    "failures_recorded",
    "open_rank_log",
    "print_banner",
    "read_status",
    "save_run",
    "sends_alerts",
    "tracker_mode",
    "write_status",
]

"""Which pictures a report has, in which order."""

from __future__ import annotations

from collections.abc import Sequence

from dtrain.tracking.report.drawing import Chart
from dtrain.tracking.report.evidence import Evidence
from dtrain.tracking.report.line_charts import line_chart, scale_chart, step_time_chart
from dtrain.tracking.report.time_chart import time_chart
from dtrain.tracking.report.wording import listed

_MOST = 12  # pictures of metrics that a task, a device or another version adds, of each kind

#: What every run has, or is told to lack: metric, title, where the axis begins (None: it fits).
_USUAL: tuple[tuple[str, str, float | None], ...] = (
    ("train/lr", "Learning rate", None),
    ("train/grad_norm", "Gradient norm, before clipping", None),
    ("throughput/samples_per_second", "Throughput (samples a second)", 0.0),
    ("time/data_wait_fraction", "Waiting for data (share of the step)", 0.0),
)
_MACHINE = {
    "throughput/mfu": "Model FLOPs utilisation (share of the device's peak)",
    "throughput/tflops_per_second": "TFLOP/s of the model",
    "time/straggler_seconds": "Slowest rank behind the median (seconds a step)",
    "memory/max_allocated_gib": "Peak memory of rank 0's GPU (GiB)",
    "memory/max_resident_gib": "Peak memory of rank 0's process (GiB)",
}
_NO_MEMORY = Chart("memory", "Peak memory", None, "No run has recorded it.")
_NOT_DRAWN = ("eval/samples", "eval/bad_samples")


def charts(runs: Sequence[Evidence]) -> list[Chart]:
    """All pictures of a report, in order."""
    histories = [run.history for run in runs]
    known = {"train/loss", *_NOT_DRAWN, *(name for name, *_ in _USUAL)}
    more = [name for name in dict.fromkeys(name for run in histories for name in run.names("")) if name not in known]
    evaluated = [name for name in more if name.startswith("eval/")]
    trained = [name for name in more if name.startswith("train/")]
    machine = [name for name in more if name.startswith(("throughput/", "memory/")) or name in _MACHINE]
    drawn = [
        line_chart(histories, "train/loss", "Training loss"),
        *(line_chart(histories, name, f"Evaluation: {_spoken(name)}") for name in evaluated[:_MOST]),
        *([] if evaluated else [Chart("evaluation", "Evaluation", None, "No run has been evaluated yet.")]),
        *(line_chart(histories, name, f"Training: {_spoken(name)}") for name in trained[:_MOST]),
        scale_chart(histories),
        time_chart(runs),
        step_time_chart(histories),
        *(line_chart(histories, name, title, floor=floor) for name, title, floor in _USUAL),
        *(line_chart(histories, name, _MACHINE.get(name, _spoken(name)), floor=0.0) for name in machine[:_MOST]),
        *([] if any(name.startswith("memory/") for name in machine) else [_NO_MEMORY]),
    ]
    left = [*evaluated[_MOST:], *trained[_MOST:], *machine[_MOST:]]
    return drawn + ([Chart("others", "Further metrics", None, f"Not drawn: {listed(left)}.")] if left else [])


def _spoken(name: str) -> str:
    return name.partition("/")[2].replace("_", " ")

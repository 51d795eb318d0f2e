"""The charts of a report as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dtrain.tracking.atomic import replacing
from dtrain.tracking.report.charts import charts
from dtrain.tracking.report.drawing import as_png
from dtrain.tracking.report.evidence import Evidence
from dtrain.tracking.report.setting_charts import setting_charts
from dtrain.tracking.report.sweep import Sweep


def write_pictures(runs: Sequence[Evidence], sweep: Sweep, folder: Path) -> list[Path]:
    """Writes each chart into ``folder``, which is made if it is not there; returns the files.

    Raises:
        OSError: If the disk refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, Path] = {}
    for chart in [*setting_charts(sweep), *charts(runs)]:
        if content := as_png(chart, [run.history for run in runs]):
            # Of metrics that differ in signs only, the names of the files would be the same.
            name = chart.name if chart.name not in written else f"{chart.name}-{len(written)}"
            written[name] = folder / f"{name}.png"
            with replacing(written[name]) as file:
                file.write(content)
    return list(written.values())

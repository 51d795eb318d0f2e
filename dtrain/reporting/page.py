"""The report as one HTML page, and its charts as PNG files.

``page.html.j2`` has the sections of the page in order, its CSS, and the content security policy, which forbids scripts and
external sources. Jinja2 escapes everything that comes from a run, except the SVGs of matplotlib, which escapes their labels.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dtrain.distributed.atomic import replace_file
from dtrain.reporting.charts import Chart, run_charts, setting_charts
from dtrain.reporting.health import RunData
from dtrain.reporting.run_logs import EvaluationFile
from dtrain.reporting.style import THEME, count_of, format_date, join_some, run_colour, run_dashes, shorten, themed
from dtrain.reporting.sweep import Sweep
from dtrain.reporting.tables import config_rows, number_rows, run_columns, seed_columns, sweep_notes
from dtrain.tracking.history import History


def _fact_rows(evaluations: Sequence[EvaluationFile]) -> list[list[str]]:
    """One row for each fact that an evaluation has: its name and the value in each evaluation."""
    names = dict.fromkeys(name for evaluation in evaluations for name in evaluation.facts)
    return [[name, *(evaluation.facts.get(name, "") for evaluation in evaluations)] for name in names]


_FILTERS = {
    "base64": lambda content: base64.b64encode(content).decode(),
    "count_of": count_of,
    "join_some": join_some,
    "shorten": shorten,
    "css_colour": themed,
    "fact_rows": _fact_rows,
    "svg": lambda chart: Markup(chart.svg()),
    "rows": lambda columns: list(zip(*(column.cells for column in columns), strict=True)),
}


def report_page(runs: Sequence[RunData], sweep: Sweep, now: float) -> str:
    """The page as HTML.

    Args:
        runs: The runs with curves and details: those of ``sweep.shown``.
        sweep: All runs, at least one.
        now: Unix seconds of the report.
    """
    histories = [run.history for run in runs]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= _FILTERS
    return environment.get_template("page.html.j2").render(
        title=f"{len(sweep.runs)} runs" if len(sweep.runs) > 1 else histories[0].label,
        date=format_date(now),
        theme=THEME,
        runs=runs,
        sweep=sweep,
        sweep_notes=sweep_notes(sweep),
        sweep_columns=run_columns(sweep),
        seed_columns=seed_columns(sweep),
        lines=[(run_colour(place), run_dashes(place, svg=True)) for place in range(len(runs))],
        setting_charts=setting_charts(sweep),
        charts=run_charts(runs),
        gaps=gap_lines(sweep.runs),
        numbers=number_rows(histories, now),
        configs=config_rows(histories),
    )


def gap_lines(runs: Sequence[History]) -> list[str]:
    """One line for each missing or damaged file, with the runs that it concerns."""
    labels: dict[str, list[str]] = {}
    for run in runs:
        for gap in run.gaps:
            labels.setdefault(gap, []).append(run.label)
    return [f"{join_some(names)}: {gap}" for gap, names in labels.items()]


def write_charts(runs: Sequence[RunData], sweep: Sweep, folder: Path) -> None:
    """Writes each chart as a PNG into a folder, which is created if necessary.

    Raises:
        OSError: On a write failure.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn: list[Chart] = [chart for chart in [*setting_charts(sweep), *run_charts(runs)] if chart.draw is not None]
    names: set[str] = set()
    for chart in drawn:
        # Metrics that differ in punctuation only have the same file name.
        name = chart.name if chart.name not in names else f"{chart.name}-{len(names)}"
        names.add(name)
        with replace_file(folder / f"{name}.png") as file:
            file.write(chart.png([run.history for run in runs]))

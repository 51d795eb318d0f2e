"""The report as one HTML page.

``page.html.j2`` has the sections of the page in order. The page contains the data of its charts as JSON, uPlot and
``charts.js``; ``shell`` has what it shares with other pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from dtrain.report.charts import Chart, run_charts, setting_charts
from dtrain.report.health import TIME_NAMES, RunData
from dtrain.report.run_logs import EvaluationFile
from dtrain.report.shell import render
from dtrain.report.style import join_some, run_dashes
from dtrain.report.sweep import Comparison
from dtrain.report.tables import Column, config_rows, number_rows, run_columns, seed_columns, sweep_notes
from dtrain.runs.history import History

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Section:
    """A part of the page between the table of runs and the health.

    Attributes:
        heading: Its heading.
        note: A sentence below it.
        columns: A table; empty for none.
        charts: Its charts.
    """

    heading: str
    note: str = ""
    columns: Sequence[Column] = ()
    charts: Sequence[Chart] = ()


def _fact_rows(evaluations: Sequence[EvaluationFile]) -> list[list[str]]:
    """One row for each fact that an evaluation has: its name and the value in each evaluation."""
    names = dict.fromkeys(name for evaluation in evaluations for name in evaluation.facts)
    return [[name, *(evaluation.facts.get(name, "") for evaluation in evaluations)] for name in names]


def _breakable(name: str) -> Markup:
    """Escaped, with permission to begin a new line after the separators of a key or metric."""
    return Markup(re.sub(r"(?<=[a-z0-9][./_])(?=.)", "<wbr>", str(escape(name))))


_FILTERS: dict[str, Callable[..., Any]] = {
    "breakable": _breakable,
    "id": id,
    "fact_rows": _fact_rows,
    "rows": lambda columns: list(zip(*(column.cells for column in columns), strict=True)),
}


def report_page(runs: Sequence[RunData], comparison: Comparison, now: float, sections: Sequence[Section] = ()) -> str:
    """The page as HTML.

    Args:
        runs: The runs with curves and details, ``comparison.shown``.
        comparison: All runs, at least one.
        now: Unix seconds of the report.
        sections: Further sections.
    """
    histories, everything = [run.history for run in runs], comparison.runs
    licence = (_HERE / "uplot" / "LICENSE").read_text(encoding="utf-8")
    library = (_HERE / "uplot" / "uPlot.iife.min.js").read_text(encoding="utf-8")
    scripts = [Markup(f"\n/*\n{licence}\n*/\n{library}"), Markup((_HERE / "charts.js").read_text(encoding="utf-8"))]
    # Sections, charts over settings and curves draw their charts from one list in the page.
    settings, groups = [setting_charts(sweep) for sweep in comparison.sweeps], run_charts(runs)
    charts = [*(chart for section in sections for chart in section.charts), *chain(*settings)]
    charts += [chart for group in groups.values() for chart in group]
    drawn = [chart for chart in charts if chart.lines]
    return render(
        "page.html.j2",
        f"{len(everything)} runs" if len(everything) > 1 else histories[0].label,
        "dtrain report of",
        now,
        scripts=scripts,
        filters=_FILTERS,
        library_css=Markup((_HERE / "uplot" / "uPlot.min.css").read_text(encoding="utf-8")),
        chart_data=[chart.as_json() for chart in drawn],
        chart_number={id(chart): number for number, chart in enumerate(drawn)},
        runs=runs,
        several=len(everything) > 1,
        comparison=comparison,
        sweep_parts=[
            (heading, sweep, sweep_notes(sweep), run_columns(sweep), seed_columns(sweep), charts)
            for heading, sweep, charts in zip(comparison.headings, comparison.sweeps, settings, strict=True)
        ],
        run_number={id(run): number for number, run in enumerate(histories)},
        sections=sections,
        groups=groups,
        dashes=[" ".join(map(str, run_dashes(place))) for place in range(len(runs))],
        time_names=TIME_NAMES,
        not_drawn=[chart for chart in charts if not chart.is_drawn],
        gaps=gap_lines(everything),
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

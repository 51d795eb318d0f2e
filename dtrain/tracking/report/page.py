"""The page: one HTML file about one or several runs that opens from disk, with no script and nothing from outside."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from dtrain.tracking.report.charts import charts
from dtrain.tracking.report.drawing import Chart, as_svg
from dtrain.tracking.report.evidence import Evidence
from dtrain.tracking.report.palette import line_key, patch_key, style_sheet
from dtrain.tracking.report.sections import (
    evaluations_section,
    gaps_section,
    health_section,
    media_section,
    trouble_section,
)
from dtrain.tracking.report.setting_charts import setting_charts
from dtrain.tracking.report.sweep import Sweep
from dtrain.tracking.report.sweep_table import sweep_section
from dtrain.tracking.report.tables import configs, numbers
from dtrain.tracking.report.wording import date

_STYLE = """
* { box-sizing: border-box }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1180px;
  margin: 1.5em auto; padding: 0 1em; overflow-wrap: anywhere }
h1 { font-size: 1.5em; margin-bottom: 0 } h2 { font-size: 1.2em; margin: 2em 0 .6em }
h3 { font-size: 1em; margin: 1.4em 0 .4em } h4 { font-size: .95em; margin: 1.2em 0 .3em }
.small, figcaption { color: var(--soft); font-size: .87em }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .25em .9em .25em 0; border-bottom: 1px solid var(--line); vertical-align: top }
td { min-width: 6em; max-width: 46em } thead th { white-space: nowrap }
tbody th { font-weight: normal; color: var(--soft); min-width: 9em; max-width: 18em }
th:first-child { position: sticky; left: 0; background: var(--paper) }
.number, .text { min-width: 0 !important; max-width: none !important; white-space: nowrap }
.number { text-align: right !important } thead .number { white-space: normal; overflow-wrap: normal }
thead .number, thead .text { vertical-align: bottom } .marked, .marked th { background: var(--panel) }
code, pre { font-size: .9em } pre { white-space: pre-wrap; background: var(--panel); padding: .6em; max-height: 24em;
  overflow: auto }
.health { padding: .5em .9em; background: var(--panel); border-left: 5px solid var(--good); margin: .5em 0 }
.health.warning { border-color: var(--warn) } .health.error { border-color: var(--bad) }
.badge { text-transform: uppercase; font-size: .85em; letter-spacing: .03em; white-space: nowrap }
.finished, .ok b, .badge.ok { color: var(--good) }
.failed, .error b, .critical b, .badge.error { color: var(--bad) }
.stopped, .running, .warning b, .badge.warning { color: var(--warn) }
.messages { list-style: none; padding: 0 } .messages li { padding: .2em 0; border-bottom: 1px solid var(--line) }
.findings { list-style: none; padding: 0 } .findings li { display: flex; gap: .8em; padding: .15em 0 }
.findings b { min-width: 3em; font-weight: 600 } .findings i { color: var(--soft) }
.legend { display: flex; flex-wrap: wrap; gap: .3em 1.2em; padding: .5em 0; background: var(--paper) }
.legend.few { position: sticky; top: 0; z-index: 1 }
.key { width: 26px; height: 8px; margin-right: .4em; vertical-align: middle }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); gap: 1.6em 1.4em;
  margin-top: 1em }
figure { margin: 0; min-width: 0 } .charts svg:not(.key) { display: block; width: 100%; height: auto }
.charts svg text { font-family: system-ui, sans-serif !important } .charts h3 { margin: 0 0 .2em }
.charts p { margin: .2em 0 0 }
.media { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); gap: 1.2em }
.media img { max-width: 100%; min-width: 128px; height: auto; background: #fff }
"""


def report_page(runs: Sequence[Evidence], sweep: Sweep, now: float) -> str:
    """The page as HTML.

    Args:
        runs: What to look at closely: ``sweep.shown``.
        sweep: All runs, at least one.
        now: Unix seconds of the report.
    """
    histories = [run.history for run in runs]
    several = len(sweep.runs) > 1
    title = f"{len(sweep.runs)} runs" if several else histories[0].label
    parts = [
        f'<h1>{escape(title)}</h1><p class="small">dtrain report of {date(now)}</p>',
        *([sweep_section(sweep), _figures(setting_charts(sweep)), f"<p>{escape(sweep.choice)}</p>"] if several else []),
        health_section(runs),
        gaps_section(sweep.runs),
        "<h2>Curves</h2>",
        _curves(runs),
        f"<h2>Numbers</h2>{numbers(histories, now)}",
        media_section(runs),
        evaluations_section(runs),
        trouble_section(runs),
        f"<h2>Config</h2>{configs(histories)}",
    ]
    # The policy makes the promise of the first line hold: a browser runs nothing, and loads only the pictures inside.
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">"
        f"<title>{escape(title)} - dtrain</title><style>{style_sheet()}{_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _curves(runs: Sequence[Evidence]) -> str:
    drawn = charts(runs)
    absent = "".join(f"<li>{escape(chart.title)}: {escape(chart.note)}</li>" for chart in drawn if chart.draw is None)
    missing = f'<div class="small"><p>Not drawn:</p><ul>{absent}</ul></div>' if absent else ""
    return f"{_legend(runs)}{_figures(drawn)}{missing}"


def _figures(drawn: Sequence[Chart]) -> str:
    figures = "".join(_figure(chart) for chart in drawn if chart.draw is not None)
    return f'<div class="charts">{figures}</div>' if figures else ""


def _legend(runs: Sequence[Evidence]) -> str:
    names = [f"<span>{line_key(n)}{escape(run.history.label)}</span>" for n, run in enumerate(runs)]
    shown = names if len(runs) > 1 else []
    if any(len(run.history.restarts) for run in runs):
        shown = [*shown, "<span>\N{BLACK UP-POINTING TRIANGLE} started again</span>"]
    return f'<div class="legend{" few" if len(runs) <= 8 else ""}">{"".join(shown)}</div>' if shown else ""


def _figure(chart: Chart) -> str:
    keys = "".join(f"<span>{patch_key(key)}{escape(label)}</span>" for label, key in chart.keys)
    legend = f'<div class="legend small">{keys}</div>' if keys else ""
    note = f'<p class="small">{escape(chart.note)}</p>' if chart.note else ""
    name = escape(chart.title, quote=True)
    svg = as_svg(chart).replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)
    return f"<figure><h3>{escape(chart.title)}</h3>{legend}{svg}{note}</figure>"

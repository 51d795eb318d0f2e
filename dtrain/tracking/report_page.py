"""The report: one HTML file about one or several runs that opens from disk, with no script and nothing from outside."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from html import escape
from typing import Any

import numpy as np

from dtrain.tracking.charts import COLOURS, Chart, charts
from dtrain.tracking.history import ABSENT, History, differences

_NONE = "&ndash;"
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 1180px; margin: 2em auto;
  padding: 0 1em }
h1 { font-size: 1.5em; margin-bottom: 0 } h2 { font-size: 1.15em; margin-top: 2em } .small { color: #666; font-size: .87em }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .25em .9em .25em 0; border-bottom: 1px solid #ddd; vertical-align: top }
td { overflow-wrap: anywhere; min-width: 6em } tbody th { font-weight: normal; color: #444; white-space: nowrap }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); gap: 1.4em }
figure { margin: 0 } figure img { width: 100%; height: auto } figcaption { font-weight: 600 }
.swatch { display: inline-block; width: .8em; height: .8em; margin-right: .4em }
.finished { color: #1a7f37 } .failed { color: #b00020 } .stopped, .running { color: #9a6700 }
code { font-size: .92em }
"""


def report_page(runs: Sequence[History], now: float) -> str:
    """The page as HTML.

    Args:
        runs: What to show, at least one run.
        now: Unix seconds of the report.
    """
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="small">dtrain report of {_date(now)}</p>',
        _gaps(runs),
        "<h2>Numbers</h2>",
        _table(runs, _numbers(runs, now)),
        "<h2>Curves</h2>",
        f'<div class="charts">{"".join(map(_figure, charts(runs)))}</div>',
        "<h2>Config</h2>",
        _config(runs),
    ]
    # The policy makes the promise of the first line hold: a browser loads nothing but the pictures inside.
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">"
        f"<title>{escape(title)} - dtrain</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _gaps(runs: Sequence[History]) -> str:
    items = [f"<li>{escape(run.label)}: {escape(gap)}</li>" for run in runs for gap in run.gaps]
    return f"<h2>Missing or damaged</h2><ul>{''.join(items)}</ul>" if items else ""


def _figure(chart: Chart) -> str:
    note = f'<p class="small">{escape(chart.note)}</p>' if chart.note else ""
    if chart.svg is None:
        return f"<figure><figcaption>{escape(chart.title)}</figcaption>{note}</figure>"
    # An image of its own, because ids of several SVGs in one page would collide.
    data = base64.b64encode(chart.svg).decode()
    alt = escape(chart.title, quote=True)
    return (
        f'<figure><figcaption>{escape(chart.title)}</figcaption><img alt="{alt}" src="data:image/svg+xml;base64,{data}">'
        f"{note}</figure>"
    )


def _table(runs: Sequence[History], rows: dict[str, list[str]]) -> str:
    """A column for each run; cells are HTML."""
    heads = "".join(
        f'<th><span class="swatch" style="background:{COLOURS[i % len(COLOURS)]}"></span>{escape(run.label)}</th>'
        for i, run in enumerate(runs)
    )
    body = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        for name, cells in rows.items()
    )
    return f'<div class="wide"><table><thead><tr><th></th>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _numbers(runs: Sequence[History], now: float) -> dict[str, list[str]]:
    rows: dict[str, Callable[[History], str]] = {
        "directory": lambda run: f"<code>{escape(str(run.path.resolve()))}</code>",
        "state": lambda run: _state(run, now),
        "started": _started,
        "time between first and last record": _duration,
        "attempted steps": lambda run: _last(run, "step"),
        "applied steps": lambda run: _last(run, "applied_steps"),
        "epochs": lambda run: _last(run, "epoch"),
        "samples": lambda run: _last(run, "samples"),
        "train/loss, last": lambda run: _last(run, "train/loss"),
    }
    for name in dict.fromkeys(name for run in runs for name in run.names("eval/")):
        rows[f"{name}, last"] = lambda run, name=name: _last(run, name)  # type: ignore[misc]
    rows |= {
        "best": _best,
        "samples a second, median": lambda run: _median(run, "throughput/samples_per_second"),
        "seconds a step, median": lambda run: _median(run, "time/step_seconds"),
        "waiting for data, median": lambda run: _median(run, "time/data_wait_fraction", "{:.1%}"),
        "bytes a sample on the wire, median": lambda run: _median(run, "data/bytes_per_sample"),
        "skipped steps": lambda run: _last(run, "precision/skipped_steps"),
        "bad samples": lambda run: _last(run, "data/bad_samples"),
        "peak memory, GiB": lambda run: _largest(run, "memory/max_allocated_gib"),
    }
    filled = {name: [cell(run) for run in runs] for name, cell in rows.items()}
    return {name: cells for name, cells in filled.items() if any(cell != _NONE for cell in cells)}


def _state(run: History, now: float) -> str:
    state = run.status.get("state")
    if state is None:
        return _NONE
    reason = f": {escape(str(run.status['reason']))}" if run.status.get("reason") else ""
    seen = run.series("time")[1].max(initial=0.0)
    ago = now - max(seen, float(run.status.get("time", 0.0)))
    # A killed run cannot change its status any more.
    silent = f" (last sign of life {_span(ago)} before this report)" if state == "running" else ""
    return f'<span class="{escape(str(state))}">{escape(str(state))}</span>{reason}{silent}'


def _best(run: History) -> str:
    name, mode = run.config.get("checkpoint.best"), run.config.get("checkpoint.best_mode")
    steps, values = run.series(str(name))
    if not np.isfinite(values).any():
        return _NONE
    at = int(np.nanargmin(values) if mode == "min" else np.nanargmax(values))
    return f"{escape(str(name))} {_number(values[at])} at step {steps[at]:.0f}"


def _last(run: History, name: str) -> str:
    values = run.series(name)[1]
    return _NONE if not len(values) else "not finite" if np.isnan(values[-1]) else _number(values[-1])


def _median(run: History, name: str, form: str = "") -> str:
    values = run.series(name)[1]
    values = values[np.isfinite(values)]
    if not len(values):
        return _NONE
    return form.format(np.median(values)) if form else _number(np.median(values))


def _largest(run: History, name: str) -> str:
    values = run.series(name)[1]
    return _number(np.nanmax(values)) if np.isfinite(values).any() else _NONE


def _started(run: History) -> str:
    times = run.series("time")[1]
    return _date(times[0]) if len(times) else _NONE


def _duration(run: History) -> str:
    times = run.series("time")[1]
    return _span(times[-1] - times[0]) if len(times) else _NONE


def _config(runs: Sequence[History]) -> str:
    commands = {
        "started with": [" ".join(f"<code>{escape(item)}</code>" for item in run.overrides) or _NONE for run in runs]
    }
    if len(runs) == 1:
        return _table(runs, commands)
    rows = {key: [_value(value) for value in values] for key, values in differences(runs).items()}
    equal = "" if rows else "<p>The configs are equal.</p>"
    return f"<p>What differs between the runs:</p>{_table(runs, commands | rows)}{equal}"


def _value(value: Any) -> str:
    if value is ABSENT:
        return _NONE
    return f"<code>{escape(value if isinstance(value, str) else json.dumps(value, default=str))}</code>"


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def _span(seconds: float) -> str:
    return str(timedelta(seconds=round(max(seconds, 0.0))))


def _date(time: float) -> str:
    return datetime.fromtimestamp(time).astimezone().strftime("%Y-%m-%d %H:%M %Z")

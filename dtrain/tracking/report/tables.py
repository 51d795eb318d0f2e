"""The tables of a report: the numbers of each run, and what differs between configs. Cells are HTML."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

import numpy as np

from dtrain.tracking.columns import number
from dtrain.tracking.history import ABSENT, History, differences
from dtrain.tracking.report.goal import Goal
from dtrain.tracking.report.health import last, sign_of_life
from dtrain.tracking.report.palette import line_key
from dtrain.tracking.report.wording import date, figure, percent, shortened, span

NONE = "&ndash;"


def table(
    heading: Sequence[str], rows: Iterable[Iterable[str]], kinds: Sequence[str] = (), marked: int | None = None
) -> str:
    """A table; the first cell of a row names it.

    Args:
        heading: Cells of the first line.
        rows: Cells of the other ones.
        kinds: CSS class of each column.
        marked: A row that stands out.
    """
    classes = [f' class="{kind}"' for kind in kinds] or [""] * len(heading)
    heads = "".join(f"<th{kind}>{cell}</th>" for kind, cell in zip(classes, heading, strict=True))
    lines = []
    for place, (name, *cells) in enumerate(rows):
        told = "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(classes[1:], cells, strict=True))
        mark = ' class="marked"' if place == marked else ""
        lines.append(f"<tr{mark}><th{classes[0]}>{name}</th>{told}</tr>")
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def run_table(runs: Sequence[History], rows: dict[str, list[str]]) -> str:
    """A table with a column for each run."""
    heads = [f"{line_key(number) if len(runs) > 1 else ''}{escape(run.label)}" for number, run in enumerate(runs)]
    return table(["", *heads], ([escape(name), *cells] for name, cells in rows.items()))


def numbers(runs: Sequence[History], now: float) -> str:
    """The numbers of each run; rows that no run fills are left out."""
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
        "tokens a second, median": lambda run: _median(run, "throughput/tokens_per_second"),
        "TFLOP/s, median": lambda run: _median(run, "throughput/tflops_per_second"),
        "MFU, median": lambda run: _median(run, "throughput/mfu", percent),
        "time a step, median": lambda run: _median(run, "time/step_seconds", span),
        "time a step, 95th percentile, median": lambda run: _median(run, "time/step_seconds_p95", span),
        "waiting for data, median": lambda run: _median(run, "time/data_wait_fraction", percent),
        "bytes a sample on the wire, median": lambda run: _median(run, "data/bytes_per_sample"),
        "bytes a step between ranks, median": lambda run: _median(run, "comm/bytes_per_step"),
        "skipped steps": lambda run: _last(run, "precision/skipped_steps"),
        "bad samples": lambda run: _last(run, "data/bad_samples"),
        "restarts": lambda run: _of_status(run, "restarts", figure),
        "training done again": lambda run: _of_status(run, "lost_seconds", span),
        "between the starts": lambda run: _of_status(run, "down_seconds", span),
    }
    for name in dict.fromkeys(name for run in runs for name in run.names("memory/")):
        rows[f"{name}, largest"] = lambda run, name=name: _largest(run, name)  # type: ignore[misc]
    filled = {name: [cell(run) for run in runs] for name, cell in rows.items()}
    return run_table(runs, {name: cells for name, cells in filled.items() if any(cell != NONE for cell in cells)})


def configs(runs: Sequence[History]) -> str:
    """What the runs were started with, and what differs between their configs."""
    commands = {"started with": [_command(run) for run in runs]}
    if len(runs) == 1:
        return run_table(runs, commands)
    rows = {key: [_value(value) for value in values] for key, values in differences(runs).items()}
    equal = "" if rows else "<p>The configs are equal.</p>"
    return f"<p>What differs between the runs:</p>{run_table(runs, commands | rows)}{equal}"


def _command(run: History) -> str:
    shown = " ".join(f"<code>{escape(shortened(item, 300))}</code>" for item in run.overrides[:100])
    return shown or NONE


def _state(run: History, now: float) -> str:
    state = run.status.get("state")
    if state is None:
        return NONE
    reason = f": {escape(shortened(str(run.status['reason'])))}" if run.status.get("reason") else ""
    # A killed run cannot change its status any more.
    ago = now - sign_of_life(run)
    silent = f" (last sign of life {span(ago)} before this report)" if state == "running" else ""
    return f'<span class="{escape(str(state))}">{escape(str(state))}</span>{reason}{silent}'


def _best(run: History) -> str:
    goal = Goal.configured(run)
    best = goal.best(run) if goal else None
    if goal is None or best is None:
        return NONE
    return f"{escape(goal.metric)} {figure(best[0])} at step {best[1]:.0f}"


def _last(run: History, name: str) -> str:
    return figure(last(run, name)) if len(run.series(name)[1]) else NONE


def _median(run: History, name: str, form: Callable[[float], str] = figure) -> str:
    values = run.series(name)[1]
    values = values[np.isfinite(values)]
    return form(float(np.median(values))) if len(values) else NONE


def _largest(run: History, name: str) -> str:
    values = run.series(name)[1]
    return figure(float(np.nanmax(values))) if np.isfinite(values).any() else NONE


def _of_status(run: History, name: str, form: Callable[[float], str]) -> str:
    value = number(run.status.get(name))
    return form(value) if value > 0 else NONE


def _started(run: History) -> str:
    times = run.series("time")[1]
    return date(times[0]) if len(times) else NONE


def _duration(run: History) -> str:
    times = run.series("time")[1]
    return span(times[-1] - times[0]) if len(times) else NONE


def _value(value: Any) -> str:
    if value is ABSENT:
        return NONE
    try:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
    except TypeError:  # YAML knows mappings whose keys are dates
        text = str(value)
    return f"<code>{escape(shortened(text, 300))}</code>"

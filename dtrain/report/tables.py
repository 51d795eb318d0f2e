"""The tables of a report: runs of a sweep, groups over seeds, numbers of each run, and differences between configs.

Tables of a sweep are lists of ``Column``, for the page and the terminal. The other tables are ``Rows``, for the page only:
name to one cell for each run. Cells are plain text, ``""`` if empty; the template of the page escapes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dtrain.console import align_rows
from dtrain.errors import printable
from dtrain.report.health import last_activity, parameters, run_state, run_state_with_reason
from dtrain.report.style import (
    format_column,
    format_date,
    format_duration,
    format_number,
    format_percent,
    join_some,
    shorten,
)
from dtrain.report.sweep import Comparison, Goal, Setting, Sweep, seed_groups, value_text
from dtrain.runs.history import ABSENT, History, as_float, differences

_MAX_METRICS, _MAX_OVERRIDES, _MAX_VALUE = 4, 100, 300
_MAX_SETTINGS = 4  # that are not details
_COUNTS = ("samples", "bad_samples")  # not results

Rows = dict[str, list[str]]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        head: Heading.
        cells: One for each row; ``""`` if empty.
        is_number: Whether to align the cells to the right.
        is_detail: Whether the page shows it on request only.
    """

    head: str
    cells: Sequence[str]
    is_number: bool = True
    is_detail: bool = False


def text_table(columns: Sequence[Column]) -> str:
    """A table for a terminal or a pipe; ``-`` where a cell is empty."""
    rows = zip(*((column.head, *column.cells) for column in columns), strict=True)
    numbers = [place for place, column in enumerate(columns) if column.is_number]
    return align_rows([[cell or "-" for cell in row] for row in rows], numbers)


def comparison_text(comparison: Comparison) -> str:
    """The tables of all sweeps for a terminal."""
    if len(comparison.sweeps) == 1:
        return sweep_text(comparison.sweeps[0])
    parts = (
        f"{printable(heading)}\n{sweep_text(sweep)}"
        for heading, sweep in zip(comparison.headings, comparison.sweeps, strict=True)
    )
    return "\n".join([f"{comparison.REASON}\n", *parts])


def sweep_text(sweep: Sweep) -> str:
    """The tables of a sweep for a terminal, the best run marked by an asterisk."""
    marks = ["*" if place == 0 and sweep.is_ranked else " " for place in range(len(sweep.runs))]
    columns = [column for column in run_columns(sweep) if not column.is_detail or column.head in ("run", "note")]
    parts = [text_table([Column(" ", marks, False), *(column for column in columns if any(column.cells))])]
    if sweep.is_ranked:
        parts[0] += f"{_order(sweep)}\n"
    if groups := seed_columns(sweep):
        parts.append(text_table(groups))
    if sweep.selection:
        parts.append(f"{sweep.selection}\n")
    return "\n".join(parts)


def sweep_notes(sweep: Sweep) -> str:
    """Sentences about the order of the table, and about metrics and settings that are not in it."""
    metrics, settings = _evaluation_metrics(sweep)[_MAX_METRICS:], [setting.key for setting in sweep.more_settings]
    notes = [order] if (order := _order(sweep)) else []
    notes += [f"Not in the table: {join_some(metrics)}."] if metrics else []
    notes += [f"Other keys in which the configs differ: {join_some(settings)}."] if settings else []
    return " ".join(notes)


def _order(sweep: Sweep) -> str:
    if sweep.goal is None:
        return "No run has logged a metric to rank the runs by."
    return f"Ranked by {sweep.goal.metric}, the {sweep.goal.which} value first." if sweep.is_ranked else ""


def run_columns(sweep: Sweep) -> list[Column]:
    """Place, state, time, name, settings and results of each run, in the order of ``sweep.runs``; then the details."""
    runs, goal = sweep.runs, sweep.goal
    places = [str(place) if goal and goal.best(run) else "" for place, run in enumerate(runs, 1)]
    settings = list(map(setting_column, sweep.settings))
    is_named_by_settings = any(run.label != name for run, name in zip(runs, sweep.names, strict=True))
    columns = [
        Column("place", places),
        Column("state", [run_state(run) for run in runs], False),
        Column("time", [_duration(run) for run in runs]),
        # Labels that are made of the settings would repeat their columns.
        Column("run", sweep.names, False, is_detail=is_named_by_settings),
        *settings[:_MAX_SETTINGS],
    ]
    if goal is not None:
        best = [goal.best(run) or (math.nan, math.nan) for run in runs]
        columns.append(Column(f"best {goal.metric}", format_column([value for value, _ in best])))
        columns.append(Column("at step", format_column([step for _, step in best])))
    details = [Column(f"last {name}", _last_values(runs, name)) for name in _evaluation_metrics(sweep)[:_MAX_METRICS]]
    details += [
        Column("skipped", _last_values(runs, "precision/skipped_steps")),
        Column("restarts", format_column([as_float(run.status.get("restarts")) for run in runs])),
        Column("note", [_note(run) for run in runs], False),
    ]
    columns.append(Column("last train/loss", _last_values(runs, "train/loss")))
    return [*columns, *(replace(column, is_detail=True) for column in [*settings[_MAX_SETTINGS:], *details])]


def seed_columns(sweep: Sweep) -> list[Column]:
    """Settings, number of runs, mean and range of each seed group; empty if there are none."""
    groups = seed_groups(sweep)
    if not groups or sweep.goal is None:
        return []
    settings = [setting_column(setting) for setting in sweep.settings if not setting.is_seed]
    columns = [
        Column(column.head, [group.values[place] for group in groups], column.is_number)
        for place, column in enumerate(settings)
    ] or [Column("settings", ["all" for _ in groups], False)]
    columns.append(Column("seeds finished", [f"{len(group.best)} of {group.runs}" for group in groups]))
    for which in ("best", "last"):
        known = [results[np.isfinite(results)] for results in (getattr(group, which) for group in groups)]
        numbers = [float(of(each)) if len(each) else math.nan for of in (np.mean, np.min, np.max) for each in known]
        # Formatted in one call, so that all have the same number of decimals.
        means, lows, highs = np.array(format_column(numbers), object).reshape(3, -1)
        ranges = [f"{low} to {high}" if low else "" for low, high in zip(lows, highs, strict=True)]
        columns += [Column(f"{which} {sweep.goal.metric}: mean", list(means)), Column("range", ranges)]
    return columns


def setting_column(setting: Setting) -> Column:
    """The values of a setting."""
    return Column(setting.name, setting.short_texts, any(math.isfinite(number) for number in setting.numbers))


def number_rows(runs: Sequence[History], now: float) -> Rows:
    """The numbers of each run at ``now`` (Unix seconds), without the rows that are empty for all runs."""
    rows: dict[str, Callable[[History], str]] = {
        "directory": lambda run: run.place or str(run.path.resolve()),
        "state": lambda run: _state(run, now),
        "forked from": lambda run: str(run.config.get("run.fork") or ""),
        "precision": lambda run: str(run.config.get("precision.name", "")),
        "parameters": parameters,
        "started": lambda run: format_date(run.series("time")[1][0]) if run.has("time") else "",
        "time between first and last record": _duration,
        "attempted steps": lambda run: _last(run, "step"),
        "applied steps": lambda run: _last(run, "applied_steps"),
        "epochs": lambda run: f"{run.last('epoch'):.2f}" if np.isfinite(run.last("epoch")) else "",
        "samples": lambda run: _last(run, "samples"),
        "train/loss, last": lambda run: _last(run, "train/loss"),
    }
    for name in dict.fromkeys(name for run in runs for name in run.names("eval/")):
        rows[f"{name}, last"] = lambda run, name=name: _last(run, name)  # type: ignore[misc]
        if name.rpartition("/")[2] not in _COUNTS:
            rows[f"{name}, best"] = lambda run, name=name: best_text(run, name)  # type: ignore[misc]
    rows |= {
        "samples per second, median": lambda run: _median(run, "throughput/samples_per_second"),
        "tokens per second, median": lambda run: _median(run, "throughput/tokens_per_second"),
        "TFLOP/s, median": lambda run: _median(run, "throughput/tflops_per_second"),
        "MFU, median": lambda run: _median(run, "throughput/mfu", format_percent),
        "time per step, median": lambda run: _median(run, "time/step_seconds", format_duration),
        "time per step, 95th percentile": lambda run: _median(run, "time/step_seconds_p95", format_duration),
        "waiting for data, median": lambda run: _median(run, "time/data_wait_fraction", format_percent),
        "bytes per sample from the workers, median": lambda run: _median(run, "data/bytes_per_sample"),
        "bytes per step between ranks, median": lambda run: _median(run, "comm/bytes_per_step"),
        "skipped steps": lambda run: _last(run, "precision/skipped_steps"),
        "spikes of the gradient norm": lambda run: _last(run, "train/spikes"),
        "bad samples": lambda run: _last(run, "data/bad_samples"),
        "excluded samples": lambda run: _last(run, "data/excluded_samples"),
        "restarts": lambda run: _from_status(run, "restarts", format_number),
        "training repeated after restarts": lambda run: _from_status(run, "lost_seconds", format_duration),
        "not running between starts": lambda run: _from_status(run, "down_seconds", format_duration),
    }
    for name in dict.fromkeys(name for run in runs for name in run.names("memory/")):
        rows[f"{name}, largest"] = lambda run, name=name: _largest(run, name)  # type: ignore[misc]
    filled = {name: [cell(run) for run in runs] for name, cell in rows.items()}
    return {name: cells for name, cells in filled.items() if any(cells)}


def config_rows(runs: Sequence[History]) -> Rows:
    """The command line of each run and, of several runs, the config keys that differ."""
    commands = [" ".join(shorten(item, _MAX_VALUE) for item in run.overrides[:_MAX_OVERRIDES]) for run in runs]
    rows = {
        key: ["" if value is ABSENT else shorten(value_text(value), _MAX_VALUE) for value in values]
        for key, values in differences(runs).items()
    }
    return {"started with": commands} | rows


def _evaluation_metrics(sweep: Sweep) -> list[str]:
    """Evaluation metrics of any run, the goal's first."""
    names = dict.fromkeys(
        name for run in sweep.runs for name in run.names("eval/") if name.rpartition("/")[2] not in _COUNTS
    )
    first = [sweep.goal.metric] if sweep.goal and sweep.goal.metric in names else []
    return [*first, *(name for name in names if name not in first)]


def _last_values(runs: Sequence[History], name: str) -> list[str]:
    texts = format_column([run.last(name) for run in runs])
    return [text or ("not finite" if run.has(name) else "") for text, run in zip(texts, runs, strict=True)]


def _note(run: History) -> str:
    """Why it failed or was stopped, and what it lacks."""
    reason = run_state_with_reason(run).partition(": ")[2]
    missing = "" if run.names("eval/") else "not evaluated" if len(run.columns.steps) else "nothing logged"
    return "; ".join(filter(None, (reason, missing)))


def _state(run: History, now: float) -> str:
    state = run_state(run)
    reason = f": {shorten(str(run.status['reason']))}" if run.status.get("reason") else ""
    # status.json of a killed run still says running.
    silent = f" (last activity {format_duration(now - last_activity(run))} before this report)"
    return f"{state}{reason}{silent if state in ('running', 'killed') else ''}"


def best_text(run: History, metric: str) -> str:
    """Such as ``0.175 at step 92, smallest``; ``""`` without a value, or if it is not known which direction is better."""
    goal = Goal.of(run, metric)
    best = goal.best(run) if goal else None
    return f"{format_number(best[0])} at step {best[1]:.0f}, {goal.which}" if goal and best else ""


def _last(run: History, name: str) -> str:
    return format_number(run.last(name)) if len(run.series(name)[1]) else ""


def _median(run: History, name: str, form: Callable[[float], str] = format_number) -> str:
    values = run.series(name)[1]
    values = values[np.isfinite(values)]
    return form(float(np.median(values))) if len(values) else ""


def _largest(run: History, name: str) -> str:
    values = run.series(name)[1]
    return format_number(float(np.nanmax(values))) if np.isfinite(values).any() else ""


def _from_status(run: History, name: str, form: Callable[[float], str]) -> str:
    value = as_float(run.status.get(name))
    return form(value) if value > 0 else ""


def _duration(run: History) -> str:
    times = run.series("time")[1]
    return format_duration(float(times[-1] - times[0])) if len(times) > 1 else ""

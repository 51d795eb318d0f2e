"""A sweep as tables: a row for each run, and one for each setting over its seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape

import numpy as np

from dtrain.tracking.columns import number
from dtrain.tracking.history import History
from dtrain.tracking.report.aligned import Column, as_html, as_text
from dtrain.tracking.report.health import last
from dtrain.tracking.report.palette import line_key
from dtrain.tracking.report.seeds import over_seeds
from dtrain.tracking.report.standing import told
from dtrain.tracking.report.sweep import Sweep
from dtrain.tracking.report.varied import Setting
from dtrain.tracking.report.wording import in_column, listed, span

_MOST_METRICS = 4
_COUNTS = ("eval/samples", "eval/bad_samples")


def run_columns(sweep: Sweep) -> list[Column]:
    """Place, name, settings, results and state of each run, in the order of ``sweep.runs``."""
    runs, goal = sweep.runs, sweep.goal
    places = [str(place) if goal and goal.best(run) else "" for place, run in enumerate(runs, 1)]
    columns = [
        Column("place", places),
        Column("run", [run.label for run in runs], False),
        *map(_setting, sweep.settings),
    ]
    if goal is not None:
        best = [goal.best(run) or (math.nan, math.nan) for run in runs]
        columns.append(Column(f"best {goal.metric}", in_column([value for value, _ in best])))
        columns.append(Column("at step", in_column([step for _, step in best])))
    columns += [Column(f"last {name}", _of_all(runs, name)) for name in _metrics(sweep)[:_MOST_METRICS]]
    return [
        *columns,
        Column("last train/loss", _of_all(runs, "train/loss")),
        Column("skipped", _of_all(runs, "precision/skipped_steps")),
        Column("restarts", in_column([number(run.status.get("restarts")) for run in runs])),
        Column("time", [_time(run) for run in runs]),
        Column("state", [told(run) for run in runs], False),  # last, because a reason may be long
    ]


def seed_columns(sweep: Sweep) -> list[Column]:
    """Settings, number of runs, mean and range over them; no rows if no runs differ in their seeds only."""
    groups = over_seeds(sweep)
    others = [setting for setting in sweep.settings if not setting.is_seed]
    columns = [
        replace(_setting(setting), cells=[group.values[place] for group in groups])
        for place, setting in enumerate(others)
    ] or [Column("settings", ["all" for _ in groups], False)]
    finished = [f"{len(group.best)} of {group.runs}" for group in groups]
    columns.append(Column("seeds finished", finished))
    metric = sweep.goal.metric if sweep.goal else ""
    for head, results in (
        (f"best {metric}", [group.best for group in groups]),
        (f"last {metric}", [group.last for group in groups]),
    ):
        known = [values[np.isfinite(values)] for values in results]
        summed = [
            float(of(values)) if len(values) else math.nan for of in (np.mean, np.min, np.max) for values in known
        ]
        texts = np.array(in_column(summed), object).reshape(3, -1)
        spread = [f"{least} to {most}" if least else "" for _, least, most in texts.T]
        columns += [Column(f"{head}: mean", list(texts[0])), Column("least to largest", spread)]
    return columns


def notes(sweep: Sweep) -> list[str]:
    """What a reader of the table must know."""
    goal = sweep.goal
    if goal is None:
        return ["No run has logged a metric to rank them by."]
    order = f"In the order of {goal.metric}, the {'largest' if goal.largest else 'smallest'} first."
    left = _metrics(sweep)[_MOST_METRICS:]
    others = [setting.key for setting in sweep.unshown]
    return [
        order,
        *([f"Not in the table: {listed(left)}."] if left else []),
        *([f"Other keys in which the configs differ: {listed(others)}."] if others else []),
    ]


def sweep_text(sweep: Sweep) -> Iterator[str]:
    """The tables as lines for a terminal, the best run marked, and which runs are looked at closely."""
    yield from as_text(run_columns(sweep), "*" if sweep.goal else " ")
    seeds = seed_columns(sweep)
    if seeds[0].cells:
        yield ""
        yield from as_text(seeds)
    if sweep.choice:
        yield ""
        yield sweep.choice


def sweep_section(sweep: Sweep) -> str:
    """The tables as HTML."""
    parts = [f'<h2>Runs</h2><p class="small">{escape(" ".join(notes(sweep)))}</p>']
    keys = [line_key(sweep.shown.index(run)) if run in sweep.shown else "" for run in sweep.runs]
    parts.append(as_html(run_columns(sweep), keys, best=sweep.goal is not None))
    seeds = seed_columns(sweep)
    if seeds[0].cells:
        which = "Of the finished runs that differ in their seeds only."
        parts.append(f'<h3>Over seeds</h3><p class="small">{which}</p>{as_html(seeds)}')
    return "".join(parts)


def _setting(setting: Setting) -> Column:
    return Column(setting.name, setting.brief, any(math.isfinite(value) for value in setting.numbers))


def _metrics(sweep: Sweep) -> list[str]:
    """Evaluation metrics of any run, that of the goal first."""
    names = dict.fromkeys(name for run in sweep.runs for name in run.names("eval/") if name not in _COUNTS)
    first = [sweep.goal.metric] if sweep.goal and sweep.goal.metric in names else []
    return [*first, *(name for name in names if name not in first)]


def _of_all(runs: Sequence[History], name: str) -> list[str]:
    values = [last(run, name) for run in runs]
    lost = [math.isnan(value) and run.has(name) for value, run in zip(values, runs, strict=True)]
    return ["not finite" if nan else text for nan, text in zip(lost, in_column(values), strict=True)]


def _time(run: History) -> str:
    times = run.series("time")[1]
    return span(float(times[-1] - times[0])) if len(times) > 1 else ""

"""The parts of a report that show what a run directory holds beside metrics: pictures, evaluations, trouble. As HTML."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from itertools import groupby

from dtrain.tracking.history import History
from dtrain.tracking.report.evidence import Evidence
from dtrain.tracking.report.media import Medium
from dtrain.tracking.report.tables import table
from dtrain.tracking.report.trouble import BadSamples, Hang, Message
from dtrain.tracking.report.wording import counted, listed, shortened

_NEWEST_MESSAGES = 30
_WORDS = {"ok": "ok", "warning": "look", "error": "error"}


def health_section(runs: Sequence[Evidence]) -> str:
    """A line for each run, and of a single one everything that was looked at."""
    if len(runs) > 1:
        return "".join(
            f'<p class="health {run.health.level}"><b>{escape(run.history.label)}</b> {_badge(run)} '
            f"{escape(shortened(run.health.line, 400))}</p>"
            for run in runs
        )
    (run,) = runs
    points = "".join(
        f'<li class="{finding.level}"><b>{_WORDS[finding.level]}</b> <span>{escape(shortened(finding.text, 1_000))}'
        f"{f'<br><i>{escape(finding.remedy)}</i>' if finding.remedy else ''}</span></li>"
        for finding in run.health.findings
    )
    return (
        f'<p class="health {run.health.level}">{_badge(run)} {escape(shortened(run.health.line, 600))}.</p>'
        f'<ul class="findings">{points}</ul>'
    )


def gaps_section(runs: Sequence[History]) -> str:
    """What is missing or damaged; ``""`` if nothing is."""
    items = "".join(f"<li>{escape(line)}</li>" for line in gap_lines(runs))
    return f"<h2>Missing or damaged</h2><ul>{items}</ul>" if items else ""


def gap_lines(runs: Sequence[History]) -> list[str]:
    """What is missing or damaged, the same of several runs in one line."""
    same: dict[str, list[str]] = {}
    for run in runs:
        for gap in run.gaps:
            same.setdefault(gap, []).append(run.label)
    return [f"{listed(labels)}: {gap}" for gap, labels in same.items()]


def media_section(runs: Sequence[Evidence]) -> str:
    """The newest pictures and texts of each name; ``""`` if there are none."""
    parts = []
    for run in runs:
        for name, group in groupby(run.media, key=lambda medium: medium.name):
            shown = "".join(map(_medium, group))
            parts.append(f'<h3>{_of(run, runs)}{escape(name)}</h3><div class="media">{shown}</div>')
    return f"<h2>Pictures and texts</h2>{''.join(parts)}" if parts else ""


def evaluations_section(runs: Sequence[Evidence]) -> str:
    """Results of ``dtrain.evaluate``; ``""`` if there are none."""
    parts = []
    for run in (run for run in runs if run.evaluations):
        parts.append(f"<h3>{escape(run.history.label)}</h3>" if len(runs) > 1 else "")
        names = dict.fromkeys(name for result in run.evaluations for name in result.facts)
        facts = ([escape(name), *(escape(result.facts.get(name, "")) for result in run.evaluations)] for name in names)
        parts.append(table(["", *(escape(result.name) for result in run.evaluations)], facts))
        for result in run.evaluations:
            if result.classes:
                parts.append(f"<h4>Classes in {escape(result.name)}, the lowest recall first</h4>")
                parts.append(table([*map(escape, result.heading)], (map(escape, row) for row in result.classes)))
            if result.left_out:
                parts.append(f'<p class="small">Classes that are not shown: {result.left_out:,}.</p>')
            if result.pictures:
                parts.append(f'<div class="media">{"".join(map(_medium, result.pictures))}</div>')
    return f"<h2>Evaluations</h2>{''.join(parts)}" if parts else ""


def trouble_section(runs: Sequence[Evidence]) -> str:
    """Bad samples, hangs, warnings and errors of each run."""
    parts = []
    for run in runs:
        of_run = _bad(run.bad) + _hangs(run.hangs) + _messages(run.messages)
        if of_run and len(runs) > 1:
            parts.append(f"<h3>{escape(run.history.label)}</h3>")
        parts.append(of_run)
    told = "".join(parts) or "<p>No bad samples, hangs, warnings or errors were logged.</p>"
    return f"<h2>Trouble</h2>{told}"


def _of(run: Evidence, runs: Sequence[Evidence]) -> str:
    return f"{escape(run.history.label)}: " if len(runs) > 1 else ""


def _badge(run: Evidence) -> str:
    return f'<b class="badge {run.health.level}">{run.health.word}</b>'


def _medium(medium: Medium) -> str:
    told = medium.name if medium.step is None else f"step {medium.step:,}"
    caption = f"<figcaption>{escape(told)}</figcaption>"
    if medium.png is not None:
        alt = escape(f"{medium.name}, {told}", quote=True)
        data = base64.b64encode(medium.png).decode()
        return f'<figure><img alt="{alt}" src="data:image/png;base64,{data}">{caption}</figure>'
    if medium.text is not None:
        return f"<figure><pre>{escape(medium.text)}</pre>{caption}</figure>"
    return f'<figure><p class="small">Not shown: {escape(shortened(medium.refused))}.</p>{caption}</figure>'


def _bad(bad: BadSamples) -> str:
    if not bad.count:
        return ""
    reasons = "".join(f"<li>{count:,} times: {escape(reason)}</li>" for reason, count in bad.reasons)
    first = ([f"{step:,}", f"<code>{escape(shortened(key, 300))}</code>"] for step, key, _ in bad.first)
    told = f"<h4>{counted(bad.count, 'bad sample')}</h4><p>They were left out of the loss and are named in the ledgers.</p>"
    return f"{told}<ul>{reasons}</ul>{table(['step', f'key (the first {len(bad.first)})'], first)}"


def _hangs(hangs: Sequence[Hang]) -> str:
    parts = []
    for (when, why), group in groupby(hangs, key=lambda hang: (hang.when, hang.why)):
        places = "".join(f"<li><code>{escape(shortened(hang.place))}</code></li>" for hang in group)
        parts.append(f"<h4>Hung at {escape(when)}: {escape(shortened(why))}</h4><ul>{places}</ul>")
    stacks = '<p class="small">Stacks of all threads are in logs/hang-rank-*.txt.</p>' if parts else ""
    return "".join(parts) + stacks


def _messages(messages: Sequence[Message]) -> str:
    same: dict[tuple[str, str], list[Message]] = {}
    for message in messages:
        same.setdefault((message.level.lower(), message.text), []).append(message)
    if not same:
        return ""
    items = []
    for (level, text), group in list(same.items())[-_NEWEST_MESSAGES:]:
        ranks = listed([str(rank) for rank in sorted({one.rank for one in group})])
        until = f" to {group[-1].when}" if group[-1].when != group[0].when else ""
        often = f", {counted(len(group), 'time')}" if len(group) > 1 else ""
        where = f"{escape(group[0].when)}{escape(until)}, rank {ranks}{often}"
        items.append(f'<li class="{level}"><b>{level}</b> <span class="small">{where}</span><br>{escape(text)}</li>')
    which = f"the last {_NEWEST_MESSAGES} of {len(same):,}" if len(same) > _NEWEST_MESSAGES else f"{len(same)}"
    return f'<h4>Warnings and errors of all ranks ({which})</h4><ul class="messages">{"".join(items)}</ul>'

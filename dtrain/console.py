"""Output of all commands: banners, aligned tables, progress bars, findings and sizes.

Plain lines are written with one call each: under torchrun several processes share a file, and Python's ``print`` writes text
and newline separately.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from dtrain.errors import printable

#: From harmless to severe.
LEVELS = ("ok", "warning", "error")
#: Called with the amount of work done since the last call.
OnProgress = Callable[[int], None]
_SECONDS_BETWEEN_LINES = 10.0
_UNLIMITED = 1 << 16  # columns of a table; rich would otherwise cut it to the width of the terminal


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        subject: What was checked, in a word or two.
        text: The result.
        level: ``ok``; ``warning``: it works, but slowly or not always; ``error``: it does not work.
        remedy: What to do, in one or more lines; empty if nothing needs to be done.
    """

    subject: str
    text: str
    level: str = "ok"
    remedy: str = ""


def as_text(findings: Iterable[Finding]) -> str:
    """One line for each finding, with its remedy below it."""
    findings = list(findings)
    width = max((len(finding.subject) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"  {finding.level:<7}  {finding.subject:<{width}}  {finding.text}")
        lines += [f"  {'':<7}  {'':<{width}}  -> {remedy}" for remedy in finding.remedy.splitlines()]
    return printable("\n".join(lines), keep="\n")


def size_text(nbytes: float) -> str:
    """Bytes in binary units: ``1.5 GiB``, ``12 MiB``, ``3 KiB``, ``88 B``."""
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.1f} GiB"
    if nbytes >= 2**20:
        return f"{nbytes / 2**20:.0f} MiB"
    return f"{nbytes / 2**10:.0f} KiB" if nbytes >= 2**10 else f"{nbytes:.0f} B"


def print_banner(title: str, rows: Mapping[str, str], stream: TextIO | None = None) -> None:
    """Prints a title, and ``rows`` as an aligned table below it; a value may have several lines.

    Args:
        title: The first line; bold in a terminal.
        rows: Name to value, in the order of printing.
        stream: Where to write; standard output by default.
    """
    width = max(map(len, rows), default=0)
    text = Text(title, style="bold")
    for name, value in rows.items():
        for number, line in enumerate(value.splitlines() or [""]):
            text.append(
                printable(f"\n  {'' if number else name:<{width}}  {line}".rstrip(), keep="\n"), style="not bold"
            )
    Console(file=stream or sys.stdout, highlight=False).print(text, soft_wrap=True)


@contextmanager
def until_reader_leaves() -> Iterator[None]:
    """Ends the block silently if the reader of standard output has gone, as in ``| head``."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # flushed once more at exit


def align_rows(rows: Sequence[Sequence[str]], numbers: Container[int] = ()) -> str:
    """Rows as lines with aligned columns, two spaces apart, for a terminal or a pipe; no line is cut or coloured.

    Args:
        rows: Cells of each row; the heading, if there is one, is the first row.
        numbers: Indexes of columns that are aligned to the right.
    """
    table = Table.grid(padding=(0, 2, 0, 0))
    for column in range(max(map(len, rows), default=0)):
        table.add_column(justify="right" if column in numbers else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # not str, in which rich looks for markup
    console = Console(width=_UNLIMITED, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


@contextmanager
def progress(console: Console, description: str, total: int) -> Iterator[OnProgress]:
    """Shows the progress of the block: a bar in a terminal, elsewhere a line every ten seconds.

    Args:
        console: The output.
        description: The items, such as ``train samples``.
        total: Number of items.

    Yields:
        A function to call with the number done since the last call.
    """
    if not console.is_terminal:
        yield _ProgressLog(console, description, total).advance
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda count: bar.advance(task, count)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f}/s" if speed else "", style="progress.data.speed")


class _ProgressLog:
    """``train samples: 12,000 of 50,000, 1,234/s, 31 s left``."""

    def __init__(self, console: Console, description: str, total: int) -> None:
        self._console, self._description, self._total = console, description, total
        self._done = 0
        self._started = self._printed = time.monotonic()

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._printed < _SECONDS_BETWEEN_LINES:
            return
        self._printed = now
        rate = self._done / (now - self._started)
        left = f"{(self._total - self._done) / rate:,.0f} s left" if rate else "time left unknown"
        self._console.print(
            f"{self._description}: {self._done:,} of {self._total:,}, {rate:,.0f}/s, {left}", markup=False
        )

"""How far a long command is: a bar in a terminal, a line now and then elsewhere; nothing for what is done in no time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from dtrain.packing.workers import Tick

_LINE_EVERY = 10.0


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f}/s" if speed else "", style="progress.data.speed")


@contextmanager
def progress(console: Console, what: str, total: int) -> Iterator[Tick]:
    """Shows how much of something is done while the block runs.

    Args:
        console: Where to.
        what: Is done, such as ``train samples``.
        total: How much there is.

    Yields:
        Called with how much was done since the last call.
    """
    if not console.is_terminal:
        yield _Lines(console, what, total).advance
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


class _Lines:
    """Progress for a log: ``train samples: 12,000 of 50,000, 1,234/s, 31 s left``."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        self._console, self._what, self._total = console, what, total
        self._done = 0
        self._began = self._told = time.monotonic()

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._told < _LINE_EVERY:
            return
        self._told = now
        rate = self._done / (now - self._began)
        left = f"{(self._total - self._done) / rate:,.0f} s left" if rate else "nothing yet"
        self._console.print(f"{self._what}: {self._done:,} of {self._total:,}, {rate:,.0f}/s, {left}", markup=False)

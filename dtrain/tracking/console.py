"""What a person sees of a run: one moving line in a terminal, plain lines in a log file.

Both show the same text, made from the records that also go to metrics.jsonl. Plain lines are written with one call
each, because under torchrun several processes share a file and Python's ``print`` writes text and newline apart.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from dtrain.tracking.record import Record

#: A terminal is redrawn at most so often: drawing costs a millisecond, and nobody reads faster.
SECONDS_BETWEEN_REDRAWS = 0.1


class ConsoleSink(Protocol):
    """A sink that a person reads."""

    def log(self, record: Record) -> None:
        """Shows one record."""

    def note(self, text: str) -> None:
        """Shows a sentence without disturbing what is there; any thread may call."""

    def media(self, step: int, name: str, path: Path) -> None:
        """Does nothing: they are to be looked at elsewhere."""

    def finish(self, state: str, reason: str | None = None) -> None:
        """Says how the run ended."""


def console_sink(total_steps: int | None = None, stream: TextIO | None = None) -> ConsoleSink:
    """The sink that suits ``stream``: a progress line in a terminal, plain lines elsewhere.

    Args:
        total_steps: Attempted steps at which the run ends; None if nobody knows.
        stream: Where to write; standard output by default.
    """
    stream = stream or sys.stdout
    terminal = Console(file=stream, highlight=False)
    # isatty too: FORCE_COLOR makes rich call a file a terminal, and cursor movements would end up in a log.
    if stream.isatty() and terminal.is_terminal and not terminal.is_dumb_terminal:
        return ProgressLine(terminal, total_steps)
    return PlainLines(stream, total_steps)


def print_banner(title: str, rows: Mapping[str, str], stream: TextIO | None = None) -> None:
    """Prints a title and under it ``rows`` as an aligned table; the lines of a longer value stay in its column.

    Args:
        title: The first line; bold in a terminal.
        rows: Name to value, in the order of printing.
        stream: Where to write; standard output by default.
    """
    width = max(map(len, rows), default=0)
    text = Text(title, style="bold")
    for name, value in rows.items():
        for number, line in enumerate(value.splitlines() or [""]):
            text.append(f"\n  {'' if number else name:<{width}}  {line}".rstrip(), style="not bold")
    Console(file=stream or sys.stdout, highlight=False).print(text, soft_wrap=True)


class PlainLines:
    """A line for each record, for log files and pipes."""

    def __init__(self, stream: TextIO, total_steps: int | None) -> None:
        self._stream = stream
        self._total = total_steps
        self._eta = Eta(total_steps)

    def log(self, record: Record) -> None:
        """Writes the training part and the evaluation part of ``record``, each as a line if it is there."""
        at = _step(record, self._total)
        eta = self._eta.after(record)
        if has_training(record):
            self._write(f"step {at}  {training_text(record)}{eta and '  eta ' + eta}")
        if evaluation := evaluation_text(record):
            self._write(f"eval {at}  {evaluation}")

    def note(self, text: str) -> None:
        """Writes ``text`` as a line."""
        self._write(text)

    def media(self, step: int, name: str, path: Path) -> None:
        """Does nothing: they are to be looked at elsewhere."""

    def finish(self, state: str, reason: str | None = None) -> None:
        """Says nothing: who ends the run says how."""

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class ProgressLine:
    """A bar that moves, with the newest record beside it; evaluations and notes scroll away above it."""

    def __init__(self, terminal: Console, total_steps: int | None) -> None:
        self._terminal = terminal
        self._total = total_steps
        self._eta = Eta(total_steps)
        self._drawn = float("-inf")
        # Redrawn by hand: a refreshing thread would take the interpreter from the loop ten times a second.
        self._progress = Progress(
            TextColumn("step {task.description}", markup=False),
            BarColumn(bar_width=12, table_column=Column(min_width=12)),
            TextColumn("{task.fields[eta]}", markup=False),
            TextColumn("{task.fields[text]}", markup=False),
            console=terminal,
            auto_refresh=False,
        )
        self._task: TaskID | None = None

    def log(self, record: Record) -> None:
        """Moves the line and prints the evaluation part of ``record``, if it has one, above it."""
        at = _step(record, self._total)
        if self._task is None:
            self._task = self._progress.add_task(at, total=self._total, eta="", text="")
            self._progress.start()
            # rich hides the cursor until it is told to stop; a killed run would leave the terminal without one.
            self._terminal.show_cursor(True)
        eta = self._eta.after(record)
        step = int(record["step"])
        if has_training(record):
            self._progress.update(self._task, completed=step, description=at, eta=eta, text=training_text(record))
        if evaluation := evaluation_text(record):
            self.note(f"eval {at}  {evaluation}")
        if (now := time.monotonic()) - self._drawn >= SECONDS_BETWEEN_REDRAWS or step == self._total:
            self._progress.refresh()
            self._drawn = now

    def note(self, text: str) -> None:
        """Prints ``text`` above the line."""
        self._terminal.print(Text(text), soft_wrap=True)

    def media(self, step: int, name: str, path: Path) -> None:
        """Does nothing: they are to be looked at elsewhere."""

    def finish(self, state: str, reason: str | None = None) -> None:
        """Leaves the line as it is and gives the terminal back."""
        self._progress.stop()


class Eta:
    """Time until the last step, from the steps since this process's first record, evaluations and saves included."""

    def __init__(self, total_steps: int | None) -> None:
        self._total = total_steps
        self._first: tuple[int, float] | None = None

    def after(self, record: Record) -> str:
        """The time that remains after ``record`` as h:mm:ss, or "" while nobody can tell."""
        step, now = int(record["step"]), float(record["time"])
        if self._first is None:
            self._first = (step, now)
        steps, seconds = step - self._first[0], now - self._first[1]
        if self._total is None or steps <= 0:
            return ""
        minutes, rest = divmod(round(max(self._total - step, 0) * seconds / steps), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def has_training(record: Record) -> bool:
    """True if ``record`` says something about training steps, and not only about an evaluation."""
    return any(name.startswith(("train/", "time/", "throughput/")) for name in record)


def training_text(record: Record) -> str:
    """The parts of ``record`` that a person watches, two spaces apart; parts that it lacks are left out."""
    parts = []
    if "epoch" in record:
        parts.append(f"epoch {_number(record['epoch'])}")
    if "train/loss" in record:
        parts.append(f"loss {record['train/loss']:.4g}")
    if "train/lr" in record:
        parts.append(f"lr {record['train/lr']:.1e}")
    if "throughput/samples_per_second" in record:
        parts.append(f"{record['throughput/samples_per_second']:,.0f} samples/s")
    if "time/data_wait_fraction" in record:
        parts.append(f"wait {record['time/data_wait_fraction']:.0%}")
    if "precision/loss_scale" in record:
        parts.append(f"scale {record['precision/loss_scale']:.8g}")
    if record.get("precision/skipped_steps"):
        parts.append(f"skipped {record['precision/skipped_steps']}")
    if record.get("data/bad_samples"):
        parts.append(f"bad {record['data/bad_samples']}")
    return "  ".join(parts)


def evaluation_text(record: Record) -> str:
    """The ``eval/`` metrics of ``record``, two spaces apart; "" if it has none."""
    return "  ".join(
        f"{name.removeprefix('eval/')} {_number(value)}"
        for name, value in record.items()
        if name.startswith("eval/") and (value or not isinstance(value, int))  # nothing bad is not worth a word
    )


def _number(value: float | int) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _step(record: Record, total: int | None) -> str:
    return f"{record['step']}/{total}" if total is not None else f"{record['step']}"

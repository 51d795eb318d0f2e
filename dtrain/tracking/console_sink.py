"""Console output of a training: one progress line in a terminal, plain lines in a log file.

Both show the same text, made from the records that also go to metrics.jsonl.
"""

from __future__ import annotations

import sys
import time
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
)
from rich.table import Column
from rich.text import Text

from dtrain.errors import printable
from dtrain.runs.records import Record

#: A terminal is redrawn at most this often, because drawing takes a millisecond.
SECONDS_BETWEEN_REDRAWS = 0.1


class ConsoleSink(Protocol):
    """The sink that a person reads."""

    def log(self, record: Record) -> None:
        """Shows one record."""

    def note(self, text: str) -> None:
        """Shows a sentence without disturbing the progress line; any thread may call."""

    def finish(self, state: str, reason: str | None = None) -> None:
        """Ends the output. The entry point prints how the run ended."""


def console_sink(total_steps: int | None = None, stream: TextIO | None = None) -> ConsoleSink:
    """The sink that suits ``stream``: a progress line in a terminal, plain lines elsewhere.

    Args:
        total_steps: Attempted steps at which the run ends; None if unknown.
        stream: Where to write; standard output by default.
    """
    stream = stream or sys.stdout
    terminal = Console(file=stream, highlight=False)
    # isatty too: FORCE_COLOR makes rich call a file a terminal, and cursor movements would end up in a log.
    if stream.isatty() and terminal.is_terminal and not terminal.is_dumb_terminal:
        return ProgressLine(terminal, total_steps)
    return PlainLines(stream, total_steps)


class PlainLines:
    """Lines for each record, for log files and pipes."""

    def __init__(self, stream: TextIO, total_steps: int | None) -> None:
        self._stream = stream
        self._total = total_steps
        self._eta = Eta(total_steps)

    def log(self, record: Record) -> None:
        """Writes the lines of ``record``."""
        for line in self.lines(record):
            self._write(line)

    def lines(self, record: Record) -> list[str]:
        """One line for the training metrics of ``record`` and one for its evaluation metrics, if it has them."""
        at = _step(record, self._total)
        eta = self._eta.after(record)
        lines = [f"step {at}  {training_text(record)}{eta and '  eta ' + eta}"] if has_training(record) else []
        if evaluation := evaluation_text(record):
            lines.append(f"eval {at}  {evaluation}")
        return lines

    def note(self, text: str) -> None:
        """Writes ``text`` as a line."""
        self._write(text)

    def finish(self, state: str, reason: str | None = None) -> None:
        """Does nothing."""

    def _write(self, line: str) -> None:
        self._stream.write(printable(line, keep="\n\t") + "\n")
        self._stream.flush()


class ProgressLine:
    """A progress bar with the newest record next to it, on one line.

    Evaluations and notes are printed above it, an evaluation below the training metrics of its step. At the end the bar is
    replaced by the last training metrics.
    """

    def __init__(self, terminal: Console, total_steps: int | None) -> None:
        self._terminal = terminal
        self._total = total_steps
        self._eta = Eta(total_steps)
        self._drawn = float("-inf")
        self._unprinted = ""  # the newest training metrics, if the bar alone shows them
        # Redrawn explicitly: a refresh thread would take the interpreter lock from the loop ten times a second.
        self._progress = Progress(
            TextColumn("step {task.description}", markup=False),
            BarColumn(bar_width=12, table_column=Column(min_width=12)),
            TextColumn("{task.fields[eta]}", markup=False),
            # In a narrow terminal the end is cut off; a second line would leave traces above the bar.
            TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=terminal,
            auto_refresh=False,
            transient=True,
        )
        self._task: TaskID | None = None

    def log(self, record: Record) -> None:
        """Updates the line, and prints the evaluation metrics of ``record``, if it has any, above it."""
        at = _step(record, self._total)
        if self._task is None:
            self._task = self._progress.add_task(at, total=self._total, eta="", text="")
            self._progress.start()
            # rich hides the cursor until its end; a killed run would leave the terminal without one.
            self._terminal.show_cursor(True)
        eta = self._eta.after(record)
        step = int(record["step"])
        if has_training(record):
            text = training_text(record)
            self._progress.update(self._task, completed=step, description=at, eta=eta, text=printable(text))
            self._unprinted = f"step {at}  {text}"
        if evaluation := evaluation_text(record):
            self._print_training()
            self.note(f"eval {at}  {evaluation}")
        if (now := time.monotonic()) - self._drawn >= SECONDS_BETWEEN_REDRAWS or step == self._total:
            self._progress.refresh()
            self._drawn = now

    def note(self, text: str) -> None:
        """Prints ``text`` above the progress line, wrapped between words."""
        self._terminal.print(Text(printable(text, keep="\n\t")), overflow="ignore")  # a long path stays whole

    def finish(self, state: str, reason: str | None = None) -> None:
        """Replaces the bar by a line and releases the terminal."""
        self._print_training()
        self._progress.stop()

    def _print_training(self) -> None:
        if self._unprinted:
            self.note(self._unprinted)
        self._unprinted = ""


class Eta:
    """Estimates the time until the last step from the steps since the first record, evaluations and saves included."""

    def __init__(self, total_steps: int | None) -> None:
        self._total = total_steps
        self._first: tuple[int, float] | None = None

    def after(self, record: Record) -> str:
        """The time left after ``record`` as h:mm:ss; ``""`` while it is unknown."""
        step, now = int(record["step"]), float(record["time"])
        if self._first is None:
            self._first = (step, now)
        steps, seconds = step - self._first[0], now - self._first[1]
        if self._total is None or steps <= 0:
            return ""
        minutes, rest = divmod(round(max(self._total - step, 0) * seconds / steps), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def has_training(record: Record) -> bool:
    """Whether ``record`` has metrics of training steps, and not only of an evaluation."""
    return any(name.startswith(("train/", "time/", "throughput/")) for name in record)


def training_text(record: Record) -> str:
    """The most important training metrics of ``record``, two spaces apart; those that it lacks are left out."""
    parts = []
    if "epoch" in record:
        parts.append(f"epoch {record['epoch']:.2f}")
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
    """The ``eval/`` metrics of ``record``, two spaces apart; ``""`` if it has none."""
    return "  ".join(
        f"{name.removeprefix('eval/')} {_number(value)}"
        for name, value in record.items()
        if name.startswith("eval/")
        and (value or not isinstance(value, int))  # a count of zero bad samples is not shown
    )


def _number(value: float | int) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _step(record: Record, total: int | None) -> str:
    return f"{record['step']}/{total}" if total is not None else f"{record['step']}"


# -- progress bars of other commands

import io
import os
import pty
import sys

import pytest
from rich.console import Console

from dtrain.console import Finding, align_rows, as_text, print_banner, progress
from dtrain.tracking import console_sink as module
from dtrain.tracking.console_sink import PlainLines, ProgressLine, console_sink

TRAIN = {
    "step": 50, "applied_steps": 49, "epoch": 2, "samples": 3200, "time": 1000.0, "train/loss": 0.43119,
    "train/lr": 9.8e-4, "throughput/samples_per_second": 1234.4, "time/data_wait_fraction": 0.031,
}  # fmt: skip
EVAL = {"step": 50, "epoch": 2, "samples": 3200, "time": 1001.0, "eval/loss": 0.29114, "eval/accuracy": 0.97778}


class Log(io.StringIO):
    """A stream that remembers what each call of ``write`` got."""

    def __init__(self):
        super().__init__()
        self.writes = []

    def write(self, text):
        self.writes.append(text)
        return super().write(text)


@pytest.fixture
def terminal(monkeypatch):
    """A pseudo-terminal of 120 columns: the stream to write to, and a function that returns what it shows."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:

        def shown():
            stream.write("<end>")  # what was written takes its time to arrive at the other side
            stream.flush()
            text = b""
            while not text.endswith(b"<end>"):
                text += os.read(master, 65536)
            return text.decode().removesuffix("<end>")

        yield stream, shown
    os.close(master)


def test_a_log_file_gets_one_plain_line_for_each_record():
    log = Log()
    sink = console_sink(276, log)
    sink.log(TRAIN)
    sink.log(EVAL)
    sink.note("checkpoint written")
    sink.finish("finished")
    assert log.getvalue() == (
        "step 50/276  epoch 2.00  loss 0.4312  lr 9.8e-04  1,234 samples/s  wait 3%\n"
        "eval 50/276  loss 0.2911  accuracy 0.9778\n"
        "checkpoint written\n"
    )


def test_a_line_is_written_by_one_call_so_that_two_processes_cannot_glue_theirs():
    log = Log()
    sink = console_sink(None, log)
    for _ in range(3):
        sink.log(TRAIN)
    assert log.writes == ["step 50  epoch 2.00  loss 0.4312  lr 9.8e-04  1,234 samples/s  wait 3%\n"] * 3


@pytest.mark.parametrize(("epoch", "text"), [(11.757132915796799, "11.76"), (10, "10.00"), (0.4454, "0.45")])
def test_counts_are_whole_and_epochs_have_two_decimals(epoch, text):
    log = Log()
    console_sink(None, log).log(TRAIN | EVAL | {"epoch": epoch, "eval/samples": 50_000, "eval/bad": 0})
    assert f"  epoch {text}  loss" in log.getvalue()
    assert log.getvalue().endswith("eval 50  loss 0.2911  accuracy 0.9778  samples 50,000\n")


def test_scale_skips_and_bad_samples_show_once_there_are_any():
    log = Log()
    console_sink(None, log).log(
        TRAIN | {"precision/loss_scale": 16777216.0, "precision/skipped_steps": 2, "data/bad_samples": 1}
    )
    assert log.getvalue().endswith("  wait 3%  scale 16777216  skipped 2  bad 1\n")


def test_a_window_without_a_loss_is_still_a_line():
    log = Log()
    console_sink(None, log).log(
        {"step": 1, "time": 1.0, "epoch": 0, "time/step_seconds": 1.0, "precision/skipped_steps": 1}
    )
    assert log.getvalue() == "step 1  epoch 0.00  skipped 1\n"


def test_a_record_with_training_and_evaluation_gives_both_lines():
    log = Log()
    console_sink(None, log).log(TRAIN | EVAL)
    assert [line.split()[0] for line in log.getvalue().splitlines()] == ["step", "eval"]


@pytest.mark.parametrize(
    ("total", "end"), [(276, "  eta 1:26\n"), (10_000, "  eta 1:06:16\n"), (60, "  eta 0:00\n"), (None, "wait 3%\n")]
)
def test_the_remaining_time_follows_from_the_steps_since_this_start(total, end):
    log = Log()
    sink = console_sink(total, log)
    sink.log(TRAIN)
    sink.log(TRAIN | {"step": 60, "time": 1004.0})  # ten steps in four seconds
    assert log.getvalue().endswith(end)


def test_a_log_file_gets_no_terminal_codes_even_if_colour_is_forced(monkeypatch, tmp_path):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with (tmp_path / "log").open("w+") as stream:
        sink = console_sink(276, stream)
        sink.log(TRAIN)
        sink.log(EVAL)
        sink.finish("finished")
        stream.seek(0)
        text = stream.read()
    assert isinstance(sink, PlainLines)
    assert "\r" not in text
    assert "\033" not in text


def test_a_terminal_shows_a_line_that_moves_with_evaluations_and_notes_above_it(terminal):
    stream, shown = terminal
    sink = console_sink(276, stream)
    assert isinstance(sink, ProgressLine)
    sink.log(TRAIN)
    sink.log(EVAL)
    sink.note("checkpoint written")
    sink.finish("finished")
    text = shown()
    bar = "\N{BOX DRAWINGS HEAVY HORIZONTAL}"
    line, evaluation = (
        "step 50/276  epoch 2.00  loss 0.4312  lr 9.8e-04  1,234 samples/s  wait 3%",
        "eval 50/276  loss 0.2911",
    )
    assert text.index(line) < text.index(evaluation) < text.index("checkpoint written") < text.rindex(bar)
    assert text.count(line) == 1
    erase_line = "\033[2K"
    assert erase_line in text[text.rindex(bar) :]


def test_a_bar_takes_one_line_of_a_narrow_terminal_and_its_last_metrics_stay(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    stream, shown = terminal
    sink = console_sink(276, stream)
    sink.log(TRAIN)
    assert "\n" not in shown()
    sink.finish("stopped")
    assert "step 50/276  epoch 2.00  loss 0.4312" in shown()


def test_a_killed_run_leaves_the_terminal_with_a_cursor_and_prints_stay_visible(terminal, capsys):
    stream, shown = terminal
    sink = console_sink(276, stream)
    sink.log(TRAIN)
    text = shown()
    assert text.rindex("\033[?25h") > text.rindex("\033[?25l")
    print("from somewhere else", file=sys.stderr)
    sink.finish("failed")
    assert "from somewhere else" in shown() + capsys.readouterr().err


def test_a_dumb_terminal_gets_plain_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(console_sink(276, terminal[0]), PlainLines)


def test_the_banner_is_aligned_and_never_wrapped():
    log = io.StringIO()
    print_banner(
        "dtrain  digits-12", {"ranks": "2 (gloo)", "run directory": "/" + "x" * 300, "wire": "a u8\nb f16"}, log
    )
    assert log.getvalue() == (
        "dtrain  digits-12\n"
        "  ranks          2 (gloo)\n"
        "  run directory  /" + "x" * 300 + "\n"
        "  wire           a u8\n"
        "                 b f16\n"
    )


def test_a_banner_prints_brackets_and_colons_as_they_are():
    log = io.StringIO()
    print_banner("[bold]", {"a": "[red]x[/red] :smile:", "b": ""}, log)
    assert log.getvalue() == "[bold]\n  a  [red]x[/red] :smile:\n  b\n"


# -- progress bars


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test sets."""
    seconds = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: seconds[0])
    return seconds


def test_a_log_gets_a_line_now_and_then_with_rate_and_time_left(clock):
    text = io.StringIO()
    with progress(Console(file=text), "samples", 4000) as tick:
        for second in range(1, 31):
            clock[0] = float(second)
            tick(100)
    assert text.getvalue().splitlines() == [
        "samples: 1,000 of 4,000, 100/s, 30 s left",
        "samples: 2,000 of 4,000, 100/s, 20 s left",
        "samples: 3,000 of 4,000, 100/s, 10 s left",
    ]


def test_what_is_done_in_no_time_is_not_worth_a_line(clock):
    text = io.StringIO()
    with progress(Console(file=text), "samples", 10) as tick:
        tick(10)
    assert text.getvalue() == ""


def test_a_terminal_gets_a_bar_that_goes_away():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100)
    with progress(console, "train samples", 10) as tick:
        tick(4)
        tick(6)
    assert "train samples" in text.getvalue()
    assert "10/10" in text.getvalue()


def test_no_text_of_somebody_else_commands_the_terminal(terminal):
    # ESC, the one-byte form of ESC [, and an override of the writing direction
    name = "x\x1b]0;y\x07\x9b2J\u202e"
    log = Log()
    line = PlainLines(log, 100)
    line.log({**EVAL, f"eval/{name}": 0.5})
    line.note(name)
    print_banner("dtrain", {name: name}, log)
    stream, shown = terminal
    bar = ProgressLine(Console(file=stream, force_terminal=True), 100)
    bar.log({**EVAL, f"eval/{name}": 0.5})
    bar.note(name)
    on_terminal = shown()
    assert "x?]0;y??2J?" in on_terminal
    assert not {"\x07", "\x9b", "\u202e"} & {*on_terminal}
    finding = as_text([Finding(name, name, "warning", name)])
    for text in (log.getvalue(), align_rows([[name, name]]), finding):
        assert "x?]0;y??2J?" in text
        assert all(character.isprintable() or character == "\n" for character in text)

"""What torch.compile could not take is told with its place and torch's reason, once."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dtrain.training.compiler_log import CompilerLog
from tests.runs import torchrun

LOGS = ("torch._dynamo.symbolic_convert.__graph_breaks", "torch._dynamo.convert_frame.__graph_breaks")


class Whole(nn.Linear):
    """Compiles to one graph."""

    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class Broken(Whole):
    """Two places that no graph can hold."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # a branch
            x = x + 1
        print(end="")  # a call
        return x * 2


class GivenUp(Whole):
    """A break in a loop, which makes torch give the whole function up."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            print(end="")  # in a loop
            x = x * 2
        return x


class Changing(Whole):
    """A number that the compiler takes for a constant, and that is another one at every call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Digits(nn.Module):
    """For a real run: a convolution network with a branch on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 10, 3)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.layer(images).mean(dim=(2, 3))
        if hidden.sum() > 0:  # in a run
            hidden = hidden * 2
        return hidden


@contextmanager
def compiled(kind: Callable[[], nn.Module]) -> Iterator[tuple[nn.Module, CompilerLog, list[str]]]:
    """A compiled model, the log, and the list of what it notes."""
    torch._dynamo.reset()
    model, notes = kind(), list[str]()
    model.compile(backend="eager")
    log = CompilerLog(model, notes.append)
    try:
        yield model, log, notes
    finally:
        log.close()
        torch._dynamo.reset()


def line_of(remark: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"# {remark}"))
    return f"{__file__}:{number}: "


def test_each_break_is_told_in_a_line_with_its_place_and_reason_and_only_once() -> None:
    with compiled(Broken) as (model, log, notes):
        model(torch.ones(2, 3))
        log.tell()
        log.tell()
        (text,) = notes
    head, *lines = text.splitlines()
    assert re.match(r"train.compile: 2 graph breaks, \d+ graphs compiled", head)
    assert lines[0].strip().startswith(line_of("a branch"))
    assert lines[1].strip().startswith(line_of("a call"))
    assert "ata-dependent" in lines[0]
    assert "print" in lines[1]


def test_a_function_that_is_given_up_is_told_with_the_place_of_the_break() -> None:
    with compiled(GivenUp) as (model, log, notes):
        model(torch.ones(2, 3))
        log.tell()
        (text,) = notes
    assert "1 graph break," in text
    assert line_of("in a loop") in text


def test_a_model_that_compiles_whole_is_not_talked_about() -> None:
    with compiled(Whole) as (model, log, notes):
        model(torch.ones(2, 3)).sum().backward()
        log.tell()
        assert notes == []


def test_breaks_that_come_later_are_told_when_they_come() -> None:
    with compiled(lambda: nn.Sequential(Whole(), Broken())) as (model, log, notes):
        model[0](torch.ones(2, 3))  # type: ignore[index]
        log.tell()
        assert notes == []
        model(torch.ones(2, 3))
    assert "2 graph breaks" in notes[0]  # by `close` at the latest


def test_a_function_that_is_compiled_again_and_again_is_told_with_the_reason() -> None:
    with compiled(Changing) as (model, log, notes), redirect_stderr(StringIO()):
        for _ in range(torch._dynamo.config.recompile_limit + 3):
            model(torch.ones(2, 3))
        log.tell()
        (text,) = notes
    assert f"'forward' ({__file__}:" in text
    assert "compiled" in text
    assert "8 times (recompile_limit), the last time because of self.calls ==" in text
    assert "gives up" in text


def test_torchs_logs_are_as_they_were_afterwards_and_nobody_listens_where_nothing_is_compiled() -> None:
    def state() -> list[tuple[int, bool, int]]:
        loggers = [logging.getLogger(name) for name in (*LOGS, "torch._dynamo.convert_frame")]
        return [(logger.level, logger.propagate, len(logger.handlers)) for logger in loggers]

    before = state()
    with compiled(Whole):
        assert state() != before
    assert state() == before
    log = CompilerLog(Whole(), pytest.fail)
    assert state() == before
    log.close()


def test_who_asked_torch_for_its_log_still_gets_it() -> None:
    source, heard = logging.getLogger(LOGS[0]), list[logging.LogRecord]()
    theirs = logging.Handler()
    theirs.emit = heard.append  # type: ignore[method-assign, assignment]
    parent = logging.getLogger("torch._dynamo.symbolic_convert")
    parent.addHandler(theirs)
    source.setLevel(logging.DEBUG)
    try:
        with compiled(Broken) as (model, _, notes), redirect_stderr(StringIO()):
            model(torch.ones(2, 3))
    finally:
        source.setLevel(logging.NOTSET)
        parent.removeHandler(theirs)
    assert notes
    assert heard


@pytest.mark.slow
def test_a_run_notes_the_breaks_of_its_model_at_the_first_record_of_a_step(digits: Path, tmp_path: Path) -> None:
    run = torchrun(
        1,
        "experiment=digits",
        "tracker=none",
        f"run.dir={tmp_path}",
        "model._target_=tests.training.test_compiler_log.Digits",
        "~model.classes",
        "~model.width",
        "train.compile=true",
        "train.max_steps=4",
        "train.log_every=2",
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    (number,) = (number for number, line in enumerate(lines) if line.startswith("train.compile: 1 graph break,"))
    assert line_of("in a run") in lines[number + 1]
    assert lines[number - 1].startswith("step 2/4")

"""``breakpoint()`` in a task, at a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dtrain.training.breakpoints import without_breakpoints
from tests.forked_python import forked_python
from tests.ranks import RanksFailed
from tests.whole_runs import ROOT, status, train_on

TASK = """
from dtrain.tasks import Classification

class Task(Classification):
    calls = 0

    def __call__(self, model, batch):
        self.calls += 1
        breakpoint()
        return super().__call__(model, batch)
"""
SMALL = (
    "model.width=4",
    "data.num_workers=0",
    "tracker=none",
    "checkpoint.best=null",
    "task._target_=task_to_debug.Task",
)


class Terminal:
    """A program at a terminal of its own."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._master, slave = pty.openpty()
        path = os.pathsep.join([str(folder), str(ROOT)])
        self.running = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, cwd=folder, env=os.environ | {"PYTHONPATH": path}
        )
        os.close(slave)
        self.shown = ""

    def until(self, text: str | None) -> str:
        """What the program shows until ``text``, or its end."""
        before, deadline = len(self.shown), time.monotonic() + 100
        while text is None or text not in self.shown[before:]:
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self._master, 4096).decode()
                except OSError:  # the program has ended
                    break
            assert time.monotonic() < deadline, self.shown
        return self.shown[before:].replace("\r\n", "\n")

    def type(self, line: str) -> None:
        os.write(self._master, f"{line}\n".encode())


@pytest.mark.slow
@pytest.mark.parametrize("command", [("dtrain", "train", "--nproc", "1"), ("dtrain.train",)], ids=" ".join)
def test_a_prompt_in_a_task_works_with_one_rank_for_any_time(
    digits: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "task_to_debug.py").write_text(TASK)
    run_dir = tmp_path / "run"
    limits = ("parallel.timeout_start=0.5", "parallel.timeout_step=0.5")
    terminal = Terminal(
        [forked_python(), "-m", *command, "experiment=digits", f"run.dir={run_dir}", *SMALL, *limits], tmp_path
    )
    try:
        terminal.until("(Pdb) ")
        time.sleep(1)  # more than the limit of a step
        terminal.type("p self.calls, batch.valid.sum()")
        assert "(5, tensor(64))" in terminal.until("(Pdb) ")  # the first call of the training, after dtrain's own
        terminal.type("c")
        terminal.until("(Pdb) ")
        terminal.type("q")
        rest = terminal.until(None)
        assert terminal.running.wait(100) == 1
    finally:
        terminal.running.kill()
    assert "Traceback" not in terminal.shown
    _, line, *more = rest.splitlines()  # after the q itself
    assert not any(more), rest
    assert "failed at step 1" in line
    assert "debugger" in line
    assert "debugger" in status(run_dir)["reason"]


def test_with_several_ranks_a_breakpoint_says_to_use_one(
    digits: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "task_to_debug.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RanksFailed):
        train_on(2, tmp_path / "run", *SMALL)
    shown = capfd.readouterr().err
    assert shown.count("dtrain train --nproc 1") >= 1
    assert "Traceback" not in shown
    assert "breakpoint()" in status(tmp_path / "run")["reason"]


def test_in_dtrains_own_calls_a_breakpoint_does_nothing_until_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: called.append(1))
    monkeypatch.setenv("PYTHONBREAKPOINT", "no.such.debugger")
    with suppress(ZeroDivisionError), without_breakpoints():
        breakpoint()
        raise ZeroDivisionError
    assert called == []
    breakpoint()
    assert called == [1]

"""How an entry point is called: what its errors look like, and on which ranks."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtrain.command_line import EXIT_FAILED, run
from dtrain.config.compose import Composed
from dtrain.errors import ConfigError, Explained, PeerFailed, add_note
from dtrain.training.hook_calls import Hooks


def test_a_character_that_the_terminal_lacks_does_not_end_the_run(monkeypatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    run(lambda composed: print("runs/caf\u00e9 and caf\udce9", flush=True), ["experiment=digits"])
    assert shown.getvalue() == b"runs/caf\\xe9 and caf\\udce9\n"


def test_only_rank_zero_explains(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(SystemExit):
        run(lambda composed: None, ["precision=fp17"])
    assert capsys.readouterr().err == ""


def test_standard_output_and_error_may_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    run(lambda composed: written.append(sys.stdout.write("a") + sys.stderr.write("b")), ["experiment=digits"])
    sys.stdout.close()
    sys.stderr.close()
    assert written == [2]


def test_a_bug_shows_its_traceback_on_the_rank_that_has_it(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    def main(composed: Composed) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        run(main, ["experiment=digits"])
    assert ended.value.code == EXIT_FAILED
    message = capsys.readouterr().err
    assert message.startswith("dtrain: rank 1 failed\nTraceback")
    assert "ZeroDivisionError: a bug" in message


@pytest.mark.slow
def test_a_traceback_begins_with_the_code_of_the_user_and_the_last_line_says_what_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(composed: Composed) -> None:
        error = KeyError("here")
        error.last_line = "dtrain: failed at step 7"  # type: ignore[attr-defined]
        raise error

    def shown() -> list[str]:
        with pytest.raises(SystemExit):
            run(fails, ["experiment=digits"])
        return capsys.readouterr().err.splitlines()

    lines = shown()
    assert "test_command_line.py" in lines[2]
    assert lines[-2:] == ["KeyError: 'here'", "dtrain: failed at step 7"]
    monkeypatch.setenv("DTRAIN_TRACEBACK", "1")
    assert "dtrain/command_line.py" in shown()[2]
    assert "test_command_line.py" not in shown()[2]


def test_a_failure_begins_with_its_note_and_shows_the_frames_of_the_user_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(composed: Composed) -> None:
        try:
            torch.nn.Linear(2, 3)(torch.ones(4, 5))
        except RuntimeError as error:
            add_note(error, "of the\nuser")
            add_note(error, "task my.Task: RuntimeError: wrong shapes.")
            raise

    with pytest.raises(SystemExit):
        run(fails, ["experiment=digits"])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "dtrain: rank 0 failed: of the user: task my.Task: RuntimeError: wrong shapes."
    files = [line for line in lines if line.startswith("  File ")]
    assert len(files) == 1
    assert "test_command_line.py" in files[0]
    assert "DTRAIN_TRACEBACK=1" in lines[1]
    assert "wrong shapes" not in "".join(lines[1:])


def test_an_error_that_dtrain_raises_from_one_of_the_user_shows_no_frames_of_dtrain(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(composed: Composed) -> None:
        def on_step(run: Any, outcome: Any) -> None:
            raise KeyError("of the user")

        run: Any = None
        Hooks({"train.hooks[0]": SimpleNamespace(on_step=on_step)}).call("on_step", run, None)

    with pytest.raises(SystemExit):
        run(fails, ["experiment=digits"])
    shown = capsys.readouterr().err
    assert "HookFailed" in shown
    assert "KeyError: 'of the user'" in shown
    files = [line for line in shown.splitlines() if line.startswith("  File ")]
    assert all("test_command_line.py" in line for line in files)


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "1", "LOCAL_RANK": "1"}, False),
        ({"RANK": "4", "LOCAL_RANK": "0"}, True),  # srun: nobody else tells what is missing on the second node
        ({"RANK": "4", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}, False),  # torchrun shows it
        ({"RANK": "1", "WORLD_SIZE": "2"}, True),  # the second pod of PyTorchJob
    ],
)
def test_a_wrong_config_is_shown_once_on_each_node(
    capsys: pytest.CaptureFixture[str], monkeypatch, environment: dict[str, str], shown: bool
) -> None:
    def main(composed: Composed) -> None:
        raise ConfigError("data.train: not on this node.")

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        run(main, ["experiment=digits"])
    assert capsys.readouterr().err == "dtrain: error: data.train: not on this node.\n" * shown


@pytest.mark.parametrize("rank", [0, 1])
def test_an_explained_error_is_shown_by_the_rank_that_raised_it_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch, rank: int
) -> None:
    def main(composed: Composed) -> None:
        raise Explained("the disk is full. Make room.")

    monkeypatch.setenv("RANK", str(rank))
    with pytest.raises(SystemExit) as ended:
        run(main, ["experiment=digits"])
    assert ended.value.code == EXIT_FAILED
    assert capsys.readouterr().err == f"dtrain: error: {'rank 1: ' * rank}the disk is full. Make room.\n"


def test_the_error_of_another_rank_is_one_short_line(capsys: pytest.CaptureFixture[str]) -> None:
    def main(composed: Composed) -> None:
        raise PeerFailed("rank 1 failed: DataError: " + "a long story, " * 50 + "\nand more")

    with pytest.raises(SystemExit):
        run(main, ["experiment=digits"])
    shown = capsys.readouterr().err
    assert shown.startswith("dtrain: rank 0 stops: rank 1 failed: DataError: a long story")
    assert len(shown) < 160


@pytest.mark.parametrize("option", ["--help", "--cfg=job", "--info=defaults"])
def test_hydra_s_own_options_work(capsys: pytest.CaptureFixture[str], option: str) -> None:
    with suppress(SystemExit):
        run(lambda composed: None, [*option.split("="), "experiment=digits"])
    assert "digits" in capsys.readouterr().out


@pytest.mark.slow
def test_help_may_be_cut_by_its_reader() -> None:
    code = "from dtrain.command_line import run; run(print, ['--help'])"
    done = subprocess.run(
        ["bash", "-c", f'set -o pipefail; "{sys.executable}" -c "{code}" | true'],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")

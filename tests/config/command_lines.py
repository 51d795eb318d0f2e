"""Composing a config as a command line does."""

from __future__ import annotations

import pytest

from dtrain.command_line import run
from dtrain.config.compose import Composed
from tests.refusals import assert_refused


def compose(*arguments: str) -> Composed:
    """The composed config of a command line."""
    got: list[Composed] = []
    run(got.append, arguments)
    return got[0]


def assert_not_composed(capsys: pytest.CaptureFixture[str], arguments: list[str], *parts: str) -> None:
    """Checks that a command line is refused with one message, without a traceback, that contains all ``parts``."""
    with pytest.raises(SystemExit) as ended:
        run(lambda composed: None, arguments)
    assert ended.value.code != 0
    message = capsys.readouterr().err
    assert message.startswith("dtrain: error: ")
    assert "Traceback" not in message
    assert_refused(message, *parts)

"""examples/growing.py: its own counts hold, and the page shows what it prints."""

from __future__ import annotations

import pytest

from examples import growing
from tests.whole_runs import ROOT


def test_it_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    growing.main()
    assert capsys.readouterr().out in (ROOT / "docs" / "data.md").read_text()

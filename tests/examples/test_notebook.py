"""examples/notebook.ipynb runs from top to bottom, and is stored without outputs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.run_notebook import run_notebook
from tests.whole_runs import ROOT, status

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
def test_the_notebook_trains_plots_and_predicts(tmp_path: Path) -> None:
    copy = tmp_path / "notebook.ipynb"
    copy.write_text(NOTEBOOK.read_text())
    printed = run_notebook(copy, tmp_path)
    assert status(tmp_path / "runs" / "notebook")["state"] == "finished"
    assert len(re.findall(r"^shown: .*image/png", printed, re.MULTILINE)) == 2
    assert "error:" not in printed
    assert "finished at step 92" in printed


def test_the_notebook_is_stored_without_outputs() -> None:
    text = NOTEBOOK.read_text()
    assert '"outputs": []' in text
    assert '"output_type"' not in text
    assert '"execution_count": 1' not in text

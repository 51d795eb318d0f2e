"""examples/notebook.ipynb runs from top to bottom, and is stored without outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.whole_runs import ROOT, status

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
def test_the_notebook_trains_plots_and_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # The kernel of this environment, whatever kernels the user has installed.
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=250, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    assert status(tmp_path / "runs" / "notebook")["state"] == "finished"
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    shown = "".join(output.get("text", "") for output in outputs)
    assert "error:" not in shown
    assert "finished at step 92" in shown


def test_the_notebook_is_stored_without_outputs() -> None:
    text = NOTEBOOK.read_text()
    assert '"outputs": []' in text
    assert '"output_type"' not in text
    assert '"execution_count": 1' not in text

"""A run directory of an earlier version, with old key names in its files, resumes, evaluates and exports."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dtrain.config.renamed_keys import RENAMED_KEYS
from tests.forked_python import forked_python
from tests.runs import status, train_on

SMALL = ("model.width=4", "data.num_workers=0", "train.eval_every=0", "train.global_batch_size=16")
KEY, OLD_KEY = "parallel.reduce_dtype", "parallel.comm_dtype"


def command(module: str, *arguments: str) -> str:
    """Runs an entry point; returns its output, after checking that it succeeded."""
    done = subprocess.run([forked_python(), "-m", module, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_directory_with_old_key_names_resumes_evaluates_and_exports(digits: Path, tmp_path: Path) -> None:
    assert RENAMED_KEYS[OLD_KEY] == KEY
    run_dir = tmp_path / "run"
    train_on(1, run_dir, *SMALL, f"{KEY}=bf16", "train.max_steps=2")
    for name in ("config.yaml", "overrides.yaml"):
        text = (run_dir / name).read_text()
        old = text.replace("reduce_dtype", "comm_dtype")
        assert old != text
        (run_dir / name).write_text(old)
    # The same command with the new key, then entry points that read the directory's own command line.
    assert "eval/loss" in command("dtrain.evaluate", f"run.dir={run_dir}", "--trust", f"out={tmp_path / 'results'}")
    command(
        "dtrain.export", f"run.dir={run_dir}", "--trust", f"export.out={tmp_path / 'artefact'}", "export.measure=false"
    )
    assert (tmp_path / "artefact" / "model.json").exists()
    train_on(1, run_dir, *SMALL, f"{KEY}=bf16", "train.max_steps=4")
    assert status(run_dir)["state"] == "finished"
    config = (run_dir / "config.yaml").read_text()
    assert "reduce_dtype: bf16" in config
    assert "comm_dtype" not in config

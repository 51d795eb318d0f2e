from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import status

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
def test_the_wheel_trains_from_any_directory(tmp_path: Path) -> None:
    """The wheel alone, unpacked where nothing else of the checkout is visible."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path / "dist", ROOT], check=True, timeout=240)
    wheel = next((tmp_path / "dist").glob("dtrain-*.whl"))
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel], check=True, timeout=120)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}
    where = subprocess.run(
        [sys.executable, "-c", "import dtrain; print(dtrain.__file__)"],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.startswith(str(tmp_path))
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "dtrain.train",
    ]
    subprocess.run(
        [*torchrun, "experiment=digits", f"run.dir={tmp_path / 'run'}", "tracker=none", "train.max_steps=3"],
        cwd="/",
        env=environment,
        check=True,
        timeout=120,
    )
    assert status(tmp_path / "run")["state"] == "finished"
    report = [sys.executable, "-m", "dtrain.report", str(tmp_path / "run")]
    subprocess.run(report, cwd="/", env=environment, check=True, timeout=60)
    assert "uPlot" in (tmp_path / "run" / "report.html").read_text()

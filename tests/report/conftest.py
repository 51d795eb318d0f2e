"""A sweep for the tests of tables, charts and sweeps."""

from __future__ import annotations

import random

import pytest

from dtrain.runs.history import History
from tests.report.runs_for_tests import point_of

RATES = (1e-4, 1e-3, 1e-2)


@pytest.fixture(scope="session", name="runs")
def _runs(tmp_path_factory: pytest.TempPathFactory) -> list[History]:
    """Three learning rates times four seeds (one run killed, one failed, one diverged), and a queued run."""
    folder, draw = tmp_path_factory.mktemp("sweep"), random.Random(0)
    found = []
    for rate in RATES:
        for seed in range(4):
            results: list[float | None] = [draw.random() for _ in range(5)]
            status = {"restarts": seed}
            if (rate, seed) == (1e-3, 0):
                results, status = results[:2], status | {"state": "running"}
            elif (rate, seed) == (1e-3, 1):
                results, status = [], {"state": "failed", "reason": "ValueError: no"}
            elif (rate, seed) == (1e-2, 3):
                results = [None, None]
            run_dir = folder / f"{rate}-{seed}"
            found.append(point_of(run_dir, {"optimizer.lr": rate, "run.seed": seed}, results, **status))
    (folder / "0.001-0" / ".lock").touch()
    (folder / "waits").mkdir()
    (folder / "waits" / ".job").touch()
    return [*found, History.read(folder / "waits", "waits")]

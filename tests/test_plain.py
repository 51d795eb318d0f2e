"""Presets have, step by step, the losses of the plain scripts in benchmarks/plain, on one rank and on two."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.plain import compare

#: 200 steps of all are compared by `python -m benchmarks.plain.compare`; these take too long for a test.
SHORTER = {"shakespeare_cpu": 40, "mnist1d_gru": 60}


@pytest.mark.slow
@pytest.mark.parametrize("experiment", compare.EXPERIMENTS)
def test_a_preset_has_the_losses_of_its_plain_script(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = compare.EXPERIMENTS[experiment].data
    folder = os.environ.get(compare.DATA[name])
    if not folder:
        pytest.skip(f"{compare.DATA[name]} names no folder with the data")
    monkeypatch.setenv(name, folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(Path(__file__).parents[1])
    arguments = argparse.Namespace(steps=SHORTER.get(experiment, 200), ranks=[1, 2], time=None)
    results = compare.compare(tmp_path, experiment, arguments)
    assert max(result["difference"] for result in results.values()) < 1e-5


@pytest.mark.parametrize("script", ["mnist1d", "nanogpt", "cifar10_tutorial"])
def test_a_plain_script_is_short_and_without_dtrain(script: str) -> None:
    text = (Path(compare.__file__).parent / f"{script}.py").read_text()
    assert len(text.splitlines()) <= 80
    assert "import dtrain" not in text
    assert "from dtrain" not in text
    assert "from benchmarks" not in text


def test_every_compared_experiment_is_a_preset() -> None:
    conf = Path(harness.__file__).parents[1] / "conf" / "experiment"
    assert all((conf / f"{name}.yaml").exists() for name in compare.EXPERIMENTS)

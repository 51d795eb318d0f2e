"""A run directory of an earlier version resumes with today's code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.runs import records, train_on, weights

FOLDER = Path(__file__).parents[1] / "data_files" / "run_of_version_0_1_0"
OVERRIDES = (
    "precision=fp16",
    "precision.loss_scale.init=40000",
    "precision.loss_scale.growth_interval=3",
    "optimizer.lr=0.05",
    "optimizer.momentum=0.9",
    "optimizer.nesterov=true",
    "train.ema_decay=0.5",
    "train.eval_every=3",
    "data.train.length=40",
    "data.num_workers=0",
    "checkpoint.keep_last=1",
    "train.max_steps=12",
)


def test_a_run_of_version_0_1_0_resumes_with_the_same_losses_counters_and_weights(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = json.loads((FOLDER / "expected.json").read_text())
    run_dir = tmp_path / "run"
    shutil.copytree(FOLDER, run_dir)
    train_on(1, run_dir, *OVERRIDES, experiment="line")
    assert "changed since the last start: train.hooks" not in capfd.readouterr().out  # absent then, at its default now

    resumed = [record for record in records(run_dir) if record["step"] > 7]
    for record, want in zip(resumed, expected["records_after_resume"], strict=True):
        assert {name: record[name] for name in want} == {name: approximately(value) for name, value in want.items()}
    state = json.loads((run_dir / "checkpoints" / "step-000000012" / "state.json").read_text())
    assert state["counters"] == expected["counters"]
    assert state["loss_scale"] == expected["loss_scale"]
    assert state["loader"] == expected["loader"] | {"version": 2}
    assert {name: state["progress"][name] for name in expected["progress"]} == expected["progress"]
    for name, tensors in expected["tensors"].items():
        found = weights(run_dir, 12, name)
        assert found.keys() == tensors.keys()
        for key, values in tensors.items():
            assert found[key].flatten().tolist() == pytest.approx(flattened(values), rel=1e-6), key


def approximately(value: float) -> Any:
    """Equal to the last digits: another CPU or torch version may round the last bit differently."""
    return pytest.approx(value, rel=1e-6) if isinstance(value, float) else value


def flattened(values: Any) -> list[float]:
    return [number for value in values for number in flattened(value)] if isinstance(values, list) else [values]

"""scripts/seeds.py: its rule, and that what is finished is read and not trained again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import seeds  # type: ignore[import-not-found]

    return seeds


def test_a_mean_is_within_the_spread_if_it_lies_between_fp32s_smallest_and_largest_result(seeds: Any) -> None:
    results = {"bf16": [0.80, 0.86], "fp32": [0.8, 0.9, 0.85], "fp16": [0.92, 0.89]}
    lines = {line[0]: line[2:] for line in seeds.rows(results)}
    assert lines == {
        "fp32": ["0.8500", "0.8000-0.9000", "", ""],
        "bf16": ["0.8300", "0.8000-0.8600", "-0.0200", "yes"],
        "fp16": ["0.9050", "0.8900-0.9200", "+0.0550", "NO"],
    }


def test_only_a_finished_run_of_the_same_keys_is_not_trained_again(seeds: Any, tmp_path: Path) -> None:
    keys = ["experiment=digits", "run.seed=1"]
    assert not seeds.is_finished(tmp_path, keys)
    (tmp_path / "overrides.yaml").write_text(yaml.safe_dump({"overrides": [*keys, f"run.dir={tmp_path}"]}))
    (tmp_path / "status.json").write_text('{"state": "stopped"}')
    assert not seeds.is_finished(tmp_path, keys)
    (tmp_path / "status.json").write_text('{"state": "finished"}')
    assert seeds.is_finished(tmp_path, keys)
    assert not seeds.is_finished(tmp_path, [*keys, "train.max_epochs=2"])


def test_a_metric_that_a_run_does_not_have_is_an_error_that_says_so(seeds: Any, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"eval/loss": 3.0}\n{"eval/loss": 2.5}\n{"train/loss": 1.0}\n')
    assert seeds.result(tmp_path, "eval/loss") == 2.5
    with pytest.raises(SystemExit, match="has no 'eval/accuracy'"):
        seeds.result(tmp_path, "eval/accuracy")


@pytest.mark.slow
def test_started_again_it_goes_on_with_what_is_missing(digits: Path, tmp_path: Path) -> None:
    def said(*precisions: str) -> list[str]:
        options = ["--experiment", "digits", "--quick", "--folder", tmp_path, "--precisions", *precisions]
        command = [sys.executable, SCRIPTS / "seeds.py", *options, "train.log_every=1"]
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return [line.rpartition("(")[2] for line in done.stdout.splitlines() if ", seed 0: " in line]

    assert said("fp32") == ["trained)"]
    assert said("fp32", "bf16") == ["was finished, not trained again)", "trained)"]

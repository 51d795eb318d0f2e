from __future__ import annotations

from pathlib import Path

from dtrain.launching.presets import freeze, frozen_arguments
from tests.launching.points import single


def test_presets_that_are_edited_after_the_submission_do_not_reach_the_run(tmp_path: Path) -> None:
    """As happened: a preset got one key more while a job waited, which then was another run and refused."""
    mine = tmp_path / "mine"
    (mine / "experiment").mkdir(parents=True)
    preset = mine / "experiment" / "e.yaml"
    preset.write_text("# @package _global_\ndefaults:\n  - digits\nrun: {seed: 7}\n")
    point = single("--config-dir", str(mine), "experiment=e", f"run.dir='{tmp_path}/my run'")
    point.run.dir.mkdir()
    freeze(point)
    preset.write_text("# @package _global_\ndefaults:\n  - digits\nrun: {seed: 8}\n")
    again = single(*frozen_arguments(point))
    assert again.run.dir == point.run.dir
    ours, theirs = ({key: value for key, value in run.config.items() if key != "run"} for run in (point.run, again.run))
    assert ours == theirs
    assert again.run.config["run"]["seed"] == 7
    # dtrain's own, too
    (point.run.dir / "presets" / "conf" / "precision" / "fp32.yaml").write_text("name: bf16\n")
    assert single(*frozen_arguments(point)).run.config["precision"]["name"] == "bf16"
    freeze(point)
    assert single(*frozen_arguments(point)).run.config["precision"]["name"] == "fp32"

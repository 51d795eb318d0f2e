"""Presets have, step by step, the losses of the plain scripts in benchmarks/plain, on one rank and on two."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.plain import compare
from tests.whole_runs import metrics, train_on

#: 200 steps of all are compared by `python -m benchmarks.plain.compare`; these take too long for a test, or, on some CPUs,
#: round one loss differently, which grows from step 77 on.
SHORTER = {"shakespeare_cpu": 20, "mnist1d_gru": 60, "mnist1d_mlp": 60, "mnist1d_conv": 60}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("experiment", compare.EXPERIMENTS)
def test_a_preset_has_the_losses_of_its_plain_script(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = compare.EXPERIMENTS[experiment].data
    folder = os.environ.get(compare.DATA[name])
    if not folder:
        pytest.skip(f"{compare.DATA[name]} names no folder with the data")
    if name == "DTRAIN_CIFAR10":  # enough for all steps: the script decodes all images that there are
        for shard in ("train-00000.tar", "test-00000.tar"):
            (tmp_path / shard).symlink_to(Path(folder) / shard)
        folder = str(tmp_path)
    monkeypatch.setenv(name, folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(Path(__file__).parents[1])
    steps = SHORTER.get(experiment, 200)
    expected = compare.run_plain(tmp_path / "plain", experiment, steps)["losses"]
    assert len(expected) == steps
    _, *overrides = compare.overrides(experiment, tmp_path / "plain", steps)
    for ranks in (1, 2):
        train_on(ranks, tmp_path / str(ranks), *overrides, experiment=experiment)
        assert compare.largest_difference(metrics(tmp_path / str(ranks)), expected) < 1e-5


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

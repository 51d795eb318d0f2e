from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.config.errors import ConfigError
from dtrain.config.run import Run
from dtrain.launching.point import told_apart
from tests.launching.points import compose, single, sweep


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def started(*arguments: str) -> Run:
    """The run that ``dtrain.train`` makes of a command line."""
    return single(*arguments).run


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("run.dir=relative/place",),
        ("run.dir='it\\'s a place'",),
        ("run.name=mine", "launch.processes_per_node=4", "launch.dry_run=true", "train.max_steps=7"),
        ('data.train="a/{0..3}.tar"', "+data.fields.json={name: x, role: feature}", "run.seed=3"),
    ],
)
def test_what_is_started_is_the_run_that_was_asked_for(arguments: tuple[str, ...]) -> None:
    point = single("experiment=digits", *arguments)
    again = started(*point.arguments)
    assert (again.name, again.dir) == (point.run.name, point.run.dir)
    ours, theirs = ({key: value for key, value in run.config.items() if key != "run"} for run in (point.run, again))
    ours["launch"]["dry_run"] = False
    assert ours == theirs


def test_presets_of_the_users_own_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "e.yaml").write_text(
        "# @package _global_\ndefaults:\n  - digits\nrun: {seed: 7}\n"
    )
    point = single("--config-dir", "mine", "experiment=e")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert started(*point.arguments).config["run"]["seed"] == 7


def test_points_of_a_sweep_have_directories_of_their_own() -> None:
    points = sweep("experiment=digits", "optimizer.lr=1e-3,3e-3", "precision=fp32,bf16")
    assert len({point.run.dir for point in points}) == 4
    assert points[1].varied == ("optimizer.lr=0.001", "precision=bf16")
    assert points[1].run.dir == single("experiment=digits", "optimizer.lr=1e-3", "precision=bf16").run.dir


def test_points_whose_names_agree_are_told_apart_by_what_was_varied(tmp_path: Path) -> None:
    seeds = sweep("experiment=digits", "run.seed=1,2")
    name = single("experiment=digits").run.name
    assert [point.run.dir for point in seeds] == [tmp_path / "runs" / f"{name}-run.seed={seed}" for seed in (1, 2)]
    assert [started(*point.arguments).dir for point in seeds] == [point.run.dir for point in seeds]
    assert [started(*point.arguments).name for point in seeds] == [f"{name}-run.seed=1", f"{name}-run.seed=2"]
    placed = sweep("experiment=digits", "run.dir=here", "data.train=/a/b,/a/c")
    assert [point.run.dir.name for point in placed] == ["here-data.train=_a_b", "here-data.train=_a_c"]


def test_points_that_do_not_differ_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"several points .* would be one run"):
        told_apart(compose("--multirun", "experiment=digits", "run.seed=1,1"))


@pytest.mark.parametrize("key", ["nodes", "min_nodes", "processes_per_node", "cpus_per_process", "max_running"])
def test_impossible_counts_are_refused(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        single("experiment=digits", f"launch.{key}=0")
    assert f"launch.{key}: got 0, want at least 1" in capsys.readouterr().err


def test_more_nodes_at_least_than_at_most_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        single("experiment=digits", "launch.nodes=2", "launch.min_nodes=3")
    assert "launch.min_nodes: got 3 for launch.nodes=2" in capsys.readouterr().err

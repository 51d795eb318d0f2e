from __future__ import annotations

import pytest

from dtrain.config.compose import require_choice
from dtrain.errors import ConfigError
from tests.config.command_lines import assert_not_composed, compose
from tests.refusals import refused


def test_presets_and_overrides_make_one_typed_config() -> None:
    composed = compose("experiment=digits", "precision=bf16", "optimizer.lr=0.5", "train.max_steps=7")
    assert composed.experiment == "digits"
    assert composed.cfg.precision.name == "bf16"
    assert composed.cfg.optimizer["lr"] == 0.5
    assert composed.cfg.train.max_steps == 7
    assert composed.overrides == ("experiment=digits", "precision=bf16", "optimizer.lr=0.5", "train.max_steps=7")


def test_options_may_stand_between_keys(tmp_path) -> None:
    composed = compose("experiment=digits", "--config-dir", str(tmp_path), "train.max_steps=3")
    assert composed.config_dirs == (str(tmp_path),)
    assert composed.overrides == ("experiment=digits", "train.max_steps=3")


def test_own_presets_come_from_a_config_dir(tmp_path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrain:\n  max_steps: 3\n")
    composed = compose("--config-dir", str(tmp_path), "experiment=mine")
    assert composed.cfg.train.max_steps == 3
    assert composed.config_dirs == (str(tmp_path),)


def test_an_empty_command_line_lists_the_experiments() -> None:
    with pytest.raises(ConfigError, match="digits"):
        require_choice(compose())


def test_an_experiment_without_data_asks_for_data_alone() -> None:
    with refused(ConfigError, "data.train", "is not set"):
        require_choice(compose("experiment=imagenet_resnet50"))


@pytest.mark.slow
def test_the_number_of_classes_comes_from_the_names_beside_the_shards(tmp_path) -> None:
    arguments = ["data=shards", f"data.train='{tmp_path}/train-{{000..003}}.tar'", "model=small_cnn"]
    assert compose(*arguments).cfg.model["classes"] == 10
    (tmp_path / "classes.json").write_text('["cat", "dog", "owl"]')
    assert compose(*arguments).cfg.model["classes"] == 3
    assert compose(*arguments, "model.classes=5").cfg.model["classes"] == 5


def test_a_users_own_values_can_be_used_in_other_keys() -> None:
    cfg = compose("experiment=digits", "vars.width=64", "vars.note=tried", "model.width=${vars.width}").cfg
    assert cfg.model["width"] == 64
    assert cfg.vars == {"width": 64, "note": "tried"}


@pytest.mark.parametrize(("width", "remedy"), [("${vars.width}", "vars.width=..."), ("${model.widths}", "Correct it")])
def test_a_value_that_leads_nowhere_is_refused(width: str, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_not_composed(capsys, ["experiment=digits", f"model.width={width}"], "model.width", width, remedy)

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dtrain.config.errors import ConfigError
from dtrain.config.instantiate import by_target, why_missing
from tests.refusals import refused


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("no_such_package.Model", "There is no package 'no_such_package' here: pip install no_such_package."),
        ("torchh.optim.AdamW", "There is no package 'torchh' here. Did you mean 'torch'?"),
        ("torch.optim.AdamWW", "torch.optim has no 'AdamWW'. Did you mean 'AdamW' or "),
        ("dtrain.models.Resnet9", "dtrain.models has no 'Resnet9'. Did you mean 'ResNet9' or "),
        ("dtrain.modelss.MLP", "dtrain has no 'modelss'. Did you mean 'models'?"),
        ("dtrain.data.mixing.Mix.drawn", "dtrain.data.mixing.Mix has no 'drawn'. Did you mean 'draw'?"),
        ("torch.optim.q", "torch.optim has no 'q'. Check the spelling, and the version"),
        ("MLP", "want a dotted path, such as package.module.Class."),
        ("torch..optim", "want a dotted path"),
        ("my model.MLP", "want a dotted path"),  # of which pip would install two packages
    ],
)
def test_a_missing_package_wants_pip_and_a_wrong_name_the_right_one(target: str, told: str) -> None:
    assert why_missing(target).startswith(told)


def test_the_pip_command_names_the_distribution_where_it_is_called_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)  # as if it were not installed, wherever this runs
    assert "pip install opencv-python." in why_missing("cv2.imread")


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("own_needy", "own_broken", "own_renamed", "own_package", "own_package.part"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_package_that_another_one_needs_is_named(own_modules: Path) -> None:
    (own_modules / "own_needy.py").write_text("import no_such_package.part\n")
    assert why_missing("own_needy.Model").startswith(
        "own_needy needs another package. There is no package 'no_such_package' here: pip install no_such_package."
    )


def test_an_import_that_fails_inside_a_module_is_told_in_its_own_words(own_modules: Path) -> None:
    (own_modules / "own_renamed.py").write_text("from json import no_such_name\n")
    assert why_missing("own_renamed.Model").startswith(
        "importing own_renamed fails: cannot import name 'no_such_name' from 'json'"
    )


def test_modules_that_nobody_imported_yet_are_offered_too(own_modules: Path) -> None:
    (own_modules / "own_package").mkdir()
    (own_modules / "own_package" / "__init__.py").write_text("")
    (own_modules / "own_package" / "part.py").write_text("")
    assert why_missing("own_package.parts.Model") == ("own_package has no 'parts'. Did you mean 'part'?")


def test_what_is_there_is_not_missing() -> None:
    assert why_missing("torch.optim.AdamW") == why_missing("dtrain.data.mixing.Mix.draw") == ""


def test_a_mistake_in_a_users_module_is_shown_as_it_is(own_modules: Path) -> None:
    (own_modules / "own_broken.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError) as raised:
        by_target("model", OmegaConf.create({"_target_": "own_broken.Model"}))
    assert str(raised.traceback[-1].path).endswith("own_broken.py")


def test_a_missing_target_inside_a_node_is_named_itself() -> None:
    steps = [{"_target_": "dtrain.data.augment.Flip"}, {"_target_": "dtrain.data.augment.Flipp"}]
    config = OmegaConf.create({"data": {"augment": {"_target_": "dtrain.data.augment.Compose", "steps": steps}}})
    with refused(ConfigError, "data.augment, a _target_ inside", "'dtrain.data.augment.Flipp'", "'Flip'"):
        by_target("data.augment", config.data.augment)


def test_what_cannot_be_called_is_refused_as_that() -> None:
    with refused(ConfigError, "model._target_", "'dtrain.models'", "callable"):
        by_target("model", OmegaConf.create({"_target_": "dtrain.models"}))

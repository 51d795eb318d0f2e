from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

from dtrain.config.instantiate import by_target, why_missing
from dtrain.errors import ConfigError
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


def test_a_module_that_cannot_be_imported_is_named_with_the_place(own_modules: Path) -> None:
    (own_modules / "own_broken.py").write_text("\n1 / 0\n")
    with refused(
        ConfigError, "model._target_", "own_broken.Model", "own_broken.py, line 2", "ZeroDivisionError"
    ) as raised:
        by_target("model", {"_target_": "own_broken.Model"})
    assert isinstance(raised.value.__cause__, ZeroDivisionError)  # DTRAIN_TRACEBACK=1 shows it


COMPOSE = "dtrain.data.augment.Compose"


@pytest.mark.parametrize(
    ("node", "key", "got", "remedy"),
    [
        # names of arguments
        ({"_target_": COMPOSE, "transforms": []}, "data.augment.transforms", COMPOSE, "Valid: steps."),
        ({"_target_": COMPOSE}, "data.augment.steps is not set", COMPOSE, "Set data.augment.steps=VALUE."),
        (
            {"_target_": COMPOSE, "steps": "???"},
            "data.augment.steps is not set",
            COMPOSE,
            "Set data.augment.steps=VALUE.",
        ),
        (
            {"_target_": COMPOSE, "steps": [{"_target_": "dtrain.data.augment.RandomCropFlip", "pading": 4}]},
            "data.augment.steps[0].pading",
            "RandomCropFlip",
            "Did you mean 'padding'?",
        ),
        ({"_target_": "torch.optim.SGD", "params": []}, "data.augment.params", "torch.optim.SGD", "Valid: dampening"),
        # what is named
        ({"_target_": 3}, "data.augment._target_", "3", "package.module.Class"),
        ({"_target_": None}, "data.augment._target_", "None", "package.module.Class"),
        ({"_target_": "dtrain.models"}, "data.augment._target_", "dtrain.models", "class or function"),
        (
            {"_target_": COMPOSE, "steps": [{"_target_": "dtrain.data.augment.Flipp"}]},
            "data.augment.steps[0]._target_",
            "'dtrain.data.augment.Flipp'",
            "'Flip'",
        ),
        ({"_target_": "os.system", "command": "true"}, "data.augment", "os.system", ""),
        # values
        ({"_target_": "dtrain.models.SmallCNN", "width": "abc"}, "data.augment.width", "'abc'", "wants int"),
        ({"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1, "bias": "no"}, "bias", "'no'", "bool"),
        ({"_target_": "math.sqrt", "_args_": [-1]}, "data.augment", "math.sqrt", "DTRAIN_TRACEBACK=1"),
        (
            {"_target_": "collections.deque", "maxlen": "abc"},
            "data.augment: collections.deque(maxlen='abc')",
            "TypeError",
            "DTRAIN_TRACEBACK=1",
        ),
        (
            {
                "_target_": "fractions.Fraction",
                "numerator": "a",
                "denominator": {"_target_": "decimal.Decimal", "value": 3},
            },
            "data.augment: fractions.Fraction(numerator='a', denominator=decimal.Decimal(...))",
            "TypeError",
            "DTRAIN_TRACEBACK=1",
        ),
        (
            {"_target_": COMPOSE, "steps": [{"_target_": "fractions.Fraction", "numerator": "x"}]},
            "data.augment.steps[0]: fractions.Fraction(numerator='x')",
            "Invalid literal",
            "fractions.py, line ",
        ),
    ],
    ids=str,
)
def test_a_node_that_cannot_be_built_is_refused_with_key_target_and_value(
    node: dict, key: str, got: str, remedy: str
) -> None:
    with refused(ConfigError, key, got, remedy):
        by_target("data.augment", node, *[[]] * (key[-6:] == "params"))


def test_no_secret_is_shown() -> None:
    with refused(ConfigError, "maxlen=", "token=<hidden>") as raised:
        by_target("data.train", {"_target_": f"{__name__}.needs_a_number", "token": "a1", "maxlen": "b"})
    assert "a1" not in str(raised.value)


def needs_a_number(token: str, maxlen: object) -> None:
    raise RuntimeError("no number")


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "builtins.dict", "a": 1},  # takes any key
        {"_target_": "dtrain.data.augment.RandomCropFlip", "_partial_": True},
        {"_target_": "fractions.Fraction", "_args_": [1, 2]},
        {"_target_": "builtins.dict", "_recursive_": False, "inner": {"_target_": "not.there"}},
    ],
    ids=str,
)
def test_what_can_be_called_is_called(node: dict) -> None:
    assert by_target("model", node) is not None


def scaled(value: int, factor: int) -> int:
    return value * factor


def marked() -> functools.partial[int]:
    function = functools.partial(scaled, factor=3)
    function.unit = "metres"  # type: ignore[attr-defined]
    return function


def test_calls_of_a_partial_function_are_not_checked_one_by_one() -> None:
    # Hydra 1.3.8 would check each of them, which takes a tenth of a millisecond or more.
    node = {"_target_": f"{__name__}.scaled", "_partial_": True, "factor": 3}
    augment = "dtrain.data.augment"
    found = [
        by_target("data.fields.x.decoder", node),
        by_target("data.train", {"_target_": "dtrain.data.Generated", "function": node, "length": 2}).function,
        by_target("data.augment", {"_target_": f"{augment}.Compose", "steps": [node]}).steps[0],
        by_target("data.augment", {"_target_": f"{augment}.TorchvisionTransform", "transform": node}).transform,
    ]
    assert [(type(function), function(2)) for function in found] == [(functools.partial, 6)] * 4


def test_a_partial_function_that_a_target_returns_keeps_its_attributes() -> None:
    function = by_target("model", {"_target_": f"{__name__}.marked"})
    assert (type(function), function.unit, function(2)) == (functools.partial, "metres", 6)

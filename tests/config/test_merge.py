"""A node of another class replaces the default node, whether a preset, a group choice or a key names the class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from dtrain.config import merge
from tests.config.command_lines import assert_not_composed, compose


def plain(node: Any, key: str) -> Any:
    node = OmegaConf.select(node, key)
    return OmegaConf.to_container(node) if OmegaConf.is_config(node) else node


@pytest.fixture
def preset(tmp_path: Path):
    """Composes a preset of the user's own, with further arguments."""

    def composed(text: str, *arguments: str) -> Any:
        (tmp_path / "experiment").mkdir(exist_ok=True)
        (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}")
        return compose("--config-dir", str(tmp_path), "experiment=mine", *arguments).node

    return composed


@pytest.mark.parametrize(
    ("arguments", "key", "expected"),
    [
        # a class takes the user's keys alone, in any order, also those that equal the default's
        (["task._target_=my.Task"], "task", {"_target_": "my.Task"}),
        (["model._target_=my.Net", "model.width=32", "model.depth=3"], "model", {"width": 32, "depth": 3}),
        (["model.width=32", "model._target_=my.Net"], "model", {"width": 32}),
        (["+model.depth=3", "model._target_=my.Net"], "model", {"depth": 3}),
        (["optimizer._target_=torch.optim.RAdam"], "optimizer", {"_target_": "torch.optim.RAdam"}),
        (["optimizer={_target_: torch.optim.RAdam, lr: 3e-3}"], "optimizer", {"lr": 3e-3}),
        (["schedule._target_=my.schedule"], "schedule", {"_target_": "my.schedule"}),
        (["task={_target_: my.Task}", "task.input=image"], "task", {"input": "image"}),
        (["++task={_target_: my.Task}"], "task", {"_target_": "my.Task"}),
        # the same class keeps its keys
        (
            ["model._target_=dtrain.models.SmallCNN", "model.width=4"],
            "model",
            {"classes": "${dtrain.classes:10}", "width": 4},
        ),
        # an argument of the class that its preset leaves out
        (["model=gpt", "model.positions=learned"], "model.positions", "learned"),
        (["optimizer=sgd", "optimizer.dampening=0.1"], "optimizer.dampening", 0.1),
        (["optimizer.lr=1.0"], "optimizer", {"lr": 1.0, "weight_decay": 0.01, "no_decay": None, "betas": [0.9, 0.999]}),
        # keys that went with the node that was replaced can still be removed
        (["model._target_=my.Net", "~model.width"], "model", {"_target_": "my.Net"}),
        # names of weights are the user's
        (["run.warm_start={path: a, rename: {model.: b}}"], "run.warm_start.rename", {"model.": "b"}),
        (["run.warm_start.rename={model.: ''}"], "run.warm_start.rename", {"model.": ""}),
        # a group choice replaces what the experiment says of the group
        (["optimizer=sgd"], "optimizer.lr", 0.1),
        (["optimizer=adamw"], "optimizer.lr", 3e-3),
        # datasets, augmentations, fields
        (["data=memory", "data.train={_target_: my.arrays}"], "data.train", {"_target_": "my.arrays"}),
        (["data=memory", "data.train._target_=my.arrays"], "data.train", {"_target_": "my.arrays"}),
        (["data=map", "data.train={_target_: my.Data, root: /data}"], "data.train", {"root": "/data"}),
        (["data=map", "data.train._target_=my.Data"], "data.train", {"_target_": "my.Data"}),
        (["data=imagenet", "data.augment._target_=my.Noise"], "data.augment", {"_target_": "my.Noise"}),
        (["data.augment._target_=my.Noise", "data.augment.std=0.1"], "data.augment", {"std": 0.1}),
        (["data.fields={jpg: {name: photo}}"], "data.fields", {"jpg": {"name": "photo"}}),
        (
            ["data.fields={png: {size: 8}}"],
            "data.fields",
            {"png": {"name": "image", "role": "image", "size": 8}, "cls": {"name": "label", "role": "label"}},
        ),
        (["data.fields.png.size=8"], "data.fields.png", {"name": "image", "role": "image", "size": 8}),
        (
            ["+data.fields.txt={name: text}"],
            "data.fields",
            {
                "png": {"name": "image", "role": "image"},
                "cls": {"name": "label", "role": "label"},
                "txt": {"name": "text"},
            },
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_the_command_line_replaces_a_node_of_another_class(arguments: list[str], key: str, expected: Any) -> None:
    found = plain(compose("experiment=digits", *arguments).node, key)
    if isinstance(expected, dict) and "_target_" not in expected and "fields" not in key:
        found.pop("_target_", None)
    assert found == expected


@pytest.mark.parametrize(
    ("text", "arguments", "key", "expected"),
    [
        ("task: {_target_: my.Task}\n", [], "task", {"_target_": "my.Task"}),
        ("task: {_target_: my.Task, label: label}\n", [], "task", {"_target_": "my.Task", "label": "label"}),
        ("optimizer: {_target_: my.Lion, lr: 1}\n", ["optimizer.lr=2"], "optimizer", {"_target_": "my.Lion", "lr": 2}),
        ("optimizer: {lr: 0.5}\n", [], "optimizer.weight_decay", 0.01),
        # the command line's choice, although the preset is merged after it
        ("model: {_target_: my.Net, depth: 3}\n", ["model=mlp"], "model._target_", "dtrain.models.MLP"),
        ("task: {_target_: my.Task}\n", ["task=classification"], "task._target_", "dtrain.tasks.Classification"),
        ("model: {width: 8}\n", ["model=small_cnn"], "model.width", 8),
        # a preset on top of another
        ("defaults: [digits]\nmodel: {_target_: my.Net}\n", [], "model", {"_target_": "my.Net"}),
        ("defaults: [digits]\n", ["optimizer=sgd"], "optimizer.lr", 0.1),
        ("defaults: [digits]\noptimizer: {lr: 1}\n", [], "optimizer.lr", 1),
        # nodes inside
        (
            "defaults: [override /data: imagenet]\ndata: {augment: {_target_: my.Noise}}\n",
            [],
            "data.augment",
            {"_target_": "my.Noise"},
        ),
        (
            "defaults: [override /data: memory]\ndata: {train: {_target_: my.arrays}}\n",
            [],
            "data.train",
            {"_target_": "my.arrays"},
        ),
        (
            "defaults: [override /data: shards]\ndata: {fields: {jpg: {name: a}}}\n",
            [],
            "data.fields",
            {"jpg": {"name": "a"}},
        ),
        (
            "defaults: [override /data: digits]\ndata: {fields: {png: {size: 8}}}\n",
            ["data.fields.cls.role=target"],
            "data.fields",
            {"png": {"name": "image", "role": "image", "size": 8}, "cls": {"name": "label", "role": "target"}},
        ),
    ],
)
def test_a_preset_replaces_a_node_of_another_class(
    preset, text: str, arguments: list[str], key: str, expected: Any
) -> None:
    assert plain(preset(text, *arguments), key) == expected


def test_a_class_replaces_what_all_presets_below_have_set(preset, tmp_path: Path) -> None:
    below = "# @package _global_\ndefaults: [digits]\nmodel: {width: 8}\n"
    (tmp_path / "experiment").mkdir(exist_ok=True)
    (tmp_path / "experiment" / "below.yaml").write_text(below)
    assert plain(preset("defaults: [below]\nmodel: {_target_: my.Net}\n"), "model") == {"_target_": "my.Net"}


@pytest.mark.parametrize(
    ("text", "arguments", "best"),
    [
        ("defaults: [digits]\n", [], "eval/accuracy"),
        ("defaults: [digits]\n", ["task=classification"], "eval/accuracy"),
        ("defaults: [digits]\n", ["task.label_smoothing=0.1"], "eval/accuracy"),
        ("defaults: [digits]\n", ["task._target_=dtrain.tasks.Classification"], "eval/accuracy"),
        ("defaults: [digits]\n", ["task._target_=my.Task"], None),
        ("defaults: [digits]\n", ["task={_target_: my.Task, width: 3}"], None),
        ("defaults: [digits]\n", ["task=regression"], None),
        ("defaults: [digits]\n", ["task._target_=my.Task", "checkpoint.best=eval/accuracy"], "eval/accuracy"),
        ("defaults: [digits]\ntask: {_target_: my.Task}\n", [], None),
        ("defaults: [digits]\ntask: {_target_: my.Task}\ncheckpoint: {best: eval/f1}\n", [], "eval/f1"),
        ("defaults: [digits]\ntask: {_target_: my.Task}\n", ["task=classification"], None),
        ("defaults: [digits]\ncheckpoint: {best: eval/loss}\n", ["task._target_=my.Task"], "eval/loss"),
        ("defaults: [digits]\ncheckpoint: {best_mode: max}\n", ["task._target_=my.Task"], None),
        (
            "defaults: [digits]\ntrain: {metrics: {f1: {_target_: torchmetrics.MeanMetric}}}\ncheckpoint: {best: eval/f1}\n",
            ["task._target_=my.Task"],
            "eval/f1",
        ),
    ],
)
def test_the_best_metric_of_a_preset_goes_with_its_task(
    preset, text: str, arguments: list[str], best: str | None
) -> None:
    checkpoint = plain(preset(text, *arguments), "checkpoint")
    assert checkpoint["best"] == best
    assert checkpoint["best_mode"] is None


def test_the_printed_config_is_the_composed_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(IndexError):  # nothing is composed for the entry point
        compose("experiment=digits", "task._target_=my.Task", "--cfg", "job", "--package", "task")
    assert capsys.readouterr().out.splitlines()[1:] == ["_target_: my.Task"]


@pytest.mark.slow
def test_a_sweep_over_classes_replaces_the_node_in_each_run(monkeypatch) -> None:
    from dtrain.command_line import run

    tasks = []
    run(
        lambda composed: tasks.append(plain(composed.node, "task")),
        ["-m", "experiment=digits", "task._target_=a.A,b.B"],
    )
    assert tasks == [{"_target_": "a.A"}, {"_target_": "b.B"}]


def test_a_misspelt_key_of_a_class_that_stays_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert_not_composed(capsys, ["experiment=digits", "model.widht=3"], "model.widht", "'width'")
    assert_not_composed(capsys, ["experiment=digits", "dta.augment._target_=my.Noise"], "dta", "")


def test_a_command_line_is_composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra would do it twice, which takes a noticeable part of a start."""
    calls = []
    composing = merge._Loader._compose_config_from_defaults_list

    def counted(self: Any, **of_hydra: Any) -> Any:
        calls.append(of_hydra)
        return composing(self, **of_hydra)

    monkeypatch.setattr(merge._Loader, "_compose_config_from_defaults_list", counted)
    compose("experiment=digits")
    assert len(calls) == 1

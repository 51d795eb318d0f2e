from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dtrain.config.errors import ConfigError
from dtrain.config.schema import RunConfig, WarmStartConfig
from dtrain.distributed.process_group import process_group
from dtrain.training.checkpoints import Checkpoint, Checkpoints
from dtrain.training.resume import starting_weights
from tests.refusals import refused
from tests.runs import train_on, weights

SMALL = ("model.width=4", "data.num_workers=0", "schedule=constant")


@pytest.mark.usefixtures("digits")
def test_a_new_run_begins_with_the_average_of_another_and_its_own_counters(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    train_on(1, first, *SMALL, "train.max_steps=3", "optimizer.lr=0.01", "train.ema_decay=0.5")
    train_on(2, second, *SMALL, "train.max_steps=1", "optimizer.lr=0", f"run.weights_from={first}")
    expected, got = weights(first, 3, "ema"), weights(second, 1)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert not all(torch.equal(expected[name], tensor) for name, tensor in weights(first, 3).items())


class Classifier(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 4)
        self.head = nn.Linear(4, classes)


OLD = {
    "backbone.weight": torch.full((4, 3), 1.0),
    "backbone.bias": torch.full((4,), 2.0),
    "head.weight": torch.zeros(10, 4),
    "head.bias": torch.zeros(10),
}


@pytest.fixture(autouse=True)
def world_of_one(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if "digits" in request.fixturenames:  # its ranks make their own
        yield
        return
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with process_group(timeout=20):
        yield


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.safetensors"
    save_file(OLD, path)
    return path


def begin(model: nn.Module, path: Path | None, rename: dict[str, str] | None = None, skip: tuple[str, ...] = ()) -> str:
    run = RunConfig(warm_start=WarmStartConfig(str(path) if path else None, rename or {}, list(skip)))
    start = starting_weights(run, model)
    assert start is not None
    start.load(model)
    return start.description


def test_names_are_mapped_and_what_is_skipped_keeps_its_initialisation(old: Path) -> None:
    model = Classifier(5)
    head = model.head.weight.detach().clone()
    message = begin(model, old, {"backbone.": "encoder."}, ("head.*",))
    assert torch.equal(model.encoder.weight, OLD["backbone.weight"])
    assert torch.equal(model.encoder.bias, OLD["backbone.bias"])
    assert torch.equal(model.head.weight, head)
    assert "2 of 4 left out" in message


def test_nothing_is_asked_for_and_nothing_is_loaded() -> None:
    assert starting_weights(RunConfig(), Classifier(5)) is None


@pytest.mark.parametrize(
    ("rename", "skip", "names"),
    [
        ({}, ("head.*",), ["encoder.weight is missing; encoder.bias is missing; backbone"]),
        ({"backbone.": "encoder."}, (), ["head.weight has shape [10, 4], the model has [5, 4]"]),
        ({"backbone.": "head."}, (), ["both become head."]),
    ],
    ids=["names", "shapes", "two of one name"],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    old: Path, rename: dict[str, str], skip: tuple[str, ...], names: list[str]
) -> None:
    model = Classifier(5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with refused(ConfigError, *names):
        begin(model, old, rename, skip)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_damaged_checkpoint_is_passed_over_and_one_that_is_named_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (1, 2):
        model = {"encoder.weight": torch.full((4, 3), float(step)), "encoder.bias": torch.zeros(4)}
        checkpoints.save(step, Checkpoint({"model": model}, {"metrics": {}}))
    (checkpoints.path(2) / "model.safetensors").write_bytes(b"torn")
    model = Classifier(5)
    begin(model, tmp_path, skip=("head.*",))
    assert torch.equal(model.encoder.weight, torch.ones(4, 3))
    with refused(ConfigError, "model.safetensors"):
        begin(model, checkpoints.path(2), skip=("head.*",))


@pytest.mark.parametrize("name", ["latest", "best", "kept"])
def test_a_checkpoint_that_was_copied_or_linked_is_taken_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, Checkpoint({"model": {"weight": torch.full((1, 1), float(step))}}, {"metrics": {}}))
    (tmp_path / name).symlink_to("step-000000001")
    found = starting_weights(RunConfig(weights_from=str(tmp_path / name)), nn.Linear(1, 1, bias=False))
    assert found is not None
    assert found.tensors["weight"].item() == 1


def test_a_path_that_holds_no_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run directory, no checkpoint"):
        begin(Classifier(5), tmp_path / "nothing")
    (tmp_path / "weights.pt").write_bytes(b"PK")
    with pytest.raises(ConfigError, match="cannot be read"):
        begin(Classifier(5), tmp_path / "weights.pt")


def test_settings_that_contradict_each_other_are_refused(old: Path) -> None:
    with pytest.raises(ConfigError, match="both set"):
        starting_weights(RunConfig(weights_from=str(old), warm_start=WarmStartConfig(str(old))), Classifier(5))
    with pytest.raises(ConfigError, match="no path"):
        starting_weights(RunConfig(warm_start=WarmStartConfig(skip=["head.*"])), Classifier(5))

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dtrain.config.schema import CheckpointConfig, RunConfig, WarmStartConfig
from dtrain.distributed.process_group import process_group
from dtrain.errors import ConfigError
from dtrain.precision.modules import dtype_name
from dtrain.runs.run_dir import write_status
from dtrain.runs.run_spec import RunSpec
from dtrain.training.checkpoint.checkpoints import Checkpoint, Checkpoints
from dtrain.training.checkpoint.resume import EarlierStarts, starting_weights
from dtrain.training.checkpoint.state import RunTotals
from tests.refusals import assert_refused, refused
from tests.training.checkpoints_for_tests import content
from tests.whole_runs import train_on, tree, weights

SMALL = ("model.width=4", "data.num_workers=0", "schedule=constant")


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
def test_a_new_run_begins_with_the_average_of_another_and_its_own_counters(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    train_on(1, first, *SMALL, "train.max_steps=3", "optimizer.lr=0.01", "train.ema_decay=0.5")
    train_on(
        2, second, *SMALL, "train.max_steps=1", "optimizer.lr=0", "train.ema_decay=0.5", f"run.weights_from={first}"
    )
    expected = weights(first, 3, "ema")
    for got in (weights(second, 1), weights(second, 1, "ema")):
        assert expected.keys() == got.keys()
        assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert not all(torch.equal(expected[name], tensor) for name, tensor in weights(first, 3).items())


# -- what earlier starts have left


class Place:
    """A run directory without a run; ``start`` is what a start of a run in it decides."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.checkpoints = Checkpoints(run_dir / "checkpoints")

    def start(self, resume: str = "auto") -> EarlierStarts:
        cfg: Any = SimpleNamespace(run=RunConfig(resume=resume), checkpoint=CheckpointConfig())
        before = tree(self.run_dir)
        try:
            return EarlierStarts.from_config(cfg, RunSpec("run", self.run_dir, {}, (), ()))
        finally:
            assert tree(self.run_dir) == before

    def trained(self, *files: str, state: str = "running") -> None:
        """As if the run had trained up to step 3."""
        (self.run_dir / "logs").mkdir(exist_ok=True)
        if "status" in files:
            write_status(self.run_dir, state, 3)
        if "metrics" in files:
            (self.run_dir / "metrics.jsonl").write_text('{"step": 3}\n')
        if "keys" in files:
            (self.run_dir / "logs" / "keys-rank-00001.jsonl").write_text('{"step": 3, "keys": []}\n')


REMEDIES = ("Restore the checkpoints", "run.resume=never", "run.dir")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_new_run_begins_and_one_with_a_checkpoint_resumes(place: Place) -> None:
    assert place.start() == place.start("never") == EarlierStarts()
    with refused(ConfigError, "run.resume=must", "there is none"):
        place.start("must")
    place.trained("status", "metrics")
    place.checkpoints.save(3, content(3.0))
    assert place.start().checkpoint == place.start("must").checkpoint == 3
    with refused(ConfigError, "run.resume=never", "step 3", "Leave run.resume out"):
        place.start("never")


@pytest.mark.parametrize("mode", ["auto", "must"])
def test_a_start_passes_over_broken_checkpoints_and_says_so(place: Place, mode: str) -> None:
    for step in (10, 20):
        place.checkpoints.save(step, content(step))
    (place.checkpoints.path(20) / "state.json").write_text("{}")
    earlier = place.start(mode)
    assert earlier.checkpoint == 10
    assert_refused(earlier.problems[0], "broken checkpoint", "step-000000020")
    (place.checkpoints.path(10) / "state.json").write_text("{}")
    with refused(ConfigError, "no checkpoint", "step-000000010", "", *REMEDIES):
        place.start(mode)
    assert place.start("never").moved_aside
    place.checkpoints.record(0)  # the record of the save was lost
    with refused(ConfigError, "no checkpoint", "step-000000010", "", *REMEDIES):
        place.start(mode)


@pytest.mark.parametrize("files", [["status"], ["metrics"], ["keys"], ["status", "metrics", "keys"]])
@pytest.mark.parametrize("saved", [3, None])
def test_a_run_that_shows_progress_and_has_lost_its_checkpoints_is_refused(
    place: Place, files: list[str], saved: int | None
) -> None:
    place.trained(*files)
    if saved is not None:
        place.checkpoints.record(saved)
    for mode in ("auto", "must"):
        with refused(ConfigError, "no checkpoint to resume from", *REMEDIES) as raised:
            place.start(mode)
        assert all(file in str(raised.value) for file in files)
        assert ("saved after step 3" in str(raised.value)) == (saved is not None)
    assert place.start("never") == EarlierStarts(moved_aside=True)


@pytest.mark.parametrize("state", ["running", "failed"])
def test_a_run_that_was_killed_before_its_first_save_begins_again_by_itself(place: Place, state: str) -> None:
    place.checkpoints.record(0)
    place.trained("status", "metrics", "keys", state=state)
    earlier = place.start()
    assert (earlier.checkpoint, earlier.moved_aside, earlier.problems) == (None, False, [])
    assert earlier.status is not None


def test_a_finished_run_that_has_lost_its_checkpoints_is_finished_all_the_same(place: Place) -> None:
    place.trained("status", "metrics", state="finished")
    earlier = place.start()
    assert (earlier.checkpoint, earlier.finished) == (None, True)


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "DTRAIN_STARTS"])
def test_a_new_beginning_is_not_begun_again_by_the_restarts_of_its_job(
    place: Place, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.trained("status")
    place.checkpoints.save(3, content(3.0))
    monkeypatch.setenv(name, "1")
    assert place.start("never").checkpoint == 3
    monkeypatch.setenv(name, "0")
    with refused(ConfigError, "run.resume=never"):
        place.start("never")


@pytest.mark.parametrize(
    "damage",
    [
        *("", "{", "[]", "hello", '{"state": "done"}', '{"state": "running", "step": "x"}', "[" * 200_000),
        *('{"state": "finished", "step": 3, "time": "yesterday"}', '{"state": "running", "restarts": null}'),
        '{"state": "running", "lost_seconds": NaN}',
    ],
    ids=lambda text: text[:30],
)
def test_a_damaged_status_stops_no_run_whose_checkpoints_are_whole(place: Place, damage: str) -> None:
    place.checkpoints.save(3, content(3.0))
    (place.run_dir / "status.json").write_text(damage)
    earlier = place.start()
    assert earlier.checkpoint == 3
    assert not earlier.finished
    assert_refused(earlier.problems[0], "status.json", "", "counted from 0")
    RunTotals().add_restart(earlier.status)


@pytest.mark.parametrize("kind", ["folder", "pipe", "endless"])
def test_a_status_that_is_no_file_stops_no_run(place: Place, kind: str) -> None:
    path = place.run_dir / "status.json"
    place.checkpoints.save(3, content(3.0))
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    earlier = place.start()
    assert earlier.checkpoint == 3
    assert_refused(earlier.problems[0], "status.json")
    write_status(place.run_dir, "running", 3)
    assert place.start().problems == []


def test_a_status_without_times_counts_as_a_restart(place: Place) -> None:
    (place.run_dir / "status.json").write_text('{"state": "running"}')
    totals = RunTotals()
    totals.add_restart(place.start().status)
    assert (totals.restarts, totals.lost_seconds, totals.down_seconds) == (1, 0, 0)


# -- weights of another run


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
    message = begin(model, old, {"backbone.": "encoder.", "head.": "backbone."}, ("head.*", "backbone.*"))
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
        ({"bakcbone.": "encoder."}, (), ["run.warm_start.rename", "'bakcbone.'", "no name", "backbone."]),
        ({"backbone.": "encoder."}, ("haed.*",), ["run.warm_start.skip", "'haed.*'", "no name", "backbone."]),
    ],
    ids=["names", "shapes", "two of one name", "a rename of nothing", "a skip of nothing"],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    old: Path, rename: dict[str, str], skip: tuple[str, ...], names: list[str]
) -> None:
    model = Classifier(5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with refused(ConfigError, *names):
        begin(model, old, rename, skip)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=lambda dtype: str(dtype)
)
def test_weights_of_a_type_that_is_no_weight_are_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    try:
        save_file({"weight": torch.zeros(2, 2).to(dtype), "bias": torch.zeros(2)}, tmp_path / "w.safetensors")
    except KeyError:
        pytest.skip(f"safetensors before 0.7 cannot store {dtype}")
    with refused(ConfigError, "weight has dtype", dtype_name(dtype), "fp32"):
        starting_weights(RunConfig(weights_from=str(tmp_path / "w.safetensors")), nn.Linear(2, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=lambda dtype: str(dtype))
def test_weights_of_other_floats_and_counts_of_other_integers_are_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = {name: tensor.to(dtype) for name, tensor in nn.BatchNorm1d(2).state_dict().items()}
    saved["num_batches_tracked"] = torch.tensor(7, dtype=torch.int32)
    save_file(saved, tmp_path / "w.safetensors")
    model = nn.BatchNorm1d(2)
    begin(model, tmp_path / "w.safetensors")
    assert model.num_batches_tracked is not None
    assert model.num_batches_tracked.item() == 7
    assert torch.equal(model.weight, torch.ones(2))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name_unless_the_models_own_are_not(
    tmp_path: Path, value: float
) -> None:
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

    saved = {name: tensor.clone() for name, tensor in Masked().state_dict().items()}
    save_file(saved, tmp_path / "w.safetensors")
    begin(Masked(), tmp_path / "w.safetensors")
    saved["bias"][1] = value
    save_file(saved, tmp_path / "w.safetensors")
    with refused(ConfigError, "bias", "NaN or infinite", "run.warm_start.skip"):
        begin(Masked(), tmp_path / "w.safetensors")


def test_a_damaged_checkpoint_is_passed_over_and_one_that_is_named_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (1, 2):
        model = {"encoder.weight": torch.full((4, 3), float(step)), "encoder.bias": torch.zeros(4)}
        checkpoints.save(step, Checkpoint({"model": model}, {"metrics": {}}))
    file = checkpoints.path(2) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")  # still a whole file of safetensors
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
    assert found.tensors["weight"][...].item() == 1


def test_a_path_that_holds_no_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing does not exist"):
        begin(Classifier(5), tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no run directory, no checkpoint"):
        begin(Classifier(5), tmp_path / "empty")
    for new in (True, False):
        torch.save({"w": torch.ones(1)}, tmp_path / "weights.pt", _use_new_zipfile_serialization=new)
        with pytest.raises(ConfigError, match=r"weights.pt is a pickle.*safetensors.torch.save_file"):
            begin(Classifier(5), tmp_path / "weights.pt")
    (tmp_path / "weights.pt").write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match="cannot be read"):
        begin(Classifier(5), tmp_path / "weights.pt")


def test_settings_that_contradict_each_other_are_refused(old: Path) -> None:
    with pytest.raises(ConfigError, match="both set"):
        starting_weights(RunConfig(weights_from=str(old), warm_start=WarmStartConfig(str(old))), Classifier(5))
    with pytest.raises(ConfigError, match="no path"):
        starting_weights(RunConfig(warm_start=WarmStartConfig(skip=["head.*"])), Classifier(5))

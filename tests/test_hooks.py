"""dtrain.hooks in real runs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from benchmarks.fault_hook import faulty
from dtrain.data import Batch
from dtrain.errors import ConfigError
from dtrain.hooks import EarlyStopping, Samples
from dtrain.training.checkpoint.state import TrainState
from dtrain.training.hook_calls import Hooks
from dtrain.training.task import Evaluation
from tests.ranks import RanksFailed
from tests.refusals import assert_refused, refused
from tests.tracking.wandb_records import rows
from tests.whole_runs import metrics, status, train_on, weights

SMALL = ("model.width=4", "checkpoint.best=null", "checkpoint.keep_last=9")
KILL = faulty("kill@rank=1,step=7").removeprefix("train.hooks=[").removesuffix("]")
NEVER_BETTER = "EarlyStopping, metric: eval/samples, mode: max, patience: 3"  # always 360
pytestmark = pytest.mark.usefixtures("digits")


def hook(text: str, *others: str) -> str:
    return f"train.hooks=[{','.join((f'{{_target_: dtrain.hooks.{text}}}', *others))}]"


# -- EarlyStopping


class Run(SimpleNamespace):
    def end_early(self, reason: str) -> None:
        self.ended = reason


def evaluated(stopping: EarlyStopping, values: Sequence[float], first: int = 1) -> int | None:
    """The number of the evaluation that ends the run."""
    for number, value in enumerate(values, first):
        run = Run(step=SimpleNamespace(step=number), ended=None)
        stopping.on_evaluation(cast(TrainState, run), Evaluation({"loss": value, "accuracy": value}))
        if run.ended is not None:
            return number
    return None


@pytest.mark.parametrize(
    ("options", "values", "end"),
    [
        ({}, [3, 2, 2, 2.5, 1.9, 2, 2, 2, 1], 8),
        ({"metric": "eval/accuracy"}, [1, 2, 3, 3, 2, 1, 4], 6),
        ({"metric": "eval/accuracy", "mode": "min"}, [1, 2, 3, 3], 4),
        ({"min_delta": 0.5}, [3, 2.5, 2.4, 2.3, 2.2, 2.1], 6),  # 2.4 is better than 3 by more than 0.5
        ({"patience": 1}, [3, 2, 1, 1], 4),
        ({"patience": 2}, [math.nan, 3, math.nan, math.nan, 1], 4),
        ({"patience": 2}, [math.nan, math.nan, 1], 2),
    ],
)
def test_a_run_ends_after_evaluations_without_improvement(
    options: dict[str, Any], values: list[float], end: int
) -> None:
    assert evaluated(EarlyStopping(**options), values) == end
    for cut in range(1, end):  # saved and restored anywhere
        before, after = EarlyStopping(**options), EarlyStopping(**options)
        assert evaluated(before, values[:cut]) is None
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert evaluated(after, values[cut - 1 : cut], first=cut) is None  # repeated, so it does not count
        assert evaluated(after, values[cut:], first=cut + 1) == end
        other = EarlyStopping("eval/other", mode="max")
        other.load_state_dict(before.state_dict())
        assert other.state_dict()["best"] is None


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"metric": "eval/quality"}, ("EarlyStopping.mode", "'eval/quality'")),
        ({"mode": "largest"}, ("EarlyStopping.mode", "'largest'")),
        ({"patience": 0}, ("EarlyStopping.patience", "0", "at least 1")),
        ({"min_delta": -1.0}, ("EarlyStopping.min_delta", "-1.0", "0 or more")),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], names: tuple[str, ...]) -> None:
    with refused((ConfigError, ValueError), *names):
        EarlyStopping(**options)


@pytest.mark.slow
def test_a_killed_run_ends_at_the_step_of_an_undisturbed_one(tmp_path: Path) -> None:
    options = (*SMALL, "train.eval_every=2", "checkpoint.every_steps=1", "train.max_steps=20")
    with pytest.raises(RanksFailed):
        train_on(2, tmp_path, *options, hook(NEVER_BETTER, KILL))
    assert status(tmp_path)["step"] < 8
    train_on(2, tmp_path, *options, hook(NEVER_BETTER, KILL))
    assert status(tmp_path)["state"] == "finished"
    # The first evaluation, after step 2, is the best one, and 4, 6 and 8 are no better; without its state it would end later.
    assert (status(tmp_path)["step"], status(tmp_path)["reason"]) == (8, "no better eval/samples in 3 evaluations")
    assert len(metrics(tmp_path, "eval/samples")) == 4


@pytest.mark.slow
def test_a_run_that_has_ended_early_is_extended_by_a_larger_patience_only(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = (*SMALL, "train.eval_every=1", "checkpoint.every_steps=1")
    train_on(1, tmp_path, *options, "train.max_steps=20", hook(NEVER_BETTER))
    train_on(1, tmp_path, *options, "train.max_steps=30", hook(NEVER_BETTER))
    assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("finished", 4)
    train_on(1, tmp_path, *options, "train.max_steps=30", hook(NEVER_BETTER.replace("3", "5")))
    assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("finished", 6)
    assert "begins anew" not in capfd.readouterr().out
    # Another hook in its place; then it is back, and begins anew.
    train_on(1, tmp_path, *options, "train.max_steps=7", hook("Samples"))
    assert "dtrain.hooks.EarlyStopping[0] is not among them any more" in capfd.readouterr().out
    train_on(
        1,
        tmp_path,
        *options,
        "train.max_steps=30",
        hook("Samples", f"{{_target_: dtrain.hooks.{NEVER_BETTER}}}"),
    )
    assert "train.hooks[1] (dtrain.hooks.EarlyStopping): the checkpoint has no state" in capfd.readouterr().out
    assert status(tmp_path)["step"] == 11


@pytest.mark.slow
def test_a_metric_that_no_evaluation_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):
        train_on(1, tmp_path, *SMALL, hook("EarlyStopping, metric: eval/acuracy, mode: max"), "train.max_steps=2")
    assert_refused(status(tmp_path)["reason"], "EarlyStopping", "'eval/acuracy'", "eval/accuracy")
    assert status(tmp_path)["step"] == 0


# -- states of hooks


class Counts:
    def __init__(self) -> None:
        self.state: Any = {"n": 0}

    def on_end(self, run: TrainState, state: str) -> None: ...

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_states_are_copies_found_by_class_and_position_among_the_hooks_of_the_class() -> None:
    first, second, third = Counts(), Counts(), EarlyStopping()
    saving = Hooks({"a": first, "b": third, "c": second})
    first.state, second.state = {"n": 1}, {"n": 2}
    saved = saving.state_dict()
    first.state["n"] = 5
    one, other = Counts(), Counts()
    loading = Hooks({"x": one, "y": other})
    loading.load_state_dict(saved)
    assert (one.state, other.state) == ({"n": 1}, {"n": 2})
    (note,) = loading.notes
    assert_refused(note, "train.hooks", "dtrain.hooks.EarlyStopping[0]")
    Hooks({"x": one}).load_state_dict({})
    assert one.state == {"n": 1}


def test_a_state_that_json_cannot_hold_is_an_error_before_the_first_step() -> None:
    counts = Counts()
    counts.state = torch.zeros(1)
    with refused(RuntimeError, "my hook", "state_dict", "Tensor"):
        Hooks({"my hook": counts}).call("on_start", cast(TrainState, None))


# -- GradientHistograms


@pytest.mark.slow
def test_gradient_histograms_are_in_wandb_and_no_record_of_the_run_is_lost(tmp_path: Path) -> None:
    every = hook("GradientHistograms, every: 2")
    train_on(2, tmp_path, *SMALL, every, "tracker=wandb", "tracker.mode=offline", "train.max_steps=6")
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    logged = rows(file)
    histograms = [row for row in logged if any(name.startswith("gradients/") for name in row)]
    assert 1 <= len(histograms) <= 3  # the tracker's thread may put two into one row of so short a run
    assert sum("train/loss" in row for row in logged) == len(metrics(tmp_path)) == 6
    names = {name.split("/")[1] for name in histograms[0] if name.startswith("gradients/")}
    assert names == set(weights(tmp_path, 6))


# -- Samples


def described(model: nn.Module, batch: Batch) -> dict[str, str]:
    assert not model.training
    assert not torch.is_grad_enabled()
    noise = float(torch.rand(()))
    return {"keys": " ".join(batch.sample_keys), "noise": f"{noise}"}


@pytest.mark.slow
def test_samples_of_each_evaluation_are_media_of_the_run(tmp_path: Path) -> None:
    options = (*SMALL, "train.eval_every=1", "train.max_steps=4", "tracker.media=true")
    function = f"{{_target_: {__name__}.described, _partial_: true}}"
    own = f"{{_target_: dtrain.hooks.Samples, name: own, every: 2, function: {function}}}"
    train_on(2, tmp_path, *options, hook("Samples, count: 3", own))
    media = tmp_path / "media"
    texts = [(media / "samples" / f"step-{step:09d}.txt").read_text().splitlines() for step in (1, 2, 3, 4)]
    keys = [[line.split(":")[0] for line in text] for text in texts]
    assert keys == [keys[0]] * 4
    assert len(keys[0]) == 3
    assert texts[0] != texts[3]
    assert "label" in texts[0][0]
    assert "predicted" in texts[0][0]
    named = {path.name: path.read_text().split() for path in (media / "own-keys").iterdir()}
    assert set(named) == {"step-000000002.txt", "step-000000004.txt"}
    assert named["step-000000002.txt"][:3] == keys[0]
    assert len({path.read_text() for path in (media / "own-noise").iterdir()}) == 1


def test_samples_without_a_function_or_evaluation_data_are_refused() -> None:
    run: Any = SimpleNamespace(task=object(), eval_loader=object())
    with refused(ConfigError, "Samples.function", "object", "samples(model, batch)"):
        Samples().on_start(run)
    run.eval_loader = None
    for each, name in ((Samples(), "Samples"), (EarlyStopping(), "EarlyStopping")):
        with refused(ConfigError, name, "data.eval"):
            each.on_start(run)

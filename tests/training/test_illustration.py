"""When pictures are drawn, and what a task gets to draw from."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.data import Batch
from dtrain.tasks import Classification
from dtrain.training import illustration
from dtrain.training.checkpoints import Checkpoints
from dtrain.training.result import Evaluation
from tests.ranks import RanksFailed
from tests.runs import metrics, train_on

pytestmark = pytest.mark.usefixtures("digits")
SMALL = ("model.width=4", "data.num_workers=0", "checkpoint.best=null", "tracker.media=true", "train.max_steps=4")


class Telling(Classification):
    """Shows what it was given, as a text."""

    def illustrate(self, model: nn.Module, evaluation: Evaluation, samples: Iterable[Batch]) -> dict[str, str]:
        assert not model.training
        assert not torch.is_grad_enabled()
        keys = [key for batch in samples for key in batch.sample_keys if key]
        labels = evaluation.tables["confusion"].sum()
        return {"keys": "\n".join(keys), "counted": str(int(labels))}


class Failing(Classification):
    """Cannot draw."""

    def illustrate(self, model: nn.Module, evaluation: Evaluation, samples: Iterable[Batch]) -> dict[str, str]:
        raise ZeroDivisionError


class Shrugging(Classification):
    """Returns nothing."""

    def illustrate(self, model: nn.Module, evaluation: Evaluation, samples: Iterable[Batch]) -> None:
        pass


def train(run_dir: Path, ranks: int, task: type, *overrides: str) -> None:
    chosen = {override.partition("=")[0] for override in overrides}
    small = [override for override in SMALL if override.partition("=")[0] not in chosen]
    train_on(ranks, run_dir, *small, f"task._target_={__name__}.{task.__name__}", *overrides)


def drawn(run_dir: Path, name: str) -> list[str]:
    return sorted(path.name for path in (run_dir / "media" / name).glob("*"))


def test_a_task_draws_on_one_rank_from_the_whole_evaluation_set_in_its_order_in_the_last_evaluation(
    tmp_path: Path, digits: Path
) -> None:
    train(tmp_path, 2, Telling, "train.eval_every=2")
    assert drawn(tmp_path, "keys") == drawn(tmp_path, "counted") == ["step-000000004.txt"]
    assert drawn(tmp_path, "confusion") == ["step-000000004.png"]
    keys = (tmp_path / "media" / "keys" / "step-000000004.txt").read_text().splitlines()
    stored = []
    for shard in sorted(digits.glob("test-*.tar")):
        with tarfile.open(shard) as tar:
            stored += [f"{shard.name}/{Path(name).stem}" for name in tar.getnames() if name.endswith(".png")]
    assert keys == stored
    assert len(keys) == 360
    assert (tmp_path / "media" / "counted" / "step-000000004.txt").read_text() == "360"


@pytest.mark.slow
def test_before_the_last_evaluation_pictures_are_drawn_once_in_a_while_and_change_nothing_of_what_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "without", 1, Telling, "train.eval_every=1", "tracker.media=false")
    monkeypatch.setattr(illustration, "SECONDS_BETWEEN", -1.0)
    train(tmp_path / "with", 1, Telling, "train.eval_every=1")
    assert drawn(tmp_path / "with", "keys") == [f"step-00000000{step}.txt" for step in (1, 2, 3, 4)]
    assert not (tmp_path / "without" / "media").exists()
    assert metrics(tmp_path / "with") == metrics(tmp_path / "without")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "said"),
    [(Failing, "ZeroDivisionError"), (Shrugging, "Shrugging.illustrate returned a NoneType, want names")],
)
def test_a_fault_in_a_drawing_is_shown_and_costs_no_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[Any], task: type, said: str
) -> None:
    with pytest.raises(RanksFailed):
        train(tmp_path, 1, task, "train.eval_every=0")
    assert said in capfd.readouterr().err
    assert Checkpoints(tmp_path / "checkpoints").steps() == [4]

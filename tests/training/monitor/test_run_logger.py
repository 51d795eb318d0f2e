from __future__ import annotations

import json
import os
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.config.schema import Config, TrainConfig
from dtrain.data import Batch, ShardLoader
from dtrain.runs.run_spec import RunSpec
from dtrain.tasks import Classification
from dtrain.training.checkpoint.checkpoints import Checkpoints
from dtrain.training.checkpoint.state import TrainState
from dtrain.training.monitor import run_logger
from dtrain.training.monitor.run_logger import banner_rows, write_final_status
from dtrain.training.schedule import WarmupConstant
from dtrain.training.task import Evaluation
from tests.ranks import RanksFailed
from tests.shards import VECTOR_FIELDS, write_vectors
from tests.toys import Net, NetWithBatchNorm, train_step, world
from tests.whole_runs import metrics, train_on

# -- illustration


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


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
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


@pytest.mark.usefixtures("digits")
@pytest.mark.slow
def test_before_the_last_evaluation_pictures_are_drawn_once_in_a_while_and_change_nothing_of_what_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "without", 1, Telling, "train.eval_every=1", "tracker.media=false")
    monkeypatch.setattr(run_logger, "SECONDS_BETWEEN", -1.0)
    train(tmp_path / "with", 1, Telling, "train.eval_every=1")
    assert drawn(tmp_path / "with", "keys") == [f"step-00000000{step}.txt" for step in (1, 2, 3, 4)]
    assert not (tmp_path / "without" / "media").exists()
    assert metrics(tmp_path / "with") == metrics(tmp_path / "without")


@pytest.mark.usefixtures("digits")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "message"),
    [(Failing, "ZeroDivisionError"), (Shrugging, "Shrugging.illustrate returned a NoneType")],
)
def test_a_fault_in_a_drawing_is_shown_and_costs_no_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[Any], task: type, message: str
) -> None:
    with pytest.raises(RanksFailed):
        train(tmp_path, 1, task, "train.eval_every=0")
    assert message in capfd.readouterr().err
    assert Checkpoints(tmp_path / "checkpoints").steps() == [4]


# -- banner


@pytest.fixture
def shards(tmp_path: Path) -> str:
    return write_vectors(tmp_path, 50)


def rows(
    shards: str,
    run_dir: Path,
    precision: str = "bf16",
    ranks: int = 3,
    evaluated: bool = True,
    model: nn.Module | None = None,
    **options: Any,
) -> dict[str, str]:
    cfg = Config(train=TrainConfig(global_batch_size=16))
    model = model or Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True, fused=True)
    loader = ShardLoader(
        shards,
        VECTOR_FIELDS,
        global_batch_size=16,
        micro_batch_size=3,
        world_size=ranks,
        num_workers=0,
        precision=precision,
    )
    cfg.train.max_steps = 120
    run = TrainState(
        cfg=cfg,
        run_dir=run_dir,
        train_loader=loader,
        eval_loader=loader if evaluated else None,
        step=train_step(model, optimizer, world=world(0, ranks), precision=precision, **options),
        checkpoints=Checkpoints(run_dir / "checkpoints"),
    )
    return banner_rows(RunSpec("mine", run_dir, {}, (), ()), run, "new", last_step=12)


def test_the_banner_says_what_was_derived(shards: str, tmp_path: Path) -> None:
    shown = rows(shards, tmp_path)
    assert shown["run"] == "mine"
    assert shown["directory"] == str(tmp_path)
    assert shown["starts"] == "new"
    assert shown["ranks"] == "3 on CPU, gloo"
    assert shown["precision"].startswith("bf16 (autocast bf16")
    assert shown["train data"] == shown["eval data"] == "50 samples in 3 shards"
    # 16 samples on 3 ranks are 6 each at most: 2 micro-batches of 3 rows, 18 rows in all.
    assert shown["global batch"] == "16 = 3 ranks x 2 micro-batches x 3 rows (2 masked)"
    assert shown["steps"] == "12 (4 an epoch), schedule over 120"
    assert shown["model"] == "21 parameters, AdamW (fused)"
    assert "torch 2." in shown["versions"]
    assert shown["records"] == "metrics.jsonl"
    assert "x bfloat16" in shown["transfer"]
    assert shown["groups"] == ""
    own = rows(shards, tmp_path, schedule=WarmupConstant(horizon=500, warmup=10))
    assert own["steps"] == "12 (4 an epoch), schedule over 500"


def test_the_banner_has_the_learning_rates_of_groups() -> None:
    head, rest = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    groups = [
        {"params": [*head.parameters()], "lr": 6e-3, "name": "head"},
        {"params": [*rest.parameters()], "name": "default"},
    ]
    step = train_step(torch.nn.Sequential(head, rest), torch.optim.AdamW(groups, lr=2e-3))
    step.optimizer.param_groups[0]["lr"] = 1e-9  # as the schedule may have left it in a checkpoint
    run: Any = SimpleNamespace(optimizer=step.optimizer, step=step)
    assert run_logger._groups(run) == "head lr 6.0e-03, default lr 2.0e-03"


def test_the_banner_says_what_keeps_masked_rows_in_batchnorm(shards: str, tmp_path: Path) -> None:
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(NetWithBatchNorm())
    assert "SyncBatchNorm" in rows(shards, tmp_path, model=synchronised)["BatchNorm"]
    assert [rows(shards, tmp_path, model=model)["BatchNorm"] for model in (Net(), NetWithBatchNorm())] == ["", ""]


@pytest.mark.parametrize(("precision", "scaled"), [("fp16", True), ("fp32", False)])
def test_loss_scaling_is_shown_where_there_is_some(shards: str, tmp_path: Path, precision: str, scaled: bool) -> None:
    assert ("loss scaling" in rows(shards, tmp_path, precision)["precision"]) == scaled


def test_a_run_without_evaluation_and_without_masked_rows_says_so(shards: str, tmp_path: Path) -> None:
    cfg = rows(shards, tmp_path, evaluated=False)
    assert cfg["eval data"] == "none"


def test_a_run_whose_output_nobody_reads_ends_as_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    run: Any = SimpleNamespace(
        world=SimpleNamespace(rank=0),
        step=SimpleNamespace(step=3),
        run_dir=tmp_path,
        status_entries=lambda: {"trained_seconds": 1.0},
    )
    with open(write, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        write_final_status(run, "finished", None, 3)
        monkeypatch.undo()
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "finished"

"""``train.micro_batch_size=auto``: the largest micro-batch that fits on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.data import Batch
from dtrain.tasks import Classification
from dtrain.training import micro_batch
from dtrain.training.task import Output
from tests.ranks import RanksFailed
from tests.whole_runs import metrics, torchrun, train_on

pytestmark = pytest.mark.usefixtures("digits")
SMALL = (
    *("model._target_=tests.memory_faults.Layers", "model.width=64", "train.max_steps=3", "train.eval_every=0"),
    *("train.log_every=1", "checkpoint.best=null"),
)


class Limited(Classification):
    """A task that has memory for so many rows, on rank 0 twice as many as on others."""

    def __init__(self, rows: int = 9) -> None:
        super().__init__()
        self._rows = rows

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        rank = torch.distributed.get_rank()
        if model.training and len(batch.valid) > self._rows * (2 - min(rank, 1)):
            raise MemoryError("injected")
        return super().__call__(model, batch)


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU kills what exceeds its memory, so there is nothing to find there."""
    monkeypatch.setattr(micro_batch, "_has_limit", lambda device: True)


def train(ranks: int, run_dir: Path, *overrides: str) -> dict[str, Any]:
    auto = ("train.micro_batch_size=auto",) if not any("micro_batch_size" in each for each in overrides) else ()
    train_on(ranks, run_dir, *SMALL, *auto, *overrides)
    path = run_dir / micro_batch.FILE
    return dict(json.loads(path.read_text())) if path.exists() else {}


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_all_ranks_take_the_smallest_of_their_sizes_and_the_result_stays(tmp_path: Path) -> None:
    limited = f"task._target_={__name__}.Limited"
    found = train(2, tmp_path / "auto", limited, "task.rows=9")
    assert found["micro_batch_size"] == 8
    assert found["rows_of_a_rank"] == 32
    train(2, tmp_path / "fixed", limited, "task.rows=99", "train.micro_batch_size=32")
    losses = [metrics(tmp_path / name, "train/loss") for name in ("auto", "fixed")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_a_later_start_does_not_search_again(tmp_path: Path) -> None:
    train(1, tmp_path / "run")
    done = torchrun(1, f"run.dir={tmp_path / 'run'}", "train.max_steps=4", "tracker=none")
    assert done.returncode == 0, done.stderr
    assert "as found by an earlier start" in done.stdout


def test_a_cpu_takes_the_whole_share_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train(1, tmp_path / "run")["micro_batch_size"] == 64
    assert "micro-batches of 64 rows: a CPU has no limit" in capfd.readouterr().out


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_not_even_one_row(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RanksFailed):
        train(2, tmp_path / "run", f"task._target_={__name__}.Limited", "task.rows=0")
    assert "train.micro_batch_size=auto: on some rank not even one row fits" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_sharded_model_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RanksFailed):
        train(2, tmp_path / "run", "parallel=fsdp")
    shown = capfd.readouterr().err
    assert "train.micro_batch_size: got auto" in shown
    assert "dtrain doctor memory" in shown


def test_another_word_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RanksFailed):
        train(1, tmp_path / "run", "train.micro_batch_size=most")
    assert "train.micro_batch_size: got 'most', want a number of rows, auto, or null" in capfd.readouterr().err

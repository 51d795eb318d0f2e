"""Whole runs of two ranks on an iterable dataset."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from tests.ranks import RanksFailed
from tests.refusals import assert_refused
from tests.whole_runs import metrics, train_on, weights

COUNT = 100


class Line(IterableDataset[dict[str, np.ndarray]]):
    """Points of y = 2 x, divided among ranks and workers; rank 1 may end early."""

    def __init__(self, missing: int = 0) -> None:
        self.missing = missing

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        end = COUNT - (self.missing if rank == 1 else 0)
        for n in range(rank + worker * world_size, end, world_size * workers):
            x = np.float32([[n / COUNT]])
            yield {"x": x, "y": 2 * x}


def arguments(missing: int = 0) -> list[str]:
    return [
        "data=iterable",
        "~data.train.function",  # of the experiment
        f"data.train.dataset={{_target_: tests.training.test_stream_runs.Line, missing: {missing}}}",
        f"data.train.length={COUNT}",
        "data.train.divided=true",
        "data.eval=${data.train}",
        "~data.fields.image",
        "~data.fields.label",
        "+data.fields.x={name: x, role: feature}",
        "+data.fields.y={name: y, role: target}",
        "train.global_batch_size=16",
        "train.max_epochs=2",
        "data.num_workers=2",
        "checkpoint.every_steps=3",
    ]


@pytest.mark.slow
def test_a_run_on_a_stream_goes_on_in_the_middle_of_an_epoch_exactly(tmp_path: Path) -> None:
    train_on(2, tmp_path / "whole", *arguments(), experiment="line")
    train_on(2, tmp_path / "parts", *arguments(), "train.max_steps=10", experiment="line")
    train_on(2, tmp_path / "parts", *arguments(), experiment="line")
    steps = 2 * 7  # 100 samples in global batches of 16
    whole, parts = weights(tmp_path / "whole", steps), weights(tmp_path / "parts", steps)
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    assert metrics(tmp_path / "whole", "eval/samples")[-1] == COUNT
    losses = metrics(tmp_path / "whole")
    assert len(losses) == steps
    assert losses[7] < losses[0]  # of the same samples, an epoch later


@pytest.mark.slow
def test_a_stream_that_ends_early_on_one_rank_is_one_message_and_no_hang(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RanksFailed) as failed:
        train_on(2, tmp_path, *arguments(missing=10), experiment="line")
    assert set(failed.value.reports) == {0, 1}
    assert not failed.value.hung
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("dtrain: error: ")]
    assert len(errors) == 1
    assert_refused(errors[0], "rank 1", "45", "50", "length")

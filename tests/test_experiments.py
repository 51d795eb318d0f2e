from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.runs import metrics, torchrun, train_on


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_digits_reaches_97_percent_on_two_ranks(tmp_path: Path, precision: str) -> None:
    done = torchrun(
        2, "experiment=digits", f"run.dir={tmp_path}", f"precision={precision}", "tracker=none", timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path, "eval/accuracy")[-1] >= 0.97


@pytest.mark.slow
@pytest.mark.skipif("DTRAIN_TEST_CIFAR10" not in os.environ, reason="DTRAIN_TEST_CIFAR10 names no folder of shards")
def test_cifar10_learns_from_read_only_jpeg_shards(tmp_path: Path) -> None:
    before = sorted(os.listdir(os.environ["DTRAIN_TEST_CIFAR10"]))
    train_on(2, tmp_path, "train.max_epochs=1", "train.log_every=20", experiment="cifar10")
    losses = metrics(tmp_path)
    assert losses[0] == pytest.approx(2.3, abs=0.1)  # chance: ln 10
    assert losses[-1] < 1.8
    assert metrics(tmp_path, "eval/accuracy")[-1] > 0.3
    assert sorted(os.listdir(os.environ["DTRAIN_TEST_CIFAR10"])) == before

"""Runs on data that are in no shards: the entry point itself, through the presets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtrain.data import digits
from tests.ranks import RanksFailed
from tests.runs import metrics, records, status, train_on

pytestmark = pytest.mark.usefixtures("digits")
HERE = "tests.training.test_data_sources"
SMALL = ("model.width=4", "data.num_workers=0", "checkpoint.every_minutes=null", "checkpoint.best=null")


class Digits:
    """Map-style: a dict for each sample."""

    def __init__(self, split: str, count: int = 100) -> None:
        self._arrays = digits.arrays(split)
        self._count = count
        self.fingerprint = "v1"

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, sample: int) -> dict[str, Any]:
        return {name: array[sample] for name, array in self._arrays.items()}


class DiskThatGoes(Digits):
    """Nothing can be read from sample 48 on."""

    def __getitem__(self, sample: int) -> dict[str, Any]:
        if sample >= 48:
            raise OSError("no such device")
        return super().__getitem__(sample)


def noise(sample: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"image": rng.integers(0, 256, (8, 8, 3), dtype=np.uint8), "label": sample % 10}


def test_digits_in_memory_give_the_losses_of_digits_in_shards(tmp_path: Path) -> None:
    common = (*SMALL, "train.max_steps=6", "data.shuffle=none")
    train_on(1, tmp_path / "shards", *common)
    train_on(2, tmp_path / "memory", "data=memory", *common)
    assert metrics(tmp_path / "memory") == pytest.approx(metrics(tmp_path / "shards"), rel=1e-4)
    name = "eval/accuracy"
    assert metrics(tmp_path / "memory", name) == pytest.approx(metrics(tmp_path / "shards", name), abs=1 / 360)


def test_a_map_style_data_set_is_trained_on_and_resumed_on_other_ranks(tmp_path: Path) -> None:
    target = f"data.train={{_target_: {HERE}.Digits, split: train}}"
    data = ("data=map", target, "data.fields.image.size=null")
    evaluated = f"data.eval={{_target_: {HERE}.Digits, split: test, count: 30}}"
    for ranks, end in ((2, 3), (1, 7)):
        options = ("train.global_batch_size=16", f"train.max_steps={end}", "data.record_keys=true")
        train_on(ranks, tmp_path, *data, evaluated, *SMALL, *options)
    lines = [json.loads(line) for path in tmp_path.glob("logs/keys-*") for line in path.read_text().splitlines()]
    assert sorted(key for line in lines for key in line["keys"]) == sorted(f"Digits/{number}" for number in range(100))
    assert records(tmp_path)[-1]["eval/samples"] == 30


def test_generated_samples_are_trained_on_by_as_many_workers_as_they_need(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = f"{{_target_: dtrain.data.Generated, length: 40, function: {{_target_: {HERE}.noise, _partial_: true}}}}"
    data = ("data=map", f"data.train={target}", "data.fields.image.size=null", "data.num_workers=auto")
    small = (option for option in SMALL if "num_workers" not in option)
    train_on(1, tmp_path, *data, *small, "train.global_batch_size=16", "train.max_steps=4")
    assert len(metrics(tmp_path)) == 4
    said = " ".join(capfd.readouterr().out.split())
    assert "40 samples of Generated" in said
    assert "for each rank (a micro-batch takes" in said


@pytest.mark.slow
def test_a_row_of_bad_samples_ends_the_run_on_every_rank_alike(tmp_path: Path) -> None:
    target = f"data.train={{_target_: {HERE}.DiskThatGoes, split: train}}"
    data = ("data=map", target, "data.fields.image.size=null", "data.shuffle=none")
    budget = ("data.max_bad=1000", "data.max_bad_consecutive=20", "train.global_batch_size=16", "train.max_epochs=1")
    with pytest.raises(RanksFailed) as failed:
        train_on(2, tmp_path, *data, *budget, *SMALL)
    assert set(failed.value.reports) == {0, 1}
    assert not failed.value.hung
    assert status(tmp_path)["state"] == "failed"
    told = "32 samples in a row could not be read, more than data.max_bad_consecutive=20 allows"
    assert told in status(tmp_path)["reason"]

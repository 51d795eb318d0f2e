from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dtrain.config.run import Run
from dtrain.config.schema import Config
from dtrain.data import ShardLoader
from dtrain.precision import Precision
from dtrain.training.banner import banner
from dtrain.training.parts import Parts, Progress
from tests.training.shards import FIELDS, numbered_shards
from tests.training.test_state import OPTIMIZERS
from tests.training.toys import Net, squared_error, train_step, world


@pytest.fixture
def shards(tmp_path: Path) -> str:
    return numbered_shards(tmp_path, 50)


def rows(shards: str, run_dir: Path, precision: str = "bf16", ranks: int = 3, evaluated: bool = True) -> dict[str, str]:
    cfg: Config = OmegaConf.merge(OmegaConf.structured(Config), {"train": {"global_batch_size": 16}})  # type: ignore[assignment]
    model = Net()
    optimizer = OPTIMIZERS["AdamW, amsgrad, fused"](model.parameters())
    loader = ShardLoader(
        shards, FIELDS, global_batch_size=16, micro_batch_size=3, world_size=ranks, num_workers=0, precision=precision
    )
    parts = Parts(
        cfg, run_dir, world(0, ranks), Precision(precision), loader, loader if evaluated else None, model,
        squared_error, optimizer, train_step(model, optimizer), None, Progress(),
    )  # fmt: skip
    run = Run("mine", run_dir, {}, (), ())
    return banner(run, parts, "new", last_step=12, horizon=120)


def test_the_banner_says_what_was_derived(shards: str, tmp_path: Path) -> None:
    told = rows(shards, tmp_path)
    assert told["run"] == "mine"
    assert told["directory"] == str(tmp_path)
    assert told["starts"] == "new"
    assert told["ranks"] == "3 on CPU, gloo"
    assert told["precision"].startswith("bf16 (autocast bf16")
    assert told["train data"] == told["eval data"] == "50 samples in 3 shards"
    # 16 samples on 3 ranks are 6 each at most: 2 micro-batches of 3 rows, 18 rows in all.
    assert told["global batch"] == "16 = 3 ranks x 2 micro-batches x 3 rows (2 masked)"
    assert told["steps"] == "12 (4 an epoch), schedule over 120"
    assert told["model"] == "21 parameters, AdamW (fused)"
    assert "torch 2." in told["versions"]
    assert "x bfloat16" in told["on the wire"]


@pytest.mark.parametrize(("precision", "scaled"), [("fp16", True), ("fp32", False)])
def test_loss_scaling_is_told_where_there_is_some(shards: str, tmp_path: Path, precision: str, scaled: bool) -> None:
    assert ("loss scaling" in rows(shards, tmp_path, precision)["precision"]) == scaled


def test_a_run_without_evaluation_and_without_masked_rows_says_so(shards: str, tmp_path: Path) -> None:
    cfg = rows(shards, tmp_path, evaluated=False)
    assert cfg["eval data"] == "none"

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from dtrain.config.errors import ConfigError
from dtrain.config.schema import Config
from dtrain.data import Batch, ShardLoader
from dtrain.precision import Precision
from dtrain.precision.loss_scale import LossScale
from dtrain.training.checkpoints import Checkpoints
from dtrain.training.ema import Ema
from dtrain.training.parts import Parts, Progress
from dtrain.training.step import Outcome
from dtrain.training.task import Output
from tests.training.shards import FIELDS, numbered_shards
from tests.training.toys import CPU, NetWithBatchNorm, train_step, world


class Tied(nn.Module):
    """An image made of three numbers, a channels_last convolution, BatchNorm, tied weights, dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.other.weight = self.one.weight
        self.dropout = nn.Dropout(0.5)
        self.temperature = nn.Parameter(torch.ones(()))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        images = x[:, :, None, None].expand(-1, -1, 4, 4).contiguous(memory_format=torch.channels_last)
        features = self.dropout(self.norm(self.conv(images))).mean((2, 3))
        return self.other(self.one(features)).sum(1, keepdim=True) * self.temperature


def odd_or_even(model: nn.Module, batch: Batch) -> Output:
    losses = (model(batch["x"]).squeeze(1).float() - batch["number"] % 2).square()
    return Output(losses.masked_fill(~batch.valid, 0).sum(), batch.valid.sum())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, amsgrad=True, fused=True)


@dataclass
class Setting:
    """How a start differs from another one."""

    precision: str = "fp32"
    ema_decay: float | None = 0.75
    optimizer: Callable[..., torch.optim.Optimizer] = adamw
    model: Callable[[], nn.Module] = Tied
    scale: float = 1024.0
    growth_interval: int = 3


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered_shards(tmp_path_factory.mktemp("shards"), 50)


def start(shards: str, run_dir: Path, setting: Setting) -> Parts:
    """What the main makes from a config, before anything is restored."""
    cfg: Config = OmegaConf.structured(Config)
    cfg.precision.loss_scale.growth_interval = setting.growth_interval
    model = setting.model()
    loader = ShardLoader(shards, FIELDS, global_batch_size=8, num_workers=0, precision=setting.precision)
    ema = Ema(model, setting.ema_decay) if setting.ema_decay is not None else None
    optimizer = setting.optimizer(model.parameters())
    scales = setting.precision == "fp16"
    step = train_step(
        model,
        optimizer,
        task=odd_or_even,
        precision=setting.precision,
        nominal=8,
        schedule=lambda applied_steps: 1 / (1 + applied_steps),
        loss_scale=LossScale(CPU, init=setting.scale, growth_interval=setting.growth_interval) if scales else None,
        ema=ema,
        seed=3,
    )
    precision = Precision(setting.precision)
    return Parts(cfg, run_dir, world(), precision, loader, None, model, odd_or_even, optimizer, step, ema, Progress())


def go_on(parts: Parts, steps: int, overflow_at: int | None = None) -> list[Outcome]:
    """Some steps of the loop."""
    outcomes = []
    batches = iter(parts.train_loader)
    for _ in range(steps):
        batch = next(batches)
        if parts.step.step == overflow_at:
            batch["x"][0] = torch.inf
        parts.step.accumulate([batch], 1)
        parts.step.apply()
        outcome = parts.step.settle()
        assert outcome is not None
        outcomes.append(outcome)
        parts.progress.samples += parts.train_loader.commit()
        if parts.train_loader.position[1] == 0:
            batches = iter(parts.train_loader)
    parts.train_loader.close()
    return outcomes


def everything(parts: Parts) -> dict[str, Any]:
    """All that a run consists of, as text where it is not a tensor."""
    tensors: dict[str, Any] = {f"model {name}": tensor for name, tensor in parts.model.state_dict().items()}
    if parts.ema is not None:
        tensors |= {f"ema {name}": tensor for name, tensor in parts.ema.averaged().state_dict().items()}
    for number, parameter in enumerate(parts.model.parameters()):
        tensors |= {f"optimizer {number} {key}": value for key, value in parts.optimizer.state[parameter].items()}
    scale = parts.step.loss_scale
    tensors["counters"] = repr((parts.step.state_dict(), parts.train_loader.state_dict(), parts.progress))
    tensors["scale"] = repr(scale.state_dict() if scale is not None else None)
    return tensors


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        assert same, name


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True)


@pytest.mark.parametrize(
    "setting",
    [
        Setting(),
        Setting(precision="fp16"),
        Setting(precision="bf16", ema_decay=None, optimizer=sgd),
        Setting(model=NetWithBatchNorm, optimizer=lambda p: torch.optim.NAdam(p, lr=0.01)),
    ],
    ids=["fp32", "fp16", "bf16, SGD, no average", "NAdam"],
)
def test_a_run_taken_apart_and_put_together_again_goes_on_bit_for_bit(
    shards: str, tmp_path: Path, setting: Setting
) -> None:
    whole = start(shards, tmp_path, setting)
    losses = [repr(outcome) for outcome in go_on(whole, 12, overflow_at=4)]

    before = start(shards, tmp_path, setting)
    go_on(before, 5, overflow_at=4)
    Checkpoints(tmp_path).save(5, before.checkpoint({}))
    after = start(shards, tmp_path, setting)
    after.restore(Checkpoints(tmp_path).load(5))
    assert_same(everything(after), everything(before))
    assert [repr(outcome) for outcome in go_on(after, 7)] == losses[5:]
    assert_same(everything(after), everything(whole))
    if isinstance(after.model, Tied):
        assert after.model.one.weight is after.model.other.weight
        momentum = next(value for value in after.optimizer.state[after.model.conv.weight].values() if value.dim() == 4)
        assert momentum.stride() == after.model.conv.weight.stride()


def test_a_checkpoint_is_a_copy_that_later_steps_do_not_change(shards: str, tmp_path: Path) -> None:
    parts = start(shards, tmp_path, Setting(precision="fp16"))
    go_on(parts, 2)
    taken = parts.checkpoint({})
    before = copy.deepcopy(taken)
    go_on(parts, 3)
    for group, tensors in before.tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, taken.tensors[group][name])
    assert taken.state == before.state


def restored(shards: str, tmp_path: Path, before: Parts, setting: Setting) -> Parts:
    Checkpoints(tmp_path).save(before.step.step, before.checkpoint({}))
    after = start(shards, tmp_path, setting)
    after.restore(Checkpoints(tmp_path).load(before.step.step))
    return after


def test_an_average_that_is_switched_on_begins_with_the_weights(shards: str, tmp_path: Path) -> None:
    before = start(shards, tmp_path, Setting(ema_decay=None))
    go_on(before, 3)
    after = restored(shards, tmp_path, before, Setting(ema_decay=0.5))
    assert after.ema is not None
    assert_same(dict(after.ema.averaged().state_dict()), dict(before.model.state_dict()))
    go_on(after, 1)
    for average, weight, first in zip(
        after.ema.averaged().parameters(), after.model.parameters(), before.model.parameters(), strict=True
    ):
        torch.testing.assert_close(average, (weight + first) / 2, rtol=1e-5, atol=1e-6)


def test_an_average_that_is_switched_off_is_left_behind(shards: str, tmp_path: Path) -> None:
    before = start(shards, tmp_path, Setting())
    go_on(before, 3)
    after = restored(shards, tmp_path, before, Setting(ema_decay=None))
    assert_same(dict(after.model.state_dict()), dict(before.model.state_dict()))
    assert "ema" not in after.checkpoint({}).tensors


@pytest.mark.parametrize(("first", "then"), [("fp32", "fp16"), ("fp16", "fp32"), ("bf16", "fp16"), ("fp16", "bf16")])
def test_a_run_goes_on_in_another_precision(shards: str, tmp_path: Path, first: str, then: str) -> None:
    before = start(shards, tmp_path, Setting(first, scale=512.0))
    go_on(before, 3)
    after = restored(shards, tmp_path, before, Setting(then, scale=256.0))
    assert_same(dict(after.model.state_dict()), dict(before.model.state_dict()))
    scale = after.step.loss_scale
    assert (float(scale.scale) if scale is not None else None) == (256.0 if then == "fp16" else None)
    assert all(outcome.tally.applied for outcome in go_on(after, 3))


def test_the_scale_goes_on_and_how_it_adapts_is_config(shards: str, tmp_path: Path) -> None:
    before = start(shards, tmp_path, Setting("fp16", scale=512.0, growth_interval=100))
    go_on(before, 3, overflow_at=1)
    after = restored(shards, tmp_path, before, Setting("fp16", scale=64.0, growth_interval=2))
    assert after.step.loss_scale is not None
    assert float(after.step.loss_scale.scale) == 256.0
    go_on(after, 1)
    assert float(after.step.loss_scale.scale) == 512.0


def test_another_data_set_is_refused(shards: str, tmp_path: Path) -> None:
    before = start(shards, tmp_path, Setting())
    go_on(before, 1)
    (tmp_path / "other").mkdir()
    other = numbered_shards(tmp_path / "other", 49)
    with pytest.raises(ConfigError, match="data: the data set changed"):
        restored(other, tmp_path, before, Setting())


def test_another_model_is_refused(shards: str, tmp_path: Path) -> None:
    before = start(shards, tmp_path, Setting())
    go_on(before, 1)
    with pytest.raises(ConfigError, match=r"the checkpoint is of another model: .* is missing"):
        restored(shards, tmp_path, before, Setting(model=NetWithBatchNorm))

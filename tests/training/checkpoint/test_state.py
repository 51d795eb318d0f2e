from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from dtrain.config.schema import Config
from dtrain.data import Batch, ShardLoader
from dtrain.errors import ConfigError
from dtrain.precision.loss_scale import LossScale
from dtrain.training.checkpoint.checkpoints import Checkpoint, Checkpoints
from dtrain.training.checkpoint.state import (
    RunTotals,
    TrainState,
    changed_groups,
    group_values,
    host_copy,
    load_module,
    load_optimizer,
    load_weights,
    optimizer_state,
)
from dtrain.training.checkpoint.tensors import contiguous
from dtrain.training.setup.ema import Ema
from dtrain.training.step import StepOutcome
from dtrain.training.task import Output
from tests.refusals import refused
from tests.shards import VECTOR_FIELDS, write_vectors
from tests.toys import CPU, NetWithBatchNorm, averages, train_step

# -- state


class Model(nn.Module):
    """A convolution in channels_last, tied weights, a scalar, one parameter that is frozen and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)
        self.tied, self.again = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.again.weight = self.tied.weight
        self.temperature = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        return self.again(self.tied(self.conv(images).mean((2, 3)))) * self.temperature

    def trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]


class Counting(torch.optim.Optimizer):
    """Keeps Python numbers: one for each parameter, and in its group a step size that it adapts, as Prodigy does, and a
    factor in a tensor, as timm's Lamb."""

    def __init__(self, params: Any, lr: float = 0.1, d: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "d": d, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["d"] *= 1.5
            group["k"] = group.get("k", 0) + 1
            group["f"] = group.get("f", torch.tensor([1.0, 0.1])) * 1.1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    state["best"] = None
                    parameter.sub_(
                        parameter.grad, alpha=group["d"] * group["lr"] * group["f"].sum().item() / state["count"]
                    )


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD+momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "SGD+momentum, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "Adam, foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "AdamW, amsgrad, fused": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, fused=True),
    "Adagrad, fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "Python numbers": lambda p: Counting(p),
}


def train(model: Model, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(images.to(memory_format=torch.channels_last)).square().sum().backward()
        optimizer.step()


def on_disk(tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Through a file, which refuses tensors that share memory."""
    # A file of its own, because safetensors below 0.6 returns tensors that are mapped to the file.
    path = folder / f"{len(list(folder.iterdir()))}.safetensors"
    safetensors.torch.save_file(contiguous(host_copy(tensors)), path)
    return safetensors.torch.load_file(path)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit_from_a_saved_state(name: str, tmp_path: Path) -> None:
    whole, parts = Model(), Model()
    optimizer = OPTIMIZERS[name](whole.trainable())
    train(whole, optimizer, range(5))

    before = OPTIMIZERS[name](parts.trainable())
    built = group_values(before)
    train(parts, before, range(2))
    weights = on_disk(dict(parts.state_dict()), tmp_path)
    tensors, values = optimizer_state(before, parts)
    tensors, values = on_disk(tensors, tmp_path), json.loads(json.dumps(values))
    groups = json.loads(json.dumps(changed_groups(before, built)))

    resumed = Model()
    after = OPTIMIZERS[name](resumed.trainable())
    load_module(resumed, weights, "the checkpoint")
    load_optimizer(after, resumed, tensors, values, groups)
    train(resumed, after, range(2, 5))

    for key, tensor in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[key], tensor), key
    (_, want), (_, got) = optimizer_state(optimizer, whole), optimizer_state(after, resumed)
    assert got == want
    assert group_values(after) == group_values(optimizer)
    assert resumed.again.weight is resumed.tied.weight


def test_state_lies_in_memory_as_its_weight_does(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.trainable(), fused=True)
    train(model, optimizer, range(1))
    tensors, values = optimizer_state(optimizer, model)
    load_optimizer(optimizer, model, on_disk(tensors, tmp_path), values, [{}])
    weight = model.conv.weight
    assert not weight.is_contiguous()
    assert optimizer.state[weight]["exp_avg"].stride() == weight.stride()


def test_hyper_parameters_stay_those_of_the_config() -> None:
    model = Model()
    before = torch.optim.AdamW(model.trainable(), lr=0.1, weight_decay=0.5)
    built = group_values(before)
    train(model, before, range(2))
    assert changed_groups(before, built) == [{}]
    after = torch.optim.AdamW(model.trainable(), lr=0.2, weight_decay=0.25)
    load_optimizer(after, model, *optimizer_state(before, model), changed_groups(before, built))
    assert after.param_groups[0]["lr"] == 0.2
    assert after.param_groups[0]["weight_decay"] == 0.25


def test_the_order_of_parameters_does_not_matter() -> None:
    model = Model()
    before = torch.optim.Adam(model.trainable())
    train(model, before, range(2))
    after = torch.optim.Adam(model.trainable()[::-1])
    load_optimizer(after, model, *optimizer_state(before, model), [{}])
    assert torch.equal(after.state[model.conv.weight]["exp_avg"], before.state[model.conv.weight]["exp_avg"])


def test_the_state_of_a_parameter_that_is_not_trained_any_more_is_refused_by_name() -> None:
    model = Model()
    before = torch.optim.Adam(model.trainable())
    train(model, before, range(1))
    after = torch.optim.Adam([model.conv.weight])
    with pytest.raises(ConfigError, match=r"a state for [\w.]+, which this one does not train"):
        load_optimizer(after, model, *optimizer_state(before, model), [{}])


def test_groups_that_were_joined_or_split_are_refused_where_they_hold_state() -> None:
    model = Model()
    before = Counting(model.trainable())
    built = group_values(before)
    train(model, before, range(1))
    first, *others = model.trainable()
    after = Counting([{"params": [first]}, {"params": others}])
    with refused(ConfigError, "parameter groups", 1, 2):
        load_optimizer(after, model, *optimizer_state(before, model), changed_groups(before, built))


@pytest.mark.parametrize(
    ("kind", "options", "missing"),
    [
        (torch.optim.Adam, {"amsgrad": True}, "max_exp_avg_sq"),
        (torch.optim.AdamW, {"amsgrad": True}, "max_exp_avg_sq"),
        (torch.optim.RMSprop, {"centered": True}, "grad_avg"),
        (torch.optim.RMSprop, {"momentum": 0.5}, "momentum_buffer"),
    ],
)
def test_an_option_that_needs_a_state_which_was_never_made_is_refused_by_name(
    kind: Any, options: dict[str, Any], missing: str
) -> None:
    model = Model()
    before = kind(model.trainable())
    train(model, before, range(1))
    (option,) = options
    with refused(ConfigError, f"optimizer.{option}", "got", missing):
        load_optimizer(kind(model.trainable(), **options), model, *optimizer_state(before, model), [{}])
    after = kind(model.trainable(), **options)
    load_optimizer(after, model, {}, {}, [{}])  # before its first step a run has no state that could lack anything
    train(model, after, range(1))


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        (torch.optim.SGD, {}, {"momentum": 0.9}),
        (torch.optim.SGD, {"momentum": 0.9}, {}),
        (torch.optim.AdamW, {"amsgrad": True}, {}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}, {}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}, {"centered": True, "momentum": 0.5}),
    ],
)
def test_options_whose_state_is_there_or_can_be_made_later_may_change(
    kind: Any, before: dict[str, Any], after: dict[str, Any]
) -> None:
    model = Model()
    first = kind(model.trainable(), lr=0.1, **before)
    train(model, first, range(2))
    second = kind(model.trainable(), lr=0.1, **after)
    load_optimizer(second, model, *optimizer_state(first, model), [{}])
    train(model, second, range(2))


def test_an_optimizer_whose_state_is_a_list_is_refused_with_its_place() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.trainable(), lr=0.1)
    optimizer.state[model.conv.weight]["history"] = [torch.zeros(3)]  # as LBFGS does
    with refused(ConfigError, "SGD", "conv.weight/history", "list"):
        optimizer_state(optimizer, model)


def test_copies_share_no_memory_with_the_model_or_each_other() -> None:
    model = Model()
    copies = host_copy(model.state_dict())
    with torch.no_grad():
        model.tied.weight.fill_(7)
    assert not (copies["tied.weight"] == 7).any()
    assert copies["tied.weight"].data_ptr() != copies["again.weight"].data_ptr()
    assert not any(copy.requires_grad for copy in copies.values())


def test_the_layout_of_a_checkpoint_is_made_by_the_thread_that_writes(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    copies = host_copy(model.state_dict())
    assert copies["weight"].stride() == model.weight.stride()
    assert not copies["weight"].is_contiguous()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, Checkpoint({"model": copies}, {}))
    loaded = checkpoints.load(1).stored("model")
    assert all(torch.equal(loaded[name][...], tensor) for name, tensor in model.state_dict().items())


def test_weights_of_another_model_are_refused_before_anything_is_copied() -> None:
    model = Model()
    before = copy.deepcopy(model.state_dict())
    tensors = host_copy(model.state_dict())
    tensors["conv.bias"] = torch.zeros(5)
    tensors["head.weight"] = tensors.pop("frozen")
    tensors["tied.weight"] += 1
    with pytest.raises(ConfigError) as raised:
        load_module(model, tensors, "the checkpoint")
    for part in (
        "the checkpoint is from a different model",
        "frozen is missing",
        "head.weight is unknown to this model",
        "conv.bias has shape [5], the model has [4]",
    ):
        assert part in str(raised.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("stored", "own", "fits"),
    [
        (torch.tensor([300]), torch.int8, False),
        (torch.tensor([-1], dtype=torch.int8), torch.uint8, False),
        (torch.tensor([7, -128]), torch.int8, True),
        (torch.tensor([200], dtype=torch.uint8), torch.int16, True),
    ],
    ids=["too large", "negative", "narrower", "wider"],
)
def test_integers_are_loaded_only_if_the_models_dtype_holds_them(stored: Tensor, own: torch.dtype, fits: bool) -> None:
    model = nn.Module()
    model.register_buffer("codes", torch.zeros(len(stored), dtype=own))
    if fits:
        load_module(model, {"codes": stored}, "the checkpoint")
        assert model.state_dict()["codes"].tolist() == stored.tolist()
    else:
        with refused(ConfigError, "codes has values", str(stored.item()), str(own).removeprefix("torch.")):
            load_module(model, {"codes": stored}, "the checkpoint")
        assert not model.state_dict()["codes"].any()


def test_of_many_differences_a_few_are_named_and_the_others_counted() -> None:
    with refused(ConfigError, "and 15 more."):
        load_module(nn.Linear(1, 1), {f"layer{n}.weight": torch.zeros(1) for n in range(18)}, "the checkpoint")


@pytest.mark.parametrize(
    ("asked", "has_ema", "used", "value"), [("", True, "ema", 2.0), ("", False, "raw", 1.0), ("raw", True, "raw", 1.0)]
)
def test_weights_are_the_average_where_there_is_one_unless_asked_otherwise(
    asked: str, has_ema: bool, used: str, value: float
) -> None:
    model = nn.Linear(1, 1, bias=False)
    tensors = {"model": {"weight": torch.full((1, 1), 1.0)}}
    if has_ema:
        tensors["ema"] = {"weight": torch.full((1, 1), 2.0)}
    assert load_weights(model, Checkpoint(tensors, {}), asked) == used
    assert model.weight.item() == value


@pytest.mark.parametrize(("asked", "names"), [("ema", ["no moving average"]), ("best", ["got 'best'", "ema or raw"])])
def test_weights_that_are_not_there_are_refused(asked: str, names: list[str]) -> None:
    with refused(ConfigError, *names):
        load_weights(nn.Linear(1, 1), Checkpoint({"model": {}}, {}), asked)


# -- parts


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
    growth_factor: float = 2.0
    backoff_factor: float = 0.5


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_vectors(tmp_path_factory.mktemp("shards"), 50)


def start(shards: str, run_dir: Path, setting: Setting) -> TrainState:
    """What the main makes from a config, before anything is restored."""
    cfg = Config()
    for key in ("growth_interval", "growth_factor", "backoff_factor"):
        setattr(cfg.precision.loss_scale, key, getattr(setting, key))
    model = setting.model()
    loader = ShardLoader(shards, VECTOR_FIELDS, global_batch_size=8, num_workers=0, precision=setting.precision)
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
    return TrainState(
        cfg=cfg,
        run_dir=run_dir,
        train_loader=loader,
        eval_loader=None,
        step=step,
        checkpoints=Checkpoints(run_dir / "checkpoints"),
    )


def go_on(parts: TrainState, steps: int, overflow_at: int | None = None) -> list[StepOutcome]:
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
        parts.totals.samples += parts.train_loader.commit()
        if parts.train_loader.position[1] == 0:
            batches = iter(parts.train_loader)
    parts.train_loader.close()
    return outcomes


def everything(parts: TrainState) -> dict[str, Any]:
    """All that a run consists of, as text where it is not a tensor."""
    tensors: dict[str, Any] = {f"model {name}": tensor for name, tensor in parts.model.state_dict().items()}
    if parts.ema is not None:
        tensors |= {f"ema {name}": tensor for name, tensor in averages(parts.ema).items()}
    for number, parameter in enumerate(parts.model.parameters()):
        tensors |= {f"optimizer {number} {key}": value for key, value in parts.optimizer.state[parameter].items()}
    scale = parts.step.loss_scale
    tensors["counters"] = repr((parts.step.state_dict(), parts.train_loader.state_dict(), parts.totals))
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


def restored(shards: str, tmp_path: Path, before: TrainState, setting: Setting) -> TrainState:
    Checkpoints(tmp_path).save(before.step.step, before.checkpoint({}))
    after = start(shards, tmp_path, setting)
    after.restore(Checkpoints(tmp_path).load(before.step.step))
    return after


def test_an_average_that_is_switched_on_begins_with_the_weights(shards: str, tmp_path: Path) -> None:
    before = start(shards, tmp_path, Setting(ema_decay=None))
    go_on(before, 3)
    after = restored(shards, tmp_path, before, Setting(ema_decay=0.5))
    assert after.ema is not None
    assert_same(averages(after.ema), dict(before.model.state_dict()))
    go_on(after, 1)
    moved, first = averages(after.ema), before.model.state_dict()
    for name, weight in after.model.named_parameters():
        torch.testing.assert_close(moved[name], (weight + first[name]) / 2, rtol=1e-5, atol=1e-6)


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
    assert all(outcome.stats.applied for outcome in go_on(after, 3))


def test_the_scale_goes_on_and_how_it_adapts_is_config(shards: str, tmp_path: Path) -> None:
    before = start(shards, tmp_path, Setting("fp16", scale=512.0, growth_interval=100))
    go_on(before, 3, overflow_at=1)
    setting = Setting("fp16", scale=64.0, growth_interval=2, growth_factor=8.0, backoff_factor=0.25)
    after = restored(shards, tmp_path, before, setting)
    assert after.step.loss_scale is not None
    assert float(after.step.loss_scale.scale) == 256.0
    go_on(after, 1)
    assert float(after.step.loss_scale.scale) == 2048.0
    go_on(after, 1, overflow_at=4)
    assert float(after.step.loss_scale.scale) == 512.0


def test_another_data_set_is_refused(shards: str, tmp_path: Path) -> None:
    before = start(shards, tmp_path, Setting())
    go_on(before, 1)
    (tmp_path / "other").mkdir()
    other = write_vectors(tmp_path / "other", 49)
    with refused(ConfigError, "data: ", "changed"):
        restored(other, tmp_path, before, Setting())


def test_another_model_is_refused(shards: str, tmp_path: Path) -> None:
    before = start(shards, tmp_path, Setting())
    go_on(before, 1)
    with refused(ConfigError, "a different model", "is missing"):
        restored(shards, tmp_path, before, Setting(model=NetWithBatchNorm))


# -- progress


STATUS: dict[str, Any] = {
    "state": "running",
    "time": 1000.0,
    "restarts": 2,
    "lost_seconds": 5.0,
    "down_seconds": 10.0,
    "trained_seconds": 70.0,
}


@pytest.mark.parametrize("state", ["running", "stopped", "failed"])
def test_an_interruption_costs_what_was_trained_and_not_saved_and_the_time_without_a_process(state: str) -> None:
    progress = RunTotals(seconds=60.0)  # as the checkpoint counts it
    progress.add_restart(STATUS | {"state": state}, now=1030.0)
    assert (progress.restarts, progress.lost_seconds, progress.down_seconds) == (3, 15.0, 40.0)
    assert all(part in progress.interruptions() for part in ("3", "15 s", "40 s"))
    assert progress.times() == {"restarts": 3, "lost_seconds": 15.0, "down_seconds": 40.0, "trained_seconds": 60.0}


def test_an_interruption_never_costs_less_than_nothing() -> None:
    progress = RunTotals(seconds=80.0)  # the status is older than the checkpoint, and the clock was put back
    progress.add_restart(STATUS, now=990.0)
    assert (progress.restarts, progress.lost_seconds, progress.down_seconds) == (3, 5.0, 10.0)


def test_a_new_run_and_one_that_goes_on_after_its_end_were_not_interrupted() -> None:
    new, longer = RunTotals(), RunTotals(seconds=70.0)
    new.add_restart(None)
    longer.add_restart(STATUS | {"state": "finished"}, now=9999.0)
    assert new == RunTotals()
    assert new.interruptions() == ""
    assert (longer.restarts, longer.lost_seconds, longer.down_seconds) == (2, 5.0, 10.0)


def test_a_checkpoint_of_a_version_whose_evaluations_ran_to_their_end_has_none_due() -> None:
    assert not RunTotals(**{"samples": 640, "evaluations": 2}).evaluation_due


def test_the_status_of_a_version_that_did_not_count_is_a_first_interruption() -> None:
    progress = RunTotals()
    progress.add_restart({"state": "failed", "time": 1000.0}, now=1001.0)
    assert (progress.restarts, progress.lost_seconds, progress.down_seconds) == (1, 0.0, 1.0)

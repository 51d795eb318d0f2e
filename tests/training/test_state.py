from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from dtrain.config.errors import ConfigError
from dtrain.training.checkpoint import Checkpoint
from dtrain.training.state import (
    changed_groups,
    group_values,
    host_copy,
    load_module,
    load_optimizer,
    load_weights,
    optimizer_state,
)


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
    safetensors.torch.save_file(host_copy(tensors), folder / "x.safetensors")
    return safetensors.torch.load_file(folder / "x.safetensors")


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
    with pytest.raises(ConfigError, match="has 1 parameter groups that hold state, this one has 2"):
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
    with pytest.raises(ConfigError, match=rf"optimizer\.{option}: got .* needs a {missing}"):
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
    with pytest.raises(ConfigError, match=r"SGD keeps conv.weight/history as list"):
        optimizer_state(optimizer, model)


def test_copies_share_no_memory_with_the_model_or_each_other() -> None:
    model = Model()
    copies = host_copy(model.state_dict())
    with torch.no_grad():
        model.tied.weight.fill_(7)
    assert not (copies["tied.weight"] == 7).any()
    assert copies["tied.weight"].data_ptr() != copies["again.weight"].data_ptr()
    assert all(copy.is_contiguous() and not copy.requires_grad for copy in copies.values())


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
        "the checkpoint is of another model",
        "frozen is missing",
        "head.weight is unknown to this model",
        "conv.bias has shape [5], the model has [4]",
    ):
        assert part in str(raised.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_of_many_differences_a_few_are_named_and_the_others_counted() -> None:
    with pytest.raises(ConfigError, match=r"and 15 more\."):
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


@pytest.mark.parametrize(("asked", "said"), [("ema", "no moving average"), ("best", "got 'best', want ema or raw")])
def test_weights_that_are_not_there_are_refused(asked: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_weights(nn.Linear(1, 1), Checkpoint({"model": {}}, {}), asked)

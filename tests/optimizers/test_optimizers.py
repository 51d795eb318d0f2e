"""Groups of parameters, and Muon beside AdamW, against torch's own optimizers on the parameters of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dtrain.errors import ConfigError
from dtrain.models import GPT
from dtrain.training.checkpoint.optimizer_state import load_optimizer, optimizer_state
from dtrain.training.setup.optimizer import build_optimizer
from tests.refusals import refused


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=16, width=8, depth=1, heads=2, context=8)


class Plain(torch.optim.Optimizer):
    """An optimizer without weight decay."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})


def optimizer(model: nn.Module, **node: Any) -> torch.optim.Optimizer:
    return build_optimizer(node, model)


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    model(torch.randint(16, (2, 6), generator=generator)).square().sum().backward()


def test_norms_and_biases_and_named_parameters_have_no_weight_decay() -> None:
    model = gpt()
    node = {"_target_": "torch.optim.AdamW", "weight_decay": 0.1, "no_decay": ["vectors", "embedding.*"]}
    decayed, exempt = optimizer(model, **node).param_groups
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {
        f"blocks.0.{layer}.weight" for layer in ("attention.qkv", "attention.out", "mlp.0", "mlp.2")
    }
    assert len(decayed["params"]) + len(exempt["params"]) == len(names)


def test_without_no_decay_all_parameters_are_one_group() -> None:
    for node in ({}, {"no_decay": None}):
        assert len(optimizer(gpt(), _target_="torch.optim.SGD", lr=0.1, **node).param_groups) == 1


@pytest.mark.parametrize(
    ("node", "names"),
    [
        (
            {"_target_": "torch.optim.SGD", "no_decay": ["head.*"]},
            ["optimizer.no_decay: 'head.*' matches no trainable"],
        ),
        ({"_target_": "torch.optim.SGD", "no_decay": "vectors"}, ["optimizer.no_decay", "got 'vectors'"]),
        ({"_target_": "dtrain.optimizers.MuonWithAdamW", "no_decay": ["vectors"]}, ["makes its own groups"]),
        ({"_target_": "dtrain.optimizers.MuonWithAdamW", "adamw": ["head.*"]}, ["optimizer: 'head.*' matches no"]),
    ],
)
def test_impossible_groups_are_refused(node: dict[str, Any], names: list[str]) -> None:
    with refused(ConfigError, *names):
        optimizer(gpt(), **node)


GROUPS = {
    "attention": {"patterns": ["blocks.*.attention"], "lr": 10, "weight_decay": 0.5},
    "in": {"patterns": ["embedding"]},
}


def test_groups_have_factors_of_rate_and_decay_and_no_decay_holds_in_all_of_them() -> None:
    model = gpt()
    node = {"_target_": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.2, "no_decay": ["vectors"], "groups": GROUPS}
    groups = optimizer(model, **node).param_groups
    assert [(it["name"], it["lr"], it["weight_decay"]) for it in groups] == [
        ("default", 0.1, 0.2),
        ("default", 0.1, 0.0),
        ("attention", 1.0, 0.1),
        ("attention", 1.0, 0.0),
        ("in", 0.1, 0.2),
    ]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)] for p in groups[2]["params"]} == {
        f"blocks.0.attention.{part}.weight" for part in ("qkv", "out")
    }
    assert sum(len(it["params"]) for it in groups) == len(names)


def test_groups_train_as_those_that_torch_is_given() -> None:
    ours, theirs = gpt(), gpt()
    one = optimizer(ours, _target_="torch.optim.SGD", lr=1e-3, momentum=0.9, weight_decay=0.2, groups=GROUPS)
    attention = [p for name, p in theirs.named_parameters() if ".attention." in name]
    others = [p for name, p in theirs.named_parameters() if ".attention." not in name]
    groups = [{"params": others}, {"params": attention, "lr": 1e-2, "weight_decay": 0.1}]
    other = torch.optim.SGD(groups, lr=1e-3, momentum=0.9, weight_decay=0.2)
    for step in range(3):
        for model, each in ((ours, one), (theirs, other)):
            model.zero_grad()
            backward(model, step)
            each.step()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, theirs.get_parameter(name), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        ([1], ["got [1]", "{NAME: {patterns"]),
        ({"default": {"patterns": ["*"]}}, ["'default'", "want letters"]),
        ({"a/b": {"patterns": ["*"]}}, ["'a/b'", "want letters"]),
        ({"a": {"lr": 2}}, ["a: got {'lr': 2}", "want patterns"]),
        ({"a": {"patterns": ["*"], "rl": 2}}, ["'rl'", "Did you mean 'lr'?"]),
        ({"a": {"patterns": ["*"], "lr": 0}}, ["a.lr: got 0", "above 0", "train.freeze"]),
        ({"a": {"patterns": ["*"], "lr": "big"}}, ["a.lr: got 'big'", "want a factor"]),
        ({"a": {"patterns": ["*"], "weight_decay": -1}}, ["a.weight_decay: got -1", "want a factor"]),
        ({"a": {"patterns": ["embeding.*"]}}, ["'embeding.*'", "Near names: embedding"]),
        (
            {"a": {"patterns": ["embedding"]}, "b": {"patterns": ["*.weight"]}},
            ["embedding.weight is in a and in b", "Change the patterns"],
        ),
    ],
)
def test_impossible_factors_and_overlapping_groups_are_refused(groups: Any, names: list[str]) -> None:
    with refused(ConfigError, "optimizer.groups", *names):
        optimizer(gpt(), _target_="torch.optim.SGD", lr=0.1, groups=groups)


def test_an_optimizer_without_weight_decay_or_with_its_own_groups_refuses_groups() -> None:
    groups = {"a": {"patterns": ["embedding"], "weight_decay": 0.5}}
    with refused(ConfigError, "optimizer.groups: a.weight_decay", "Plain", "Leave it out"):
        optimizer(gpt(), _target_="tests.optimizers.test_optimizers.Plain", lr=0.1, groups=groups)
    with refused(ConfigError, "optimizer.groups", "makes its own groups", "null"):
        optimizer(gpt(), _target_="dtrain.optimizers.MuonWithAdamW", groups=groups)


def test_muon_needs_a_matrix() -> None:
    with refused(ConfigError, "optimizer: ", "Muon", "optimizer=adamw"):
        optimizer(nn.Conv2d(1, 1, 3), _target_="dtrain.optimizers.MuonWithAdamW")


def test_muon_moves_matrices_and_adamw_the_rest_each_as_torch_does() -> None:
    ours, theirs = gpt(), gpt()
    both = optimizer(ours, _target_="dtrain.optimizers.MuonWithAdamW", lr=0.01, adamw=["blocks.0.attention.qkv.weight"])
    named = dict(theirs.named_parameters())
    inner = [f"blocks.0.{layer}.weight" for layer in ("attention.out", "mlp.0", "mlp.2")]
    outer = ["embedding.weight", "blocks.0.attention.qkv.weight"]
    muon = torch.optim.Muon([named[name] for name in inner], lr=0.01, adjust_lr_fn="match_rms_adamw")
    groups = [
        {"params": [named[name] for name in outer], "weight_decay": 0.1},
        {"params": [parameter for parameter in named.values() if parameter.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    for step in range(3):
        for group in both.param_groups:  # as a schedule does
            group["lr"] = 0.01 / (step + 1)
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] = 0.01 / (step + 1)
        backward(ours, step)
        backward(theirs, step)
        both.step()
        muon.step()
        adamw.step()
        for each in (both, muon, adamw):
            each.zero_grad()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, named[name], rtol=0, atol=0, msg=name)


def test_muon_goes_on_from_a_checkpoint_as_if_it_had_not_stopped() -> None:
    node = {"_target_": "dtrain.optimizers.MuonWithAdamW", "lr": 0.01}
    whole, half = gpt(), gpt()
    through, first = optimizer(whole, **node), optimizer(half, **node)
    for step in range(4):
        if step == 2:  # a new process: a new model and optimizer
            tensors, values = optimizer_state(first, half)
            fresh = gpt()
            fresh.load_state_dict(half.state_dict())
            half, first = fresh, optimizer(fresh, **node)
            load_optimizer(first, half, tensors, values, [])
        for model, one in ((whole, through), (half, first)):
            backward(model, step)
            one.step()
            one.zero_grad()
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, half.get_parameter(name)), name

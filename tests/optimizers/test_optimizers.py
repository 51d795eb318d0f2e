"""Groups of parameters, and Muon beside AdamW, against torch's own optimizers on the parameters of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dtrain.errors import ConfigError
from dtrain.models import GPT
from dtrain.training.checkpoint.state import load_optimizer, optimizer_state
from dtrain.training.setup.optimizer import build_optimizer
from tests.refusals import refused


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=16, width=8, depth=1, heads=2, context=8)


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
        ({"_target_": "torch.optim.SGD", "no_decay": "vectors"}, ["optimizer.no_decay", "got the text 'vectors'"]),
        ({"_target_": "dtrain.optimizers.MuonWithAdamW", "no_decay": ["vectors"]}, ["makes its own groups"]),
        ({"_target_": "dtrain.optimizers.MuonWithAdamW", "adamw": ["head.*"]}, ["optimizer: 'head.*' matches no"]),
    ],
)
def test_impossible_groups_are_refused(node: dict[str, Any], names: list[str]) -> None:
    with refused(ConfigError, *names):
        optimizer(gpt(), **node)


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

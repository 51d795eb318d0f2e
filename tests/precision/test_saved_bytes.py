"""Autocast saves memory: the bytes that a forward keeps for its backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dtrain.precision import Precision


def checkerboard() -> nn.Sequential:
    """The network that learns a checkerboard from coordinates: 2-256-256-256-1, 1x1 convolutions, BatchNorm, ReLU."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs in (2, 256, 256):
        layers += [nn.Conv2d(inputs, 256, 1), nn.BatchNorm2d(256), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(256, 1, 1))


def saved_bytes(precision: str) -> int:
    """Bytes of all storages that a forward holds until its backward: parameters do not count, their 16-bit copies do."""
    model = checkerboard()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage  # held, so that no address comes twice
        return tensor

    x = torch.rand(1, 2, 32, 32)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        Precision(precision).autocast("cpu"),
    ):
        loss = model(x).float().square().mean()
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_at_least_a_third_fewer_bytes_are_saved_for_the_backward(precision: str) -> None:
    assert saved_bytes(precision) <= 2 / 3 * saved_bytes("fp32")

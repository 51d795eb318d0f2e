from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.data import Batch
from dtrain.models import GPT
from dtrain.precision import Precision
from dtrain.tasks import LanguageModelling
from dtrain.training.monitor.flops import PEAKS, flops_per_row, peak_flops
from dtrain.training.setup.model import checkpoint_activations
from dtrain.training.task import Output
from tests.toys import CPU

# -- flops


FP32 = Precision("fp32")


class Small(nn.Module):
    """A convolution, a norm with statistics, dropout and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.dropout(self.norm(self.conv(x)).mean((2, 3)), 0.5, self.training))


def task(model: nn.Module, batch: Batch) -> Output:
    # Looks at values, and picks rows by them.
    losses = model(batch["x"]).float().square().sum(dim=1)[batch.valid]
    return Output(losses.sum(), int(batch.valid.sum()))


def images(rows: int) -> Batch:
    return Batch({"x": torch.randn(rows, 3, 16, 12)}, ["a"] * rows, torch.ones(rows, dtype=torch.bool))


def test_a_network_is_its_multiplications_and_additions_three_times_over() -> None:
    forward = 2 * (16 * 12) * 8 * (3 * 3 * 3) + 2 * 8 * 10
    for rows in (1, 5):
        assert flops_per_row(task, Small(), images(rows), FP32, CPU) == 3 * forward


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_transformer_is_six_times_its_weights_a_token_and_its_attention(precision: str) -> None:
    width, depth, length, rows = 32, 2, 24, 3
    model = GPT(width=width, depth=depth, heads=2, context=length)
    tokens = torch.randint(0, 256, (rows, length + 1))
    batch = Batch({"tokens": tokens}, ["a"] * rows, torch.ones(rows, dtype=torch.bool))
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2)
    attention = depth * 2 * 2 * length * length * width  # queries with keys, and what they weigh with values
    counted = flops_per_row(LanguageModelling(), model, batch, Precision(precision), CPU)
    assert counted == 6 * weights * length + 3 * attention


def test_a_recurrent_layer_uses_each_weight_once_per_row_and_time_step() -> None:
    def last(model: nn.Module, batch: Batch) -> Output:
        states, _ = model(batch["x"])
        return Output(states.square().sum(), len(batch["x"]))

    batch = Batch({"x": torch.randn(5, 7, 3)}, ["a"] * 5, torch.ones(5, dtype=torch.bool))
    forward = 2 * 7 * (4 * 6 * 3 + 4 * 6 * 6)
    assert flops_per_row(last, nn.LSTM(3, 6, batch_first=True), batch, FP32, CPU) == 3 * forward


def test_a_task_that_differentiates_in_its_forward_is_counted_with_what_that_takes() -> None:
    def slope(model: nn.Module, batch: Batch) -> Output:
        x = batch["x"].requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return Output(gradient.square().sum(), len(x))

    batch = Batch({"x": torch.randn(5, 8)}, ["a"] * 5, torch.ones(5, dtype=torch.bool))
    layers = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
    forward = 2 * 8 * 6 + 2 * 6
    assert flops_per_row(slope, layers, batch, FP32, CPU) == 3 * (forward + forward)  # there, and back to the inputs
    assert not batch["x"].requires_grad


def test_a_task_that_works_in_place_leaves_the_batch_as_it_is() -> None:
    def halving(model: nn.Module, batch: Batch) -> Output:
        batch["x"].mul_(0.5)
        batch.valid.fill_(False)
        return task(model, batch)

    batch = images(4)
    before = batch["x"].clone()
    flops_per_row(halving, Small(), batch, FP32, CPU)
    assert torch.equal(batch["x"], before)
    assert batch.valid.all()


def test_a_forward_that_fails_leaves_nothing_behind_either() -> None:
    def failing(model: nn.Module, batch: Batch) -> Output:
        task(model, batch)
        raise ZeroDivisionError

    model = Small()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ZeroDivisionError):
        flops_per_row(failing, model, images(4), FP32, CPU)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_nothing_is_left_behind_and_recomputed_activations_are_no_work() -> None:
    model = Small()
    before = copy.deepcopy(model.state_dict())
    plain = flops_per_row(task, model, images(4), FP32, CPU)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    checkpoint_activations(model, ["conv"])
    assert flops_per_row(task, model, images(4), FP32, CPU) == plain


def test_a_compiled_model_is_counted_uncompiled() -> None:
    model = Small()

    def backend(graph: Any, inputs: Any) -> Any:
        raise AssertionError("it was compiled")

    model.compile(backend=backend)
    assert flops_per_row(task, model, images(2), FP32, CPU) == flops_per_row(task, Small(), images(2), FP32, CPU)


# -- peak flops


@pytest.mark.parametrize(
    ("device", "precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "fp16", 756.4),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "fp32", 66.9),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156.0),
        ("NVIDIA A10", "bf16", 125.0),
        ("NVIDIA A10G", "bf16", 70.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA GeForce RTX 4090", "fp16", 165.2),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("Tesla V100-PCIE-16GB", "fp32", 14.0),
        ("Tesla V100S-PCIE-32GB", "fp16", 130.0),
        ("AMD Instinct MI300X", "bf16", 1307.4),
    ],
)
def test_a_device_is_known_by_the_name_that_torch_gives_it(device, precision, tflops):
    assert peak_flops(device, precision) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("Tesla V100-SXM2-16GB", "bf16"),  # no such units
        ("Tesla V100-SXM2-16GB", "tf32"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "fp16"),  # another device
        ("NVIDIA A1000", "bf16"),
        ("cpu", "fp32"),
    ],
)
def test_nothing_is_made_up_for_others(device, precision):
    assert peak_flops(device, precision) is None


def test_the_figures_are_dense_and_in_order():
    for parts, peak in PEAKS:
        assert peak.half >= (peak.tf32 or 0), parts
        assert (peak.tf32 or peak.fp32) >= peak.fp32 * 0.99, parts

"""Shapes, sizes that the papers give, initialisations that are promised, and what each model refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.models import (
    GPT,
    MLP,
    ConvNet1d,
    CoordinateNet,
    GRUClassifier,
    LeNet,
    Polynomial,
    ResidualMLP,
    ResNet,
    ResNet9,
    ViT,
)
from tests.refusals import refused

IMAGES = torch.zeros(2, 3, 32, 32)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("model", "inputs", "outputs"),
    [
        (lambda: MLP([10, 20, 1]), torch.zeros(3, 10), [3, 1]),
        (lambda: Polynomial(3), torch.zeros(3, 4, 1), [3, 4, 1]),
        (ResidualMLP, torch.zeros(3, 40), [3, 10]),
        (ConvNet1d, torch.zeros(3, 40), [3, 10]),
        (GRUClassifier, torch.zeros(3, 40), [3, 10]),
        (LeNet, IMAGES, [2, 10]),
        (lambda: CoordinateNet(width=8), torch.zeros(3, 2, 1, 7), [3, 1, 1, 7]),
        (lambda: ResNet9(width=4), IMAGES, [2, 10]),
        (lambda: ResNet(18, 10, "cifar", width=4), IMAGES, [2, 10]),
        (lambda: ResNet(50, 10, "imagenet", width=4), IMAGES, [2, 10]),
        (lambda: ViT([16, 2, 2], 10, 32, 8), IMAGES, [2, 10]),
        (lambda: GPT(width=16, depth=2, heads=2), torch.zeros(2, 9, dtype=torch.long), [2, 9, 257]),
    ],
    ids=[
        "mlp",
        "polynomial",
        "residual mlp",
        "convnet1d",
        "gru",
        "lenet",
        "coordinate net",
        "resnet9",
        "resnet18",
        "resnet50",
        "vit",
        "gpt",
    ],
)
def test_outputs_have_the_documented_shape_and_all_parameters_a_gradient(
    model: Any, inputs: Tensor, outputs: list[int]
) -> None:
    built = model()
    result = built(inputs)
    assert list(result.shape) == outputs
    result.sum().backward()
    assert all(parameter.grad is not None for parameter in built.parameters())


@pytest.mark.parametrize(
    ("model", "size"),
    [
        # 10 * 20 + 20 weights and biases, 20 + 1
        (lambda: MLP([10, 20, 1]), 241),
        # printed by the notebook of MNIST-1D
        (ResidualMLP, 15_210),
        (ConvNet1d, 5_210),
        (GRUClassifier, 5_134),
        # 3*6*25+6 and 6*16*25+16 of the convolutions, 400*120+120, 120*84+84, 84*10+10
        (LeNet, 62_006),
        # torchvision's resnet18 and resnet50, with its stem and 1,000 classes
        (lambda: ResNet(18), 11_689_512),
        (lambda: ResNet(50), 25_557_032),
        # Beyer et al. 2022: 22 million for S/16
        (lambda: ViT("small"), 21_974_632),
        (lambda: GPT(50257, 768, 12, 12, 1024, positions="learned", mlp="gelu_tanh"), 124_439_808),
        # nanoGPT's character model, which prints 10.65M: it leaves out the 256 * 384 of the positions
        (lambda: GPT(65, 384, 6, 6, 256, positions="learned", bias=False), 10_646_784 + 98_304),
    ],
    ids=["mlp", "residual mlp", "convnet1d", "gru", "lenet", "resnet18", "resnet50", "vit small", "gpt2", "nanogpt"],
)
def test_models_have_the_published_number_of_parameters(model: Any, size: int) -> None:
    with torch.device("meta"):
        assert parameters(model()) == size


def test_blocks_of_a_new_resnet_are_the_identity() -> None:
    model = ResNet(18, 10, "cifar", width=4)
    hidden = torch.rand(2, 4, 8, 8)
    torch.testing.assert_close(model.blocks[0](hidden), hidden)


def test_a_new_vit_and_a_new_gpt_know_nothing() -> None:
    assert not ViT([16, 2, 2], 10, 32, 8)(torch.rand(2, 3, 32, 32)).any()
    torch.manual_seed(0)
    logits = GPT(width=64, depth=2, heads=2)(torch.randint(257, (4, 32)))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(257, (128,)))
    assert loss.item() == pytest.approx(math.log(257), abs=0.1)


def test_a_polynomial_is_the_sum_of_its_powers() -> None:
    model = Polynomial(3)
    with torch.no_grad():
        model.powers.weight.copy_(torch.tensor([[2.0, -1.0, 0.5]]))
        model.powers.bias.fill_(7.0)
    x = torch.linspace(-2, 2, 5)
    torch.testing.assert_close(model(x[:, None])[:, 0], 7 + 2 * x - x**2 + 0.5 * x**3)


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda: MLP([10]), ["MLP", "got widths [10]"]),
        (lambda: MLP([1, 1], "sinus"), ["MLP", "got activation 'sinus'", "relu"]),
        (lambda: Polynomial(0), ["Polynomial", "got degree 0"]),
        (lambda: CoordinateNet(hidden=0), ["CoordinateNet", "got 0 hidden layers"]),
        (lambda: ResNet(17), ["ResNet", "got depth 17", "18, 34, 50, 101"]),
        (lambda: ResNet(18, stem="mnist"), ["stem 'mnist'", "imagenet, cifar"]),
        (lambda: ViT("huge"), ["ViT", "got size 'huge'", "tiny, small, base"]),
        (lambda: ViT([16, 1, 2], image_size=30, patch=8), ["30 pixels in patches of 8"]),
    ],
)
def test_impossible_models_are_refused_with_their_numbers(build: Any, names: list[str]) -> None:
    with refused(ValueError, *names):
        build()

"""Losses at ordinary and extreme logits, against the textbook's formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dtrain.tasks.losses import binary_cross_entropy, softmax_cross_entropy

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: The same in fp32 for the loss; a gradient is rounded once, to the dtype of the logits.
EPSILON = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def textbook_softmax(logits: Tensor, targets: Tensor, smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    z = logits.double()
    classes = z.shape[-1]
    if not targets.is_floating_point():
        targets = torch.nn.functional.one_hot(targets.long(), classes)
    t = targets.double() * (1 - smoothing) + smoothing / classes
    partition = (
        z.exp().sum(-1).log() if z.abs().max() < 500 else z.amax(-1) + (z - z.amax(-1, True)).exp().sum(-1).log()
    )
    return (t * (partition.unsqueeze(-1) - z)).sum(-1) + z_loss * partition**2


def textbook_binary(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    z = logits.double()
    t = targets.double() * (1 - smoothing) + smoothing / 2
    loss = t * torch.log1p((-z).exp()) + (1 - t) * torch.log1p(z.exp())
    return loss if loss.dim() == 1 else loss.mean(1)


def gradient(loss: Tensor, logits: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    return grad


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_logits_with_soft_labels(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1000.0, 0.0]], dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = softmax_cross_entropy(logits, torch.tensor([[0.5, 0.5]]))
    assert loss.tolist() == [500.0]
    assert loss.dtype == torch.float32
    assert gradient(loss, logits).tolist() == [[0.5, -0.5]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 1e3, 6e4])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("soft", [False, True])
def test_softmax_value_and_gradient_are_float64s(dtype: torch.dtype, size: float, smoothing: float, soft: bool) -> None:
    torch.manual_seed(0)
    logits = (torch.rand(7, 5) * 2 - 1).mul(size).to(dtype).requires_grad_()
    targets = torch.rand(7, 5).softmax(-1) if soft else torch.randint(5, (7,))
    z_loss = 1e-4
    exact = logits.detach().double().requires_grad_()
    expected = textbook_softmax(exact, targets, smoothing, z_loss)
    loss = softmax_cross_entropy(logits, targets, label_smoothing=smoothing, z_loss=z_loss)
    assert loss.shape == (7,)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    tolerance = 2 * EPSILON[dtype] + 2e-6
    torch.testing.assert_close(gradient(loss, logits).double(), gradient(expected, exact), rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 20.0, 600.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["bool", "soft"])
def test_binary_value_and_gradient_are_float64s(dtype: torch.dtype, size: float, smoothing: float, kind: str) -> None:
    torch.manual_seed(0)
    logits = (torch.rand(40) * 2 - 1).mul(size).to(dtype).requires_grad_()
    targets = torch.rand(40) < 0.5 if kind == "bool" else torch.rand(40)
    exact = logits.detach().double().requires_grad_()
    expected = textbook_binary(exact, targets, smoothing)
    loss = binary_cross_entropy(logits, targets, label_smoothing=smoothing)
    assert loss.dtype == torch.float32
    # Relative, down to the smallest: a confident and correct row keeps its small loss.
    torch.testing.assert_close(loss.double(), expected, rtol=2e-6, atol=1e-37)
    rounding = EPSILON[dtype] if dtype != torch.float32 else 2e-6
    torch.testing.assert_close(gradient(loss, logits).double(), gradient(expected, exact), rtol=rounding, atol=1e-7)


def test_many_binary_labels_are_averaged_within_their_row() -> None:
    logits, targets = torch.randn(3, 4), torch.randint(2, (3, 4))
    expected = torch.stack([binary_cross_entropy(logits[:, i], targets[:, i]) for i in range(4)]).mean(0)
    torch.testing.assert_close(binary_cross_entropy(logits, targets), expected)


def test_an_extreme_binary_logit_is_exact() -> None:
    logits = torch.tensor([1e4, -1e4, 1e4], requires_grad=True)
    loss = binary_cross_entropy(logits, torch.tensor([1.0, 1.0, 0.5]))
    assert loss.tolist() == [0.0, 1e4, 5e3]
    assert gradient(loss, logits).tolist() == [0.0, -1.0, 0.5]


def test_a_class_masked_by_minus_infinity_costs_nothing() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    loss = softmax_cross_entropy(logits, torch.tensor([[0.5, 0.5, 0.0]]))
    torch.testing.assert_close(loss, torch.tensor([2.0]).log())
    assert gradient(loss, logits).isfinite().all()


def test_tokens_keep_their_shape() -> None:
    logits, targets = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    loss = softmax_cross_entropy(logits, targets)
    assert loss.shape == (2, 3)
    torch.testing.assert_close(loss.flatten(), softmax_cross_entropy(logits.flatten(0, 1), targets.flatten()))


def test_shapes_that_do_not_fit_are_both_named() -> None:
    logits = torch.randn(4, 3)
    with pytest.raises(ValueError, match=r"float32 \[4, 3\].*int64 \[5\]"):
        softmax_cross_entropy(logits, torch.zeros(5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"float32 \[4, 3\].*int64 \[4, 3\].*probabilities"):
        softmax_cross_entropy(logits, torch.zeros(4, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"float32 \[4, 3\].*float32 \[4\]"):
        softmax_cross_entropy(logits, torch.zeros(4))
    with pytest.raises(ValueError, match=r"float32 \[4, 1\].*int64 \[4\]"):
        binary_cross_entropy(torch.randn(4, 1), torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"label_smoothing: got 1\.0"):
        softmax_cross_entropy(logits, torch.zeros(4, dtype=torch.long), label_smoothing=1.0)

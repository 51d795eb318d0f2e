"""A torch upgrade that changes what autocast does with an operation fails here.

torch documents these lists (https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference). dtrain's models, losses
and documentation rely on the operations below. The table was measured with torch 2.13; after a failure, compare the new
behaviour with torch's release notes, check the models and losses that use the operation, then change the row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import autocast_table
from dtrain.precision.audit.module_stack import floating, is_work
from dtrain.tasks.losses import binary_cross_entropy, softmax_cross_entropy, squared_error

# behaviour: operation: (shapes of its activations, the call)
_TABLE: dict[str, dict[str, tuple[tuple[tuple[int, ...], ...], Callable[..., Tensor]]]] = {
    "16 bits whatever comes in": {
        "matmul": (((3, 4), (4, 5)), torch.matmul),
        "bmm": (((2, 3, 4), (2, 4, 5)), torch.bmm),
        "einsum": (((3, 4), (4, 5)), lambda a, b: torch.einsum("ij,jk->ik", a, b)),
        "linear": (((3, 4),), lambda x: F.linear(x, torch.ones(5, 4), torch.ones(5))),
        "conv2d": (((2, 3, 8, 8),), lambda x: F.conv2d(x, torch.ones(4, 3, 3, 3))),
        "attention": (((2, 2, 3, 4),) * 3, F.scaled_dot_product_attention),
    },
    "fp32 whatever comes in": {
        "cross_entropy": (((3, 4),), lambda x: F.cross_entropy(x, torch.zeros(3, dtype=torch.int64))),
        "mse_loss": (((3, 4), (3, 4)), F.mse_loss),
        "bce_with_logits": (((3, 4), (3, 4)), F.binary_cross_entropy_with_logits),
    },
    "the widest activation": {
        "layer_norm": (((3, 4),), lambda x: F.layer_norm(x, (4,), torch.ones(4), torch.ones(4))),
        "batch_norm": (((2, 4, 3, 3),), lambda x: F.batch_norm(x, None, None, torch.ones(4), torch.ones(4), True)),
        "softmax": (((3, 4),), lambda x: x.softmax(1)),
        "log_softmax": (((3, 4),), lambda x: x.log_softmax(1)),
        "gelu": (((3, 4),), F.gelu),
        "sum": (((3, 4),), torch.sum),
        "cumsum": (((3, 4),), lambda x: x.cumsum(1)),
        "interpolate": (((2, 3, 4, 4),), lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
        "avg_pool2d": (((2, 3, 4, 4),), lambda x: F.avg_pool2d(x, 2)),
        "add": (((3, 4), (3, 4)), torch.add),
        "cat": (((3, 4), (3, 4)), lambda *parts: torch.cat(parts)),
        "where": (((3, 4), (3, 4)), lambda a, b: torch.where(torch.eye(3, 4) > 0, a, b)),
    },
}


def result_dtypes(
    shapes: tuple[tuple[int, ...], ...], call: Callable[..., Tensor], inputs: list[torch.dtype], low: torch.dtype
) -> list[torch.dtype]:
    """The dtype of the result under autocast in ``low``, then those of the inputs' gradients."""
    # Between 0.1 and 0.9, which a probability has to be.
    activations = [
        (0.1 + 0.8 * torch.rand(shape)).to(given).requires_grad_() for shape, given in zip(shapes, inputs, strict=True)
    ]
    with torch.autocast("cpu", dtype=low):
        out = call(*activations)
    out.float().sum().backward()
    return [out.dtype, *(x.grad.dtype for x in activations if x.grad is not None)]


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("behaviour", "name"), [(kind, name) for kind, calls in _TABLE.items() for name in calls])
def test_cpu_autocast_behaves_as_in_the_table(behaviour: str, name: str, low: torch.dtype) -> None:
    shapes, call = _TABLE[behaviour][name]
    wide, number = torch.float32, len(shapes)
    for inputs in ([wide] * number, [low] * number, [low] + [wide] * (number - 1)):
        widest = wide if wide in inputs else low
        output = {"16 bits whatever comes in": low, "fp32 whatever comes in": wide}.get(behaviour, widest)
        assert result_dtypes(shapes, call, inputs, low) == [output, *inputs]


# -- CUDA: torch's documented lists, compared with the installed torch on fake tensors

_UNARY = ("acos", "asin", "cosh", "erfinv", "expm1", "log10", "log1p", "log2", "reciprocal", "sinh", "tan")
_BINARY = ("addcmul", "atan2", "cdist", "dist", "cosine_similarity", "smooth_l1_loss", "soft_margin_loss", "addbmm")


def on_cuda(name: str, low: torch.dtype) -> str:
    try:
        return autocast_table.measured(name, "cuda", low)
    except torch.AcceleratorError:
        if torch.cuda.is_available():
            raise
        pytest.skip(
            "torch 2.9 for CUDA asks the driver, also on fake tensors, which kernel a convolution or attention takes"
        )


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_on_cuda_is_as_torch_documents(low: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    three, matrix = (2, 3, 3), autocast_table.MATRIX
    more: dict[str, Any] = {name: ((matrix,), getattr(torch, name)) for name in _UNARY}
    more |= {name: ((matrix,) * 2, getattr(torch, name, None) or getattr(F, name)) for name in _BINARY}
    more |= {"addcmul": ((matrix,) * 3, torch.addcmul), "addbmm": ((matrix, three, three), torch.addbmm)}
    monkeypatch.setattr(autocast_table, "OPERATIONS", autocast_table.OPERATIONS | more)
    documented = {name: kind for kind, names in autocast_table.DOCUMENTED.items() for name in names}
    checked = [name for name in autocast_table.OPERATIONS if name in documented]
    assert len(checked) > 50
    found = {name: on_cuda(name, low) for name in checked}
    assert found == {name: documented[name] for name in checked}
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_operation_of_the_table_can_be_called_on_both_devices(low: torch.dtype) -> None:
    kinds = {autocast_table.SIXTEEN, autocast_table.FP32, autocast_table.WIDEST, autocast_table.REFUSED}
    for name in autocast_table.OPERATIONS:
        assert autocast_table.measured(name, "cpu", low) in kinds
        assert on_cuda(name, low) in kinds


# -- dtrain's own losses


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "loss",
    [
        lambda x: softmax_cross_entropy(x, torch.tensor([0, 1, 2])),
        lambda x: softmax_cross_entropy(x, torch.eye(3), label_smoothing=0.1, z_loss=1e-4),  # KL, up to a constant
        lambda x: binary_cross_entropy(x, torch.eye(3)),
        lambda x: squared_error(x, torch.eye(3).to(x.dtype), "task"),
    ],
    ids=["cross-entropy", "soft labels", "binary", "squared error"],
)
def test_losses_compute_in_fp32_under_autocast_from_16_bit_outputs(
    loss: Callable[[Tensor], Tensor], low: torch.dtype
) -> None:
    # Confident and wrong: in 16 bits the logarithm of a probability of e^-60 would be that of zero, and 300^2 infinite.
    outputs = (300 * torch.tensor([[0.1, 0.0, -0.1], [-0.1, 0.0, 0.1], [1.0, 0.0, -1.0]])).to(low).requires_grad_()
    wide = outputs.detach().double().requires_grad_()
    with torch.autocast("cpu", dtype=low), LowestDtype() as seen:
        losses = loss(outputs)
    assert losses.dtype == torch.float32
    assert seen.computed == {torch.float32}
    losses.sum().backward()
    expected = loss(wide.float())
    torch.testing.assert_close(losses, expected)
    expected.sum().backward()
    assert outputs.grad is not None
    assert wide.grad is not None
    torch.testing.assert_close(outputs.grad.double(), wide.grad, rtol=1e-2, atol=1e-6)


class LowestDtype(TorchDispatchMode):
    """Records the dtypes in which operations compute, casts and views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_work(func, floating((args, kwargs or {})), floating(out)):
            self.computed |= {tensor.dtype for tensor in floating(out)}
        return out

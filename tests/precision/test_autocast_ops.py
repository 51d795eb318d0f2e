"""A torch upgrade that changes what CPU autocast does with an operation fails here.

torch documents these lists (https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference). dtrain's models, losses
and documentation rely on the operations below. The table was measured with torch 2.13; after a failure, compare the new
behaviour with torch's release notes, check the models and losses that use the operation, then change the row.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

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

"""Operations that autocast may treat in one way or another, each with floating inputs to try it on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OpCase:
    """One operation.

    Attributes:
        name: As torch calls it.
        activations: Shapes of the floating inputs that other operations make.
        parameters: Shapes of those that a model keeps, in fp32 as long as it trains.
        call: Takes them all, returns a floating tensor.
    """

    name: str
    activations: tuple[Shape, ...]
    parameters: tuple[Shape, ...]
    call: Callable[..., Tensor]


def op_cases() -> list[OpCase]:
    """Matrix products and convolutions first, then recurrent layers, losses, the rest, and what joins tensors."""
    return [
        # The list that every text on autocast has.
        OpCase("__matmul__", ((3, 4), (4, 5)), (), lambda a, b: a @ b),
        OpCase("matmul", ((3, 4), (4, 5)), (), torch.matmul),
        OpCase("addbmm", ((3, 5), (2, 3, 4), (2, 4, 5)), (), torch.addbmm),
        OpCase("addmm", ((3, 5), (3, 4), (4, 5)), (), torch.addmm),
        OpCase("addmv", ((3,), (3, 4), (4,)), (), torch.addmv),
        OpCase("addr", ((3, 4), (3,), (4,)), (), torch.addr),
        OpCase("baddbmm", ((2, 3, 5), (2, 3, 4), (2, 4, 5)), (), torch.baddbmm),
        OpCase("bmm", ((2, 3, 4), (2, 4, 5)), (), torch.bmm),
        OpCase("chain_matmul", ((3, 4), (4, 5), (5, 2)), (), lambda *matrices: torch.chain_matmul(*matrices)),
        OpCase("linalg.multi_dot", ((3, 4), (4, 5), (5, 2)), (), lambda *matrices: torch.linalg.multi_dot(matrices)),
        OpCase("conv1d", ((2, 3, 8),), ((4, 3, 3), (4,)), F.conv1d),
        OpCase("conv2d", ((2, 3, 8, 8),), ((4, 3, 3, 3), (4,)), F.conv2d),
        OpCase("conv3d", ((2, 3, 4, 4, 4),), ((4, 3, 3, 3, 3), (4,)), F.conv3d),
        OpCase("conv_transpose1d", ((2, 3, 8),), ((3, 4, 3), (4,)), F.conv_transpose1d),
        OpCase("conv_transpose2d", ((2, 3, 8, 8),), ((3, 4, 3, 3), (4,)), F.conv_transpose2d),
        OpCase("conv_transpose3d", ((2, 3, 4, 4, 4),), ((3, 4, 3, 3, 3), (4,)), F.conv_transpose3d),
        OpCase("linear", ((3, 4),), ((5, 4), (5,)), F.linear),
        OpCase("mm", ((3, 4), (4, 5)), (), torch.mm),
        OpCase("mv", ((3, 4), (4,)), (), torch.mv),
        OpCase("prelu", ((3, 4),), ((4,),), F.prelu),
        OpCase("einsum", ((3, 4), (4, 5)), (), lambda a, b: torch.einsum("ij,jk->ik", a, b)),
        OpCase("bilinear", ((3, 4), (3, 5)), ((2, 4, 5), (2,)), F.bilinear),
        OpCase("scaled_dot_product_attention", ((2, 2, 3, 4),) * 3, (), F.scaled_dot_product_attention),
        OpCase("LSTM", ((5, 2, 3),), ((16, 3), (16, 4), (16,), (16,)), _lstm),
        OpCase("GRU", ((5, 2, 3),), ((12, 3), (12, 4), (12,), (12,)), _gru),
        OpCase("layer_norm", ((3, 4),), ((4,), (4,)), lambda x, w, b: F.layer_norm(x, (4,), w, b)),
        OpCase("rms_norm", ((3, 4),), ((4,),), lambda x, w: F.rms_norm(x, (4,), w)),
        OpCase("group_norm", ((2, 4, 3, 3),), ((4,), (4,)), lambda x, w, b: F.group_norm(x, 2, w, b)),
        OpCase("batch_norm", ((2, 4, 3, 3),), ((4,), (4,)), _batch_norm),
        OpCase("softmax", ((3, 4),), (), lambda x: torch.softmax(x, 1)),
        OpCase("log_softmax", ((3, 4),), (), lambda x: torch.log_softmax(x, 1)),
        OpCase("logsumexp", ((3, 4),), (), lambda x: torch.logsumexp(x, 1)),
        OpCase("gelu", ((3, 4),), (), F.gelu),
        OpCase("exp", ((3, 4),), (), torch.exp),
        OpCase("log", ((3, 4),), (), torch.log),
        OpCase("pow", ((3, 4),), (), lambda x: torch.pow(x, 2)),
        OpCase("rsqrt", ((3, 4),), (), torch.rsqrt),
        OpCase("sum", ((3, 4),), (), torch.sum),
        OpCase("mean", ((3, 4),), (), torch.mean),
        OpCase("prod", ((3, 4),), (), torch.prod),
        OpCase("cumsum", ((3, 4),), (), lambda x: torch.cumsum(x, 1)),
        OpCase("norm", ((3, 4),), (), torch.norm),
        OpCase("linalg.vector_norm", ((3, 4),), (), torch.linalg.vector_norm),
        OpCase("cosine_similarity", ((3, 4), (3, 4)), (), F.cosine_similarity),
        OpCase("cross_entropy", ((3, 4),), (), lambda x: F.cross_entropy(x, _classes(x))),
        OpCase("nll_loss", ((3, 4),), (), lambda x: F.nll_loss(x, _classes(x))),
        OpCase("mse_loss", ((3, 4), (3, 4)), (), F.mse_loss),
        OpCase("smooth_l1_loss", ((3, 4), (3, 4)), (), F.smooth_l1_loss),
        OpCase("kl_div", ((3, 4), (3, 4)), (), lambda x, y: F.kl_div(x, y, reduction="batchmean")),
        OpCase("binary_cross_entropy", ((3, 4), (3, 4)), (), F.binary_cross_entropy),
        OpCase("binary_cross_entropy_with_logits", ((3, 4), (3, 4)), (), F.binary_cross_entropy_with_logits),
        OpCase("embedding", ((6, 4),), (), lambda w: F.embedding(_classes(w), w)),
        OpCase("interpolate", ((2, 3, 4, 4),), (), lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
        OpCase("grid_sample", ((2, 3, 4, 4), (2, 4, 4, 2)), (), lambda x, g: F.grid_sample(x, g, align_corners=False)),
        OpCase("avg_pool2d", ((2, 3, 4, 4),), (), lambda x: F.avg_pool2d(x, 2)),
        OpCase("adaptive_avg_pool2d", ((2, 3, 4, 4),), (), lambda x: F.adaptive_avg_pool2d(x, 1)),
        OpCase("add", ((3, 4), (3, 4)), (), torch.add),
        OpCase("mul", ((3, 4), (3, 4)), (), torch.mul),
        OpCase("addcmul", ((3, 4), (3, 4), (3, 4)), (), torch.addcmul),
        OpCase("dot", ((4,), (4,)), (), torch.dot),
        OpCase("where", ((3, 4), (3, 4)), (), lambda x, y: torch.where(torch.eye(3, 4, device=x.device) > 0, x, y)),
        OpCase("cat", ((3, 4), (3, 4)), (), lambda *parts: torch.cat(parts)),
        OpCase("stack", ((3, 4), (3, 4)), (), lambda *parts: torch.stack(parts)),
        OpCase("index_put", ((3, 4), (2, 4)), (), lambda x, y: torch.index_put(x, (_classes(y),), y)),
        OpCase(
            "scatter_add", ((3, 4), (3, 4)), (), lambda x, y: torch.scatter_add(x, 0, torch.zeros_like(x).long(), y)
        ),
    ]


def _classes(logits: Tensor) -> Tensor:
    return torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)


def _batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, torch.zeros_like(weight), torch.ones_like(weight), weight, bias, training=True)


def _lstm(x: Tensor, *weights: Tensor) -> Tensor:
    return _recurrent(torch.lstm, x, weights, 2)


def _gru(x: Tensor, *weights: Tensor) -> Tensor:
    return _recurrent(torch.gru, x, weights, 1)


def _recurrent(run: Callable[..., tuple[Tensor, ...]], x: Tensor, weights: Sequence[Tensor], states: int) -> Tensor:
    # As torch.nn.LSTM and GRU call it: the states start at zero in the dtype of the input.
    hidden = [x.new_zeros(1, x.shape[1], weights[1].shape[1]) for _ in range(states)]
    # biases, one layer, no dropout, training, one direction, time first
    return run(x, hidden if states > 1 else hidden[0], list(weights), True, 1, 0.0, True, False, False)[0]

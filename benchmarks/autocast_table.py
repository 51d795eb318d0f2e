"""Prints in which dtype autocast computes each operation, on a CPU and on CUDA; no GPU is needed.

    python -m benchmarks.autocast_table [--json FILE]

* ``16 bits``: any inputs are cast to the dtype of autocast; ``fp32``: any inputs are cast to fp32; ``as its inputs``: the
  widest of their dtypes; ``refused``: an error.
* Each entry is measured by two calls, with fp32 and with 16-bit inputs. The calls for CUDA are on fake tensors, which go
  through the same dispatch as real ones and compute nothing.
* ``DOCUMENTED`` are torch's own lists for CUDA, as of ``DOCUMENTED_IN``
  (https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference). A test compares them with the installed torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import harness

SIXTEEN, FP32, WIDEST, REFUSED = "16 bits", "fp32", "as its inputs", "refused"
DOCUMENTED_IN = "2.13"
DOCUMENTED: dict[str, tuple[str, ...]] = {
    SIXTEEN: (
        *("__matmul__", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "multi_dot", "conv1d"),
        *("conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "GRUCell", "linear"),
        *("LSTMCell", "matmul", "mm", "mv", "prelu", "RNNCell"),
    ),
    FP32: (
        *("__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "acos", "asin", "binary_cross_entropy_with_logits"),
        *("cosh", "cosine_embedding_loss", "cdist", "cosine_similarity", "cross_entropy", "cumprod", "cumsum", "dist"),
        *("erfinv", "exp", "expm1", "group_norm", "hinge_embedding_loss", "kl_div", "l1_loss", "layer_norm", "log"),
        *("log10", "log_softmax", "log1p", "log2", "margin_ranking_loss", "mse_loss", "multilabel_margin_loss"),
        *("multi_margin_loss", "nll_loss", "norm", "normalize", "pdist", "poisson_nll_loss", "pow", "prod"),
        *("reciprocal", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softmax", "softmin", "softplus"),
        *("sum", "renorm", "tan", "triplet_margin_loss"),
    ),
    WIDEST: (
        *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sample", "index_put", "scatter_add"),
        "tensordot",
    ),
    REFUSED: ("binary_cross_entropy",),
}

Call = Callable[..., Tensor]


def _classes(logits: Tensor) -> Tensor:
    return torch.zeros(len(logits), dtype=torch.int64, device=logits.device)


def _like(x: Tensor, *shape: int) -> Tensor:
    """Weights: fp32 in every precision."""
    return torch.ones(shape, device=x.device)


MATRIX, IMAGES = (3, 3), (2, 3, 8, 8)
#: Operation: (shapes of its inputs, the call).
OPERATIONS: dict[str, tuple[tuple[tuple[int, ...], ...], Call]] = {
    "matmul": ((MATRIX,) * 2, torch.matmul),
    "mm": ((MATRIX,) * 2, torch.mm),
    "bmm": (((2, 3, 3),) * 2, torch.bmm),
    "mv": ((MATRIX, (3,)), torch.mv),
    "addmm": ((MATRIX,) * 3, torch.addmm),
    "addmv": (((3,), MATRIX, (3,)), torch.addmv),
    "addr": ((MATRIX, (3,), (3,)), torch.addr),
    "chain_matmul": ((MATRIX,) * 3, torch.chain_matmul),
    "dot": (((3,), (3,)), torch.dot),
    "bilinear": (((3, 3),) * 2, lambda a, b: F.bilinear(a, b, _like(a, 4, 3, 3).to(a.dtype))),
    "einsum": ((MATRIX,) * 2, lambda a, b: torch.einsum("ij,jk->ik", a, b)),
    "linear": ((MATRIX,), lambda x: F.linear(x, _like(x, 5, 3), _like(x, 5))),
    "conv2d": ((IMAGES,), lambda x: F.conv2d(x, _like(x, 4, 3, 3, 3))),
    "conv_transpose2d": ((IMAGES,), lambda x: F.conv_transpose2d(x, _like(x, 3, 4, 3, 3))),
    "scaled_dot_product_attention": (((2, 2, 3, 4),) * 3, F.scaled_dot_product_attention),
    "prelu": ((MATRIX,), lambda x: F.prelu(x, _like(x, 1))),
    "relu": ((MATRIX,), F.relu),
    "gelu": ((MATRIX,), F.gelu),
    "sigmoid": ((MATRIX,), torch.sigmoid),
    "tanh": ((MATRIX,), torch.tanh),
    "exp": ((MATRIX,), torch.exp),
    "log": ((MATRIX,), torch.log),
    "pow": ((MATRIX,), lambda x: x.pow(2)),
    "rsqrt": ((MATRIX,), torch.rsqrt),
    "softplus": ((MATRIX,), F.softplus),
    "softmax": ((MATRIX,), lambda x: x.softmax(1)),
    "log_softmax": ((MATRIX,), lambda x: x.log_softmax(1)),
    "logsumexp": ((MATRIX,), lambda x: x.logsumexp(1)),
    "sum": ((MATRIX,), torch.sum),
    "mean": ((MATRIX,), torch.mean),
    "cumsum": ((MATRIX,), lambda x: x.cumsum(1)),
    "prod": ((MATRIX,), torch.prod),
    "norm": ((MATRIX,), torch.norm),
    "layer_norm": ((MATRIX,), lambda x: F.layer_norm(x, (3,), _like(x, 3), _like(x, 3))),
    "group_norm": ((IMAGES,), lambda x: F.group_norm(x, 3, _like(x, 3), _like(x, 3))),
    "batch_norm": ((IMAGES,), lambda x: F.batch_norm(x, None, None, _like(x, 3), _like(x, 3), True)),
    "max_pool2d": ((IMAGES,), lambda x: F.max_pool2d(x, 2)),
    "avg_pool2d": ((IMAGES,), lambda x: F.avg_pool2d(x, 2)),
    "interpolate": ((IMAGES,), lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "add": ((MATRIX,) * 2, torch.add),
    "cat": ((MATRIX,) * 2, lambda *parts: torch.cat(parts)),
    "cross_entropy": ((MATRIX,), lambda x: F.cross_entropy(x, _classes(x))),
    "nll_loss": ((MATRIX,), lambda x: F.nll_loss(x, _classes(x))),
    "kl_div": ((MATRIX,) * 2, lambda a, b: F.kl_div(a, b, reduction="batchmean")),
    "mse_loss": ((MATRIX,) * 2, F.mse_loss),
    "l1_loss": ((MATRIX,) * 2, F.l1_loss),
    "binary_cross_entropy_with_logits": ((MATRIX,) * 2, F.binary_cross_entropy_with_logits),
    "binary_cross_entropy": ((MATRIX,) * 2, F.binary_cross_entropy),
}


def main() -> None:
    """Command line."""
    arguments = harness.parse(harness.command_line(__doc__))
    rows = table()
    columns = list(next(iter(rows.values())))
    printed = harness.Table(f"autocast of torch {torch.__version__}", rows)
    for column in columns:
        printed.text(column, {name: row[column] for name, row in rows.items()})
    printed.show()
    harness.finish(arguments, {"torch": torch.__version__, "documented_in": DOCUMENTED_IN, "rows": rows})


def table() -> dict[str, dict[str, str]]:
    """For each operation its entries by column: ``CPU bf16``, ``CPU fp16``, ``CUDA fp16``, ``CUDA documented`` ("" if not)."""
    return {
        name: {
            "CPU bf16": measured(name, "cpu", torch.bfloat16),
            "CPU fp16": measured(name, "cpu", torch.float16),
            "CUDA fp16": measured(name, "cuda", torch.float16),
            "CUDA documented": next((kind for kind, names in DOCUMENTED.items() if name in names), ""),
        }
        for name in OPERATIONS
    }


def measured(name: str, device: str, low: torch.dtype) -> str:
    """``SIXTEEN``, ``FP32``, ``WIDEST`` or ``REFUSED``: what the installed torch does under autocast in ``low``.

    Args:
        name: One of ``OPERATIONS``.
        device: ``cpu`` or ``cuda``; the latter on fake tensors.
        low: ``torch.float16`` or ``torch.bfloat16``.
    """
    shapes, call = OPERATIONS[name]
    dtypes = []
    with _autocast(device, low):
        for given in (torch.float32, low):
            try:
                dtypes.append(call(*(torch.full(shape, 0.5, dtype=given, device=device) for shape in shapes)).dtype)
            except RuntimeError as error:
                if "autocast" not in str(error):
                    raise
                return REFUSED
    kinds = {(low, low): SIXTEEN, (torch.float32, torch.float32): FP32, (torch.float32, low): WIDEST}
    return kinds[dtypes[0], dtypes[1]]


@contextmanager
def _autocast(device: str, low: torch.dtype) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.chain_matmul is deprecated")
        if device == "cpu":
            with torch.autocast(device, dtype=low):
                yield
            return
        # torch.autocast("cuda") disables itself without a GPU.
        before: tuple[Any, Any] = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, low)
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                yield
        finally:
            torch.set_autocast_enabled(device, before[0])
            torch.set_autocast_dtype(device, before[1])


if __name__ == "__main__":
    main()

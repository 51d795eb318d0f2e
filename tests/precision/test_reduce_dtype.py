"""The reduce dtype of DDP."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from dtrain.config.schema import ParallelConfig
from dtrain.errors import ConfigError
from dtrain.precision import CrossRankGradScaler
from dtrain.precision.reduce_dtype import REDUCE_DTYPES, reduce_in
from dtrain.training.build import wrap
from tests.ranks import RanksFailed, run_ranks
from tests.refusals import Refusal
from tests.toys import Net, micro_batches, run_steps, train_step, world
from tests.whole_runs import metrics, train_on


class Weights(nn.Module):
    """One weight of each given dtype; the gradient of each is what goes in."""

    def __init__(self, *dtypes: torch.dtype, numbers: int = 4) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(numbers, dtype=dtype) for dtype in dtypes)

    def forward(self, gradient: Tensor) -> Tensor:
        # fp32 throughout, and then exactly the gradient in each dtype.
        return sum(((weight * gradient.to(weight.dtype)).float().sum() for weight in self.weights), torch.zeros(()))

    def gradients(self) -> list[Tensor]:
        return [weight.grad for weight in self.weights if weight.grad is not None]


def reduced_mean(per_rank: list[list[float]], reduce_dtype: str, *dtypes: torch.dtype) -> list[list[Tensor]]:
    """By rank, the averaged gradient of each weight."""

    def rank(number: int) -> list[Tensor]:
        model = Weights(*dtypes, numbers=len(per_rank[0]))
        ddp = DistributedDataParallel(model)
        reduce_in(ddp, REDUCE_DTYPES[reduce_dtype])
        ddp(torch.tensor(per_rank[number])).backward()
        return model.gradients()

    return run_ranks(len(per_rank), rank)


@pytest.mark.parametrize("reduce_dtype", REDUCE_DTYPES)
def test_the_mean_is_rounded_to_the_reduce_dtype_and_cast_back(reduce_dtype: str) -> None:
    per_rank = [[1.0, 1 / 3, -3e-3, 7.0], [2.0, 2 / 3, 1e-3, 0.0], [0.0, 1.0, 5e-3, 0.5]]
    exact = torch.tensor(per_rank, dtype=torch.float64).mean(0)
    precision = {"fp32": 2e-7, "bf16": 2e-2, "fp16": 2e-3}[reduce_dtype]
    for (gradient,) in reduced_mean(per_rank, reduce_dtype, torch.float32):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient.double(), exact, rtol=precision, atol=0)
        rounded = gradient.to(REDUCE_DTYPES[reduce_dtype]).float()
        assert torch.equal(rounded, gradient)
        if reduce_dtype != "fp32":
            assert not torch.allclose(gradient.double(), exact, rtol=1e-6, atol=0)


def test_a_reduce_dtype_of_fp32_is_a_lower_bound() -> None:
    # Half a unit of bf16 between the ranks: in bf16 their sum would be rounded away before it is divided.
    wide = 1 + 2.0**-40
    (doubles, halves), _ = reduced_mean([[wide] * 4, [wide] * 4], "fp32", torch.float64, torch.bfloat16)
    assert doubles.dtype == torch.float64
    assert halves.dtype == torch.bfloat16
    (gradient,), _, _ = reduced_mean([[1.0], [1.0], [1.0078125]], "fp32", torch.bfloat16)
    # The mean 1.0026 is nearest to 1.0; thirds rounded one by one add up to 1.0078.
    assert gradient.item() == 1.0


def test_complex_parameters_have_no_shorter_form() -> None:
    def rank(number: int) -> str:
        model = nn.Linear(1, 1, dtype=torch.complex64)
        ddp = DistributedDataParallel(model)
        reduce_in(ddp, torch.float32)
        with pytest.raises(ConfigError) as raised:
            reduce_in(ddp, torch.bfloat16)
        return str(raised.value)

    assert "complex" in run_ranks(2, rank)[0]


class Branched(Net):
    """Has a branch that a step may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(3, 1)
        self.uses_branch = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.branch(x) if self.uses_branch else 0)


@pytest.mark.parametrize(
    ("reduce_dtype", "ignored"), [("fp32", False), ("bf16", False), ("fp32", True)], ids=["fp32", "bf16", "ignored"]
)
def test_weight_decay_moves_no_parameter_that_a_step_leaves_unused(reduce_dtype: str, ignored: bool) -> None:
    def rank(number: int) -> tuple[Tensor, Tensor]:
        model = Branched()
        parallel = ParallelConfig(reduce_dtype=reduce_dtype, find_unused_parameters=not ignored)
        if ignored:
            names = ["branch.weight", "branch.bias"]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        wrapped = wrap(model, parallel, world(number, 2), False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        step = train_step(wrapped, optimizer, world=world(number, 2))
        weights = []
        for used in (True, False):
            model.uses_branch = used
            run_steps(step, [micro_batches(0, 12, ranks=2, rank=number, rows=2)])
            weights.append(model.branch.weight.detach().clone())
        return weights[0], weights[1]

    for used, unused in run_ranks(2, rank):
        assert torch.equal(used, unused)


# -- S22


def test_s22_a_mean_that_fits_fp16_arrives_where_torchs_hook_overflows() -> None:
    per_rank = [[98_304.0, 1.0], [16_384.0, 3.0]]
    for (gradient,) in reduced_mean(per_rank, "fp16", torch.float32):
        assert gradient.tolist() == [57_344.0, 2.0]
    for (gradient,) in reduced_mean(per_rank, "bf16", torch.float32):
        torch.testing.assert_close(gradient, torch.tensor([57_344.0, 2.0]), rtol=2**-8, atol=0)

    def with_hook(rank: int, hook: Any) -> Tensor:
        model = Weights(torch.float32, numbers=2)
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(None, hook)
        ddp(torch.tensor(per_rank[rank])).backward()
        return model.gradients()[0]

    for gradient in run_ranks(2, with_hook, default_hooks.fp16_compress_hook):
        assert gradient.tolist() == [torch.inf, 2.0]
    if not (torch.version.cuda and dist.is_nccl_available()):  # a torch with both refuses the hook with no backend
        with pytest.raises(RanksFailed, match="BF16 all reduce communication hook required"):
            run_ranks(2, with_hook, default_hooks.bf16_compress_hook)


@pytest.mark.parametrize(("reduce_dtype", "scale"), [("bf16", 65536.0), ("fp16", 512.0)])
def test_s22_a_reduce_dtype_of_fp16_limits_the_scale_and_bf16_does_not(reduce_dtype: str, scale: float) -> None:
    def rank(number: int) -> float:
        model = Weights(torch.float32)
        ddp = DistributedDataParallel(model)
        reduce_in(ddp, REDUCE_DTYPES[reduce_dtype])
        scaler, optimizer = CrossRankGradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(10):
            scaler.scale(ddp(torch.full((4,), 100.0))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return scaler.get_scale()

    # 100 * 512 is the largest power of two times 100 that fp16 can hold.
    assert run_ranks(2, rank) == [scale] * 2


# -- the config


@pytest.mark.parametrize("size", [1, 2])
def test_an_unknown_reduce_dtype_is_refused_with_any_number_of_ranks(size: int) -> None:
    call = partial(wrap, Net(), ParallelConfig(reduce_dtype="fp8"), world(0, size), deterministic=False)
    Refusal(call, "parallel.reduce_dtype", "'fp8'", "fp32, bf16, fp16", ConfigError).check()


SHORT = ("train.max_steps=46", "model.width=16")


@pytest.fixture(scope="module")
def fp32_losses(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run_dir = tmp_path_factory.mktemp("reduced") / "fp32"
    train_on(2, run_dir, *SHORT)
    return metrics(run_dir)


@pytest.mark.slow
@pytest.mark.parametrize(("reduced", "close"), [("bf16", 2e-2), ("fp16", 5e-3)])
def test_a_run_learns_with_any_reduce_dtype(
    tmp_path: Path, fp32_losses: list[float], reduced: str, close: float
) -> None:
    train_on(2, tmp_path, *SHORT, f"parallel.reduce_dtype={reduced}")
    expected, losses = fp32_losses, metrics(tmp_path)
    assert losses[0] == expected[0]
    assert losses[3:] != expected[3:]
    assert losses == pytest.approx(expected, rel=close)
    assert losses[-1] < 0.8 * losses[0]

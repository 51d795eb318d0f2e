"""A sharded model trains as DDP and as one process do: losses, norms, skips, weights and averages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # here once, and not in every rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.config.schema import ParallelConfig
from dtrain.data import Batch
from dtrain.distributed.sharding import UnreducedGradient, is_dtensor, is_sharded, local_part, shard_model
from dtrain.errors import ConfigError
from dtrain.precision import Precision
from dtrain.precision.loss_scale import LossScale
from dtrain.training.setup.ema import Ema
from dtrain.training.setup.optimizer import build_optimizer
from dtrain.training.step import TooManySkips
from dtrain.training.task import Output
from tests.ranks import run_ranks
from tests.refusals import assert_refused, refused
from tests.toys import CPU, Net, micro_batches, run_steps, samples, squared_error, train_step, world
from tests.training.test_step import decide_on_device

ROWS, STEPS, SPOILT = 12, 5, 2  # the step whose data hold an infinity on the last rank
CLIP = 0.3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Blocks(nn.Module):
    """Three numbers to one, through repeated blocks with widths that no number of ranks divides; a buffer and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.entry = nn.Linear(3, 5)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(2)))
        self.out = nn.Linear(5, 1)
        self.entry.again = nn.Linear(5, 1)  # tied to `out`, in the same unit
        self.entry.again.weight = self.out.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.blocks(self.entry(x))
        return self.out(hidden) + self.entry.again(hidden.tanh())  # type: ignore[operator]


@dataclass
class Trained:
    losses: list[float]
    norms: list[float]
    applied: list[bool]
    weights: Tensor
    averages: Tensor


def whole(model: nn.Module) -> Tensor:
    parts = [p.full_tensor() if is_dtensor(p) else p for p in model.parameters()]  # type: ignore[attr-defined]
    return torch.cat([part.detach().flatten() for part in parts])


def train(
    rank: int,
    ranks: int,
    strategy: str,
    precision: str,
    rows: int | None,
    *,
    on_device: bool = False,
    **parallel: object,
) -> Trained:
    """Trains on one rank's part of the regression; ``strategy`` is ddp, full or hybrid.

    With ``on_device`` the host queues the step and does not look at the vote, as on a GPU.
    """
    model = Blocks()
    options = ParallelConfig(shard="none" if strategy == "ddp" else strategy, **parallel)  # type: ignore[arg-type]
    if strategy == "hybrid":
        options.shard_size = 2
    wrapped: nn.Module = model
    kept = Precision(precision, keep_fp32=("blocks.0.2",)).wrap_keep_fp32(model)
    if strategy != "ddp":
        units = shard_model(model, options, world(rank, ranks), compute_dtype=DTYPES[precision], kept=kept)
        assert units == ["blocks.0", "blocks.1", ""]
        assert is_sharded(model)
        held = sum(local_part(p).numel() for p in model.parameters())
        assert held < sum(p.numel() for p in model.parameters()) or ranks == 1
    elif ranks > 1:
        wrapped = DistributedDataParallel(model)
    ema = Ema(model, 0.5)
    step = train_step(
        wrapped,
        torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        world=world(rank, ranks),
        precision=precision,
        nominal=ROWS,
        clip_norm=CLIP,
        ema=ema,
        loss_scale=LossScale(CPU, init=64.0) if precision == "fp16" else None,
        reduce_each=options.reduce_after == "micro_batch",
    )
    if on_device:
        decide_on_device(step)
    windows = [micro_batches(number, ROWS, ranks=ranks, rank=rank, rows=rows) for number in range(STEPS)]
    if rank == ranks - 1:
        windows[SPOILT][-1]["x"][0, 0] = float("inf")
    outcomes = run_steps(step, windows)
    # An evaluation leaves parameters gathered, which the next step must not use.
    with ema.swapped_in() as averaged, torch.no_grad(), Precision(precision).autocast("cpu"):
        averages = whole(averaged)
        squared_error(averaged, windows[0][0])
    outcomes += run_steps(step, [micro_batches(STEPS, ROWS, ranks=ranks, rank=rank, rows=rows)])
    return Trained(
        losses=[o.stats.loss_sum / o.stats.count for o in outcomes if o.stats.applied],
        norms=[o.grad_norm for o in outcomes if o.stats.applied],
        applied=[o.stats.applied for o in outcomes],
        weights=whole(model),
        averages=averages,
    )


def reference() -> Trained:
    """The same in plain torch, in one process."""
    model, losses, norms = Blocks(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = [p.detach().clone() for p in model.parameters()]
    averages = torch.empty(0)
    for number in range(STEPS + 1):
        if number == STEPS:
            averages = torch.cat([mean.flatten() for mean in average])
        if number == SPOILT:
            continue
        x, y = samples(number, ROWS)
        loss = (model(x.float()).squeeze(1) - y.float()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
        average = [0.5 * mean + 0.5 * p.detach() for mean, p in zip(average, model.parameters(), strict=True)]
    applied = [number != SPOILT for number in range(STEPS + 1)]
    return Trained(losses, norms, applied, torch.cat([p.detach().flatten() for p in model.parameters()]), averages)


def assert_same(got: Trained, want: Trained, precision: str = "fp32") -> None:
    exact = precision == "fp32"
    assert got.applied == want.applied
    assert got.losses == pytest.approx(want.losses, rel=1e-5 if exact else 1e-3)
    assert got.norms == pytest.approx(want.norms, rel=1e-5 if exact else 1e-3)
    torch.testing.assert_close(got.weights, want.weights, rtol=0, atol=1e-6 if exact else 1e-4)
    torch.testing.assert_close(got.averages, want.averages, rtol=0, atol=1e-6 if exact else 1e-4)


def compare(ranks: int, cases: list[tuple[str, str, int | None]]) -> None:
    def on_rank(rank: int) -> list[tuple[Trained, Trained]]:
        return [
            (train(rank, ranks, strategy, precision, rows), train(rank, ranks, "ddp", precision, rows))
            for strategy, precision, rows in cases
        ]

    for results in run_ranks(ranks, on_rank):
        for (_, precision, _), (sharded, replicated) in zip(cases, results, strict=True):
            assert_same(sharded, replicated, precision)
            if precision == "fp32":
                assert_same(sharded, reference())


def test_a_sharded_model_trains_as_ddp_and_one_process_do() -> None:
    compare(2, [("full", "fp32", 1), ("full", "fp16", None)])


def test_a_forward_of_a_hook_between_two_steps_changes_no_loss() -> None:
    def on_rank(rank: int, calls_model: bool) -> list[float]:
        model = Blocks()
        shard_model(model, ParallelConfig(shard="full"), world(rank, 2))
        step = train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world(rank, 2), nominal=ROWS)
        losses = []
        for number in range(3):
            step.accumulate(micro_batches(number, ROWS, ranks=2, rank=rank), 1)
            if calls_model:  # leaves the parameters of the root unit gathered, as they are before the update
                with torch.no_grad():
                    model(torch.ones(1, 3))
            step.apply()
            outcome = step.settle()
            assert outcome is not None
            losses.append(outcome.stats.loss_sum)
        return losses

    def both(rank: int) -> tuple[list[float], list[float]]:
        return on_rank(rank, True), on_rank(rank, False)

    for with_hook, without in run_ranks(2, both):
        assert with_hook == without


class Penalised(Blocks):
    """Returns a penalty with its output; that on the weights of a block is computed and returned by the block."""

    class Block(nn.Sequential):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), self[0].weight.square().sum()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self.Block(*block) for block in self.blocks))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden, penalties = self.entry(x), self.entry.weight.square().sum()
        for block in self.blocks:
            hidden, penalty = block(hidden)
            penalties = penalties + penalty
        return self.out(hidden) + self.entry.again(hidden.tanh()), penalties  # type: ignore[operator]


def penalty_after_the_model(model: Any, batch: Batch) -> Output:
    output = squared_error(model, batch)
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    weights = torch.cat([parameter.flatten() for parameter in bare.parameters()])
    return Output(output.loss_sum + 0.1 * weights.square().sum() * output.count, output.count, output.metrics)


def penalty_of_the_model(model: nn.Module, batch: Batch) -> Output:
    penalties: list[Tensor] = []

    def predict(x: Tensor) -> Tensor:
        predicted, penalty = model(x)
        penalties.append(penalty)
        return predicted

    output = squared_error(predict, batch)  # type: ignore[arg-type]
    return Output(output.loss_sum + 0.1 * penalties[0] * output.count, output.count, output.metrics)


@pytest.mark.slow
def test_a_penalty_in_the_forward_or_on_gathered_weights_gives_the_weights_of_ddp() -> None:
    def trained(rank: int, shard: str, kind: type[Blocks], task: Callable[..., Output], rows: int | None) -> Tensor:
        model = kind()
        wrapped: nn.Module = model
        if shard == "none":
            wrapped = DistributedDataParallel(model)
        else:
            size = 1 if shard == "hybrid" else None
            modules = [] if task is penalty_after_the_model else None
            shard_model(model, ParallelConfig(shard=shard, shard_size=size, shard_modules=modules), world(rank, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step = train_step(wrapped, optimizer, task=task, world=world(rank, 2), nominal=ROWS)
        # The second rank has fewer rows.
        run_steps(step, [micro_batches(number, ROWS - 1, ranks=2, rank=rank, rows=rows) for number in range(3)])
        return whole(model)

    def on_rank(rank: int) -> None:
        for kind, task in ((Penalised, penalty_of_the_model), (Blocks, penalty_after_the_model)):
            for rows in (None, 2):
                replicated = trained(rank, "none", kind, task, rows)
                for shard in ("full", "hybrid"):
                    torch.testing.assert_close(
                        trained(rank, shard, kind, task, rows),
                        replicated,
                        rtol=0,
                        atol=1e-6,
                        msg=f"{kind} {rows} {shard}",
                    )

    run_ranks(2, on_rank)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_in_every_precision_and_strategy(ranks: int) -> None:
    strategies = ("full", "hybrid") if ranks % 2 == 0 else ("full",)
    compare(ranks, [*product(strategies, ("fp32", "bf16", "fp16"), (1,)), ("full", "fp32", None)])


@pytest.mark.slow
def test_skips_are_decided_on_the_device_and_gradients_reduced_in_each_micro_batch_or_parameters_gathered_in_bf16() -> (
    None
):
    def on_rank(rank: int) -> tuple[Trained, ...]:
        return (
            train(rank, 2, "full", "fp32", None, on_device=True),
            train(rank, 2, "full", "fp32", 1, reduce_after="micro_batch"),
            train(rank, 2, "full", "bf16", None, gather_dtype="compute"),
            train(rank, 2, "ddp", "bf16", None),
        )

    for on_device, each, low, ddp in run_ranks(2, on_rank):
        assert_same(on_device, reference())
        assert_same(each, reference())
        assert low.applied == ddp.applied
        # Biases are rounded to bf16 as well.
        assert low.losses == pytest.approx(ddp.losses, rel=0.05)


@pytest.mark.slow
def test_the_origin_of_skips_is_named_with_gradients_of_gathered_parameters() -> None:
    def spoilt(model: nn.Module, batch: Batch) -> Output:
        output = squared_error(model, batch)
        return Output(output.loss_sum * float("inf"), output.count, output.metrics)

    def on_rank(rank: int) -> str:
        model = Blocks()
        shard_model(model, ParallelConfig(shard="full"), world(rank, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"task": spoilt, "max_consecutive_skips": 2}
        step = train_step(model, optimizer, world=world(rank, 2), **options)
        windows = [micro_batches(0, ROWS, ranks=2, rank=rank)] * 3
        with pytest.raises(TooManySkips) as raised:
            run_steps(step, windows, settle_late=False)
        return str(raised.value)

    for message in run_ranks(2, on_rank):
        assert "the loss, though the output of every module is finite" in message
        assert "the gradient of entry.again.bias" in message


def test_an_optimizer_that_cannot_update_parts_is_refused_and_one_without_fused_parts_is_not_fused() -> None:
    def on_rank(rank: int) -> list[bool]:
        model = Blocks()
        shard_model(model, ParallelConfig(shard="full"), world(rank, 2))
        adafactor = {"_target_": "torch.optim.Adafactor"}
        with refused(ConfigError, "optimizer", "torch.optim.Adafactor", "parallel=ddp"):
            build_optimizer(adafactor, model)
        muon = {"_target_": "dtrain.optimizers.MuonWithAdamW"}
        with refused(ConfigError, "optimizer", "Muon", "parallel=ddp"):
            build_optimizer(muon, model)
        fused = {"_target_": "torch.optim.SGD", "lr": 0.1, "fused": True}
        with refused(ConfigError, "optimizer", "_fused_sgd_", "parallel=ddp"):
            build_optimizer(fused, model)
        nodes = [{"_target_": f"torch.optim.{name}", "lr": 0.1, "no_decay": ["vectors"]} for name in ("SGD", "AdamW")]
        return [bool(build_optimizer(node, model).defaults["fused"]) for node in nodes]

    assert run_ranks(2, on_rank) == [[False, True]] * 2


def test_a_parameter_that_is_used_outside_of_its_unit_is_explained() -> None:
    def outside(model: nn.Module, batch: Batch) -> None:
        return (batch["x"] @ model.trunk.weight.T).sum()  # type: ignore[union-attr, operator]

    def on_rank(rank: int) -> None:
        model = Net()
        shard_model(model, ParallelConfig(shard="full", shard_modules=["trunk"]), world(rank, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = train_step(model, optimizer, world=world(rank, 2), task=outside)
        with refused(ConfigError, "parallel.shard_modules", "DTensor", "Leave"):
            step.accumulate(micro_batches(0, ROWS, ranks=2, rank=rank), 1)

    run_ranks(2, on_rank)


class PenaltyTask:
    """The squared error, and a penalty on one weight that the task computes itself."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        output = squared_error(model, batch)
        (weight,) = (p for name, p in model.named_parameters() if name.endswith("blocks.0.0.weight"))
        if self._kind == "full_tensor":
            weight = weight.full_tensor()  # type: ignore[operator]
        elif self._kind == "to_local":
            weight = weight.to_local()  # type: ignore[operator]
        penalty = weight.square().sum()
        if self._kind == "norm":  # without norm(), whose gradient torch 2.9 cannot shard
            penalty = penalty.sqrt().full_tensor()  # type: ignore[attr-defined]
        return Output(output.loss_sum + 0.01 * output.count * penalty, output.count)


@pytest.mark.parametrize("rows", [None, 3])
def test_a_penalty_on_sharded_weights_is_refused_by_name_on_every_rank(rows: int | None) -> None:
    def on_rank(rank: int) -> list[str]:
        messages = []
        for kind, after in (("full_tensor", "window"), ("to_local", "micro_batch"), ("norm", "window")):
            model = Blocks()
            shard_model(model, ParallelConfig(shard="full", reduce_after=after), world(rank, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
            step = train_step(model, optimizer, world=world(rank, 2), nominal=ROWS, reduce_each=after == "micro_batch")
            step.task = PenaltyTask(kind)
            try:
                run_steps(step, [micro_batches(0, ROWS, ranks=2, rank=rank, rows=rows)])
            except UnreducedGradient as error:
                messages.append(str(error))
        return messages

    for messages in run_ranks(2, on_rank):
        assert len(messages) == 3
        for text in messages:
            assert_refused(text, "parallel.shard", "blocks.0.0.weight", "parallel=ddp")


def test_a_penalty_on_a_parameter_that_is_trained_later_is_refused() -> None:
    def on_rank(rank: int) -> None:
        model = Blocks()
        model.blocks[0][0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
        shard_model(model, ParallelConfig(shard="full"), world(rank, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        step = train_step(model, optimizer, task=PenaltyTask("to_local"), world=world(rank, 2), nominal=ROWS)
        model.blocks[0][0].weight.requires_grad_(True)  # type: ignore[index, union-attr]
        with refused(UnreducedGradient, "parallel.shard", "blocks.0.0.weight", "parallel=ddp"):
            step.accumulate(micro_batches(0, ROWS, ranks=2, rank=rank), 1)

    run_ranks(2, on_rank)


def test_a_gradient_of_a_gradient_is_refused_with_a_remedy() -> None:
    def on_rank(rank: int) -> str:
        model = Blocks()
        shard_model(model, ParallelConfig(shard="full"), world(rank, 2))
        step = train_step(model, torch.optim.SGD(model.parameters(), lr=1e-2), world=world(rank, 2), nominal=ROWS)

        def penalised(model: nn.Module, batch: Batch) -> Output:
            x = batch["x"].detach().requires_grad_()
            out = model(x)
            (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return Output(out.square().sum() + gradient.square().sum(), batch.valid.sum())

        step.task = penalised
        try:
            run_steps(step, [micro_batches(0, ROWS, ranks=2, rank=rank)])
        except ConfigError as error:
            return str(error)
        return ""

    for text in run_ranks(2, on_rank):
        assert_refused(text, "parallel.shard", "create_graph=True", "parallel=ddp")

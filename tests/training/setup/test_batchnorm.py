"""Masked rows and BatchNorm in training: the statistics are those of each rank's valid rows."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp  # here once, and not in every rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.config.schema import ParallelConfig
from dtrain.data import Batch
from dtrain.data.loading.batch import Rows
from dtrain.distributed.sharding import is_dtensor, shard_model
from dtrain.precision import Precision
from dtrain.training.setup.batchnorm import ValidRows, calls_collectives, fixed_shapes
from dtrain.training.setup.model import checkpoint_activations
from dtrain.training.task import Output
from tests.ranks import run_ranks
from tests.toys import NetWithBatchNorm, NormNet, batch, micro_batches, run_steps, samples, train_step, world

RANKS, ROWS, LR = 4, 4, 0.05
COUNT = RANKS * ROWS
# Masked samples of the global batch of 16, of which rank 0 has the first four.
MASKED = {
    "full": set(),
    "end of an epoch: 3, 3, 2 and 0 valid rows": {3, 7, 10, 11, 12, 13, 14, 15},
    "bad samples in the middle": {1, 6, 8, 9, 10},
    "no valid row on rank 0": {0, 1, 2, 3},
}


class Plus(nn.Module):
    """A BatchNorm as third parties derive theirs, one without running statistics, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()

        class Derived(nn.BatchNorm1d):
            pass

        self.net = NetWithBatchNorm()
        self.derived = Derived(3, momentum=None)
        self.untracked = nn.BatchNorm1d(3, track_running_stats=False)
        self.frozen = nn.BatchNorm1d(3)
        self.frozen.running_mean += 0.5

    def train(self, mode: bool = True) -> Plus:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.frozen(self.untracked(self.derived(x))))


def task(model: nn.Module, batch: Batch) -> Output:
    errors = (model(batch["x"].double()).squeeze(1) - batch["y"].double()).square().masked_fill(~batch.valid, 0)
    return Output(errors.sum().float(), batch.valid.sum())


def build() -> nn.Module:
    return Plus().train().double()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([(p.full_tensor() if is_dtensor(p) else p).detach().flatten() for p in model.parameters()])


def in_plain_torch(rows: int) -> tuple[Tensor, dict[str, Tensor]]:
    """One process: the forwards of all ranks one after the other. The buffers are rank 0's."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    for number, masked in enumerate(MASKED.values()):
        x, y = samples(number, COUNT)
        optimizer.zero_grad()
        for first in range(0, COUNT, rows):
            mine = range(first, first + rows)
            valid = [it for it in mine if it not in masked]
            before = copy.deepcopy(dict(model.named_buffers()))
            if len(valid) >= 2:
                errors = (model(x[valid]).squeeze(1) - y[valid]).square()
            else:  # the masked rows have the last sample
                out = model(x[[it if it in valid else -1 for it in mine]]).squeeze(1)
                errors = (out - y[first : first + rows])[[it - first for it in valid]].square()
            (errors.sum() / (COUNT - len(masked))).backward()
            if first >= ROWS or len(valid) < 2:
                model.load_state_dict(before, strict=False)
        optimizer.step()
    return flat(model), dict(model.named_buffers())


def on_ranks(rank: int, rows: int, how: str) -> tuple[Tensor, dict[str, Tensor]]:
    model = build()
    wrapped: nn.Module = model
    if how == "fsdp":
        shard_model(model, ParallelConfig(shard="full"), world(rank, RANKS), compute_dtype=torch.float32, kept=[])
    else:
        wrapped = DistributedDataParallel(model)
    step = train_step(
        wrapped,
        torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9),
        task=task,
        world=world(rank, RANKS),
        nominal=COUNT,
    )
    windows = [
        micro_batches(number, COUNT, ranks=RANKS, rank=rank, rows=rows, masked=masked)
        for number, masked in enumerate(MASKED.values())
    ]
    outcomes = run_steps(step, windows)
    assert all(outcome.stats.applied for outcome in outcomes)
    assert [outcome.stats.samples for outcome in outcomes] == [COUNT - len(masked) for masked in MASKED.values()]
    return flat(model), {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "rows"),
    [("ddp", ROWS), ("ddp", 2), ("fsdp", ROWS), ("fsdp", 2)],
    ids=["ddp", "ddp, accumulated", "fsdp", "fsdp, accumulated"],
)
def test_statistics_are_those_of_the_valid_rows_of_each_rank(how: str, rows: int) -> None:
    weights, buffers = in_plain_torch(rows)
    results = run_ranks(RANKS, on_ranks, rows, how)
    for got, _ in results:
        torch.testing.assert_close(got, weights, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(results[0][1], buffers, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("masked", [{0, 1, 2, 3}, {1, 2, 3}], ids=["no valid row", "one valid row"])
@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recomputed in the backward"])
def test_too_few_rows_for_statistics_leave_the_running_ones_alone(masked: set[int], recomputed: bool) -> None:
    model = build()
    if recomputed:
        checkpoint_activations(model, ["net", "derived"])
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    step = train_step(model, torch.optim.SGD(model.parameters(), lr=LR), task=task)
    step.accumulate(micro_batches(0, 4, masked=masked), 1)
    torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)


class Seen:
    """A task that keeps what it is given."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        self.batches.append(batch)
        return Output(model(batch["x"].float()).sum() * 0, batch.valid.sum())


def test_every_column_of_a_batch_is_cut_to_the_same_rows() -> None:
    whole = micro_batches(0, 4, masked={0, 2})[0]
    whole["text"] = ["a", "b", "c", "d"]
    whole["image"] = (
        torch.arange(4.0)[:, None, None, None].expand(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    )
    whole.bad = [{"key": "s/2"}]
    whole.sources = ("one",)
    seen = Seen()
    model = NetWithBatchNorm()
    step = train_step(model, torch.optim.SGD(model.parameters(), lr=LR), task=seen, nominal=4)
    outcomes = run_steps(step, [[whole]])
    (cut,) = seen.batches
    assert cut.sample_keys == ["s/1", "s/3"]
    assert cut["text"] == ["b", "d"]
    assert cut["image"][:, 0, 0, 0].tolist() == [1, 3]
    assert cut["image"].is_contiguous(memory_format=torch.channels_last)
    assert cut["x"].tolist() == whole["x"][[1, 3]].tolist()
    assert cut.valid.tolist() == [True, True]
    assert (cut.sources, cut.num_valid) == (("one",), 2)
    assert (len(whole.valid), whole.sample_keys) == (4, ["", "s/1", "", "s/3"])
    assert (outcomes[0].stats.samples, outcomes[0].stats.bad) == (2, 1)


class Numbers:
    def keys(self, samples: Tensor) -> list[str]:
        return [f"k{number}" for number in samples.tolist()]


def test_rows_whose_keys_are_not_built_yet_are_cut_as_well() -> None:
    x, y = samples(0, 4)
    whole = batch(x, y, [0, -1, 2, 3])
    whole.rows = Rows(torch.tensor([0, -1, 2, 3]).numpy(), Numbers())  # type: ignore[arg-type]
    assert whole.valid_rows().sample_keys == ["k0", "k2", "k3"]


def gathers(model: nn.Module, batch: Batch) -> Output:
    """As a contrastive task, it needs as many rows on each rank."""
    predicted = model(batch["x"]).squeeze(1)
    parts = [torch.empty_like(predicted) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, predicted.detach())
    return Output(predicted.masked_fill(~batch.valid, 0).sum(), batch.valid.sum())


def rows_that_a_task_gets(rank: int, how: str) -> list[int]:
    model = NetWithBatchNorm()
    wrapped: nn.Module = model
    if how == "fsdp":
        shard_model(model, ParallelConfig(shard="full"), world(rank, 2), compute_dtype=torch.float32, kept=[])
    else:
        wrapped = DistributedDataParallel(model)
    rows = []

    def counting(model: nn.Module, batch: Batch) -> Output:
        rows.append(len(batch.valid))
        return gathers(model, batch)

    step = train_step(
        wrapped, torch.optim.SGD(model.parameters(), lr=LR), task=counting, world=world(rank, 2), nominal=8
    )
    run_steps(step, [micro_batches(number, 8, ranks=2, rank=rank, masked={6}) for number in range(2)])
    return rows[-2:]


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_task_that_gathers_the_rows_of_all_ranks_gets_equally_many_on_each(how: str) -> None:
    assert run_ranks(2, rows_that_a_task_gets, how) == [[4, 4], [4, 4]]


def compiled() -> nn.Module:
    model = NormNet()
    model.compile()
    return model


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (compiled, "train.compile"),
        (lambda: nn.SyncBatchNorm.convert_sync_batchnorm(NormNet()), "SyncBatchNorm"),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.BatchNorm1d(2)), "ScriptModule"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.InstanceNorm1d(2)), ""),
        (NormNet, ""),
    ],
    ids=["compiled", "synchronised", "scripted", "without BatchNorm", "plain"],
)
def test_shapes_stay_for_what_may_need_them(build: Callable[[], nn.Module], reason: str) -> None:
    model = build()
    assert reason in fixed_shapes(model)
    assert bool(fixed_shapes(model)) == bool(reason)
    whole = micro_batches(0, 4, masked={0})[0]
    with ValidRows(model).for_batch(whole) as got:
        assert (got is not whole) == (type(model) is NormNet and not reason)


def test_a_model_whose_norms_are_all_frozen_gets_every_row() -> None:
    model = NetWithBatchNorm()
    model[1].eval()
    whole = micro_batches(0, 4, masked={0})[0]
    with ValidRows(model).for_batch(whole) as got:
        assert got is whole


@pytest.mark.parametrize(
    "column",
    [torch.tensor(0.5), 0.5, ["a"], torch.arange(9), {"a": 1}, None],
    ids=["scalar", "number", "short list", "long tensor", "dict", "None"],
)
def test_a_column_without_an_entry_per_row_keeps_the_batch_whole_and_is_named_once(column: object) -> None:
    whole = micro_batches(0, 4, masked={0})[0]
    whole["lam"] = column
    rows = ValidRows(NetWithBatchNorm())
    with pytest.warns(UserWarning, match="'lam'.*data.tail=drop"), rows.for_batch(whole) as got:
        assert got is whole
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with rows.for_batch(whole) as got:
            assert got is whole


@pytest.mark.parametrize("masked", [set(), {0}], ids=["full", "masked"])
@pytest.mark.parametrize("in_place", [False, True])
def test_rows_that_a_hook_masks_are_cut_as_well(masked: set[int], in_place: bool) -> None:
    whole = micro_batches(0, 4, masked=masked)[0]
    if in_place:
        whole.valid[3] = False
    else:
        whole.valid = whole.valid & torch.tensor([True, True, True, False])
    with ValidRows(NetWithBatchNorm()).for_batch(whole) as got:
        assert got["x"].tolist() == whole["x"][whole.valid].tolist()
        assert got.valid.all()


def test_looking_for_collectives_leaves_a_task_as_it_was() -> None:
    seen = Seen()
    assert not calls_collectives(seen, NetWithBatchNorm(), micro_batches(0, 4)[0], Precision("fp32"))
    assert seen.batches == []

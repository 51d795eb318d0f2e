from __future__ import annotations

import math
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

from dtrain.data import Batch, ShardLoader
from dtrain.data.sources.mixture import EvaluationSets
from dtrain.distributed.store import open_group_store
from dtrain.distributed.world import World
from dtrain.errors import ConfigError
from dtrain.precision import Precision
from dtrain.training.evaluation import Interrupted, MetricNames, evaluate, metric_names
from dtrain.training.task import Evaluation, NotFinite, Output
from tests.ranks import run_ranks
from tests.refusals import refused
from tests.shards import VECTOR_FIELDS, npy, vector, write_tar, write_vectors
from tests.toys import Net, world

FP32 = Precision("fp32")
STATM = Path("/proc/self/statm")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_vectors(tmp_path_factory.mktemp("shards"), 50)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_vectors(tmp_path_factory.mktemp("few"), 4, shards=2)


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_vectors(tmp_path_factory.mktemp("five"), 5, shards=1)


def loader(shards: str, rank: int = 0, ranks: int = 1, **given: Any) -> ShardLoader:
    options: dict[str, Any] = {"global_batch_size": 12, "num_workers": 0, "shuffle": "none"} | given
    return ShardLoader(shards, VECTOR_FIELDS, rank=rank, world_size=ranks, **options)


def squares(model: nn.Module, batch: Batch) -> Output:
    """The square of the prediction, two metrics whose counts are not that of the rows, and a table of counts."""
    predicted = model(batch["x"]).squeeze(1)
    losses = predicted.float().square().masked_fill(~batch.valid, 0)
    odd = batch.valid & (batch["number"] % 2 == 1)
    metrics = {"odd": (odd.sum(), batch.valid.sum()), "of_odd": ((predicted > 0)[odd].sum(), odd.sum())}
    table = torch.zeros(2, 3, dtype=torch.int64)
    table.index_put_((batch["number"] % 2, batch["number"] % 3), batch.valid.long(), accumulate=True)
    return Output(losses.sum(), batch.valid.sum(), metrics, {"remainders": table})


def remainders(samples: range) -> list[list[int]]:
    return [[sum(n % 2 == two and n % 3 == three for n in samples) for three in range(3)] for two in range(2)]


def one_by_one(samples: range) -> dict[str, float]:
    """The reference: float64, one process, one sample after the other."""
    model = Net().double()
    with torch.no_grad():
        predicted = {n: model(torch.from_numpy(vector(n)).double()).item() for n in samples}
    odd = [n for n in samples if n % 2 == 1]
    return {
        "loss": float(np.mean([value**2 for value in predicted.values()])),
        "odd": len(odd) / len(samples),
        "of_odd": sum(predicted[n] > 0 for n in odd) / len(odd),
        "samples": len(samples),
        "bad_samples": 0,
    }


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_any_split_counts_each_sample_once(shards: str, ranks: int, micro_batch_size: int | None) -> None:
    def rank(number: int) -> list[Evaluation]:
        data = loader(shards, number, ranks, micro_batch_size=micro_batch_size)
        here = world(number, ranks)
        return [evaluate(Net(), squares, data, world=here, precision=FP32, epoch=epoch) for epoch in (0, 1)]

    want = one_by_one(range(50))
    results = [result for both in run_ranks(ranks, rank) for result in both]
    for result in results:
        assert result["loss"] == pytest.approx(want["loss"], rel=1e-6)
        assert {**result, "loss": 0} == {**want, "loss": 0}
        assert result.tables["remainders"].tolist() == remainders(range(50))
    assert len({result["loss"] for result in results}) == 1  # ranks agree to the last bit


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_set_smaller_than_a_global_batch_is_evaluated_all_the_same(few: str, ranks: int) -> None:
    def rank(number: int) -> Evaluation:
        data = loader(few, number, ranks)
        return evaluate(Net(), squares, data, world=world(number, ranks), precision=FP32)

    want = one_by_one(range(4))
    for result in run_ranks(ranks, rank):
        assert result["loss"] == pytest.approx(want["loss"], rel=1e-6)
        assert {**result, "loss": 0} == {**want, "loss": 0}


def test_each_set_has_its_own_metrics_and_all_together_too(shards: str, few: str) -> None:
    def rank(number: int) -> Evaluation:
        sets = EvaluationSets({"many": shards, "few": few})
        data = loader(sets, number, 2, micro_batch_size=2)  # type: ignore[arg-type]
        return evaluate(Net(), squares, data, world=world(number, 2), precision=FP32)

    many, of_few = one_by_one(range(50)), one_by_one(range(4))
    for result in run_ranks(2, rank):
        assert result["samples"] == 54
        assert result["loss"] == pytest.approx((many["loss"] * 50 + of_few["loss"] * 4) / 54, rel=1e-6)
        for name, want in (("many", many), ("few", of_few)):
            assert {key: result[f"{name}/{key}"] for key in want} == pytest.approx(want, rel=1e-6)
        assert result.tables["remainders"].sum() == 54


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_no_graph_is_kept_and_the_model_computes_as_in_evaluation(shards: str) -> None:
    model = nn.Sequential(Net(), nn.Dropout(0.9))
    seen: list[tuple[bool, bool, bool]] = []

    def task(model: nn.Module, batch: Batch) -> Output:
        output = squares(model, batch)
        seen.append((torch.is_grad_enabled(), output.loss_sum.requires_grad, model.training))
        return output

    result = evaluate(model, task, loader(shards), world=world(), precision=FP32)
    assert set(seen) == {(False, False, False)}
    assert result["loss"] == pytest.approx(one_by_one(range(50))["loss"], rel=1e-6)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_put_back_even_after_an_error(shards: str, training: bool) -> None:
    def broken(model: nn.Module, batch: Batch) -> Output:
        raise ZeroDivisionError

    model = nn.Sequential(Net(), nn.Dropout()).train(training)
    evaluate(model, squares, loader(shards), world=world(), precision=FP32)
    assert {module.training for module in model.modules()} == {training}
    with pytest.raises(ZeroDivisionError):
        evaluate(model, broken, loader(shards), world=world(), precision=FP32)
    assert {module.training for module in model.modules()} == {training}


@pytest.mark.usefixtures("alone")
def test_evaluating_between_two_steps_does_not_disturb_training(shards: str) -> None:
    def trained(evaluated: bool) -> torch.Tensor:
        model = nn.Sequential(Net(), nn.BatchNorm1d(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.from_numpy(np.stack([vector(n) for n in range(8)]))).square().sum().backward()
            optimizer.step()
            if evaluated:
                evaluate(model, squares, loader(shards), world=world(), precision=FP32)
        return torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()])

    assert torch.equal(trained(True), trained(False))


class Remembers(nn.Module):
    """Keeps a table that a forward makes, as models with rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or not self.training:
            self.table = torch.ones(1)
        return self.net(x) * self.table  # the backward needs the table


def traced() -> nn.Module:
    return torch.jit.trace(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)), torch.ones(2, 3))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("build", [Net, traced, Remembers])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_can_be_trained_after_each_of_several_evaluations(
    shards: str, build: Callable[[], nn.Module], precision: str
) -> None:
    model, policy = build(), Precision(precision)
    for _ in range(3):
        for _ in range(2):
            with policy.autocast("cpu"):
                loss = model(torch.ones(4, 3)).float().sum()
            loss.backward()
        evaluate(model, squares, loader(shards), world=world(), precision=policy)


def test_bad_samples_of_all_ranks_are_counted(tmp_path: Path) -> None:
    samples = [
        (f"{n:06d}", {"npy": b"no array" if n in (1, 6) else npy(vector(n)), "cls": str(n).encode()}) for n in range(8)
    ]
    shard = write_tar(tmp_path / "part-0.tar", samples)

    def rank(number: int) -> tuple[float, float]:
        result = evaluate(Net(), squares, loader(shard, number, 2), world=world(number, 2), precision=FP32)
        return result["samples"], result["bad_samples"]

    assert run_ranks(2, rank) == [(6, 2)] * 2


@pytest.mark.usefixtures("alone")
def test_half_precision_computes_the_forward_and_not_the_sums(shards: str) -> None:
    dtypes = set()

    def task(model: nn.Module, batch: Batch) -> Output:
        dtypes.add(model(batch["x"]).dtype)
        return squares(model, batch)

    result = evaluate(Net(), task, loader(shards), world=world(), precision=Precision("bf16"))
    assert dtypes == {torch.bfloat16}
    assert result["loss"] == pytest.approx(one_by_one(range(50))["loss"], rel=2e-2)
    assert result["samples"] == 50


@pytest.mark.usefixtures("alone")
def test_sums_are_exact_where_fp32_would_lose_small_addends(shards: str) -> None:
    def task(model: nn.Module, batch: Batch) -> Output:
        metrics = {"large": (2.0**24 if 0 in batch["number"] else 1.0, float(0 in batch["number"]))}
        return Output(model(batch["x"]).sum() * 0, batch.valid.sum(), metrics)

    data = loader(shards)
    result = evaluate(Net(), task, data, world=world(), precision=FP32)
    assert result["large"] == 2**24 + len(data) - 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_on_one_rank_is_an_error_on_all(shards: str, value: float) -> None:
    def task(model: nn.Module, batch: Batch) -> Output:
        output = squares(model, batch)
        spoilt = (batch.valid & (batch["number"] == 17)).any()
        return Output(torch.where(spoilt, value, output.loss_sum), output.count, output.metrics, output.tables)

    def rank(number: int) -> str:
        with refused(NotFinite, "loss", value, "50 samples") as raised:
            evaluate(Net(), task, loader(shards, number, 3), world=world(number, 3), precision=FP32)
        # The rest of the result is there for who wants to show it.
        assert raised.value.evaluation["odd"] == 0.5
        assert raised.value.evaluation.tables["remainders"].sum() == 50
        return str(raised.value)

    assert len(set(run_ranks(3, rank))) == 1


def test_metrics_or_tables_that_differ_between_ranks_are_refused_on_all_of_them(shards: str) -> None:
    def rank(number: int, tables: dict[str, Any], metrics: dict[str, Any]) -> None:
        def task(model: nn.Module, batch: Batch) -> Output:
            return Output(torch.ones(()), 1, metrics if number else {}, tables if number else {})

        with refused(ValueError, "metrics", "[] on rank 0", "on rank 1"):
            evaluate(Net(), task, loader(shards, number, 2), world=world(number, 2), precision=FP32)

    run_ranks(2, rank, {"few": torch.zeros(3, dtype=torch.int64)}, {})
    run_ranks(2, rank, {}, {"rare": (1.0, 1)})


@pytest.mark.usefixtures("alone")
def test_metrics_and_tables_that_come_and_go_are_refused_with_both_lists(shards: str) -> None:
    def task(model: nn.Module, batch: Batch) -> Output:
        late = int(batch["number"][0]) > 20
        return Output(torch.ones(()), 1, {"b" if late else "a": (1.0, 1)}, {})

    def growing(model: nn.Module, batch: Batch) -> Output:
        return Output(torch.ones(()), 1, {}, {"seen": torch.zeros(1 + int(batch["number"].max()), dtype=torch.int64)})

    with refused(ValueError, "metrics", "['b']", "['a']"):
        evaluate(Net(), task, loader(shards), world=world(), precision=FP32)
    with refused(ValueError, "table seen", "[24]", "[12]"):
        evaluate(Net(), growing, loader(shards), world=world(), precision=FP32)


class Wide(nn.Module):
    """Its activations are 4 MB a row, and a history would keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 1 << 20))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh().mean(dim=1, keepdim=True)


def most_held(data: ShardLoader, held: Callable[[], int], where: World) -> int:
    """Bytes held after the micro-batch after which most were."""
    seen: list[int] = []
    model = Wide().to(where.device)
    evaluate(model, squares, data, world=where, precision=FP32, progress=lambda done, all: seen.append(held()))
    assert len(seen) == data.steps_per_epoch
    return max(seen)


def resident() -> int:
    return int(STATM.read_text().split()[1]) * resource.getpagesize()


@pytest.mark.usefixtures("alone")
@pytest.mark.skipif(not STATM.exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_number_of_batches(shards: str, five: str) -> None:
    few, many = (most_held(loader(data, global_batch_size=1), resident, world()) for data in (five, shards))
    # 45 more batches: 180 MB if one activation of each were kept, 12 for the weights of the second model.
    assert many - few < 60e6


@pytest.mark.usefixtures("alone")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_of_a_gpu_does_not_grow_with_the_number_of_batches(shards: str, five: str) -> None:
    where = World(0, 1, 0, 1, torch.device("cuda", 0), "cpu:gloo,cuda:nccl", launched=False)

    def on_gpu(model: nn.Module, batch: Batch) -> Output:
        predicted = model(batch["x"]).squeeze(1)
        return Output(predicted.float().square().sum(), batch.valid.sum())

    peaks = []
    for data in (five, shards):
        torch.cuda.reset_peak_memory_stats()
        evaluate(Wide().cuda(), on_gpu, loader(data, global_batch_size=1), world=where, precision=FP32)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] - peaks[0] < 1e6


@pytest.mark.usefixtures("alone")
def test_a_task_that_counts_nothing_is_an_error_and_a_metric_that_does_is_not_a_number(shards: str) -> None:
    def nothing(model: nn.Module, batch: Batch) -> Output:
        return Output(torch.zeros(()), 0)

    def no_metric(model: nn.Module, batch: Batch) -> Output:
        return Output(torch.ones(()), 1, {"rare": (0.0, 0)})

    with pytest.raises(ConfigError, match="no valid rows"):
        evaluate(Net(), nothing, loader(shards), world=world(), precision=FP32)
    result = evaluate(Net(), no_metric, loader(shards), world=world(), precision=FP32)
    assert result["loss"] == 1.0
    assert math.isnan(result["rare"])


@pytest.mark.usefixtures("alone")
def test_a_task_that_returns_a_mean_is_refused(shards: str) -> None:
    with refused(TypeError, key="", got="Tensor", remedy="dtrain.training.task.Output"):
        evaluate(Net(), lambda model, batch: model(batch["x"]).mean(), loader(shards), world=world(), precision=FP32)


@pytest.mark.usefixtures("alone")
def test_progress_is_told_of_every_micro_batch(shards: str) -> None:
    told: list[tuple[int, int]] = []
    data = loader(shards, micro_batch_size=4)
    evaluate(Net(), squares, data, world=world(), precision=FP32, progress=lambda done, all: told.append((done, all)))
    assert told == [(number + 1, 15) for number in range(15)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_leave_at_the_same_micro_batch_whichever_is_asked_to_stop(shards: str, ranks: int) -> None:
    def rank(number: int) -> tuple[int, bool]:
        done: list[int] = []
        model = Net()
        with pytest.raises(Interrupted):
            evaluate(
                model,
                squares,
                loader(shards, number, ranks, micro_batch_size=1),
                world=world(number, ranks),
                precision=FP32,
                progress=lambda count, all: done.append(count),
                stop=lambda: number == ranks - 1 and len(done) >= 3,
            )
        return len(done), model.training

    # Said before the fourth micro-batch, and heard before the fifth.
    assert run_ranks(ranks, rank) == [(4, True)] * ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evaluation_that_may_be_stopped_and_is_not_finds_the_same(shards: str, ranks: int) -> None:
    def rank(number: int) -> list[dict[str, float]]:
        data, here = loader(shards, number, ranks, micro_batch_size=2), world(number, ranks)
        free = evaluate(Net(), squares, data, world=here, precision=FP32)
        return [dict(free), dict(evaluate(Net(), squares, data, world=here, precision=FP32, stop=lambda: False))]

    for free, asked in run_ranks(ranks, rank):
        assert asked == free


@pytest.mark.usefixtures("alone")
def test_a_world_of_one_leaves_at_once(shards: str) -> None:
    done: list[int] = []
    with pytest.raises(Interrupted):
        evaluate(
            Net(),
            squares,
            loader(shards),
            world=world(),
            precision=FP32,
            progress=lambda count, all: done.append(count),
            stop=lambda: len(done) == 2,
        )
    assert done == [1, 2]


# -- names before the first step


class Counting:
    """A task that keeps the rows of each evaluation for ``conclude``."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        assert not batch.sources
        self.rows.append(batch.num_valid)
        return squares(model, batch)

    def conclude(self, model: nn.Module, metrics: Any) -> dict[str, float]:
        return {"seen": sum(self.rows) / metrics["samples"], "of_cats": metrics.get("cats/odd", 0.0)}


def part_of_run(model: nn.Module, task: Any, eval_loader: ShardLoader, of_rank: World) -> Any:
    cfg = SimpleNamespace(parallel=SimpleNamespace(timeout_start=20.0), train=SimpleNamespace(metrics={}))
    return SimpleNamespace(model=model, task=task, eval_loader=eval_loader, world=of_rank, precision=FP32, cfg=cfg)


def names_of(task: Any, eval_loader: ShardLoader, batch: Batch, *wanted: str) -> MetricNames:
    model = nn.Sequential(Net(), nn.BatchNorm1d(1))
    run = part_of_run(model, task, eval_loader, world())
    before = {name: buffer.clone() for name, buffer in model.state_dict().items()}
    names = metric_names(run, batch, wanted)
    assert model.training
    assert all(torch.equal(before[name], buffer) for name, buffer in model.state_dict().items())
    return names


def test_metrics_are_known_before_the_first_step_and_nothing_is_changed(shards: str, few: str) -> None:
    batch = next(iter(loader(shards)))
    batch.sources = ("a", "b")  # of a mixture in training
    task = Counting()
    names = names_of(task, loader(shards), batch, "eval/seen")
    common = {"loss", "odd", "of_odd", "samples", "bad_samples"}
    assert set(names.names) == {f"eval/{name}" for name in (*common, "seen", "of_cats")}
    assert names.problem == ""
    assert task.rows == []
    sets = loader(EvaluationSets({"cats": few, "dogs": shards}), shuffle="none")
    of_sets = {f"eval/{prefix}{name}" for name in common for prefix in ("", "cats/", "dogs/")}
    assert set(names_of(task, sets, batch, "eval/seen").names) == of_sets | {"eval/seen", "eval/of_cats"}


def test_a_task_is_not_called_for_a_metric_that_every_evaluation_has(shards: str) -> None:
    def never(model: nn.Module, batch: Batch) -> Output:
        raise AssertionError

    assert names_of(never, loader(shards), next(iter(loader(shards))), "eval/loss").problem == ""


def test_names_are_unknown_if_the_task_raises_and_wrong_ones_are_refused_if_it_does_not() -> None:
    known = MetricNames(("eval/accuracy", "eval/loss"))
    assert known.require([("checkpoint.best", "eval/loss")]) == []
    with refused(ConfigError, "train.hooks[0]", "'eval/acuracy'", "Did you mean 'eval/accuracy'?"):
        known.require([("checkpoint.best", "eval/loss"), ("train.hooks[0]", "eval/acuracy")])
    unknown = MetricNames(("eval/loss",), "the task raised KeyError: 'x'")
    (warning,) = unknown.require([("checkpoint.best", "eval/auc")])
    assert all(part in warning for part in ("checkpoint.best", "'eval/auc'", "eval/loss", "KeyError: 'x'"))


def test_a_task_that_raises_on_one_rank_leaves_names_unknown_on_all(shards: str) -> None:
    def on(rank: int) -> MetricNames:
        def raises_on_rank_1(model: nn.Module, batch: Batch) -> Output:
            if rank == 1:
                raise KeyError("of rank 1")
            return squares(model, batch)

        of_rank = world(rank, 2)
        open_group_store(c10d._get_default_store(), of_rank)
        run = part_of_run(Net(), raises_on_rank_1, loader(shards), of_rank)
        return metric_names(run, next(iter(loader(shards))), ["eval/odd"])

    first, second = run_ranks(2, on)
    assert first == second
    assert "of rank 1" in first.problem
    assert "eval/odd" in first.names

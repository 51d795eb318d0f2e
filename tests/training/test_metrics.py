"""``train.metrics`` and ``conclude``: metrics that are no sums, on any number of ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.data import Batch, ShardLoader
from dtrain.data.sources.mixture import EvaluationSets
from dtrain.errors import ConfigError
from dtrain.precision import Precision
from dtrain.tasks import Classification
from dtrain.training.build import build_task
from dtrain.training.evaluation import evaluate, metric_names
from dtrain.training.metrics import EvaluationMetrics, WrongMetric
from dtrain.training.task import ConcludingTask, Evaluation, MetricTask, Output
from dtrain.training.validation import validate
from tests.config.command_lines import assert_not_composed, compose
from tests.ranks import run_ranks
from tests.refusals import refused
from tests.replay.replays import replay_on
from tests.shards import npy, vector, write_tar
from tests.test_evaluate import ending, read
from tests.toys import CPU, Net, world
from tests.training.test_evaluation import part_of_run
from tests.whole_runs import metrics, records, train_on, weights

torchmetrics = pytest.importorskip("torchmetrics", reason="train.metrics needs it: pip install 'dtrain[metrics]'")
OF = "torchmetrics.classification.Multiclass"
FOUR: dict[str, Any] = {"num_classes": 4, "average": "macro"}
NODES: dict[str, Any] = {
    "f1": {"_target_": f"{OF}F1Score", **FOUR},
    "auc": {"_target_": f"{OF}AUROC", **FOUR},
    "iou": {"_target_": f"{OF}JaccardIndex", **FOUR},
}
FP32 = Precision("fp32")


class WithTables(Classification):
    """F1 and mean IoU from the confusion matrix; counts its calls of the model."""

    def conclude(self, model: nn.Module, evaluation: Evaluation) -> dict[str, float]:
        confusion = evaluation.tables["confusion"].double()
        hits, of_class, predicted = confusion.diag(), confusion.sum(1), confusion.sum(0)
        f1 = (2 * hits / (of_class + predicted)).nanmean().item()
        return {"table_f1": f1, "table_iou": (hits / (of_class + predicted - hits)).nanmean().item()}


def task() -> WithTables:
    return WithTables(input="x", label="label")


def label(sample: int) -> int:
    return (sample * 7 + sample // 5) % 4


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Patterns of 50 and of 5 samples, the latter fewer than three ranks have rows for."""
    folder, written = tmp_path_factory.mktemp("shards"), []
    for name, numbers in (("many", range(50)), ("few", range(5))):
        samples = [(f"{n:03d}", {"npy": npy(vector(n)), "cls": str(label(n)).encode()}) for n in numbers]
        written.append(write_tar(folder / f"{name}.tar", samples))
    return written[0], written[1]


def loader(shards: Any, rank: int = 0, ranks: int = 1, **given: Any) -> ShardLoader:
    fields = {"npy": {"name": "x", "role": "feature"}, "cls": {"name": "label", "role": "label"}}
    options: dict[str, Any] = {"global_batch_size": 12, "num_workers": 0, "shuffle": "none"} | given
    return ShardLoader(shards, fields, rank=rank, world_size=ranks, **options)


@pytest.fixture
def alone() -> Any:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def by_scikit_learn(count: int) -> dict[str, float]:
    scores = pytest.importorskip("sklearn.metrics")
    labels = [label(n) for n in range(count)]
    with torch.no_grad():
        logits = Net(4).double()(torch.from_numpy(np.stack([vector(n) for n in range(count)])).double())
    predicted = logits.argmax(1)
    auc = scores.roc_auc_score(labels, logits.softmax(1), multi_class="ovr", average="macro")
    f1, iou = (score(labels, predicted, average="macro") for score in (scores.f1_score, scores.jaccard_score))
    return {"f1": f1, "auc": auc, "iou": iou}


@pytest.mark.slow
def test_metrics_equal_those_of_scikit_learn_on_any_number_of_ranks_and_for_each_set(shards: tuple[str, str]) -> None:
    many, few = shards

    def rank(number: int, ranks: int) -> dict[str, float]:
        sets = EvaluationSets({"many": many, "few": few})
        data = loader(sets, number, ranks, micro_batch_size=2)
        return dict(evaluate(Net(4), task(), data, world=world(number, ranks), precision=FP32, metrics=NODES))

    results = [result for ranks in (1, 2, 3) for result in run_ranks(ranks, rank, ranks)]
    want = by_scikit_learn(50)
    for result in results:
        assert {name: result[f"many/{name}"] for name in want} == pytest.approx(want, abs=1e-6)
        assert result["few/auc"] == pytest.approx(by_scikit_learn(5)["auc"], abs=1e-6)
        assert result["samples"] == 55
    for name in ("f1", "iou", "many/f1", "many/iou", "few/f1", "few/iou", "table_f1", "table_iou"):
        assert len({result[name] for result in results}) == 1, name  # to the last bit: their states are counts
    assert results[0]["f1"] == pytest.approx(results[0]["table_f1"], abs=1e-6)
    assert results[0]["iou"] == pytest.approx(results[0]["table_iou"], abs=1e-6)


@pytest.mark.parametrize("ranks", [1, 3])
def test_conclude_computes_f1_and_mean_iou_from_the_confusion_matrix(shards: tuple[str, str], ranks: int) -> None:
    def rank(number: int) -> dict[str, float]:
        data = loader(shards[0], number, ranks)
        return dict(evaluate(Net(4), task(), data, world=world(number, ranks), precision=FP32))

    want = by_scikit_learn(50)
    for result in run_ranks(ranks, rank):
        assert result["table_f1"] == pytest.approx(want["f1"], abs=1e-9)
        assert result["table_iou"] == pytest.approx(want["iou"], abs=1e-9)
        assert set(result) == {"loss", "accuracy", "samples", "bad_samples", "table_f1", "table_iou"}
    assert isinstance(task(), ConcludingTask)


@pytest.mark.usefixtures("alone")
def test_metrics_share_the_forward_of_the_loss(shards: tuple[str, str]) -> None:
    model, calls = Net(4), []
    model.register_forward_hook(lambda *_: calls.append(1))
    of_metrics = task()
    data = loader(shards[0], micro_batch_size=4)
    evaluate(model, of_metrics, data, world=world(), precision=Precision("bf16"), metrics=NODES)
    assert len(calls) == data.steps_per_epoch * data.micro_batches_per_step
    assert of_metrics._kept is None  # no batch stays in memory


class Every(torchmetrics.Metric):  # type: ignore[misc, name-defined]
    """A state of each kind; its value is one number of all of them."""

    full_state_update = False

    def __init__(self, lists: bool = True) -> None:
        super().__init__()
        self.add_state("highest", torch.tensor(-1), dist_reduce_fx="max")
        self.add_state("lowest", torch.tensor(99), dist_reduce_fx="min")
        self.add_state("any", torch.tensor(False), dist_reduce_fx="max")
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("seen", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("rows", [], dist_reduce_fx="cat")
        self.add_state("apart", [], dist_reduce_fx=None)
        self.add_state("own", torch.tensor(0), dist_reduce_fx=lambda stacked: stacked.sum(0))

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.highest = torch.maximum(self.highest, target.max())
        self.lowest = torch.minimum(self.lowest, target.min())
        self.any = self.any | (target == 3).any()
        self.mean = (self.mean * self.seen + preds.sum()) / (self.seen + len(preds))
        self.seen += len(preds)
        self.rows.append(preds)
        self.apart.append(target.to(torch.uint8))  # odd sizes: what follows is not aligned
        self.own += target.sum()

    def compute(self) -> Tensor:
        rows = torchmetrics.utilities.dim_zero_cat(self.rows)
        assert sorted(torch.cat([t.reshape(-1) for t in self.apart]).long().tolist()) == sorted(rows.long().tolist())
        assert len(self.apart) > 1
        return self.highest * 1e6 + self.lowest * 1e4 + self.any * 1e3 + self.own + self.mean + len(rows) / self.seen


class Rows:
    """Gives the metrics a batch as it is."""

    def metric_inputs(self, model: Any, batch: Any) -> Any:
        return batch, batch.long()


@pytest.mark.parametrize("target", ["tests.training.test_metrics.Every", "torchmetrics.regression.PearsonCorrCoef"])
def test_every_kind_of_state_is_reduced_also_with_a_rank_without_rows(target: str) -> None:
    batches = {0: [torch.arange(2.0), torch.arange(5.0)], 2: [torch.tensor([3.0])]}

    class Correlated(Rows):
        def metric_inputs(self, model: Any, batch: Any) -> Any:
            return (batch, batch.long()) if target.startswith("tests") else (batch, batch.square() - batch)

    def rank(number: int, ranks: int) -> dict[str, float]:
        found = EvaluationMetrics({"all": {"_target_": target}}, CPU)
        for batch in batches.get(number, [torch.empty(0)]) if ranks > 1 else [*batches[0], *batches[2]]:
            found.update(Correlated(), nn.Identity(), batch, 0)  # type: ignore[arg-type]
        return found.over_all_ranks()

    (one,) = run_ranks(1, rank, 1)
    three = run_ranks(3, rank, 3)
    assert three[0] == three[1] == three[2] == {"all": pytest.approx(one["all"], rel=1e-6)}
    if target.startswith("tests"):
        assert one["all"] == pytest.approx(4e6 + 1e3 + 14 + 14 / 8 + 1)
    else:
        values = np.array([0, 1, 0, 1, 2, 3, 4, 3.0])
        assert one["all"] == pytest.approx(np.corrcoef(values, values**2 - values)[0, 1], rel=1e-5)


@pytest.mark.usefixtures("alone")
def test_without_rows_a_metric_is_nan() -> None:
    found = EvaluationMetrics(NODES, CPU, ["a", "b"])
    values = found.over_all_ranks()
    assert set(values) == {f"{prefix}{name}" for prefix in ("", "a/", "b/") for name in NODES}
    assert all(map(math.isnan, values.values()))


@pytest.mark.usefixtures("alone")
def test_metrics_are_known_and_computed_before_the_first_step(
    shards: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, float]] = []
    of_this_rank = EvaluationMetrics.alone
    monkeypatch.setattr(EvaluationMetrics, "alone", lambda self: found.append(of_this_rank(self)) or found[0])
    data = loader(EvaluationSets({"many": shards[0], "few": shards[1]}))
    run = part_of_run(Net(4), task(), data, world())
    run.cfg.train.metrics = NODES
    names = metric_names(run, next(iter(loader(shards[0], global_batch_size=50))), ["eval/few/auc"])
    assert names.problem == ""
    assert {f"eval/{prefix}{name}" for prefix in ("", "many/", "few/") for name in NODES} <= set(names.names)
    want = by_scikit_learn(50)
    assert found == [
        {f"{prefix}{name}": pytest.approx(want[name]) for prefix in ("", "many/", "few/") for name in want}
    ]


class Bare:
    """A task with two classes of its own that gives metrics only predictions."""

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        raise AssertionError

    def metric_inputs(self, model: nn.Module, batch: Batch) -> Any:
        return batch["label"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("name", "node", "named"),
    [
        ("accuracy", NODES["f1"], ("train.metrics.accuracy", "the task has a metric", "different name")),
        ("table_f1", NODES["f1"], ("train.metrics.table_f1", "the task has a metric", "different name")),
        ("f1", {**NODES["f1"], "average": "none"}, ("train.metrics.f1", "shape [4]", "average=macro")),
        ("f1", {**NODES["f1"], "num_classes": 2}, ("train.metrics.f1", f"{OF}F1Score", "predictions and targets")),
    ],
)
def test_a_metric_that_does_not_suit_the_task_is_refused_before_the_first_step(
    shards: tuple[str, str], name: str, node: Any, named: tuple[str, ...]
) -> None:
    data = loader(shards[0])
    run = part_of_run(Net(4), task(), data, world())
    run.cfg.train.metrics = {name: node}
    with refused(WrongMetric, *named):
        metric_names(run, next(iter(data)), [])
    with refused(ConfigError, *named):
        evaluate(Net(4), task(), data, world=world(), precision=FP32, metrics={name: node})


@pytest.mark.usefixtures("alone")
def test_a_task_must_return_predictions_and_targets(shards: tuple[str, str]) -> None:
    with refused(TypeError, "Bare.metric_inputs", "Tensor", "(preds, target)"):
        evaluate(Net(4), Bare(), loader(shards[0]), world=world(), precision=FP32, metrics=NODES)
    assert isinstance(Bare(), MetricTask)


# -- configs


def metric(target: str, **options: Any) -> str:
    arguments = ", ".join(f"{name}: {value}" for name, value in {"_target_": target, **options}.items())
    return f"train.metrics={{m: {{{arguments}}}}}"


def test_the_best_mode_is_the_metrics_own() -> None:
    for target, mode in (("torchmetrics.MeanSquaredError", "min"), ("torchmetrics.R2Score", "max")):
        for best in ("eval/m", "eval/cats/m"):
            composed = compose("experiment=digits", metric(target), f"checkpoint.best={best}")
            assert composed.cfg.checkpoint.best_mode == mode
    chosen = ("checkpoint.best=eval/m", "checkpoint.best_mode=max")
    assert (
        compose("experiment=digits", metric("torchmetrics.MeanSquaredError"), *chosen).cfg.checkpoint.best_mode == "max"
    )
    other = compose("experiment=digits", metric("torchmetrics.MeanSquaredError"), "checkpoint.best=eval/loss")
    assert other.cfg.checkpoint.best_mode is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([metric("torchmetrics.F2Score")], ("train.metrics.m", "F2Score", "F1Score")),
        ([metric(f"{OF}F1Score", classes=10)], ("train.metrics.m", "num_classes")),
        ([metric(f"{OF}F1Score", num_classes=10, averag="macro")], ("train.metrics.m", "averag")),
        ([metric(f"{OF}F1Score", num_classes=-1)], ("train.metrics.m", "num_classes")),
        (["train.metrics={a/b: {_target_: torchmetrics.R2Score}}"], ("train.metrics", "'a/b'", "letters")),
        (
            [metric("torchmetrics.R2Score"), "task=regression"],
            ("train.metrics", "dtrain.tasks.Regression", "metric_inputs(model, batch)"),
        ),
    ],
)
def test_a_wrong_metric_is_one_message_before_anything_starts(arguments: list[str], named: tuple[str, ...]) -> None:
    with refused(ConfigError, *named) as raised:
        validate(compose("experiment=digits", "tracker=none", *arguments).cfg)
    assert str(raised.value).count("\n") == 0


def test_what_is_no_metric_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    given = (metric("torch.nn.Identity"), "checkpoint.best=eval/m")
    assert_not_composed(capsys, ["experiment=digits", *given], "train.metrics.m", "Identity", "torchmetrics.Metric")


def test_metrics_of_the_command_line_replace_those_of_a_preset() -> None:
    preset = metric("torchmetrics.R2Score", num_outputs=2)
    assert compose("experiment=digits", preset).cfg.train.metrics["m"]["num_outputs"] == 2
    assert compose("experiment=digits", "train.metrics.f1._target_=torchmetrics.R2Score").cfg.train.metrics == {
        "f1": {"_target_": "torchmetrics.R2Score"}
    }
    assert compose("experiment=digits", "train.metrics={}").cfg.train.metrics == {}


def test_a_task_without_predictions_is_refused_when_it_is_built() -> None:
    with refused(ConfigError, "train.metrics", "f1", "metric_inputs", "builtins.dict"):
        build_task({"_target_": "builtins.dict"}, None, {"f1": {}})


# -- whole runs

F1 = f"train.metrics={{f1: {{_target_: {OF}F1Score, num_classes: 10, average: macro}}}}"


@pytest.mark.slow
def test_a_run_keeps_its_best_f1_and_is_evaluated_and_its_weights_are_those_without_metrics(
    digits: Path, tmp_path: Path
) -> None:
    options = ("train.max_steps=3", "train.eval_every=1", "model.width=4", "checkpoint.keep_last=1")
    train_on(2, tmp_path / "with", *options, F1, "checkpoint.best=eval/f1")
    train_on(2, tmp_path / "without", *options, "checkpoint.best=null")
    of_steps = metrics(tmp_path / "with", "eval/f1")
    assert len(of_steps) == 3
    best = max(range(3), key=lambda number: (of_steps[number], number)) + 1
    assert sorted(path.name for path in (tmp_path / "with/checkpoints").glob("step-*")) == sorted(
        {f"step-{best:09d}", "step-000000003"}
    )
    assert metrics(tmp_path / "with") == metrics(tmp_path / "without")
    ours, theirs = (weights(tmp_path / name, 3) for name in ("with", "without"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all("eval/f1" not in record for record in records(tmp_path / "without"))

    assert replay_on(2, tmp_path / "with", "replay.steps=[1,3]")["equal"]

    code, text = ending(f"run.dir={tmp_path / 'with'}", "precision=fp32,bf16", "data.num_workers=0", f"out={tmp_path}")
    assert code == 0, text
    assert "eval/f1" in text
    in_fp32, in_bf16 = (
        [read(path)["metrics"]["eval/f1"] for path in tmp_path.glob(f"*-{precision}*.json")]
        for precision in ("fp32", "bf16")
    )
    assert in_fp32 == [of_steps[best - 1]]
    assert in_bf16 == [pytest.approx(of_steps[best - 1], abs=0.05)]

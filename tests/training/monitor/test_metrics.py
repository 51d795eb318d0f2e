from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dtrain.data import Batch
from dtrain.precision import Precision
from dtrain.tasks import Classification
from dtrain.training.monitor import metrics
from dtrain.training.monitor.metrics import MetricSums, StepMetrics
from dtrain.training.task import Output
from tests.toys import micro_batches, world
from tests.whole_runs import records, status, train_on

# -- meter


STEP = {"samples": 64, "step_seconds": 0.5}


def test_loss_is_the_mean_over_samples_and_not_the_mean_of_step_means():
    meter = MetricSums()
    meter.add(loss_sum=60.0, count=64, **STEP)
    meter.add(loss_sum=1.0, count=5, metrics={"accuracy": (1, 5)}, samples=5, step_seconds=0.5)
    record = meter.record()
    assert record["train/loss"] == 61 / 69
    assert record["train/accuracy"] == 1 / 5


@given(st.lists(st.tuples(st.integers(-1000, 1000), st.integers(1, 100)), min_size=1, max_size=20))
def test_a_window_is_the_same_whether_its_steps_come_alone_or_together(pairs):
    apart, together = MetricSums(), MetricSums()
    for loss, number in pairs:
        apart.add(loss_sum=loss, count=number, samples=number, step_seconds=1.0, metrics={"top5": (loss, number)})
    loss, number = map(sum, zip(*pairs, strict=True))
    together.add(loss_sum=loss, count=number, samples=number, step_seconds=len(pairs), metrics={"top5": (loss, number)})
    apart, together = apart.record(), together.record()
    for name in ("train/loss", "train/top5", "throughput/samples_per_second"):
        assert apart[name] == together[name]


def test_a_skipped_step_shows_in_the_totals_and_in_the_time_but_not_in_the_loss():
    meter = MetricSums(skipped_steps=3)
    meter.add(loss_sum=64.0, count=64, grad_norm=2.0, lr=0.1, loss_scale=65536.0, **STEP)
    meter.add(loss_sum=math.inf, count=64, grad_norm=math.inf, lr=0.2, loss_scale=32768.0, skipped=True, **STEP)
    meter.add(loss_sum=32.0, count=64, grad_norm=4.0, lr=0.2, loss_scale=16384.0, **STEP)
    record = meter.record()
    assert record["train/loss"] == 96 / 128
    assert record["train/grad_norm"] == 3.0
    assert record["train/lr"] == 0.2
    assert record["precision/loss_scale"] == 16384.0
    assert record["precision/skipped_steps"] == 4
    assert record["throughput/samples_per_second"] == 192 / 1.5
    assert record["time/step_seconds"] == 0.5


def test_a_window_of_skipped_steps_has_no_loss_but_says_that_they_were_skipped():
    meter = MetricSums()
    meter.add(loss_sum=math.nan, count=64, loss_scale=8.0, skipped=True, **STEP)
    record = meter.record()
    assert "train/loss" not in record
    assert "train/lr" not in record
    assert record["precision/skipped_steps"] == 1
    assert record["precision/loss_scale"] == 8.0


def test_a_record_starts_the_next_window_and_keeps_the_totals():
    meter = MetricSums(bad_samples=2)
    meter.add(loss_sum=1.0, count=1, bad=1, wait_seconds=0.125, bytes=6400, **STEP)
    assert meter.record()["time/data_wait_fraction"] == 0.25
    meter.add(loss_sum=5.0, count=1, samples=64, step_seconds=1.0, bad=1, bytes=640)
    record = meter.record()
    assert record["train/loss"] == 5.0
    assert record["data/bad_samples"] == meter.bad_samples == 4
    assert record["data/bytes_per_sample"] == 10.0
    assert record["time/data_wait_fraction"] == 0.0


def test_names_are_those_of_the_metrics_file():
    meter = MetricSums()
    meter.add(loss_sum=1.0, count=1, grad_norm=1.0, lr=0.1, loss_scale=2.0, bytes=1, **STEP)
    assert set(meter.record()) == {
        "train/loss", "train/grad_norm", "train/lr", "precision/loss_scale", "precision/skipped_steps",
        "throughput/samples_per_second", "time/step_seconds", "time/step_seconds_p50", "time/step_seconds_p95",
        "time/step_seconds_max", "time/data_wait_fraction", "data/bytes_per_sample", "data/bad_samples",
    }  # fmt: skip


def test_a_metric_of_the_task_does_not_replace_the_loss_or_the_gradient_norm():
    meter = MetricSums()
    meter.add(loss_sum=64.0, count=64, grad_norm=2.0, metrics={"loss": (0, 64), "grad_norm": (640, 64)}, **STEP)
    record = meter.record()
    assert (record["train/loss"], record["train/grad_norm"]) == (1.0, 2.0)


def test_an_empty_window_has_totals_only():
    assert MetricSums().record() == {"precision/skipped_steps": 0, "data/bad_samples": 0}


@pytest.mark.parametrize("name", ["precision/skipped_steps", "data/bad_samples"])
def test_totals_are_whole_numbers(name):
    meter = MetricSums()
    meter.add(loss_sum=1.0, count=1, skipped=True, bad=1, **STEP)
    assert type(meter.record()[name]) is int


def test_tokens_a_second_are_those_of_the_samples_that_were_used_also_in_skipped_steps():
    meter = MetricSums(counts="tokens")
    meter.add(loss_sum=1.0, count=64 * 100, **STEP)
    meter.add(loss_sum=0.0, count=0, skipped=True, **STEP)  # a rank that overflowed has not said what it counted
    assert meter.record()["throughput/tokens_per_second"] == 128 * 100 / 1.0
    meter.add(loss_sum=0.0, count=0, skipped=True, **STEP)
    assert "throughput/tokens_per_second" not in meter.record()
    meter.add(loss_sum=0.0, count=0, skipped=True, **STEP)
    meter.add(loss_sum=1.0, count=64 * 100, **STEP)
    assert meter.record()["throughput/tokens_per_second"] == 128 * 100 / 1.0
    samples = MetricSums()
    samples.add(loss_sum=1.0, count=64, **STEP)
    assert [name for name in samples.record() if name.startswith("throughput/")] == ["throughput/samples_per_second"]


def test_mfu_is_what_the_model_needed_over_what_the_device_could_have_done():
    meter = MetricSums()
    meter.flops_per_sample = 3e9 / 4  # of four devices
    meter.add(loss_sum=1.0, count=64, **STEP)
    record = meter.record()
    assert record["throughput/tflops_per_second"] == pytest.approx(64 / 0.5 * 3e9 / 4 / 1e12)
    assert "throughput/mfu" not in record
    meter.peak_flops = 312e12
    meter.add(loss_sum=1.0, count=64, **STEP)
    assert meter.record()["throughput/mfu"] == pytest.approx(64 / 0.5 * 3e9 / 4 / 312e12)


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=50))
def test_percentiles_of_the_step_are_those_of_the_window(seconds):
    meter = MetricSums()
    meter.add(loss_sum=1.0, count=1, samples=1, step_seconds=1e6)
    meter.record()
    for each in seconds:
        meter.add(loss_sum=1.0, count=1, samples=1, step_seconds=each)
    record = meter.record()
    for name, share in (("p50", 50), ("p95", 95), ("max", 100)):
        value = record[f"time/step_seconds_{name}"]
        assert 100 * sum(each <= value for each in seconds) >= share * len(seconds)
        assert 100 * sum(each < value for each in seconds) < share * len(seconds)


def test_memory_of_the_process_is_there_on_a_cpu():
    name = "memory/max_resident_gib"
    assert 0.01 < MetricSums(torch.device("cpu")).record()[name] < 1000
    assert name not in MetricSums().record()


def test_flops_of_a_sample_are_shared_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    # Samples per second are those of all ranks, tflops_per_second and mfu are those of one device.
    monkeypatch.setattr(metrics, "flops_per_row", lambda *args: 3e9)
    totals = SimpleNamespace(skipped_steps=0, bad_samples=0, restarts=0)
    step = SimpleNamespace(step=0, model=nn.Linear(1, 1))
    run: Any = SimpleNamespace(
        world=world(0, 2), totals=totals, step=step, task=None, model=step.model, precision=Precision("fp32")
    )
    measured = StepMetrics(run)
    assert measured.count_flops(micro_batches(0, 2)[0]) is None
    assert measured._sums.flops_per_sample == 1.5e9


# -- measures


TASK = f"task._target_={__name__}.Inverting"
SMALL = ("model.width=4", "data.num_workers=0", "checkpoint.best=null", "train.eval_every=0", "train.max_steps=2")


class Inverting(Classification):
    """Works in place."""

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        batch["image"].neg_().add_(1)
        return super().__call__(model, batch)


@pytest.mark.usefixtures("digits")
def test_a_run_that_cannot_be_counted_says_so_once_and_learns_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    train_on(1, tmp_path / "counted", TASK, *SMALL)
    monkeypatch.setattr(metrics, "flops_per_row", _cannot)
    capfd.readouterr()
    train_on(1, tmp_path / "not", TASK, *SMALL)
    assert capfd.readouterr().out.count("FLOPs could not be counted (TypeError: no such mode), so") == 1
    assert status(tmp_path / "not")["state"] == "finished"
    counted, plain = (records(tmp_path / name) for name in ("counted", "not"))
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        assert [record.get(name) for record in counted] == [record.get(name) for record in plain]
    assert "throughput/tflops_per_second" in counted[0]
    assert "throughput/tflops_per_second" not in plain[0]


def _cannot(*args: Any) -> float:
    raise TypeError("no such mode")

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtrain.tracking import Meter

STEP = {"samples": 64, "step_seconds": 0.5}


def test_loss_is_the_mean_over_samples_and_not_the_mean_of_step_means():
    meter = Meter()
    meter.add(loss_sum=60.0, count=64, **STEP)
    meter.add(loss_sum=1.0, count=5, metrics={"accuracy": (1, 5)}, samples=5, step_seconds=0.5)
    record = meter.record()
    assert record["train/loss"] == 61 / 69
    assert record["train/accuracy"] == 1 / 5


@given(st.lists(st.tuples(st.integers(-1000, 1000), st.integers(1, 100)), min_size=1, max_size=20))
def test_a_window_is_the_same_whether_its_steps_come_alone_or_together(pairs):
    apart, together = Meter(), Meter()
    for loss, count in pairs:
        apart.add(loss_sum=loss, count=count, samples=count, step_seconds=1.0, metrics={"top5": (loss, count)})
    loss, count = map(sum, zip(*pairs, strict=True))
    together.add(loss_sum=loss, count=count, samples=count, step_seconds=len(pairs), metrics={"top5": (loss, count)})
    apart, together = apart.record(), together.record()
    for name in ("train/loss", "train/top5", "throughput/samples_per_second"):
        assert apart[name] == together[name]


def test_a_skipped_step_shows_in_the_totals_and_in_the_time_but_not_in_the_loss():
    meter = Meter(skipped_steps=3)
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
    meter = Meter()
    meter.add(loss_sum=math.nan, count=64, loss_scale=8.0, skipped=True, **STEP)
    record = meter.record()
    assert "train/loss" not in record
    assert "train/lr" not in record
    assert record["precision/skipped_steps"] == 1
    assert record["precision/loss_scale"] == 8.0


def test_a_record_starts_the_next_window_and_keeps_the_totals():
    meter = Meter(bad_samples=2)
    meter.add(loss_sum=1.0, count=1, bad=1, wait_seconds=0.125, bytes=6400, **STEP)
    assert meter.record()["time/data_wait_fraction"] == 0.25
    meter.add(loss_sum=5.0, count=1, samples=64, step_seconds=1.0, bad=1, bytes=640)
    record = meter.record()
    assert record["train/loss"] == 5.0
    assert record["data/bad_samples"] == meter.bad_samples == 4
    assert record["data/bytes_per_sample"] == 10.0
    assert record["time/data_wait_fraction"] == 0.0


def test_bytes_belong_to_the_rows_that_they_came_with():
    meter = Meter()
    meter.add(loss_sum=1.0, count=64, bytes=320, rows=32, **STEP)
    assert meter.record()["data/bytes_per_sample"] == 10.0


def test_names_are_those_of_the_metrics_file():
    meter = Meter()
    meter.add(loss_sum=1.0, count=1, grad_norm=1.0, lr=0.1, loss_scale=2.0, bytes=1, **STEP)
    assert set(meter.record()) == {
        "train/loss", "train/grad_norm", "train/lr", "precision/loss_scale", "precision/skipped_steps",
        "throughput/samples_per_second", "time/step_seconds", "time/step_seconds_p50", "time/step_seconds_p95",
        "time/step_seconds_max", "time/data_wait_fraction", "data/bytes_per_sample", "data/bad_samples",
    }  # fmt: skip


def test_an_empty_window_has_totals_only():
    assert Meter().record() == {"precision/skipped_steps": 0, "data/bad_samples": 0}


@pytest.mark.parametrize("name", ["precision/skipped_steps", "data/bad_samples"])
def test_totals_are_whole_numbers(name):
    meter = Meter()
    meter.add(loss_sum=1.0, count=1, skipped=True, bad=1, **STEP)
    assert type(meter.record()[name]) is int


def test_tokens_a_second_are_those_of_the_samples_that_were_used_also_in_skipped_steps():
    meter = Meter(counts="tokens")
    meter.add(loss_sum=1.0, count=64 * 100, **STEP)
    meter.add(loss_sum=0.0, count=0, skipped=True, **STEP)  # a rank that overflowed has not said what it counted
    assert meter.record()["throughput/tokens_per_second"] == 128 * 100 / 1.0
    meter.add(loss_sum=0.0, count=0, skipped=True, **STEP)
    assert "throughput/tokens_per_second" not in meter.record()
    samples = Meter()
    samples.add(loss_sum=1.0, count=64, **STEP)
    assert [name for name in samples.record() if name.startswith("throughput/")] == ["throughput/samples_per_second"]


def test_mfu_is_what_the_model_needed_over_what_the_device_could_have_done():
    meter = Meter()
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
    meter = Meter()
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
    assert 0.01 < Meter(torch.device("cpu")).record()[name] < 1000
    assert name not in Meter().record()

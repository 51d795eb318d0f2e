"""What is advised follows from what was measured."""

from __future__ import annotations

import dataclasses
from typing import Any

from dtrain.diagnosis.advice import Facts, advise
from dtrain.diagnosis.verdict import Times, judge

SLOW_DATA = Times(data=1.0, compute=0.1, step=0.1, together=1.0)
SLOW_SUMS = Times(data=0.01, compute=0.1, step=1.0, together=1.0)
MODEL = Times(data=0.1, compute=1.0, step=1.0, together=1.0)
FACTS = Facts(
    times=MODEL,
    ranks=2,
    cores=8,
    device="cuda",
    precision="fp32",
    compiled=False,
    workers=2,
    waiting=False,
    micro_batches=1,
    rows=32,
    reading=None,
    gradient_bytes=2**26,
    reducing=0.9,
    comm_dtype="fp32",
    comm_hook=False,
    unevenness=1.0,
    writing=1.0,
    between_saves=10.0,
    memory=0.2,
)


def advice(times: Times, **other: Any) -> str:
    return "\n".join(advise(judge(times), dataclasses.replace(FACTS, times=times, **other)))


def test_workers_that_compute_get_as_many_cores_as_there_are() -> None:
    told = advice(SLOW_DATA)
    assert "data.num_workers=8: to keep up takes about 22" in told
    assert "Cheaper samples" in told
    assert "Cheaper" not in advice(SLOW_DATA, cores=64)
    assert "data.num_workers=22" in advice(SLOW_DATA, cores=64)
    assert "data.num_workers" not in advice(SLOW_DATA, workers=8)


def test_on_a_cpu_a_core_is_left_to_the_step() -> None:
    assert "data.num_workers=7" in advice(SLOW_DATA, device="cpu")


def test_workers_that_wait_may_be_more_than_the_cores() -> None:
    assert "data.num_workers=22, though" in advice(SLOW_DATA, waiting=True)
    assert "data.num_workers=32, though" in advice(SLOW_DATA, waiting=True, workers=8)


def test_a_loader_without_workers_gets_some_before_anything_is_said_of_cores() -> None:
    told = advice(Times(data=0.5, compute=1.0, step=1.0, together=1.6, at_once=False), workers=0)
    assert told.startswith("data.num_workers=1: to keep up takes about 1 for each rank, 0 are there")
    assert "slow each other down" not in told


def test_a_slow_disk_is_named_before_the_workers() -> None:
    assert advice(SLOW_DATA, reading=0.9).startswith("Reading alone takes 900.0 ms of the 1,000.0 ms")
    assert "Reading alone" not in advice(SLOW_DATA, reading=0.1)


def test_a_network_that_explains_the_loss_is_relieved_and_one_that_does_not_is_not_blamed() -> None:
    assert "parallel.comm_dtype=bf16" in advice(SLOW_SUMS)
    assert "comm_dtype" not in advice(SLOW_SUMS, comm_dtype="bf16")
    elsewhere = advice(SLOW_SUMS, reducing=0.01)
    assert "comm_dtype" not in elsewhere
    assert "take 10.0 ms on this network, the step loses 900.0 ms" in elsewhere
    assert "parallel.comm_hook" in advice(SLOW_SUMS, reducing=0.01, comm_hook=True)


def test_a_slow_rank_is_told_apart_from_a_slow_network() -> None:
    assert "slowest rank computes 2.0 times" in advice(SLOW_SUMS, unevenness=2.0)
    assert "slowest rank" not in advice(SLOW_SUMS)


def test_saves_that_are_too_many_and_a_disk_that_is_too_slow_differ() -> None:
    saving = Times(data=0.1, compute=1.0, step=1.0, together=1.0, save=1.0)
    assert "to write, and the next is due after" in advice(saving, writing=20.0)
    assert "copied to host memory" in advice(saving)


def test_a_run_that_its_model_limits_is_as_it_should_be() -> None:
    told = advice(MODEL, micro_batches=4)
    for part in ("as it should be", "precision=bf16 (it is fp32)", "train.micro_batch_size above 32", "train.compile"):
        assert part in told
    told = advice(MODEL, precision="bf16", compiled=True, micro_batches=4, memory=0.9)
    assert "precision" not in told
    assert "micro" not in told
    assert "compile" not in told

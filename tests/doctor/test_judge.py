"""The bottleneck and the advice follow from measured times; known problems are found in the config."""

from __future__ import annotations

import dataclasses
import importlib
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from torch import nn

from dtrain import extras
from dtrain.config.schema import Config
from dtrain.console import Finding
from dtrain.data import ShardLoader
from dtrain.distributed.world import World
from dtrain.doctor import judge
from dtrain.doctor.judge import (
    Facts,
    PartTimes,
    advise,
    check_checkpoint_folder,
    check_config,
    find_bottleneck,
    save_stall,
)
from dtrain.tracking import sinks
from tests.configs import config_of


def times(data: float, compute: float, step: float, together: float | None = None, save: float = 0.0) -> PartTimes:
    return PartTimes(data, compute, step, max(data, step) if together is None else together, save)


def without_workers(data: float, compute: float, step: float) -> PartTimes:
    return PartTimes(data, compute, step, data + step, overlap=False)


@pytest.mark.parametrize(
    ("measured", "part", "gain"),
    [
        (times(data=10, compute=1, step=1), "data", 10),
        (times(data=10, compute=1, step=4), "data", 2.5),
        (times(data=1, compute=10, step=10), "model", None),
        (times(data=1, compute=9, step=10), "model", None),
        (times(data=1, compute=2, step=10), "communication", 5),
        (times(data=5, compute=2, step=10), "communication", 2),
        (times(data=9.5, compute=10, step=10), "balanced", None),
        (times(data=10.5, compute=10, step=10), "balanced", None),
        # Without communication the loader would be the slower part.
        (times(data=9.5, compute=2, step=10), "balanced", None),
        (times(data=1, compute=10, step=10, save=5), "saves", 1.5),
        (times(data=1, compute=10, step=10, save=0.1), "model", None),
        (times(data=6, compute=6, step=6, together=12), "cores", 2),
        (times(data=30, compute=3, step=3, together=40), "data", 10),
        (without_workers(data=10, compute=10, step=10), "data", 2),
        (without_workers(data=1, compute=10, step=10), "model", None),
        (without_workers(data=1, compute=2, step=10), "communication", 11 / 3),
        # Loader and step together were measured faster than the step alone.
        (times(data=1, compute=10, step=10, together=8), "model", None),
        # The step was measured faster with communication than without.
        (times(data=1, compute=10, step=9), "model", None),
    ],
)
def test_the_part_with_the_largest_gain_is_the_bottleneck(measured: PartTimes, part: str, gain: float | None) -> None:
    bottleneck = find_bottleneck(measured)
    assert bottleneck.part == part
    if gain is not None:
        assert bottleneck.gains[part] == pytest.approx(gain)
        assert bottleneck.worthwhile()[0] == part
    else:
        assert bottleneck.worthwhile() == []
    assert all(1 <= other < math.inf for other in bottleneck.gains.values())


def test_parts_are_ordered_by_gain() -> None:
    assert find_bottleneck(times(data=20, compute=4, step=10, save=8)).worthwhile() == ["data", "saves"]


def test_the_loop_waits_for_the_disk_only_if_it_is_slower_than_the_saves() -> None:
    assert save_stall(copy=0.1, write=5, interval=10) == pytest.approx(0.01)
    assert save_stall(copy=0.1, write=25, interval=10) == pytest.approx(1.51)
    assert save_stall(copy=0.1, write=25, interval=math.inf) == 0


# -- advice

SLOW_DATA = PartTimes(data=1.0, compute=0.1, step=0.1, together=1.0)
SLOW_SUMS = PartTimes(data=0.01, compute=0.1, step=1.0, together=1.0)
MODEL = PartTimes(data=0.1, compute=1.0, step=1.0, together=1.0)
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
    read_seconds=None,
    gradient_bytes=2**26,
    reduce_seconds=0.9,
    reduce_dtype="fp32",
    unevenness=1.0,
    write_seconds=1.0,
    save_interval=10.0,
    memory=0.2,
)


def advice(times: PartTimes, **other: Any) -> str:
    return "\n".join(advise(find_bottleneck(times), dataclasses.replace(FACTS, times=times, **other)))


def test_busy_workers_are_limited_by_the_cores() -> None:
    lines = advice(SLOW_DATA)
    assert "data.num_workers=8: each rank has 2 workers and 8 cores, and needs about 22" in lines
    assert "Make samples cheaper" in lines
    assert "cheaper" not in advice(SLOW_DATA, cores=64)
    assert "data.num_workers=22" in advice(SLOW_DATA, cores=64)
    assert "data.num_workers" not in advice(SLOW_DATA, workers=8)


def test_on_a_cpu_one_core_is_left_for_the_step() -> None:
    assert "data.num_workers=7" in advice(SLOW_DATA, device="cpu")


def test_waiting_workers_may_outnumber_the_cores() -> None:
    assert "data.num_workers=22, even with fewer cores" in advice(SLOW_DATA, waiting=True)
    assert "data.num_workers=32, even with fewer cores" in advice(SLOW_DATA, waiting=True, workers=8)


def test_a_loader_without_workers_gets_workers_first() -> None:
    lines = advice(PartTimes(data=0.5, compute=1.0, step=1.0, together=1.6, overlap=False), workers=0)
    assert lines.startswith("data.num_workers=1: each rank has 0 workers and 8 cores, and needs about 1 ")
    assert "OMP_NUM_THREADS" not in lines


def test_a_slow_disk_comes_before_the_workers() -> None:
    assert advice(SLOW_DATA, read_seconds=0.9).startswith("Reading takes 900.0 ms of the 1,000.0 ms")
    assert "Reading" not in advice(SLOW_DATA, read_seconds=0.1)


def test_bf16_reduction_is_advised_only_if_the_network_explains_the_loss() -> None:
    assert "parallel.reduce_dtype=bf16" in advice(SLOW_SUMS)
    assert "parallel.reduce_dtype" not in advice(SLOW_SUMS, reduce_dtype="bf16")
    elsewhere = advice(SLOW_SUMS, reduce_seconds=0.01)
    assert "parallel.reduce_dtype" not in elsewhere
    assert "take 10.0 ms on this network, but a step loses 900.0 ms" in elsewhere


def test_a_slow_rank_is_named() -> None:
    assert "slowest rank takes 2.0 times" in advice(SLOW_SUMS, unevenness=2.0)
    assert "slowest rank" not in advice(SLOW_SUMS)


def test_too_many_saves_and_a_slow_disk_get_different_advice() -> None:
    saving = PartTimes(data=0.1, compute=1.0, step=1.0, together=1.0, save=1.0)
    assert "Writing a checkpoint takes 20.0 s, and they are 10.0 s apart" in advice(saving, write_seconds=20.0)
    assert "checkpoint.every_minutes" in advice(saving)


def test_a_run_limited_by_its_model_gets_options_for_the_step() -> None:
    lines = advice(MODEL, micro_batches=4)
    for part in (
        "keep up with the model",
        "precision=bf16 (now fp32)",
        "train.micro_batch_size above 32",
        "train.compile",
    ):
        assert part in lines
    lines = advice(MODEL, precision="bf16", compiled=True, micro_batches=4, memory=0.9)
    assert "precision" not in lines
    assert "micro" not in lines
    assert "compile" not in lines


# -- known problems


def found(workers: int = 0, device: str = "cpu", optimizer: Any = torch.optim.SGD, **options: Any) -> list[Finding]:
    values = {"x": np.zeros((8, 1000), np.float32)}
    fields = {"x": {"name": "x", "role": "feature"}}
    loader = ShardLoader.over(values, fields, global_batch_size=4, num_workers=0)
    window = [next(iter(loader))]
    loader.num_workers = workers
    world = World(0, 2, 0, 2, torch.device(device), "gloo", True)
    return check_config(Config(), world, loader, window, optimizer(nn.Linear(1, 1).parameters(), lr=0.1, **options))


def about(subject: str, findings: list[Finding]) -> Finding | None:
    return next((finding for finding in findings if finding.subject == subject), None)


def test_more_workers_than_cores_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "process_cpu_count", lambda: 8)
    assert about("workers", found(workers=4)) is None
    crowded = about("workers", found(workers=5))
    assert crowded is not None
    assert crowded.level == "warning"
    assert "data.num_workers=4" in crowded.remedy


def test_batches_that_do_not_fit_into_shared_memory_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(judge, "SHARED_MEMORY", tmp_path)
    # Batches of 16,000 bytes, 2 prefetched and one in the making, 3 workers, 2 ranks.
    needed = 16_000 * 3 * 3 * 2
    for free, level in ((needed - 1, "error"), (needed, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        finding = about("prefetched", found(workers=3))
        assert finding is not None
        assert finding.level == level
    assert about("prefetched", found(workers=0)) is None


def test_an_optimizer_that_is_not_fused_is_a_warning() -> None:
    waiting = about("optimizer", found(device="cuda", fused=False))
    assert waiting is not None
    assert waiting.level == "warning"
    dampened = about("optimizer", found(device="cuda", fused=True, momentum=0.9, dampening=0.1))
    assert dampened is not None
    assert "dampening" in dampened.text
    for fine in (found(device="cuda", fused=True, momentum=0.9), found(fused=False)):
        finding = about("optimizer", fine)
        assert finding is not None
        assert finding.level == "ok"


def test_checkpoints_in_memory_or_without_space_are_problems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(judge, "file_system_type", lambda folder: "ext4")
    assert list(check_checkpoint_folder(tmp_path, 10, 3)) == []
    [full] = check_checkpoint_folder(tmp_path, 10**18, 3)
    assert full.level == "error"
    monkeypatch.setattr(judge, "file_system_type", lambda folder: "tmpfs")
    [lost] = check_checkpoint_folder(tmp_path, 10, 3)
    assert "tmpfs" in lost.text
    assert lost.level == "warning"


@pytest.mark.parametrize(
    ("absent", "section", "key", "remedy"),
    [
        (
            "torchmetrics",
            {"train": {"metrics": {"f1": {"_target_": "torchmetrics.F1Score"}}}},
            "train.metrics",
            "metrics",
        ),
        ("s3fs", {"data": {"train": "s3://bucket/{0..9}.tar"}}, "data.train", "s3"),
        ("aiohttp", {"data": {"eval": {"old": ["a.tar"], "new": ["https://host/b.tar"]}}}, "data.eval", "http"),
        (
            "huggingface_hub",
            {"data": {"mixture": {"web": {"shards": "hf://datasets/o/n/x.tar"}}}},
            "data.mixture",
            "hf",
        ),
        (
            "tiktoken",
            {"data": {"fields": {"txt": {"name": "t", "role": "text", "tokenizer": "tiktoken:gpt2", "length": 8}}}},
            "data.fields",
            "text",
        ),
        ("sklearn", {"data": {"prepare": {"_target_": "dtrain.data.digits.prepare"}}}, "data.prepare", "demo"),
        ("trackio", {"tracker": {"name": "trackio"}}, "tracker.name", "trackio"),
        ("s3fs", {"checkpoint": {"mirror": "s3://bucket/runs/a"}}, "checkpoint.mirror", "s3"),
        ("huggingface_hub", {"run": {"weights_from": "hf://org/name"}}, "run.weights_from", "hf"),
        ("huggingface_hub", {"run": {"warm_start": {"path": "hf://org/name"}}}, "run.warm_start.path", "hf"),
    ],
)
def test_packages_that_a_config_needs_are_named_with_their_command(
    absent: str, section: dict[str, Any], key: str, remedy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            if name.partition(".")[0] == absent:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == absent]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    for module in (sinks, extras):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name == absent else name)
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url, **options: importlib.import_module(absent))
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path))
    cfg = config_of({"tracker": {"name": "none"}} | section)
    [finding] = judge.missing_extras(cfg)
    assert (finding.subject, finding.level) == (f"extra of {key}", "error")
    assert finding.remedy == f"pip install 'dtrain[{remedy}]'"


def test_a_config_that_needs_no_missing_package_has_no_finding(tmp_path: Path) -> None:
    cfg = config_of(
        {"tracker": {"name": "none"}, "data": {"train": f"{tmp_path}/a.tar", "fields": {"a": {"wrong": 1}}}}
    )
    assert judge.missing_extras(cfg) == []  # a wrong field is left to the run

"""Examination of runs that are slow in one part each, with real ranks; the steps it measures."""

from __future__ import annotations

import contextlib
import io
import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain import command_line
from dtrain.config.compose import Composed
from dtrain.config.schema import ParallelConfig
from dtrain.distributed.process_group import process_group
from dtrain.doctor.__main__ import main
from dtrain.doctor.examination import _not_sharded, build_communicating_step, build_examined_run
from dtrain.doctor.measure import endless_batches
from dtrain.training import build
from tests.doctor import slow
from tests.ranks import RanksFailed, run_ranks

SMALL = (
    "experiment=digits",
    "tracker=none",
    "train.global_batch_size=16",
    "model._target_=tests.doctor.slow.SleepyModel",
    "~model.classes",
    "~model.width",
)


def examined(folder: Path, *overrides: str, ranks: int = 2) -> tuple[dict[str, Any], list[str]]:
    """The JSON that doctor writes, and the output of each rank."""
    file = folder / "doctor.json"

    def one(rank: int) -> str:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            assert main([*SMALL, f"run.dir={folder / 'run'}", *overrides, "--seconds=0.1", f"--json={file}"]) == 0
        return text.getvalue()

    texts = run_ranks(ranks, one, init=False)
    return json.loads(file.read_text()), texts


def reduce_by(monkeypatch: pytest.MonkeyPatch, hook: Any, state: Any = None) -> None:
    """Makes DDP reduce gradients with ``hook(state, bucket)``."""
    monkeypatch.setattr(build, "reduce_in", lambda model, dtype: model.register_comm_hook(state, hook))


def test_one_rank_is_examined_and_leaves_no_file(tmp_path: Path, digits: Path) -> None:
    found, (text,) = examined(tmp_path, "data.num_workers=0", ranks=1)
    assert [path.name for path in tmp_path.iterdir()] == ["doctor.json"]
    run = found["run"]
    rates = run["samples_per_second"]
    assert set(rates) == {"data", "compute", "step", "together", "run"}
    assert rates["compute"] == rates["step"]
    assert all(rate > 0 for rate in rates.values())
    assert run["gains"]["communication"] == 1
    assert run["facts"]["reduce_seconds"] == 0
    for part in ("shards", "checkpoints", "loader alone", "step alone", "both together", "bottleneck"):
        assert re.search(rf"^  \w+ +{part}  +\S", text, re.MULTILINE), part
        assert part in [finding["subject"] for finding in found["findings"]]


@pytest.mark.slow
def test_a_static_graph_is_timed_one_variant_after_the_other(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduce_by(monkeypatch, slow.sleepy_hook, 0.3)
    found, _ = examined(tmp_path, "parallel.static_graph=true")
    assert found["run"]["bottleneck"] == "communication"
    assert found["run"]["facts"]["times"]["compute"] < 0.3


@pytest.mark.slow
def test_a_slow_loader_is_the_bottleneck(tmp_path: Path, digits: Path) -> None:
    slow = "data.augment={_target_: tests.doctor.slow.SleepyAugmentation, seconds: 0.05}"
    found, (text, silence) = examined(tmp_path, slow)
    run = found["run"]
    assert run["bottleneck"] == "data"
    # The only worker of each rank makes 8 samples of 50 ms.
    assert run["facts"]["times"]["data"] >= 8 * 0.05 * 0.9
    assert run["facts"]["waiting"]
    assert re.search(r"data.num_workers=\d+, even with fewer cores", run["advice"][0])
    assert re.search(r"bottleneck +data: [\d,]+ samples/s", text)
    assert silence == ""


@pytest.mark.slow
def test_a_slow_model_is_the_bottleneck(tmp_path: Path, digits: Path) -> None:
    found, (text, _) = examined(tmp_path, "+model.seconds=0.5")
    assert found["run"]["bottleneck"] == "model"
    assert found["run"]["facts"]["times"]["compute"] >= 0.5
    assert re.search(r"bottleneck +model: [\d,]+ samples/s", text)


@pytest.mark.slow
def test_a_slow_all_reduce_is_the_bottleneck(tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reduce_by(monkeypatch, slow.sleepy_hook, 0.5)
    found, (text, _) = examined(tmp_path)
    run = found["run"]
    assert run["bottleneck"] == "communication"
    assert run["facts"]["times"]["step"] >= 0.5
    assert "whether ranks wait for each other" in run["advice"][0]
    assert re.search(r"bottleneck +communication: [\d,]+ samples/s", text)


def test_a_run_that_will_be_sharded_is_told_that_its_steps_were_not() -> None:
    assert not list(_not_sharded(ParallelConfig(), 2)) + list(_not_sharded(ParallelConfig(shard="full"), 1))
    [finding] = _not_sharded(ParallelConfig(shard="full"), 2)
    assert finding.level == "warning"
    assert "shard=full" in finding.text
    assert "DDP" in finding.text


@pytest.mark.slow
def test_an_error_of_one_rank_ends_all_ranks(tmp_path: Path, digits: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RanksFailed) as failed:
        examined(tmp_path, "task._target_=tests.doctor.slow.FailsOnRankOne")
    assert len(failed.value.reports) == 2
    assert not failed.value.hung
    shown = capfd.readouterr().err
    assert "dtrain: rank 1 failed: task tests.doctor.slow.FailsOnRankOne: ZeroDivisionError" in shown
    assert "ZeroDivisionError: made up" in shown
    assert "dtrain: rank 0 stops: rank 1 failed" in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("search", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_alternating_steps_change_no_parameter_and_only_one_of_them_communicates(
    digits: Path, search: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduce_by(monkeypatch, slow.counting_hook)
    overrides = [
        "experiment=digits",
        "data.num_workers=0",
        f"parallel.find_unused_parameters={search}",
        "optimizer.weight_decay=0.1",
    ]

    def one(rank: int) -> tuple[list[int], bool]:
        found: list[tuple[list[int], bool]] = []

        def job(composed: Composed) -> None:
            with process_group(30) as world:
                run, _ = build_examined_run(composed.cfg, world)
                with closing(run.train_loader):
                    batch = next(endless_batches(run.train_loader))
                before = [parameter.clone() for parameter in run.model.parameters()]
                steps = [run.step, build_communicating_step(run, world)]
                counted = []
                for _ in range(3):
                    for step in steps:
                        called = len(slow.calls)
                        step.accumulate([batch.to(world.device)], 1)
                        step.apply()
                        step.settle()
                        counted.append(len(slow.calls) - called)
                assert all(step.applied_steps == 3 for step in steps)
                same = all(map(torch.equal, before, run.model.parameters()))
                found.append((counted, same))

        command_line.run(job, overrides)
        return found[0]

    for counted, same in run_ranks(2, one, init=False):
        assert counted[::2] == [0, 0, 0]
        assert min(counted[1::2]) >= 1
        assert same

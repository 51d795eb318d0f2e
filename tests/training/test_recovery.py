"""Recovery without a restart, with real processes that are killed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.recovery import TOLERANCE, Job, difference
from dtrain.config.schema import Config, ParallelConfig
from dtrain.errors import ConfigError
from dtrain.training.checkpoint.checkpoints import Checkpoint
from dtrain.training.recovery import Recovery
from tests.ranks import run_ranks
from tests.refusals import refused
from tests.toys import world


def test_recovery_under_torchrun_is_refused(tmp_path: Path) -> None:
    environment = {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    with refused(ConfigError, "parallel.recover", "true", "parallel.recover=false", "srun"):
        Recovery(tmp_path, ParallelConfig(recover=True), environment)
    assert not Recovery(tmp_path, ParallelConfig(recover=False), environment).is_on
    assert not Recovery(tmp_path, ParallelConfig(recover=True), {}).is_on


def test_all_members_take_the_state_of_the_one_that_is_furthest(tmp_path: Path) -> None:
    def rank(number: int) -> tuple[int, float, bool]:
        step = 4 + number  # the second member has applied one step more before the rank was lost
        recovery = Recovery(tmp_path, ParallelConfig())
        recovery._generation, recovery._members = 1, ["0", "1"]
        state = {"counters": {"step": step}, "progress": {"evaluation_due": False}}
        recovery._memory = Checkpoint({"model": {"weight": torch.full((2,), float(step))}}, state)
        restored: list[Checkpoint] = []
        run: Any = SimpleNamespace(
            cfg=Config(),
            restore=restored.append,
            world=world(number, 2),
            step=SimpleNamespace(step=5),
            totals=SimpleNamespace(evaluation_due=True),
        )
        assert recovery.restore(run) == "after step 5, from the memory of member 1"
        weight: Any = restored[0].tensors["model"]["weight"]
        return restored[0].state["counters"]["step"], float(weight[0]), run.totals.evaluation_due

    assert run_ranks(2, rank) == [(5, 5.0, False)] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize(
    ("victims", "overrides"),
    [((0,), ()), ((2, 1), ()), ((0,), ("checkpoint.only_trained=true", "train.freeze=[0.*]", "train.ema_decay=0.9"))],
    ids=["rank 0", "two ranks", "only_trained"],
)
def test_the_other_ranks_continue_after_one_is_killed(
    tmp_path: Path, victims: tuple[int, ...], overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    Job(tmp_path / "undisturbed", 1, False, *overrides).end()
    job = Job(tmp_path / "run", 3, True, *overrides)
    for victim in victims:
        assert job.wait_for(job.step() + 5)
        job.ranks[victim].kill()
        assert job.wait_for(job.step() + 3)
    job.end()
    codes = [rank.returncode for rank in job.ranks]
    assert codes == [-9 if rank in victims else 0 for rank in range(3)]
    assert difference(tmp_path / "run", tmp_path / "undisturbed") < TOLERANCE
    assert job.run.status["restarts"] == len(victims)
    assert not (tmp_path / "run" / ".recovery").exists()

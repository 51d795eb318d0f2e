"""examples/gan.py: killed and resumed it equals an undisturbed run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples import gan
from tests.ranks import RanksFailed, run_ranks

pytestmark = pytest.mark.usefixtures("digits")


def train(out: Path) -> dict[str, Any]:
    run_ranks(2, lambda rank: gan.train("fp16", out, epochs=1, save_every=5), timeout=120)
    state: dict[str, Any] = torch.load(out / "checkpoint.pt", weights_only=True)
    return state


@pytest.mark.slow
def test_killed_and_resumed_it_equals_an_undisturbed_run_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(tmp_path / "whole")
    assert whole["step"] == 23
    monkeypatch.setattr(gan, "train_step", killed_after(12))  # in the forked ranks, too
    with pytest.raises(RanksFailed):
        train(tmp_path / "killed")
    monkeypatch.undo()
    assert torch.load(tmp_path / "killed" / "checkpoint.pt", weights_only=True)["step"] == 10
    resumed = train(tmp_path / "killed")
    assert bits(resumed) == bits(whole)
    assert (tmp_path / "killed" / "samples.png").read_bytes() == (tmp_path / "whole" / "samples.png").read_bytes()
    for name in ("optimizer_g", "optimizer_d"):
        assert 0 < int(whole[name]["state"][0]["step"]) <= 23


def bits(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: bits(value) for key, value in state.items()}
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else state


def killed_after(steps: int) -> Any:
    original, done = gan.train_step, []

    def train_step(*arguments: Any) -> tuple[float, float]:
        done.append(None)
        if len(done) > steps and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    return train_step

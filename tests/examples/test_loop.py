"""examples/loop.py: killed and resumed it equals an uninterrupted run; an overflow on one rank is skipped on both."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

from dtrain.data import Batch
from dtrain.models import SmallCNN
from dtrain.precision import CrossRankGradScaler
from examples import loop
from tests.forked_python import forked_python
from tests.ranks import run_ranks
from tests.whole_runs import ROOT

pytestmark = pytest.mark.usefixtures("digits")


def train_on(ranks: int, out: Path, **options: Any) -> None:
    arguments = {"precision": "fp32", "epochs": 1, "save_every": 5, **options}
    run_ranks(ranks, lambda rank: loop.train(out=out, **arguments), timeout=120)


def saved(out: Path) -> dict[str, Any]:
    with safe_open(out, framework="pt") as file:
        state: dict[str, Any] = json.loads(file.metadata()["state"])
        return state


@pytest.mark.slow
def test_a_loop_resumed_in_the_middle_of_an_epoch_on_another_number_of_ranks_trains_on_the_same_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, resumed = tmp_path / "whole.safetensors", tmp_path / "resumed.safetensors"
    train_on(1, whole)
    monkeypatch.setattr(loop, "train_step", fails_after(12))  # in the forked ranks, too
    with pytest.raises(Exception, match="stopped by the test"):
        train_on(2, resumed)
    monkeypatch.undo()
    assert saved(resumed)["step"] == 10
    assert saved(resumed)["loader"]["position"] == 10 * 64
    train_on(1, resumed)
    assert saved(resumed) == saved(whole)
    expected = load_file(whole)
    for name, tensor in load_file(resumed).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=5e-4)


def fails_after(steps: int) -> Any:
    original, done = loop.train_step, []

    def train_step(*arguments: Any) -> float:
        done.append(None)
        if len(done) > steps:
            raise RuntimeError("stopped by the test")
        return original(*arguments)

    return train_step


def test_an_overflow_on_one_rank_is_skipped_on_both() -> None:
    def steps(rank: int) -> list[Any]:
        model = DistributedDataParallel(SmallCNN(width=2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = CrossRankGradScaler("cpu", init_scale=1024.0)
        seen = []
        for poisoned in (False, True, False):
            images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(rank))
            if poisoned and rank == 1:
                images[0, 0, 0, 0] = torch.inf
            valid = torch.ones(4, dtype=torch.bool)
            batch = Batch({"image": images, "label": torch.arange(4)}, ["a", "b", "c", "d"], valid)
            before = [parameter.detach().clone() for parameter in model.parameters()]
            loop.train_step(model, optimizer, scaler, [batch, batch], torch.float32)
            unchanged = all(map(torch.equal, before, model.parameters()))
            seen.append((unchanged, scaler.get_scale(), float(sum(p.sum() for p in model.parameters()))))
        dist.barrier()
        return seen

    first, second = run_ranks(2, steps)
    assert first == second
    assert [(unchanged, scale) for unchanged, scale, _ in first] == [(False, 1024.0), (True, 512.0), (False, 512.0)]


def test_the_gradient_is_that_of_the_mean_over_all_valid_rows() -> None:
    """Rank 1 has three of four rows masked; a mean of means would weight its only row three times too much."""

    def gradient(rank: int) -> list[torch.Tensor]:
        model = SmallCNN(width=2)  # run_ranks seeds every rank alike
        generator = torch.Generator().manual_seed(1)
        images, labels = torch.randn(8, 3, 8, 8, generator=generator), torch.arange(8)
        valid = torch.tensor([True] * 5 + [False] * 3)
        own = slice(4 * rank, 4 * rank + 4)
        batch = Batch({"image": images[own], "label": labels[own]}, [""] * 4, valid[own])
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        clip = torch.nn.utils.clip_grad_norm_
        torch.nn.utils.clip_grad_norm_ = lambda *arguments: None
        loop.train_step(wrapped, optimizer, CrossRankGradScaler("cpu"), [batch], torch.float32)
        torch.nn.utils.clip_grad_norm_ = clip
        steps = [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
        with torch.no_grad():
            for parameter, old in zip(model.parameters(), before, strict=True):
                parameter.copy_(old)
        torch.nn.functional.cross_entropy(model(images[:5]), labels[:5]).backward()
        return [(step - parameter.grad).abs().max() for step, parameter in zip(steps, model.parameters(), strict=True)]

    assert max(max(differences) for differences in run_ranks(2, gradient)) < 1e-5


@pytest.mark.slow
def test_killed_and_resumed_under_torchrun_it_equals_an_uninterrupted_loop(tmp_path: Path) -> None:
    def start(out: Path) -> subprocess.Popen[str]:
        command = [forked_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        options = ["--precision", "fp16", "--out", str(out), "--epochs", "2", "--save-every", "3"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            [*command, str(ROOT / "examples" / "loop.py"), *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = start(killed)
    deadline = time.monotonic() + 100
    while not (killed / "checkpoint.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    process.terminate()  # torchrun ends its workers, which have no handler for this signal
    process.communicate(timeout=60)
    assert saved(killed / "checkpoint.safetensors")["step"] < 2 * 23
    for out in (killed, whole):
        process = start(out)
        printed, _ = process.communicate(timeout=200)
        assert process.returncode == 0, printed
        assert "finished after step 46" in printed
    resumed, expected = load_file(killed / "checkpoint.safetensors"), load_file(whole / "checkpoint.safetensors")
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.items())
    assert saved(killed / "checkpoint.safetensors") == saved(whole / "checkpoint.safetensors")

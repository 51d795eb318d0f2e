"""Which samples made a step; and spikes, which lead to that question."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.fsdp  # imported here once and not in every rank
from torch import Tensor

from dtrain.data import write_shards
from dtrain.replay import __main__ as replay
from dtrain.runs.starts import read_votes
from dtrain.training.checkpoint.state import TrainState
from tests.replay.replays import replay_on, traced
from tests.whole_runs import records, train_on

SIZE = 16
WRONG_STEP = 50


def shards(folder: Path, wrong: set[str]) -> Path:
    """Two classes of points on both sides of a plane; the labels of ``wrong`` are swapped."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    samples = []
    for number in range(1024):
        point = draw.normal(size=8).astype(np.float32)
        label = int(point[0] > 0)
        point[0] += 1 if label else -1
        samples.append(
            {"__key__": f"{number:04d}", "npy": point, "cls": 1 - label if f"{number:04d}" in wrong else label}
        )
    write_shards(samples, str(folder), shards=4)
    return folder


def train(ranks: int, run_dir: Path, data: Path, *overrides: str) -> None:
    fields = "{npy: {name: x, role: feature}, cls: {name: label}}"
    usual = (
        *(f"data.train='{data}/*.tar'", f"data.fields={fields}", "data.eval=null", "data.prepare=null"),
        *("model=mlp", "model.widths=[8,16,2]", "task=classification", "task.input=x", "checkpoint.best=null"),
        *(f"train.global_batch_size={SIZE}", f"train.max_steps={WRONG_STEP + 5}", "checkpoint.every_steps=20"),
        *("checkpoint.keep_last=9", "optimizer.lr=1e-2", "schedule=constant"),
    )
    chosen = {override.partition("=")[0] for override in overrides}
    others = [override for override in usual if override.partition("=")[0] not in chosen]
    train_on(ranks, run_dir, *others, *overrides, experiment="regression")


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Data in which half of the samples of one step have wrong labels, and the keys of these samples."""
    folder = tmp_path_factory.mktemp("block")
    train(1, folder / "clean", shards(folder / "good", set()), "train.max_steps=1")
    keys = [use["key"] for use in traced(folder / "clean", "--step", str(WRONG_STEP))][::2]
    return shards(folder / "bad", {key.rpartition("/")[2] for key in keys}), keys


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (1, []),
        (3, ["train.micro_batch_size=3"]),
        (2, ["parallel=fsdp"]),
        (4, ["parallel=fsdp", "precision=bf16"]),
        (2, ["precision=fp16", "precision.loss_scale.init=1024"]),
    ],
)
def test_a_block_of_wrong_labels_is_named_first_and_shares_add_up(
    tmp_path: Path, block: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch, ranks: int, overrides: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data, wrong = block
    train(ranks, tmp_path / "run", data, *overrides)
    found = replay_on(ranks, tmp_path / "run", f"replay.step={WRONG_STEP}", "replay.samples=true")
    assert found["step"] == WRONG_STEP
    rows = found["samples"]
    assert len(rows) == SIZE
    assert {row["key"] for row in rows[: len(wrong)]} == set(wrong)
    assert [row["loss"] for row in rows] == sorted((row["loss"] for row in rows), reverse=True)
    assert sum(row["share"] for row in rows) == pytest.approx(1, abs=1e-3 if "precision" in str(overrides) else 1e-5)
    uses = {(use["key"], use["rank"], use["row"]) for use in traced(tmp_path / "run", "--step", str(WRONG_STEP))}
    assert {(row["key"], row["rank"], row["row"]) for row in rows} == uses
    fewer = replay_on(ranks, tmp_path / "run", f"replay.step={WRONG_STEP}", "replay.samples=true", "replay.rows=3")
    for one, other in zip(rows, fewer["samples"], strict=True):
        assert other["loss"] == pytest.approx(one["loss"])
        assert (other["key"], other["share"] is None) == (
            one["key"],
            one["key"] not in [row["key"] for row in rows[:3]],
        )
    again = replay_on(ranks, tmp_path / "run", f"replay.step={WRONG_STEP}")  # nothing is left of the passes
    assert again["largest_difference"] == 0


@pytest.mark.slow
def test_losses_and_parts_are_those_of_autograd(tmp_path: Path, block: tuple[Path, list[str]]) -> None:
    data, _ = block
    train(1, tmp_path / "run", data, "train.global_batch_size=6", "train.max_steps=3", "checkpoint.every_steps=2")
    seen: dict[str, Any] = {}

    class Oracle:
        def before(self, run: TrainState, batches: list[Any]) -> None:
            [batch] = batches
            losses = torch.nn.functional.cross_entropy(run.model(batch["x"]), batch["label"], reduction="none")
            parts = [flat(torch.autograd.grad(loss / 6, run.model.parameters(), retain_graph=True)) for loss in losses]
            total = sum(parts)
            assert isinstance(total, Tensor)
            for key, loss, part in zip(batch.sample_keys, losses.tolist(), parts, strict=True):
                seen[key] = (loss, float(part.norm()), float(part @ total / (total @ total)))

        def after(self, run: TrainState, batches: list[Any]) -> None:
            pass

    original: Callable[..., Any] = replay.recompute
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "_look", lambda *_: Oracle())
        assert replay.main([f"run.dir={tmp_path / 'run'}", "replay.step=3", "--nproc", "1"]) == 0
    out = tmp_path / "out.json"
    arguments = ["replay.step=3", "replay.samples=true", f"replay.page={tmp_path / 'page.html'}", "--json", str(out)]
    assert replay.main([f"run.dir={tmp_path / 'run'}", *arguments, "--nproc", "1"]) == 0
    assert replay.recompute is original
    for row in json.loads(out.read_text())["samples"]:
        assert (row["loss"], row["grad_norm"], row["share"]) == pytest.approx(seen[row["key"]], rel=1e-4, abs=1e-6)


def flat(gradients: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([gradient.reshape(-1) for gradient in gradients])


@pytest.mark.slow
def test_a_prompt_within_a_step_has_its_parts(
    tmp_path: Path, block: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, _ = block
    train(1, tmp_path / "run", data, "train.max_steps=2")
    names: dict[str, Any] = {}

    def prompt(banner: str, local: dict[str, Any], exitmsg: str) -> None:
        names.update(local, step=local["run"].step.step)

    monkeypatch.setattr("dtrain.replay.looks.code.interact", prompt)
    monkeypatch.setitem(__import__("sys").modules, "IPython", None)
    assert replay.main([f"run.dir={tmp_path / 'run'}", "replay.step=2", "replay.shell=true"]) == 0
    assert names["step"] == 1
    norm = sum(float(gradient.square().sum()) for gradient in names["gradients"].values()) ** 0.5
    assert norm == pytest.approx(read_votes(tmp_path / "run")["grad_norm"][1])
    assert int(names["output"].count) == len(names["batch"].sample_keys) == SIZE


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_spike_is_skipped_by_all_ranks_named_and_explained(
    tmp_path: Path, block: tuple[Path, list[str]], ranks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    data, _ = block
    spike = "train.spike={factor: 4, window: 16, action: skip}"
    train(ranks, tmp_path / "run", data, spike, "train.log_every=5", "train.max_consecutive_skips=1")
    votes = read_votes(tmp_path / "run")
    assert votes["applied"][WRONG_STEP - 1] == 0
    assert np.isfinite(votes["grad_norm"]).all()
    spikes = int((votes["applied"] == 0).sum())
    last = [record for record in records(tmp_path / "run") if "train/spikes" in record][-1]
    assert last["train/spikes"] == last["precision/skipped_steps"] == spikes
    command = f"dtrain replay run.dir={tmp_path / 'run'} replay.step={WRONG_STEP} replay.samples=true"
    assert command in capfd.readouterr().out
    # The window of norms is part of the checkpoints: every skip is found again.
    result = replay_on(ranks, tmp_path / "run", f"replay.steps=[{WRONG_STEP - 5},{WRONG_STEP + 5}]")
    assert result["equal"]
    assert all(each["equal"] for each in result["checkpoints"])

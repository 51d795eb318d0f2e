from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from dtrain.training.checkpoint.state import TrainState
from dtrain.training.step import StepOutcome
from tests.ranks import RanksFailed
from tests.refusals import assert_refused
from tests.whole_runs import metrics, records, status, train_on, weights

pytestmark = pytest.mark.usefixtures("digits")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """26 steps of the digits on one rank; an epoch has 23, so a masked tail is among them."""
    run_dir = tmp_path_factory.mktemp("one-rank")
    train_on(1, run_dir, "train.max_steps=26", "model.width=4")
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(3, [], id="3 ranks, which do not divide 64"),
        pytest.param(2, ["train.micro_batch_size=8"], id="2 ranks x 4 micro-batches"),
        pytest.param(1, ["train.micro_batch_size=16", "data.num_workers=3"], id="1 rank x 4, 3 workers"),
    ],
)
def test_the_loss_is_the_same_for_any_split_of_the_global_batch(
    one_rank: Path, tmp_path: Path, ranks: int, overrides: list[str]
) -> None:
    train_on(ranks, tmp_path, "train.max_steps=26", "model.width=4", *overrides)
    losses = metrics(tmp_path)
    assert len(losses) == 26
    assert losses == pytest.approx(metrics(one_rank), rel=1e-4)
    assert metrics(tmp_path, "eval/accuracy") == pytest.approx(metrics(one_rank, "eval/accuracy"), abs=1 / 360)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_stopped_in_mid_epoch_continues_bit_for_bit(tmp_path: Path, ranks: int) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = ("train.ema_decay=0.9", "data.record_keys=true", "model.width=4")
    train_on(ranks, whole, "train.max_steps=26", *common)
    train_on(ranks, parts, "train.max_steps=13", "data.num_workers=2", *common)
    train_on(ranks, parts, "train.max_steps=26", "data.num_workers=1", *common)
    for name in ("model", "optimizer", "ema"):
        expected, got = weights(whole, 26, name), weights(parts, 26, name)
        assert expected.keys() == got.keys()
        for key, tensor in expected.items():
            assert torch.equal(tensor, got[key]), f"{name}: {key}"
    assert metrics(parts) == metrics(whole)
    for rank in range(ranks):
        ledger = Path("logs") / f"keys-rank-{rank:05d}.jsonl"
        assert (parts / ledger).read_text() == (whole / ledger).read_text()


def test_a_checkpoint_continues_on_another_number_of_ranks_with_each_sample_once(tmp_path: Path) -> None:
    for ranks, end in ((2, 7), (3, 15), (1, 23)):
        train_on(ranks, tmp_path, f"train.max_steps={end}", "data.record_keys=true", "model.width=4", "data.eval=null")
    lines = [json.loads(line) for path in tmp_path.glob("logs/keys-*") for line in path.read_text().splitlines()]
    keys = [key for line in lines for key in line["keys"]]
    assert len(keys) == len(set(keys)) == 1437
    assert {line["step"] for line in lines} == set(range(1, 24))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_half_precision_learns_and_logs_the_documented_names(tmp_path: Path, precision: str) -> None:
    train_on(2, tmp_path, f"precision={precision}", "train.max_epochs=2", "model.width=8", "train.log_every=23")
    losses = metrics(tmp_path)
    assert losses[-1] < 0.9 * losses[0]
    trained = [record for record in records(tmp_path) if "train/loss" in record]
    expected = {"step", "applied_steps", "epoch", "samples", "time", "train/loss", "train/grad_norm", "train/lr"}
    expected |= {"precision/skipped_steps", "throughput/samples_per_second", "time/step_seconds"}
    expected |= {"time/data_wait_fraction", "data/bytes_per_sample", "data/bad_samples"}
    assert expected <= set(trained[-1])
    assert ("precision/loss_scale" in trained[-1]) == (precision == "fp16")
    assert {"eval/loss", "eval/accuracy"} <= set(records(tmp_path)[-1])
    assert status(tmp_path)["state"] == "finished"


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["data.train=/nowhere/train.tar"], ["/nowhere/train.tar"]),
        (["precision=fp8"], ["fp8", "bf16"]),
        (["train.max_epochs=null"], ["train.max_steps", "train.max_epochs"]),
        (["train.global_batch_size=2000", "data.tail=drop"], ["2000", "data.tail=pad"]),
        (["run.resume=must"], ["no checkpoint"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_bad_input_is_one_message_on_rank_zero_and_an_error_everywhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], overrides: list[str], names: list[str]
) -> None:
    with pytest.raises(RanksFailed) as failed:
        train_on(2, tmp_path, *overrides)
    assert set(failed.value.reports) == {0, 1}
    assert not failed.value.hung
    message = capfd.readouterr().err
    assert message.count("dtrain: error: ") == 1
    assert "Traceback" not in message
    assert_refused(message, *names)


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train_on(1, tmp_path / "a", "train.max_steps=1", "model.width=8")
    train_on(1, tmp_path / "b", "train.max_steps=1", "model.width=16")
    (tmp_path / "a" / "checkpoints").rename(tmp_path / "b" / "other")
    (tmp_path / "b" / "checkpoints" / "step-000000001").rename(tmp_path / "gone")
    (tmp_path / "b" / "other" / "step-000000001").rename(tmp_path / "b" / "checkpoints" / "step-000000001")
    with pytest.raises(RanksFailed):
        train_on(2, tmp_path / "b", "train.max_steps=2", "model.width=16")
    assert "a different model" in capfd.readouterr().err


def test_a_wrapped_model_is_refused_with_the_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RanksFailed):
        train_on(1, tmp_path, "model._target_=tests.test_train.wrapped_model", "~model.width", "~model.classes")
    assert "DataParallel" in capfd.readouterr().err


def wrapped_model() -> torch.nn.Module:
    return torch.nn.DataParallel(torch.nn.Linear(1, 1))


@pytest.mark.slow
def test_a_stop_file_stops_both_ranks_after_the_same_step(tmp_path: Path) -> None:
    (tmp_path / "STOP").touch()
    train_on(2, tmp_path, "train.max_epochs=1000")
    state = status(tmp_path)
    assert state["state"] == "stopped"
    assert "STOP" in state["reason"]
    assert not (tmp_path / "STOP").exists()
    assert (tmp_path / "checkpoints" / f"step-{state['step']:09d}").is_dir()


class SignalsItself:
    """A hook that sends SIGUSR1 to rank 1 after step 3."""

    def on_step(self, run: TrainState, outcome: StepOutcome) -> None:
        if run.world.rank == 1 and outcome.step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_both_after_the_same_step(tmp_path: Path) -> None:
    hook = "train.hooks=[{_target_: tests.test_train.SignalsItself}]"
    train_on(2, tmp_path, "train.max_epochs=1000", hook)
    state = status(tmp_path)
    assert state["state"] == "stopped"
    assert "SIGUSR1 (rank 1)" in state["reason"]
    assert (tmp_path / "checkpoints" / f"step-{state['step']:09d}").is_dir()
    train_on(2, tmp_path, f"train.max_steps={state['step'] + 3}", "train.max_epochs=1000", hook)
    assert status(tmp_path)["state"] == "finished"

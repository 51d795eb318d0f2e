"""What a real run leaves for those who look at it: wandb's own files, pictures, and which rank was slow."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.fault_hook import faulty
from dtrain.training import evaluation
from dtrain.training.evaluation import evaluate
from dtrain.training.monitor import stragglers
from dtrain.training.task import Evaluation
from tests.forked_python import forked_python
from tests.tracking.wandb_records import records as wandb_records
from tests.tracking.wandb_records import rows, run_of
from tests.whole_runs import records, status, torchrun, train_on

pytestmark = [pytest.mark.usefixtures("digits"), pytest.mark.slow]
SMALL = ("experiment=digits", "model.width=4", "data.num_workers=0")

NAMES = {
    "step", "applied_steps", "epoch", "samples", "time",
    "train/loss", "train/accuracy", "train/grad_norm", "train/lr", "precision/loss_scale", "precision/skipped_steps",
    "throughput/samples_per_second", "throughput/tflops_per_second",
    "time/step_seconds", "time/step_seconds_p50", "time/step_seconds_p95", "time/step_seconds_max",
    "time/data_wait_fraction", "time/slowest_rank", "time/straggler_seconds", "time/restarts", "time/lost_seconds",
    "comm/bytes_per_step", "data/bytes_per_sample", "data/bad_samples", "memory/max_resident_gib",
    "eval/loss", "eval/accuracy", "eval/samples", "eval/bad_samples",
}  # fmt: skip


def test_a_run_that_was_killed_is_one_run_in_wandbs_files_with_each_step_once_and_all_names(tmp_path: Path) -> None:
    overrides = (
        *SMALL, f"run.dir={tmp_path}", "run.name=killed", "precision=fp16", "tracker.mode=offline",
        "tracker.tags=[a,b]", "train.max_steps=40", "train.log_every=5", "train.eval_every=20",
        "checkpoint.every_steps=10", faulty("kill@rank=0,step=28"),
    )  # fmt: skip
    killed = torchrun(2, *overrides)
    assert killed.returncode != 0
    done = torchrun(2, *overrides)
    assert done.returncode == 0, done.stderr
    assert status(tmp_path)["restarts"] == 1

    # A killed wandb loses its newest records, so its directory is set aside and the next start sends all of them.
    assert len(list(tmp_path.glob("wandb/killed/offline-run-*"))) == 1
    pieces = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(pieces) == 1
    kept = (tmp_path / "wandb" / "run-id").read_text().strip()
    for run, config in map(run_of, pieces):
        assert (run.run_id, run.display_name, list(run.tags)) == (kept, "killed", ["a", "b"])
        assert config["train"]["max_steps"] == 40
        assert {"dtrain", "torch", "device"} <= set(config["provenance"])
    sent = [row for piece in pieces for row in rows(piece)]
    assert Counter(row["_step"] for row in sent) == dict.fromkeys(range(5, 45, 5), 1)
    assert {name for row in sent for name in row if not name.startswith(("_", "media/"))} == NAMES
    # What the file and wandb say of a step is the same, but for steps that wandb had from before they were done again.
    again = {int(record["step"]) for record in records(tmp_path) if record.get("time/restarts")}
    of_file = {record["step"]: record["train/loss"] for record in records(tmp_path) if "train/loss" in record}
    of_wandb = {row["_step"]: row["train/loss"] for row in sent}
    assert of_wandb.keys() == of_file.keys()
    assert {step: of_wandb[step] for step in of_file if step not in again} == {
        step: loss for step, loss in of_file.items() if step not in again
    }
    assert any("media/confusion/path" in row for row in sent)
    assert not [r for piece in pieces for r in wandb_records(piece) if r.WhichOneof("record_type") == "alert"]


def test_a_run_that_is_stopped_in_an_evaluation_is_whole_in_wandbs_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*args: Any, **kwargs: Any) -> Evaluation:
        os.kill(os.getpid(), signal.SIGUSR1)
        return evaluate(*args, **kwargs)

    overrides = (
        "model.width=4", "data.num_workers=0", "tracker=wandb", "tracker.mode=offline", "train.max_steps=6",
        "train.log_every=2", "train.eval_every=2",
    )  # fmt: skip
    monkeypatch.setattr(evaluation, "evaluate", stopped)
    train_on(1, tmp_path, *overrides)
    assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("stopped", 2)
    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    train_on(1, tmp_path, *overrides)
    assert status(tmp_path)["state"] == "finished"
    sent = [row for piece in tmp_path.glob("wandb/*run-*/*.wandb") for row in rows(piece)]
    for name in ("train/loss", "eval/loss"):
        values = [(record["step"], record[name]) for record in records(tmp_path) if name in record]
        assert [step for step, _ in values] == [2, 4, 6]
        assert sorted((row["_step"], row[name]) for row in sent if name in row) == values


def test_a_failed_run_ends_with_an_alert_and_a_line_that_says_why(tmp_path: Path) -> None:
    overrides = (*SMALL, f"run.dir={tmp_path}", "tracker.mode=offline", "train.max_steps=20", faulty("crash@step=5"))
    command = [forked_python(), "-m", "dtrain.train", *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 1
    why = "rank 0 failed: InjectedFault: injected fault: crash@step=5"
    assert f"dtrain: failed at step 4 ({why}): {tmp_path}" in done.stderr
    (piece,) = tmp_path.glob("wandb/*run-*/*.wandb")
    (alert,) = [r.alert for r in wandb_records(piece) if r.WhichOneof("record_type") == "alert"]
    assert (alert.text, alert.level) == (why, "ERROR")


def test_a_rank_that_is_slow_is_named_in_the_record_after_and_once_on_the_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stragglers, "EVERY", 1)
    monkeypatch.setattr(stragglers, "_LEAST", 0.3)  # smaller differences may come from other programs
    slow = faulty("slow@rank=1,step=4,seconds=1,steps=3")
    train_on(3, tmp_path, "train.max_steps=8", "train.log_every=1", "train.eval_every=0", "data.num_workers=0", slow)
    message = {record["step"]: record for record in records(tmp_path) if "train/loss" in record}
    assert "time/slowest_rank" not in message[2]
    assert message[5]["time/slowest_rank"] == 1
    assert 0.5 < message[5]["time/straggler_seconds"] < 1.5
    output = capfd.readouterr().out
    assert output.count("is slower than the other ranks") == 1, output
    assert f"WARNING: rank 1 on {socket.gethostname()} is slower than the other ranks since step 4 (" in output


def test_the_picture_of_an_image_fitting_is_whole_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    small = ("data.train.size=16", "data.train.frequency=4", "model.width=8", "train.max_steps=3", "tracker.media=true")
    for ranks in (1, 3):
        train_on(ranks, tmp_path / str(ranks), *small, "train.micro_batch_size=2", experiment="checkerboard")
    first, second = (
        np.asarray(Image.open(io.BytesIO((tmp_path / ranks / "media" / "fit" / "step-000000003.png").read_bytes())))
        for ranks in ("1", "3")
    )
    assert first.shape == second.shape == (16, 32)
    field = np.arange(16) // 4
    board = (field[:, None] + field[None, :]) % 2 * 255
    assert np.array_equal(first[:, :16], board)
    assert np.array_equal(second[:, :16], board)
    # In the normalisation, a rank's own rows are a batch of their own, so what is fitted differs.
    assert len(np.unique(first[:, 16:])) > 2

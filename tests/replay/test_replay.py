"""Replays of real runs: steps, checkpoints and exit codes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dtrain.replay import __main__ as replay
from tests.forked_python import forked_python
from tests.replay.replays import assert_trace_is_the_log, replay_on
from tests.shards import npy, vector, write_tar
from tests.whole_runs import train_on, tree

pytestmark = pytest.mark.usefixtures("digits")
LITTLE = ("train.log_every=10", "checkpoint.keep_last=9", "checkpoint.best=null", "model.width=8")


@pytest.fixture(scope="module")
def trained(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 steps on 2 ranks, then 15 on 3 with a different batch size and rate; checkpoints every 10 steps."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train_on(2, folder, "train.max_steps=30", "checkpoint.every_steps=10", "data.record_keys=true", *LITTLE)
    again = ("train.max_steps=45", "train.global_batch_size=48", "optimizer.lr=1e-3", "checkpoint.every_steps=10")
    train_on(3, folder, *again, "data.record_keys=true", *LITTLE)
    return folder


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


@pytest.mark.slow
def test_a_range_over_two_starts_is_recomputed_bit_by_bit_and_the_directory_stays_as_it_is(
    run_dir: Path, tmp_path: Path
) -> None:
    before = tree(run_dir)
    out = tmp_path / "replay.json"
    command = [forked_python(), "-m", "dtrain", "replay", f"run.dir={run_dir}", "replay.steps=[22,41]"]
    command += ["--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "replay: 20 of 20 steps equal"
    assert "from the checkpoint of step 20: 21 steps, 1 of them before step 22" in done.stdout
    result = json.loads(out.read_text())
    assert result["equal"] is True
    assert result["largest_difference"] == 0
    assert [step["step"] for step in result["steps"]] == list(range(22, 42))
    assert [each["step"] for each in result["checkpoints"]] == [30, 40]
    assert all(each["equal"] for each in result["checkpoints"])
    assert set(result["steps"][0]) == {"step", "equal", "difference", "recorded", "recomputed"}
    assert set(result["steps"][0]["recorded"]) == {"loss", "grad_norm", "lr"}
    assert tree(run_dir) == before
    assert_trace_is_the_log(run_dir)


@pytest.mark.slow
def test_other_ranks_and_keys_begin_anew_at_each_checkpoint_and_have_a_tolerance(run_dir: Path) -> None:
    on_one = replay_on(1, run_dir, "replay.steps=[11,30]")
    assert on_one["tolerance"] == 1e-4
    assert on_one["reasons"] == ["ranks: 2 -> 1"]
    assert 0 < on_one["largest_difference"] < 1e-4
    assert not on_one["equal"]
    strict = replay_on(1, run_dir, "replay.steps=[11,30]", "replay.tolerance=0", code=1)
    assert strict["steps"] == on_one["steps"]
    windows = replay_on(2, run_dir, "replay.windows=2", "replay.window=4", "precision=bf16", code=1)
    assert [step["step"] for step in windows["steps"]] == [1, 2, 3, 4, 21, 22, 23, 24]
    assert 'precision.name: "fp32" -> "bf16"' in windows["reasons"]
    assert all(step["difference"] < 0.05 for step in windows["steps"])


def test_a_change_of_the_data_or_of_a_record_is_found(run_dir: Path) -> None:
    steps = run_dir / "steps.bin"
    votes = np.fromfile(steps, "<f8").reshape(-1, 7)
    votes[14, 2] *= 1 + 1e-12
    votes[16, 4] = np.nan
    votes.tofile(steps)
    result = replay_on(2, run_dir, "replay.steps=[12,20]", code=1)
    assert [step["step"] for step in result["steps"] if not step["equal"]] == [15, 17]
    unknown = next(step for step in result["steps"] if step["step"] == 17)
    assert (unknown["difference"], unknown["recorded"]["grad_norm"]) == (None, None)


@pytest.mark.slow
def test_steps_without_a_record_count_as_nothing_and_a_lost_checkpoint_leads_to_the_one_before(
    run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    votes = np.fromfile(run_dir / "steps.bin", "<f8").reshape(-1, 7)
    votes[:27].tofile(run_dir / "steps.bin")
    (run_dir / "checkpoints" / "step-000000020" / "model.safetensors").write_bytes(b"torn")
    result = replay_on(2, run_dir, "replay.steps=[25,29]")
    assert [step["recorded"] is None for step in result["steps"]] == [False, False, False, True, True]
    shown = capfd.readouterr()
    assert "the checkpoint of step 20 cannot be read" in shown.err
    assert "from the checkpoint of step 10: 19 steps" in shown.out
    shutil.rmtree(run_dir / "checkpoints")
    replay_on(2, run_dir, "replay.steps=[28,29]", code=2)
    assert "none of 2 steps has a record" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["replay.steps=[A,B]", "replay.step=N", "replay.windows=K"]),
        (["replay.step=0"], ["replay.step", "got 0", "at least 1"]),
        (["replay.steps=[5,3]"], ["replay.steps", "[5,3]", "A <= B"]),
        (["replay.step=3", "replay.tolerance=-1"], ["replay.tolerance", "-1", "at least 0"]),
        (["replay.step=99"], ["99", "has done 2 steps"]),
        (["replay.step=2", "replay.max_distance=0"], ["replay.max_distance", "step 2", "1 steps"]),
        (["replay.step=2", "train.clip_norm=-1"], ["train.clip_norm", "-1"]),
        (["replay.step=2", "data=iterable"], ["data"]),
    ],
)
def test_a_wrong_command_is_one_message(
    short_run: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        replay.main([f"run.dir={short_run}", "--nproc", "1", *arguments])
    assert ended.value.code == 2
    message = capfd.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("dtrain: error: ")
    for part in parts:
        assert part in message


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    folder = tmp_path_factory.mktemp("short") / "run"
    train_on(1, folder, "train.max_steps=2", *LITTLE)
    return folder


def test_a_run_of_a_different_user_is_refused_without_trust(
    short_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    starts = (short_run / "starts.jsonl").read_text()
    copy = shutil.copytree(short_run, tmp_path / "copy")
    (copy / "starts.jsonl").write_text(starts.replace("train.max_steps=2", "train.max_steps=3"))
    with pytest.raises(SystemExit):
        replay.main([f"run.dir={copy}", "replay.step=1", "--nproc", "1"])
    assert "--trust" in capfd.readouterr().err
    assert replay.main([f"run.dir={copy}", "replay.step=1", "--nproc", "1", "--trust"]) == 0


@pytest.mark.slow
def test_a_run_without_starts_and_votes_is_compared_by_the_windows_of_its_metrics(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    train_on(2, folder, "train.max_steps=25", *LITTLE)
    for name in ("starts.jsonl", "steps.bin"):
        (folder / name).unlink()
    result = replay_on(2, folder, "replay.steps=[1,25]", "replay.tolerance=0")
    assert [(step["step"], step["equal"]) for step in result["steps"]] == [(10, True), (20, True), (25, True)]


MIXED = "{{a: {{shards: '{0}/a-*.tar', weight: 3}}, b: {{shards: '{0}/b-*.tar', weight: {1}}}}}"
FIELDS = "{npy: {name: x, role: feature}, y.npy: {name: y, role: target}}"
LATE = "train.freeze=['0', {patterns: ['2'], until: 25}]"
HEAD = "optimizer.groups={head: {patterns: ['8'], lr: 3, weight_decay: 0}}"
SCENARIOS = {
    "bf16, accumulation": [(2, "precision=bf16", "train.micro_batch_size=8")],
    "fp16 with skips": [
        (2, "precision=fp16", "precision.loss_scale.init=8e6", "precision.loss_scale.growth_interval=7")
    ],
    "BatchNorm": [(2, "model={_target_: tests.toys.NormNet}"), (2, "model={_target_: tests.toys.NormNet}")],
    "augmentation, 4 ranks, workers": [
        (4, "data.augment={_target_: dtrain.data.augment.RandomCropFlip, padding: 1}", "data.num_workers=1"),
    ],
    "ema, mixup, a batch changed in the middle of an epoch": [
        (1, "train.ema_decay=0.9", "data.mix={_target_: dtrain.data.mixing.Mix, mixup_alpha: 0.2, classes: 10}"),
        (
            2,
            "train.ema_decay=0.9",
            "data.mix={_target_: dtrain.data.mixing.Mix, mixup_alpha: 0.2, classes: 10}",
            "train.global_batch_size=40",
        ),
        (
            1,
            "train.ema_decay=0.9",
            "data.mix={_target_: dtrain.data.mixing.Mix, mixup_alpha: 0.2, classes: 10}",
            "optimizer.lr=1e-4",
        ),
    ],
    "frozen until the middle, groups": [
        (2, LATE, HEAD, "optimizer=sgd"),
        (3, LATE, HEAD, "optimizer=sgd"),
    ],
    "frozen BatchNorm, fsdp": [
        (
            2,
            "parallel=fsdp",
            "model={_target_: tests.toys.NormNet}",
            "train.freeze=[{patterns: [norm1, conv1], until: 11, batchnorm: eval}]",
        )
    ],
    "fsdp, then ddp": [(2, "parallel=fsdp"), (3,)],
    "hsdp": [(4, "parallel=hsdp", "parallel.shard_size=2"), (2, "parallel=fsdp")],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_step_of_a_run_is_recomputed_bit_by_bit(tmp_path: Path, name: str) -> None:
    folder, starts, last = tmp_path / "run", SCENARIOS[name], 0
    if name.startswith("augmentation"):
        pytest.importorskip("dtrain.data.augment")
    for ranks, *overrides in starts:
        last += 20
        keys = (f"train.max_steps={last}", "checkpoint.every_steps=7", "data.record_keys=true", *LITTLE)
        own = [key for key in keys if not (key.startswith("model.width") and "NormNet" in str(overrides))]
        train_on(ranks, folder, *own, *overrides)
    before = tree(folder)
    for number, (ranks, *_) in enumerate(starts):
        result = replay_on(ranks, folder, f"replay.steps=[{20 * number + 1},{20 * number + 20}]")
        assert result["largest_difference"] == 0
        assert result["equal"]
        assert all(each["equal"] for each in result["checkpoints"])
        assert len(result["steps"]) == 20
    assert tree(folder) == before
    assert_trace_is_the_log(folder)


@pytest.mark.slow
def test_every_step_of_a_mixture_whose_weights_change_is_recomputed_and_traced(tmp_path: Path) -> None:
    for source, size in (("a", 90), ("b", 31)):
        for shard, numbers in enumerate(np.array_split(np.arange(size), 3)):
            samples = [(f"{n:06d}", {"npy": npy(vector(n)), "y.npy": npy(vector(n)[:1])}) for n in numbers.tolist()]
            write_tar(tmp_path / f"{source}-{shard}.tar", samples)
    folder = tmp_path / "run"
    for ranks, last, weight, batch in ((2, 25, "1", 16), (3, 40, "[[0, 1], [40, 5]]", 24)):
        train_on(
            ranks,
            folder,
            *(f"data.mixture={MIXED.format(tmp_path, weight)}", f"data.fields={FIELDS}", "data.record_keys=true"),
            *("model.widths=[3,4,1]", "checkpoint.every_steps=9", "data.prepare=null", "train.max_epochs=null"),
            *(
                "data.eval=null",
                f"train.max_steps={last}",
                f"train.global_batch_size={batch}",
                "checkpoint.keep_last=9",
            ),
            experiment="regression",
        )
    for ranks, steps in ((2, "[1,25]"), (3, "[26,40]")):
        assert replay_on(ranks, folder, f"replay.steps={steps}")["equal"]
    assert assert_trace_is_the_log(folder) == 25 * 16 + 15 * 24


@pytest.mark.slow
def test_a_sample_that_was_bad_then_is_masked_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shards = tmp_path / "shards"
    shards.mkdir()
    good = {"npy": npy(vector(1)), "y.npy": npy(vector(1)[:1])}
    samples = [(f"{n:03d}", good | {"npy": b"bad" if n in (3, 40) else npy(vector(n))}) for n in range(64)]
    write_tar(shards / "a.tar", samples)
    train_on(
        2,
        folder,
        *(f"data.train={shards}/a.tar", f"data.fields={FIELDS}", "data.record_keys=true", "data.eval=null"),
        *("model.widths=[3,4,1]", "data.prepare=null", "train.max_epochs=null", "train.max_steps=12"),
        *("train.global_batch_size=16", "data.max_bad=10"),
        experiment="regression",
    )
    assert replay_on(2, folder, "replay.steps=[1,12]")["equal"]
    assert assert_trace_is_the_log(folder) == 12 * 16 - 6
    # They can be read now, as after a failure of a disk, but the fingerprint of the data is the same.
    bad = {line["key"] for path in (folder / "logs").glob("bad-*") for line in map(json.loads, path.open())}
    assert bad == {"a.tar/003", "a.tar/040"}


def test_a_step_that_was_skipped_once_is_not_equal_and_steps_beyond_the_last_one_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    train_on(1, folder, "train.max_steps=4", *LITTLE)
    votes = np.fromfile(folder / "steps.bin", "<f8").reshape(-1, 7)
    votes[2, 1] = 0
    votes.tofile(folder / "steps.bin")
    result = replay_on(1, folder, "replay.steps=[2,4]", code=1)
    assert [step["equal"] for step in result["steps"]] == [True, False, True]
    assert result["largest_difference"] is None
    assert "skipped once" in capfd.readouterr().out
    with pytest.raises(SystemExit):
        replay.main([f"run.dir={folder}", "replay.steps=[2,5]", "--nproc", "1"])
    assert "has done 4 steps" in capfd.readouterr().err


def test_more_ranks_than_the_machine_has_are_not_started_unasked(
    short_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(short_run, tmp_path / "copy")
    text = (copy / "starts.jsonl").read_text()
    (copy / "starts.jsonl").write_text(text.replace('"ranks": 1', '"ranks": 5000'))
    with pytest.raises(SystemExit):
        replay.main([f"run.dir={copy}", "replay.step=1"])
    message = capfd.readouterr().err
    assert "5000 ranks" in message
    assert "--nproc" in message


@pytest.mark.slow
def test_a_terminated_replay_ends_its_ranks_and_leaves_no_folder(tmp_path: Path, run_dir: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "dtrain", "replay", f"run.dir={run_dir}", "replay.steps=[1,30]"]
    process = subprocess.Popen(
        command, env=os.environ | {"TMPDIR": str(scratch)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert "from the initial weights" in process.stdout.readline()
    time.sleep(2)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert list(scratch.iterdir()) == []

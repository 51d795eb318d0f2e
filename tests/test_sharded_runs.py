"""Sharded runs that are killed and resumed on other ranks and with another strategy."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp  # imported here once and not in every rank
import torch.distributed.tensor
from safetensors.torch import load_file

from benchmarks.fault_hook import faulty
from dtrain.export import __main__ as export
from dtrain.training.checkpoint.checkpoints import Checkpoints
from tests.ranks import RanksFailed, run_ranks
from tests.test_evaluate import evaluated, numbers
from tests.test_survival import keys_of_steps
from tests.whole_runs import metrics, records, status, train_on, weights

pytestmark = pytest.mark.slow
GPT = (
    *("model.width=16", "model.depth=2", "model.heads=2", "model.context=16", "task.sample=null", "data.prepare=null"),
    "data.fields.tok.length=17",
    *("train.global_batch_size=8", "train.max_steps=null", "train.max_epochs=1", "data.record_keys=true"),
    *("train.ema_decay=0.9", "checkpoint.every_steps=3", "schedule=constant", "optimizer.lr=1e-2"),
)


def train(ranks: int, run_dir: Path, text: Path, *overrides: str) -> None:
    chosen = {override.partition("=")[0] for override in overrides}
    others = [override for override in (*GPT, "data.eval=null") if override.partition("=")[0] not in chosen]
    train_on(ranks, run_dir, f"data.train={text}/train-*.tar", *others, *overrides, experiment="bytes_gpt")


def test_a_gpt_killed_on_fsdp_4_and_ddp_2_ends_on_hsdp_2x2_with_each_sample_used_once(
    tmp_path: Path, text: Path
) -> None:
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    train(2, whole, text)
    hybrid = ("parallel=hsdp", "parallel.shard_size=2")
    with pytest.raises(RanksFailed):
        train(4, run_dir, text, "parallel=fsdp", faulty("kill@rank=2,step=8"))
    with pytest.raises(RanksFailed):
        train(2, run_dir, text, "parallel=ddp", faulty("kill@rank=1,step=14"))
    train(4, run_dir, text, *hybrid)

    state = status(run_dir)
    assert (state["state"], state["restarts"], state["step"]) == ("finished", 2, 20)
    used = keys_of_steps(run_dir)
    assert used == keys_of_steps(whole)
    times = Counter(key for keys in used.values() for key in keys)
    assert set(times.values()) == {1}
    assert len(times) == 160
    ours, theirs = metrics(run_dir), metrics(whole)
    print(json.dumps({"ddp-2": theirs, "fsdp-4, ddp-2, hsdp-2x2": ours}))
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert theirs[-1] < theirs[0]
    for name in ("model", "ema", "optimizer"):
        expected, found = weights(whole, 20, name), weights(run_dir, 20, name)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-2, atol=1e-4, msg=key)


def test_a_sharded_run_that_is_killed_ends_bit_for_bit_as_one_that_is_not(tmp_path: Path, text: Path) -> None:
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    common = ("parallel=fsdp", "precision=bf16", "train.micro_batch_size=2", "train.max_steps=12")
    train(2, whole, text, *common)
    with pytest.raises(RanksFailed):
        train(2, run_dir, text, *common, faulty("kill@rank=1,step=8"))
    train(2, run_dir, text, *common)
    assert status(run_dir)["restarts"] == 1
    for name in sorted(path.name for path in Checkpoints(whole / "checkpoints").path(12).glob("*.safetensors")):
        ours, theirs = (Checkpoints(folder / "checkpoints").path(12) / name for folder in (run_dir, whole))
        assert ours.read_bytes() == theirs.read_bytes(), name
    assert metrics(run_dir) == metrics(whole)


def test_faults_in_sharded_saves_are_survived(tmp_path: Path, text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = faulty("disk_full@rank=1,step=6", "torn_checkpoint@step=12")
    train(2, tmp_path, text, "parallel=fsdp", given, "train.max_steps=12", "checkpoint.keep_last=9")
    assert "the checkpoint of step 6 could not be written (rank 1: " in capfd.readouterr().out
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.steps() == [3, 9, 12]
    newest, problems = checkpoints.newest_good()
    assert newest == 9
    assert "rank-00000-of-00002.safetensors" in problems[0]
    train(2, tmp_path, text, "parallel=ddp")
    assert [record["step"] for record in records(tmp_path) if "train/loss" in record] == list(range(1, 21))


def test_evaluate_and_export_read_a_sharded_run_in_one_process(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "artefact"
    train(2, run_dir, text, "parallel=fsdp", "train.max_steps=6", f"data.eval={text}/train-*.tar", "train.eval_every=6")
    expected = metrics(run_dir, "eval/loss")[-1]
    for ranks in (1, 2):
        code, output = evaluated(ranks, f"run.dir={run_dir}")
        assert code == 0, output
        assert numbers(output)["loss"] == pytest.approx(expected, rel=1e-4)

    def export_run(rank: int) -> None:
        arguments = ("export.dtype=fp32", f"export.out={out}", "samples=0", "export.measure=false")
        monkeypatch.setattr("sys.argv", ["export", f"run.dir={run_dir}", *arguments])
        export.main()

    run_ranks(1, export_run, init=False)
    exported, averaged = load_file(out / "model.safetensors"), weights(run_dir, 6, "ema")
    for name, tensor in averaged.items():
        assert any(torch.equal(tensor, other) for other in exported.values() if other.shape == tensor.shape), name


def test_a_run_whose_optimizer_has_no_state_resumes_on_any_ranks(tmp_path: Path) -> None:
    options = ("schedule=constant", "train.eval_every=0", "data.eval=null")
    train_on(2, tmp_path, "parallel=fsdp", "train.max_steps=2", *options, experiment="line")
    for ranks, steps, parallel in ((2, 4, "fsdp"), (3, 6, "fsdp"), (2, 8, "ddp")):
        train_on(ranks, tmp_path, f"parallel={parallel}", f"train.max_steps={steps}", *options, experiment="line")
    whole = tmp_path / "whole"
    train_on(1, whole, "train.max_steps=8", *options, experiment="line")
    assert [record["step"] for record in records(tmp_path) if "train/loss" in record] == list(range(1, 9))
    assert metrics(tmp_path) == pytest.approx(metrics(whole), rel=1e-5)

"""examples/lora in small: killed, resumed, evaluated, replayed, forked and exported, with checkpoints of the adapter only."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.tensor
from safetensors.torch import load_file

from benchmarks.fault_hook import faulty
from dtrain.config.instantiate import by_target
from dtrain.data.order.randomness import seed_generators
from dtrain.export import __main__ as export
from dtrain.export import artefact
from dtrain.training.checkpoint.checkpoints import Checkpoints
from tests.ranks import RanksFailed, run_ranks
from tests.refusals import assert_refused
from tests.replay.replays import replay_on
from tests.test_evaluate import evaluated, numbers
from tests.whole_runs import ROOT, metrics, status, train_on, weights

PRESETS = ROOT / "examples" / "lora" / "presets"
SMALL = (
    *("model.model.width=16", "model.model.heads=2", "model.model.context=16", "model.peft_config.r=2"),
    *("data.prepare=null", "data.fields.tok.length=17", "schedule=constant", "train.global_batch_size=8"),
    *("train.max_steps=8", "train.eval_every=4", "checkpoint.every_steps=3", "train.ema_decay=0.5"),
)
ADAPTER = re.compile(
    r"base_model\.model\.(blocks\.\d\.attention\.(qkv|out)\.lora_[AB]|head\.modules_to_save)\.default\.weight"
)


@pytest.fixture(scope="module", autouse=True)
def _peft() -> None:
    """Imports peft once, and not in every rank; only if these tests run, because it takes a second."""
    pytest.importorskip("peft", reason="pip install peft: the example needs it")


def train(ranks: int, run_dir: Path, text: Path, *overrides: str) -> None:
    chosen = {override.partition("=")[0] for override in overrides}
    small = [override for override in SMALL if override.partition("=")[0] not in chosen]
    data = [f"data.{name}={text}/train-*.tar" for name in ("train", "eval")]
    train_on(ranks, run_dir, "--config-dir", str(PRESETS), *data, *small, *overrides, experiment="lora")


def exported(run_dir: Path, out: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    def rank(number: int) -> None:
        arguments = [f"run.dir={run_dir}", f"export.out={out}", "export.dtype=fp32", "export.measure=false", *options]
        monkeypatch.setattr("sys.argv", ["export", *arguments])
        export.main()

    run_ranks(1, rank, init=False)


def test_the_page_prints_the_preset() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert f"```yaml\n{(PRESETS / 'experiment' / 'lora.yaml').read_text()}```" in page


@pytest.mark.slow
def test_a_run_saves_its_adapter_only_and_its_artefact_is_the_plain_model(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "artefact"
    train(1, run_dir, text)
    for group in ("model", "ema"):
        saved = weights(run_dir, 8, group)
        assert len(saved) == 9
        assert all(ADAPTER.fullmatch(name) for name in saved)
    losses = metrics(run_dir, "eval/loss")
    assert losses[-1] < losses[0]

    exported(run_dir, out, monkeypatch, "samples=32")
    report = json.loads((out / "report.json").read_text())
    assert report["comparison"]["max_abs_error"] < 1e-5  # in a fresh process, against the model with its adapter
    description = json.loads((out / "model.json").read_text())
    assert description["model"]["_target_"] == "dtrain.models.GPT"
    assert not any("lora" in name for name in load_file(out / "model.safetensors"))
    assert status(run_dir)["state"] == "finished"


def trained_model(run_dir: Path, step: int) -> Any:
    """The model as the run builds it, with the adapter of a checkpoint: by torch and peft alone."""
    node = json.loads(json.dumps(_config(run_dir)["model"]))
    seed_generators(torch.device("cpu"), 0)
    model = by_target("model", node)
    missing, unexpected = model.load_state_dict(weights(run_dir, step, "ema"), strict=False)
    assert not unexpected
    assert not any(ADAPTER.fullmatch(name) for name in missing)
    return model.eval()


def _config(run_dir: Path) -> Any:
    import yaml

    return yaml.safe_load((run_dir / "config.yaml").read_text())


@pytest.mark.slow
def test_the_adapter_alone_and_the_kept_model_give_the_same_outputs(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    train(1, run_dir, text, "train.max_steps=2", "train.eval_every=0")
    rows = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = trained_model(run_dir, 2)(rows)
    for _ in range(2):  # the second one replaces the first
        exported(run_dir, tmp_path / "adapter", monkeypatch, "export.adapter=separate", "samples=0")
    exported(run_dir, tmp_path / "kept", monkeypatch, "export.adapter=kept", "samples=0")

    seed_generators(torch.device("cpu"), 0)
    base = by_target("model", _config(run_dir)["model"]["model"])
    from peft import PeftModel

    with torch.no_grad():
        separate = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()(rows)
    assert torch.equal(separate, expected)
    assert torch.equal(artefact.load(tmp_path / "kept", None, trust=True).outputs(rows), expected)


def assert_equal_checkpoints(ours: Path, theirs: Path, step: int) -> None:
    one, other = (Checkpoints(folder / "checkpoints").path(step) for folder in (ours, theirs))
    names = sorted(path.name for path in other.glob("*.safetensors"))
    assert names == sorted(path.name for path in one.glob("*.safetensors"))
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_killed_and_resumed_run_equals_an_undisturbed_one_bit_for_bit(
    parallel: str, tmp_path: Path, text: Path
) -> None:
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    train(2, whole, text, f"parallel={parallel}")
    with pytest.raises(RanksFailed):
        train(2, run_dir, text, f"parallel={parallel}", faulty("kill@rank=1,step=6"))
    train(2, run_dir, text, f"parallel={parallel}")
    assert status(run_dir)["restarts"] == 1
    assert_equal_checkpoints(run_dir, whole, 8)
    assert metrics(run_dir) == metrics(whole)
    assert metrics(run_dir, "eval/loss") == metrics(whole, "eval/loss")


@pytest.mark.slow
def test_a_run_continues_on_other_ranks_with_the_other_strategy(tmp_path: Path, text: Path) -> None:
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    train(1, whole, text)
    train(2, run_dir, text, "parallel=fsdp", "train.max_steps=3")
    train(3, run_dir, text, "parallel=ddp", "train.max_steps=6")
    train(1, run_dir, text)
    assert metrics(run_dir) == pytest.approx(metrics(whole), rel=1e-4)
    assert {*weights(run_dir, 8)} == {*weights(whole, 8)}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_best_checkpoint_is_evaluated_and_every_step_is_replayed(parallel: str, tmp_path: Path, text: Path) -> None:
    run_dir = tmp_path / "run"
    train(2, run_dir, text, f"parallel={parallel}")
    best = min(metrics(run_dir, "eval/loss"))
    for ranks in (1, 2):
        code, output = evaluated(ranks, f"run.dir={run_dir}", "checkpoint=best")
        assert code == 0, output
        assert numbers(output)["loss"] == pytest.approx(best, rel=1e-4)
    for steps in ("[1,3]", "[7,8]"):  # from the seed, and from a checkpoint
        content = replay_on(2, run_dir, f"replay.steps={steps}")
        assert content["equal"]
        assert all(each["equal"] for each in content["checkpoints"])
        assert content["largest_difference"] == 0


@pytest.mark.slow
def test_forks_and_new_runs_begin_with_the_adapter_and_a_different_base_is_refused(
    tmp_path: Path, text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    train(2, source, text, "parallel=fsdp", "train.max_steps=6")
    fork = tmp_path / "fork"
    train(1, fork, text, f"run.fork={source}@6", "train.max_steps=8")
    assert metrics(fork)[0] < metrics(source)[0]
    new = tmp_path / "new"
    train(1, new, text, f"run.weights_from={source}", "train.max_steps=2")
    train(1, new, text, f"run.weights_from={source}", "train.max_steps=4")
    other = tmp_path / "other"
    for origin in (f"run.weights_from={source}", f"run.fork={source}@6"):
        with pytest.raises(RanksFailed):
            train(1, other, text, origin, "run.seed=1")
        assert_refused(
            capfd.readouterr().err, "checkpoint.only_trained", "blocks.0.attention.out", "run.seed=0", "run.seed=1"
        )
        assert not other.exists()

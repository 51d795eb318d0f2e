"""Every preset composes, says how it is run, and does what its header claims, at least for a few steps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg

from dtrain import command_line
from dtrain.config.compose import Composed, conf_dir
from tests.shards import write_tar
from tests.whole_runs import metrics, train_on, weights

EXPERIMENTS = sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_its_header_has_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("DTRAIN_CIFAR10", "DTRAIN_MNIST1D", "DTRAIN_TEXT"):
        monkeypatch.setenv(variable, "somewhere")
    composed: list[Composed] = []
    command_line.run(composed.append, [f"experiment={name}"])
    assert composed[0].cfg.train.max_steps or composed[0].cfg.train.max_epochs
    header = (conf_dir() / "experiment" / f"{name}.yaml").read_text().split("defaults:")[0]
    assert f"experiment={name}" in header
    assert "dtrain train" in header


@pytest.mark.timeout(660)
@pytest.mark.usefixtures("digits")
@pytest.mark.parametrize(
    ("precision", "width", "epochs", "accuracy"),
    [
        pytest.param("bf16", 32, 5, 0.93, marks=pytest.mark.slow),
        # On CPUs convolutions are slow in fp16: all 12 epochs take a minute or two.
        pytest.param("fp16", 8, 6, 0.8, marks=pytest.mark.slow),
        pytest.param("fp16", 32, 12, 0.97, marks=pytest.mark.soak),
    ],
)
def test_digits_are_learned_in_16_bits_on_two_ranks(
    tmp_path: Path, precision: str, width: int, epochs: int, accuracy: float
) -> None:
    overrides = (f"precision={precision}", f"model.width={width}", f"train.max_epochs={epochs}", "train.log_every=23")
    train_on(2, tmp_path, *overrides, "train.deterministic=false", timeout=600)
    assert metrics(tmp_path, "eval/accuracy")[-1] >= accuracy


@pytest.mark.slow
def test_the_polynomial_ends_at_its_coefficients_in_fp16_though_its_first_steps_overflow(tmp_path: Path) -> None:
    train_on(1, tmp_path, "precision=fp16", "train.log_every=1000", experiment="polynomial")
    tensors = weights(tmp_path, 1000)
    assert tensors["powers.weight"].tolist()[0] == pytest.approx([0.0, 5.0], abs=0.05)
    assert tensors["powers.bias"].tolist() == pytest.approx([3.0], abs=0.05)
    assert metrics(tmp_path, "precision/skipped_steps")[-1] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "small"),
    [
        ("imagenet_resnet50", ("model.width=4",)),
        ("imagenet_vit_s", ("model.size=[16,1,2]", "schedule.warmup=1")),
    ],
)
def test_imagenet_recipes_run_on_generated_shards(tmp_path: Path, experiment: str, small: tuple[str, ...]) -> None:
    rng = np.random.default_rng(0)
    files: list[tuple[str, Any]] = []
    for number in range(8):
        pixels = rng.integers(256, size=(240 + number, 300, 3), dtype=np.uint8)
        files.append((f"s{number}", {"jpg": simplejpeg.encode_jpeg(pixels), "cls": str(number).encode()}))
    shard = write_tar(tmp_path / "photographs.tar", files)
    run_dir = tmp_path / "run"
    train_on(
        2,
        run_dir,
        f"data.train={shard}",
        f"data.eval={shard}",
        "data.num_workers=1",
        "train.global_batch_size=4",
        "train.max_epochs=2",
        *(("schedule.milestones=[1,2,3]", "schedule.warmup=1") if experiment == "imagenet_resnet50" else ()),
        *small,
        experiment=experiment,
    )
    assert len(metrics(run_dir)) == 4
    assert 0 <= metrics(run_dir, "eval/accuracy")[-1] <= metrics(run_dir, "eval/top5_accuracy")[-1] <= 1


@pytest.mark.slow
def test_bytes_gpt_packs_the_standard_library_and_learns_from_it(tmp_path: Path) -> None:
    small = ("model.width=16", "model.depth=1", "model.heads=2", "train.max_steps=20", "optimizer.lr=0.02")
    train_on(1, tmp_path, *small, "tracker.media=true", experiment="bytes_gpt")
    losses = metrics(tmp_path)
    assert losses[0] == pytest.approx(np.log(257), abs=0.1)
    assert losses[-1] < 4.5
    assert metrics(tmp_path, "eval/perplexity")[-1] == pytest.approx(np.exp(metrics(tmp_path, "eval/loss")[-1]))
    log = (tmp_path / "logs" / "rank-00000.log").read_text()
    assert "sample: def " in log
    assert (tmp_path / "media" / "sample" / "step-000000020.txt").read_text(encoding="utf-8").startswith("def ")
    tokens, samples = (metrics(tmp_path, f"throughput/{each}_per_second") for each in ("tokens", "samples"))
    context = tokens[0] / samples[0]
    assert context == pytest.approx(round(context))
    assert context > 1
    packed = json.loads((Path(os.environ["DTRAIN_CACHE"]) / "standard_library" / "dataset.json").read_text())
    assert packed["splits"]["train"]["tokens"] > 1e6


@pytest.mark.slow
@pytest.mark.skipif("DTRAIN_TEST_CIFAR10" not in os.environ, reason="DTRAIN_TEST_CIFAR10 names no folder of shards")
def test_cifar10_learns_from_read_only_jpeg_shards(tmp_path: Path) -> None:
    before = sorted(os.listdir(os.environ["DTRAIN_TEST_CIFAR10"]))
    fewer = f"data.eval={os.environ['DTRAIN_TEST_CIFAR10']}/test-00000.tar"
    train_on(2, tmp_path, "train.max_steps=30", "train.log_every=10", "model.width=8", fewer, experiment="cifar10_cpu")
    losses = metrics(tmp_path)
    assert losses[0] == pytest.approx(2.3, abs=0.1)  # chance: ln 10
    assert losses[-1] < losses[0] - 0.03  # 2.335 and 2.252 in 2026-11
    assert metrics(tmp_path, "eval/accuracy")[-1] > 0.14
    assert sorted(os.listdir(os.environ["DTRAIN_TEST_CIFAR10"])) == before


@pytest.mark.slow
@pytest.mark.skipif("DTRAIN_TEST_TEXT" not in os.environ, reason="DTRAIN_TEST_TEXT names no folder with the text")
def test_shakespeare_gpu_packs_the_text_as_nanogpt_does_and_writes_a_sample(tmp_path: Path) -> None:
    small = ("model.width=16", "model.depth=1", "model.heads=2", "train.max_steps=2", "task.sample_tokens=10")
    train_on(1, tmp_path, *small, "tracker.media=true", experiment="shakespeare_gpu")
    assert metrics(tmp_path)[0] == pytest.approx(np.log(65), abs=0.1)
    packed = json.loads((Path(os.environ["DTRAIN_CACHE"]) / "shakespeare-256" / "dataset.json").read_text())
    # nanoGPT has 1,003,854 and 111,540 characters; the last row of 256 is not full.
    assert {name: split["tokens"] for name, split in packed["splits"].items()} == {
        "train": 1_003_854 // 256 * 256,
        "val": 111_540 // 256 * 256,
    }
    assert (tmp_path / "media" / "sample" / "step-000000002.txt").read_text().startswith("ROMEO:")

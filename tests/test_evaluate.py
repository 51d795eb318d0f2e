"""``dtrain.evaluate``: every sample once at any number of ranks, the weights that were asked for, and clear refusals."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tarfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from dtrain import evaluate
from tests.ranks import run_ranks
from tests.tiny_run import NormNet, tiny_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    return tiny_run(tmp_path_factory.getbasetemp())


def evaluated(ranks: int, *arguments: str) -> tuple[int, str]:
    """Exit code and output of rank 0, in forked processes."""

    def one(rank: int) -> tuple[int, str]:
        text = io.StringIO()
        with (
            mock.patch.object(sys, "argv", ["evaluate", *arguments]),
            contextlib.redirect_stdout(text),
            contextlib.redirect_stderr(text),
        ):
            try:
                evaluate.main()
            except SystemExit as ended:
                return int(ended.code or 0), text.getvalue()
        return 0, text.getvalue()

    return run_ranks(ranks, one, init=False)[0]


def numbers(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"eval/(\w+)\s+(\S+)", text)}


def by_hand(weights: Path, shards: Path) -> dict[str, float]:
    """Loss and accuracy of the test shards, read with tarfile and Pillow, in float64."""
    model = NormNet().double().eval()
    model.load_state_dict(load_file(weights))
    images, labels = [], []
    for path in sorted(shards.glob("test-*.tar")):
        with tarfile.open(path) as archive:
            files = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
        for name in (name for name in files if name.endswith(".png")):
            images.append(np.asarray(Image.open(io.BytesIO(files[name])).convert("RGB"), dtype=np.float64))
            labels.append(int(files[name.removesuffix(".png") + ".cls"]))
    with torch.no_grad():
        logits = model((torch.from_numpy(np.stack(images)) / 255 - 0.5).div(0.5).permute(0, 3, 1, 2))
    losses = [(row.logsumexp(0) - row[label]).item() for row, label in zip(logits, labels, strict=True)]
    hits = [int(row.argmax()) == label for row, label in zip(logits, labels, strict=True)]
    count = len(labels)
    return {"loss": sum(losses) / count, "accuracy": sum(hits) / count, "samples": count, "bad_samples": 0}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_sample_counts_once_at_any_number_of_ranks(run_dir: Path, digits: Path, ranks: int) -> None:
    code, text = evaluated(ranks, f"run.dir={run_dir}", "checkpoint=15")
    assert code == 0, text
    expected = by_hand(run_dir / "checkpoints/step-000000015/ema.safetensors", digits)
    assert numbers(text) == pytest.approx(expected, rel=1e-4)
    assert "(ema weights)" in text


def test_raw_weights_and_another_precision_are_a_key_away(run_dir: Path, digits: Path) -> None:
    code, text = evaluated(1, f"run.dir={run_dir}", "checkpoint=15", "weights=raw", "precision=bf16")
    assert code == 0, text
    assert re.search(r"precision\s+bf16", text)
    expected = by_hand(run_dir / "checkpoints/step-000000015/model.safetensors", digits)
    assert numbers(text)["loss"] == pytest.approx(expected["loss"], rel=0.02)


def test_the_best_checkpoint_is_the_default_and_repeats_what_the_run_has_logged(run_dir: Path) -> None:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    logged = {record["step"]: record for record in records if "eval/accuracy" in record}
    best = max(logged, key=lambda step: (logged[step]["eval/accuracy"], step))
    code, text = evaluated(1, f"run.dir={run_dir}")
    assert code == 0, text
    assert f"step-{best:09d}" in text
    assert numbers(text)["accuracy"] == pytest.approx(logged[best]["eval/accuracy"], abs=1e-5)
    assert numbers(text)["loss"] == pytest.approx(logged[best]["eval/loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["checkpoint=7"], ["checkpoint=7", "15"]),
        (["weights=blue"], ["weights", "'blue'", "ema or raw"]),
        (["data.eval=null"], ["data.eval is not set"]),
        (["data.eval=nowhere/*.tar"], ["data.eval", "nowhere/*.tar", "matches no file"]),
        (["model.width=9"], ["of another model", "conv1.weight has shape [8, 3, 3, 3]", "[9, 3, 3, 3]"]),
        (["precisoin=bf16"], ["precisoin", "'precision'"]),
    ],
)
def test_what_cannot_be_evaluated_is_refused_with_a_reason(
    run_dir: Path, arguments: list[str], parts: list[str]
) -> None:
    code, text = evaluated(2, f"run.dir={run_dir}", *arguments)
    assert code != 0
    assert "Traceback" not in text
    for part in parts:
        assert part in text


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    code, text = evaluated(1, f"run.dir={tmp_path}")
    assert code != 0
    assert f"{tmp_path} is no run directory" in text


def test_help_says_how(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["evaluate", "--help"])
    evaluate.main()
    assert "checkpoint=best|latest|STEP" in capsys.readouterr().out

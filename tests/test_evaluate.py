"""``dtrain.evaluate``: every sample once at any number of ranks, the weights that were asked for, and clear checks."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from dtrain import evaluate
from dtrain.runs.evaluation_results import confusion_picture
from dtrain.training.checkpoint.checkpoints import Checkpoint, Checkpoints
from tests.ranks import run_ranks
from tests.refusals import assert_refused
from tests.toys import NormNet


def evaluated(ranks: int, *arguments: str, out: Path | None = None) -> tuple[int, str]:
    """Exit code and output of rank 0, in forked processes, all of which must end alike."""
    _load_fonts()
    with tempfile.TemporaryDirectory() as folder:
        ended = run_ranks(ranks, lambda rank: ending(*arguments, f"out={out or folder}"), init=False)
    assert len({code for code, _ in ended}) == 1
    return ended[0]


@functools.cache
def _load_fonts() -> None:
    """Here once, and not in the rank that draws the confusion table: it takes half the time of the evaluation."""
    confusion_picture(torch.eye(10, dtype=torch.int64))


def ending(*arguments: str) -> tuple[int, str]:
    """Exit code and output of this process's evaluation."""
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


def read(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text())
    assert isinstance(content, dict)
    return content


def numbers(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"eval/(\w+)\s+(\S+)", text)}


def by_hand(weights: Path, shards: Path) -> tuple[dict[str, float], list[list[int]]]:
    """Metrics and confusion of the test shards, read with tarfile and Pillow, in float64."""
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
    pairs = [(label, int(row.argmax())) for row, label in zip(logits, labels, strict=True)]
    count, hits = len(labels), sum(label == predicted for label, predicted in pairs)
    confusion = [[pairs.count((label, predicted)) for predicted in range(10)] for label in range(10)]
    return {"loss": sum(losses) / count, "accuracy": hits / count, "samples": count, "bad_samples": 0}, confusion


@pytest.mark.parametrize("ranks", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3])
def test_each_sample_counts_once_at_any_number_of_ranks(
    finished_run: Path, digits: Path, tmp_path: Path, ranks: int
) -> None:
    code, text = evaluated(ranks, f"run.dir={finished_run}", "checkpoint=15", out=tmp_path)
    assert code == 0, text
    expected, confusion = by_hand(finished_run / "checkpoints/step-000000015/ema.safetensors", digits)
    assert numbers(text) == pytest.approx(expected, rel=1e-4)
    assert "(ema weights)" in text
    (file,) = tmp_path.glob("step-000000015-ema-fp32-*.json")
    content = read(file)
    assert content["tables"] == {"confusion": confusion}
    assert content["metrics"]["eval/accuracy"] == expected["accuracy"]
    assert content["ranks"] == ranks
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".png", ".json"]
    recalls = {str(label): counts[label] / sum(counts) for label, counts in enumerate(confusion)}
    first = re.search(r"the worst first\n.*\n\s+(\d)\s+\d+\s", text)
    assert first is not None
    assert recalls[first[1]] == min(recalls.values())


@pytest.mark.slow
def test_raw_weights_and_another_precision_are_a_key_away(finished_run: Path, digits: Path) -> None:
    code, text = evaluated(1, f"run.dir={finished_run}", "checkpoint=15", "weights=raw", "precision=bf16")
    assert code == 0, text
    assert re.search(r"precision\s+bf16", text)
    expected, _ = by_hand(finished_run / "checkpoints/step-000000015/model.safetensors", digits)
    assert numbers(text)["loss"] == pytest.approx(expected["loss"], rel=0.02)


@pytest.mark.slow
def test_several_precisions_are_one_table_of_what_each_gives_alone(
    finished_run: Path, digits: Path, tmp_path: Path
) -> None:
    (tmp_path / "conf/precision").mkdir(parents=True)
    (tmp_path / "conf/precision/careful.yaml").write_text("name: bf16\nkeep_fp32: ['*']\n")
    options = ["checkpoint=15", "precision=bf16,careful,fp32", "--config-dir", str(tmp_path / "conf")]
    code, text = evaluated(1, f"run.dir={finished_run}", *options, out=tmp_path)
    assert code == 0, text
    rows = [line for line in text.splitlines() if re.match(r"  (precision|bf16|careful|fp32) ", line)]
    heading, bf16, careful, fp32 = rows
    # A preset of one's own goes by its own name.
    (file,) = tmp_path.glob("*-careful-*.json")
    assert careful.split()[0] == "careful"
    assert read(file)["config"]["precision"]["keep_fp32"] == ["*"]
    assert heading.split()[1:3] == ["eval/loss", "eval/accuracy"]
    alone = numbers(evaluated(1, f"run.dir={finished_run}", "checkpoint=15", "precision=bf16")[1])
    assert [float(value) for value in bf16.split()[1:3]] == pytest.approx([alone["loss"], alone["accuracy"]], rel=1e-5)
    expected, _ = by_hand(finished_run / "checkpoints/step-000000015/ema.safetensors", digits)
    loss, difference, accuracy, _ = re.sub(r"[()]", "", fp32).split()[1:5]
    assert [float(loss), float(accuracy)] == pytest.approx([expected["loss"], expected["accuracy"]], rel=1e-4)
    kept = {content["precision"]: content["metrics"]["eval/loss"] for content in map(read, tmp_path.glob("*.json"))}
    assert difference == f"{kept['fp32'] - kept['bf16']:+.2g}"
    del kept["careful"]
    assert kept == {"bf16": pytest.approx(alone["loss"], rel=1e-5), "fp32": pytest.approx(expected["loss"], rel=1e-4)}


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_an_error_on_every_rank_after_all_is_shown_and_kept(
    finished_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    for name in ("config.yaml", "overrides.yaml"):
        shutil.copy(finished_run / name, tmp_path / "run")
    trained = Checkpoints(finished_run / "checkpoints").load(15)
    # In fp16 the logits are beyond all numbers.
    tensors = {
        name: stored[...] * (1e7 if name.startswith("head") else 1) for name, stored in trained.tensors["ema"].items()
    }
    spoilt = Checkpoint({"model": tensors}, trained.state)
    Checkpoints(tmp_path / "run/checkpoints").save(16, spoilt)
    code, text = evaluated(2, f"run.dir={tmp_path / 'run'}", "precision=fp32,fp16", out=tmp_path / "out")
    assert code == 1
    assert re.search(r"error: evaluation: eval/loss is (nan|inf) in fp16 .*step-000000016.*keep_fp32", text)
    assert re.search(r"\n  fp32 +\d\S+ ", text)
    assert re.search(r"\n  fp16 +(nan|inf) ", text)
    (file,) = (tmp_path / "out").glob("*-fp16-*.json")
    assert read(file)["not_finite"] == ["eval/loss"]


def test_a_folder_that_cannot_be_written_is_an_error_after_the_result_is_shown(
    finished_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    code, text = evaluated(2, f"run.dir={finished_run}", "checkpoint=15", out=tmp_path / "file/folder")
    assert code == 1
    assert f"out: the result cannot be written to {tmp_path / 'file/folder'}" in text
    assert numbers(text)["samples"] == 360


def test_the_best_checkpoint_is_the_default_and_repeats_what_the_run_has_logged(finished_run: Path) -> None:
    records = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    logged = {record["step"]: record for record in records if "eval/accuracy" in record}
    best = max(logged, key=lambda step: (logged[step]["eval/accuracy"], step))
    code, text = evaluated(1, f"run.dir={finished_run}")
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
        (["data.eval=empty.tar"], ["data.eval", "empty.tar", "have no sample"]),
        (["precision=fp32,bf17"], ["precision=bf17", "Did you mean 'bf16'?"]),
        (["model.width=9"], ["from a different model", "conv1.weight has shape [8, 3, 3, 3]", "[9, 3, 3, 3]"]),
        (["precisoin=bf16"], ["precisoin", "'precision'"]),
    ],
)
def test_what_cannot_be_evaluated_is_refused_with_a_reason(
    finished_run: Path, arguments: list[str], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tarfile.open("empty.tar", "w").close()
    # Two ranks where it is the ranks that read the data; what the command line alone shows needs no second one.
    ranks = 2 if "data.eval" in arguments[0] else 1
    code, text = evaluated(ranks, f"run.dir={finished_run}", *arguments)
    assert code != 0
    assert "Traceback" not in text
    assert_refused(text, *parts)


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    code, text = evaluated(1, f"run.dir={tmp_path}")
    assert code != 0
    assert f"{tmp_path} is not a run directory" in text


def test_help_says_how(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["evaluate", "--help"])
    evaluate.main()
    assert "checkpoint=best|latest|STEP" in capsys.readouterr().out

"""How evaluations are told side by side, what is said of numbers that are none, and what is kept in files."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.tracking import evaluation_files
from dtrain.tracking.evaluated import Evaluated, aligned, banner, not_finite, side_by_side
from dtrain.tracking.peak_memory import forget_peak, peak

CPU = torch.device("cpu")


def evaluated(precision: str = "fp32", tables: dict[str, Any] | None = None, **metrics: float) -> Evaluated:
    return Evaluated(
        checkpoint=Path("/run/checkpoints/step-000000050"),
        weights="ema",
        precision=precision,
        data={"eval": "test-*.tar", "fingerprint": "0123456789abcdef"},
        config={"task": {"_target_": "a.Task"}},
        ranks=2,
        metrics={"loss": 0.5, **metrics, "samples": 100, "bad_samples": 2},
        tables=tables or {},
        seconds=4.0,
        memory={"memory/max_resident_gib": 0.25},
    )


def test_precisions_stand_under_each_other_with_their_differences_to_the_first() -> None:
    several = [evaluated(accuracy=0.91), evaluated("bf16", accuracy=0.9), evaluated("fp16", accuracy=0.91)]
    heading, *lines = side_by_side(several)
    shown = [dict(zip(heading, line, strict=True)) for line in lines]
    assert [line["precision"] for line in shown] == ["fp32", "bf16", "fp16"]
    assert [line["eval/accuracy"] for line in shown] == ["0.91", "0.9 (-0.01)", "0.91 (+0)"]
    assert {line["eval/samples"] for line in shown} == {"100"}
    assert {line["throughput/samples_per_second"] for line in shown} == {"25"}
    assert {line["memory/max_resident_gib"] for line in shown} == {"0.25"}
    assert len({len(line) for line in aligned([heading, *lines]).splitlines()}) == 1


def test_what_a_task_could_not_conclude_leaves_a_gap() -> None:
    spoilt = evaluated("fp16", loss=math.nan)
    for several in ([evaluated(perplexity=1.5), spoilt], [spoilt, evaluated(perplexity=1.5)]):
        heading, *lines = side_by_side(several)
        column = heading.index("eval/perplexity")
        assert sorted(line[column] for line in lines) == ["", "1.5"]


def test_a_metric_that_is_not_finite_is_named_with_its_precision_and_checkpoint() -> None:
    assert not_finite([evaluated(), evaluated("bf16")]) == ""
    text = not_finite([evaluated(rare=math.nan), evaluated("bf16"), evaluated("fp16", loss=math.inf, rare=math.nan)])
    assert "eval/rare is nan in fp32; eval/loss is inf, eval/rare is nan in fp16" in text
    assert "step-000000050" in text


def test_the_banner_names_weights_data_and_cost() -> None:
    shown = banner(evaluated(accuracy=0.123456789, tokens=12_345_678))
    assert shown["checkpoint"].endswith("step-000000050 (ema weights)")
    assert shown["data"] == "test-*.tar"
    assert shown["eval/accuracy"] == "0.123457"
    assert shown["eval/tokens"] == "12345678"
    assert shown["memory/max_resident_gib"] == "0.25"


def test_files_hold_everything_and_their_names_tell_what_was_evaluated(tmp_path: Path) -> None:
    tables = {"confusion": torch.tensor([[3, 1], [0, 0]]), "other": torch.tensor([7])}
    paths = evaluation_files.write(tmp_path / "new", evaluated(tables=tables, rare=math.nan), ["cat"])
    stem = "step-000000050-ema-fp32-01234567"
    assert [path.name for path in paths] == [f"{stem}.json", f"{stem}-confusion.png"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(path.name for path in paths)
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    content = json.loads(paths[0].read_text())
    assert content["metrics"] == {"eval/loss": 0.5, "eval/rare": None, "eval/samples": 100, "eval/bad_samples": 2}
    assert content["not_finite"] == ["eval/rare"]
    assert content["tables"] == {"confusion": [[3, 1], [0, 0]], "other": [7]}
    assert [(one["name"], one["count"], one["recall"]) for one in content["classes"]] == [
        ("cat", 4, 0.75),
        ("1", 0, None),
    ]
    assert content["data"]["eval"] == "test-*.tar"
    assert content["cost"]["throughput/samples_per_second"] == 25


def test_without_a_confusion_there_is_no_picture(tmp_path: Path) -> None:
    (path,) = evaluation_files.write(tmp_path, evaluated(), None)
    assert "classes" not in json.loads(path.read_text())


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="only Linux forgets a peak")
def test_a_peak_of_memory_is_seen_after_its_memory_is_given_back_and_can_be_forgotten() -> None:
    forget_peak(CPU)
    name, before = peak(CPU)
    assert name == "memory/max_resident_gib"
    block = torch.ones(1 << 26)  # a quarter of a GiB
    del block
    assert 0.2 < peak(CPU)[1] - before < 0.3
    forget_peak(CPU)
    assert peak(CPU)[1] - before < 0.1


@pytest.mark.slow
def test_the_peak_of_a_process_is_not_that_of_the_one_that_started_it() -> None:
    block = torch.ones(1 << 28)  # a GiB, held while the other process begins
    code = "import torch; from dtrain.tracking.peak_memory import peak; print(peak(torch.device('cpu'))[1])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.05 < float(done.stdout) < block.nbytes / 2**30

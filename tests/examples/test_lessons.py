"""examples/lessons: each prints the facts that it and docs/mixed_precision.md tell, draws a picture, and refuses bad input."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import autocast_table
from dtrain.precision import CrossRankGradScaler
from tests.forked_python import forked_python
from tests.ranks import run_ranks
from tests.run_notebook import run_notebook
from tests.whole_runs import ROOT

LESSONS = ROOT / "examples" / "lessons"
PAGE = ROOT / "docs" / "mixed_precision.md"
NOTEBOOK = LESSONS / "mixed_precision.ipynb"
NAMES = ("number_formats", "underflow", "overflow", "diverging_ranks", "checkerboard")


@pytest.fixture
def lesson(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a lesson by its name, as its own folder does."""
    monkeypatch.syspath_prepend(str(LESSONS))
    return importlib.import_module


def run(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [forked_python(), str(LESSONS / f"{name}.py"), *arguments]
    given = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=280, check=False)


def is_picture(file: Path) -> bool:
    return file.read_bytes().startswith(b"\x89PNG")


# -- the facts that are told


def test_number_formats(lesson: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lesson("number_formats").main(tmp_path)
    printed = capsys.readouterr().out
    assert re.search(r"fp16 +16 +6\.55e\+04 +6\.1e-05 +5\.96e-08 +0\.000977 +3\.3", printed)
    assert re.search(r"bf16 +16 +3\.39e\+38 +1\.18e-38 +9\.18e-41 +0\.00781 +2\.4", printed)
    assert re.search(r"70000 +70000 +70144 +inf", printed)
    assert re.search(r"1e-08 +1e-08 .* +0$", printed, re.MULTILINE)
    assert is_picture(tmp_path / "number_formats.png")
    assert printed.partition(f"\n\n{tmp_path}")[0] in PAGE.read_text()


def test_underflow_loses_every_gradient_of_the_first_layer_without_scaling_and_none_with_it(lesson: Any) -> None:
    gradient = lesson("underflow").gradient
    assert [float((gradient(scale) == 0).float().mean()) for scale in (1.0, 2.0**16)] == [1.0, 0.0]
    assert not gradient(2.0**44).isfinite().any()


def test_underflow_the_scaled_gradient_divided_by_the_scale_is_that_of_fp32(lesson: Any) -> None:
    underflow = lesson("underflow")
    model = underflow.network()
    underflow.loss_of(model, "fp32").backward()
    torch.testing.assert_close(underflow.gradient(2.0**16) / 2.0**16, model[0].weight.grad, rtol=0.02, atol=1e-9)


def test_overflow_written_by_hand_every_loss_is_wrong_and_torchs_are_right(
    lesson: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = lesson("overflow").loss_table()
    assert len(rows) == 5
    for name, naive, stable, exact in rows:
        assert naive in (float("inf"), float("-inf")) or naive != naive, name
        assert stable == pytest.approx(exact, rel=1e-5), name
    assert capsys.readouterr().out.strip("\n") in PAGE.read_text()


def test_overflow_steps_are_skipped_until_the_scale_fits_and_again_after_it_has_grown(lesson: Any) -> None:
    scales, skipped, losses = lesson("overflow").train()
    assert skipped[:5] == [0, 1, 2, 3, 4]
    assert len(skipped) > 8
    halved = [step for step in range(len(scales) - 1) if scales[step + 1] == scales[step] / 2]
    assert halved == [step for step in skipped if step + 1 < len(scales)]
    assert any(after == 2 * before for before, after in itertools.pairwise(scales))
    assert losses[-1] < losses[0]


def test_diverging_ranks_only_the_stock_scaler_lets_scales_differ(lesson: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    diverging_ranks = lesson("diverging_ranks")
    monkeypatch.setattr(diverging_ranks, "STEPS", 8)

    def scales(rank: int) -> list[float]:
        stock = torch.amp.GradScaler("cpu", init_scale=1024.0)
        ours = CrossRankGradScaler("cpu", init_scale=1024.0)
        return [diverging_ranks.train(rank, scaler, (2, 4))["scale"][-1] for scaler in (stock, ours)]

    assert run_ranks(2, scales) == [[1024.0, 256.0], [256.0, 256.0]]


def test_the_naive_classifier_overflows_in_fp16_and_the_stable_one_does_not() -> None:
    from examples.lessons.naive_softmax import CosineClassifier

    images = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    naive, stable = CosineClassifier(), CosineClassifier(stable=True)
    stable.load_state_dict(naive.state_dict())
    torch.testing.assert_close(naive(images), stable(images), rtol=1e-3, atol=1e-3)  # in fp32
    with torch.autocast("cpu", dtype=torch.float16):
        assert not naive(images).isfinite().all()
        assert stable(images).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "number_formats"])
def test_a_lesson_prints_draws_and_ends_with_three_sentences(name: str, tmp_path: Path) -> None:
    done = run(name, "--out", str(tmp_path), *(("--steps=20",) if name == "checkerboard" else ()))
    assert done.returncode == 0, done.stderr
    picture, *sentences = done.stdout.splitlines()[-4:]
    assert is_picture(Path(picture))
    assert list(tmp_path.iterdir()) == [Path(picture)]
    assert Path(picture).name in NOTEBOOK.read_text()
    assert all(sentence.endswith(".") for sentence in sentences)
    if name == "underflow":
        assert re.search(r"2\^0 +100% +0%", done.stdout)
        first, last = re.findall(r"^fp16 +(\S+) +(\S+)$", done.stdout, re.MULTILINE)[0]
        assert first == last
    if name == "diverging_ranks":
        assert re.search(r"GradScaler +1024 +64 ", done.stdout)
        assert re.search(r"CrossRankGradScaler +64 +64 ", done.stdout)
    if name == "checkerboard":
        errors = [float(error) for error in re.findall(r"^\w+ +(0\.\d{4}) ", done.stdout, re.MULTILINE)]
        assert len(errors) == 3
        fp32, bf16, fp16 = (int(mib) for mib in re.findall(r"^[bf]\S+ +\S+ +\S+ +(\d+)", done.stdout, re.MULTILINE))
        assert bf16 == fp16
        assert bf16 / fp32 == pytest.approx(0.5, abs=0.01)
        assert max(errors) - min(errors) < 0.02


# -- the notebook


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("digits")
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    # The longest lesson was run above: here another picture takes the place of its own.
    longest, content = "{sys.executable} checkerboard.py --steps 60 --out {out}", NOTEBOOK.read_text()
    assert longest in content
    notebook = tmp_path / NOTEBOOK.name
    notebook.write_text(content.replace(longest, "cp {out}/overflow.png {out}/checkerboard_512.png"))
    before = set(LESSONS.iterdir())
    shown = run_notebook(notebook, LESSONS)
    assert {path for path in LESSONS.iterdir() if path.name != "__pycache__"} <= before
    assert len(re.findall(r"^shown: image/png", shown, re.MULTILINE)) == 5
    assert "Traceback" not in shown
    assert "weight of the loss 1e-06: 100% of the gradients are zero" in shown
    assert re.search(r"exp, .*naive_softmax.py:\d+", shown)
    assert re.search(r"torch.amp.GradScaler +1024 +64 ", shown)
    assert "76,840 bytes -> 38,420 bytes" in shown


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(
        cell["outputs"] == [] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code"
    )


# -- bad input


def test_a_folder_that_does_not_exist_is_refused(
    lesson: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        lesson("lesson").parser("").parse_args(["--out", str(tmp_path / "nowhere")])
    message = capsys.readouterr().err
    assert "--out" in message
    assert "nowhere" in message
    assert "Make it first" in message


@pytest.mark.usefixtures("lesson")
def test_no_steps_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["checkerboard.py", "--steps=0"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(LESSONS / "checkerboard.py"), run_name="__main__")
    assert "--steps: got 0, want at least 1" in capsys.readouterr().err


@pytest.mark.usefixtures("lesson")
def test_without_matplotlib_a_lesson_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lesson", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match=r"^[^\n]*matplotlib, which is not installed: pip install matplotlib$"):
        runpy.run_path(str(LESSONS / "number_formats.py"), run_name="__main__")


def test_every_lesson_is_listed_and_shown_in_the_tutorial() -> None:
    page = PAGE.read_text()
    for name in NAMES:
        assert f"python examples/lessons/{name}.py" in page


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the tutorial's table is that of torch 2.13")
def test_the_tutorials_table_of_autocast_is_what_torch_does() -> None:
    rows = re.findall(r"^\| (`\w+`(?: `\w+`)*) \| ([\w ]+) \| ([\w ]+) \|$", PAGE.read_text(), re.MULTILINE)
    shown = {name: (cpu, cuda) for names, cpu, cuda in rows for name in names.replace("`", "").split()}
    assert shown.keys() == autocast_table.OPERATIONS.keys()
    for name, columns in shown.items():
        for dtype in (torch.bfloat16, torch.float16):
            assert tuple(autocast_table.measured(name, device, dtype) for device in ("cpu", "cuda")) == columns, name

"""examples/coming_from: the programs of docs/coming_from.md, ours and those of the other frameworks that are installed."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.doc_pages import blocks
from tests.forked_python import forked_python
from tests.shards import write_tar
from tests.whole_runs import ROOT, metrics, train_on, weights

FOLDER = ROOT / "examples" / "coming_from"
PRESETS = ("--config-dir", str(FOLDER / "presets"))


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def test_the_page_shows_these_programs_as_they_are() -> None:
    programs = {file: file.read_text() for file in FOLDER.rglob("*") if file.suffix in (".py", ".yaml")}
    shown = set()
    for block in blocks(ROOT / "docs" / "coming_from.md"):
        if "part of a program" in (block.reason or "") or (block.language == "yaml" and "defaults:" in block.text):
            files = [file for file, text in programs.items() if block.text in text]
            assert files != [], str(block)
            shown.update(files)
    assert {file.name for file in set(programs) - shown} == {"shared.py"}


@pytest.mark.usefixtures("digits", "on_path")
def test_the_preset_beside_lightning_starts_with_the_weights_of_its_checkpoint(tmp_path: Path) -> None:
    from shared import Net  # type: ignore[import-not-found]

    net = Net()
    torch.save(
        {"state_dict": {f"model.{name}": value for name, value in net.state_dict().items()}}, tmp_path / "l.ckpt"
    )
    state = torch.load(tmp_path / "l.ckpt", weights_only=True)["state_dict"]  # as the page says
    save_file(state, tmp_path / "weights.safetensors")
    warm_start = f"run.warm_start={{path: {tmp_path}/weights.safetensors, rename: {{model.: ''}}}}"
    train_on(
        1, tmp_path / "run", *PRESETS, warm_start, "train.max_steps=1", "optimizer.lr=0", experiment="from_lightning"
    )
    trained = weights(tmp_path / "run", 1)
    assert all(torch.equal(trained[name], value) for name, value in net.state_dict().items())
    assert len(metrics(tmp_path / "run", "eval/accuracy")) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("digits", "on_path")
@pytest.mark.parametrize("experiment", ["from_ddp", "from_lightning"])
def test_a_preset_reaches_the_accuracy_of_the_program_beside_it(experiment: str, tmp_path: Path) -> None:
    train_on(2, tmp_path, *PRESETS, "train.log_every=50", experiment=experiment)
    assert metrics(tmp_path, "eval/accuracy")[-1] > 0.95


@pytest.mark.slow
@pytest.mark.usefixtures("on_path")
def test_the_preset_beside_torchtitan_trains_sharded(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(64, 80, size=(64, 257), dtype=np.uint16)
    for split in ("train", "val"):
        samples = [(f"{number:03}", {"tok": row.tobytes()}) for number, row in enumerate(rows)]
        write_tar(tmp_path / f"{split}-000000.tar", samples)
    data = (f"data.train={tmp_path}/train-*.tar", f"data.eval={tmp_path}/val-*.tar")
    train_on(2, tmp_path / "run", *PRESETS, *data, experiment="from_torchtitan")
    losses = metrics(tmp_path / "run")
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
@pytest.mark.parametrize(
    ("program", "ranks", "package"),
    [
        ("our_loop.py", 2, "torch"),
        ("our_dataset.py", 0, "torch"),
        ("their_ddp.py", 2, "torch"),
        ("their_webdataset.py", 0, "webdataset"),
        ("their_lightning.py", 0, "lightning"),
        ("their_accelerate.py", 0, "accelerate"),
    ],
)
def test_a_program_of_the_page_learns_the_digits(program: str, ranks: int, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [forked_python(), *torchrun, str(FOLDER / program)],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{FOLDER}"},
        )
    try:
        deadline = time.monotonic() + 200
        while process.poll() is None and not re.search("^accuracy ", output.read_text(), re.MULTILINE):
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)
        try:
            code = process.wait(timeout=10 if ranks else 60)
        except subprocess.TimeoutExpired:
            # A loop with torch's DDP over gloo sometimes hangs when the interpreter is torn down, after it has printed its
            # result: see dtrain/distributed/process_group.py, which prevents this in dtrain's own commands.
            process.terminate()  # torchrun then ends its ranks, which would outlive its SIGKILL
            process.wait(timeout=60)
            code = 0 if ranks else None
    finally:
        process.kill()
        process.wait()
    shown = output.read_text()
    assert code == 0, shown
    (accuracy,) = (float(line.split()[1]) for line in shown.splitlines() if line.startswith("accuracy "))
    assert accuracy > 0.95

"""A folder in which the commands of the documentation find what they name, and programs that keep them short.

``python``, ``torchrun`` and ``dtrain`` of that folder are the real ones, or forks of a process that has imported what they
import, with arguments appended that make a training last some steps: what a reader types is run as it is written.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLASSES = ("ant", "bee", "cat", "dog", "eel")
#: Module of an entry point and a word of its arguments: what is appended where both are there.
_SHORTER: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("dtrain.train", "", ("train.max_steps={steps}", "tracker.mode=disabled", "train.eval_every=0")),
    ("dtrain.launch", "launch=local", ("train.max_steps={steps}", "tracker.mode=disabled", "train.eval_every=0")),
    ("dtrain.launch", "launch=slurm", ("launch.dry_run=true",)),
    ("dtrain.doctor", "numerics experiment=", ("steps=1",)),
    ("dtrain.doctor", "dtrain.doctor experiment=", ("--seconds=0.2",)),
    ("dtrain.doctor", "dtrain.doctor --nproc 2 ", ("--seconds=0.2",)),
    ("dtrain.doctor", "dtrain.doctor run.dir=", ("--seconds=0.2",)),
    ("dtrain.export", "run.dir=", ("export.measure=false", "samples=32")),
    ("dtrain.pack", "imagefolder", ("--shards=10",)),
)


def make_world(folder: Path, session: Path) -> Path:
    """Lays out photos, texts, arrays and two finished runs.

    Args:
        folder: Where to; empty.
        session: Of all tests, for what is made only once.

    Returns:
        ``folder``.
    """
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)

    def photo(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(256, size=(24, 24, 3), dtype=np.uint8)).save(path)

    for name in CLASSES:
        for number in range(20):
            photo(folder / "photos" / name / f"{number}.jpg")
    photo(folder / "photo.jpg")
    photo(folder / "other.png")
    labels = rng.integers(10, size=20)
    np.savez(folder / "mnist.npz", x_train=rng.integers(256, size=(20, 28, 28), dtype=np.uint8), y_train=labels)
    (folder / "books" / "shelf").mkdir(parents=True)
    for number in range(40):
        (folder / "books" / "shelf" / f"{number}.txt").write_text("In the beginning was a sample. " * 100)
    for name in ("benchmarks", "examples", "scripts", "slurm"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("mine", "other"):
        shutil.copytree(_trained(session), folder / "runs" / name)
    return folder


def execute(
    script: str, folder: Path, left_out: Sequence[str] = (), python: str = sys.executable, *, in_full: bool = False
) -> str:
    """Runs a block of bash in a world.

    Args:
        script: As it is in the page.
        folder: The world.
        left_out: Programs that do nothing.
        python: The interpreter of its programs.
        in_full: Whether trainings are as long as the page says.

    Returns:
        What it printed.

    Raises:
        AssertionError: If one of its commands fails; shows what it said.
    """
    programs = folder / ".bin"
    programs.mkdir(exist_ok=True)
    for name in ("python", "torchrun", "dtrain"):
        shim = programs / name
        # -IS: a quarter of the time of a start, for what only makes a command line of another.
        shim.write_text(
            f'#!/bin/bash\nexec "{sys.executable}" -IS "{Path(__file__).resolve()}" {int(in_full)} "{python}" {name} "$@"\n'
        )
        shim.chmod(0o755)
    nothing = "".join(f"{name}() {{ :; }}\n" for name in left_out)
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail -x\nshopt -s globstar\n{nothing}{script}"],
        cwd=folder,
        env=_environment() | {"PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}"
    return done.stdout


def shortened(arguments: Sequence[str]) -> list[str]:
    """A command's arguments with those appended that keep it short; more epochs are still more steps."""
    line = " ".join(arguments)
    epochs = next((word.partition("=")[2] for word in arguments if word.startswith("train.max_epochs=")), "4")
    more = [
        each.format(steps=4 + int(epochs))
        for module, word, extra in _SHORTER
        if f"-m {module} " in f"{line} " and word in line
        for each in extra
        if f" {each.partition('=')[0]}=" not in line  # a key may be set once only
    ]
    return [*arguments, *more]


@functools.cache
def _trained(session: Path) -> Path:
    """The directory of four steps of the digits, evaluated and saved at the end."""
    from tests.forked_python import forked_python

    run_dir = session / "documented-run"
    overrides = ["experiment=digits", "tracker=none", f"run.dir={run_dir}", "train.max_steps=4", "train.eval_every=0"]
    command = [forked_python(), "-m", "dtrain.train", *overrides]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return run_dir


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


if __name__ == "__main__":
    in_full, python, program, *rest = sys.argv[1:]
    shorten = list if in_full == "1" else shortened
    if program == "dtrain":
        command, *rest = rest
        rest = ["-m", "dtrain", command, *shorten(["-m", f"dtrain.{command}", *rest])[2:]]
    else:
        rest = [*(["-m", "torch.distributed.run"] if program == "torchrun" else []), *shorten(rest)]
    os.execv(python, [python, *rest])

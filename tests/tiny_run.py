"""One small finished run for the tests of all commands that work with one: made once a session, never written to."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
STEPS = 15


class NormNet(nn.Module):
    """Two convolutions with BatchNorm, the second beside a residual, and a linear layer."""

    def __init__(self, classes: int = 10, width: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, ``[rows, classes]``."""
        hidden = self.norm1(self.conv1(images)).relu()
        hidden = hidden + self.norm2(self.conv2(hidden)).relu()
        return self.head(hidden.mean(dim=(2, 3)))


def norm_net(classes: int = 10, width: int = 8) -> NormNet:
    """The same, built by a function."""
    return NormNet(classes, width)


@functools.cache
def tiny_run(folder: Path) -> Path:
    """The directory of 15 steps of the digits with a ``NormNet``, evaluated and saved every 5, with a moving average.

    Args:
        folder: Where to make it; the session's (``tmp_path_factory.getbasetemp()``), so that it is made once.
    """
    run_dir = folder / "tiny-run"
    overrides = [
        "experiment=digits",
        "precision=fp32",
        "tracker=none",
        f"run.dir={run_dir}",
        "model._target_=tests.tiny_run.NormNet",
        "model.width=8",
        "schedule=constant",
        "optimizer.lr=0.02",
        f"train.max_steps={STEPS}",
        "train.eval_every=5",
        "train.log_every=3",
        "train.ema_decay=0.7",
        "checkpoint.every_steps=5",
    ]
    command = [sys.executable, "-m", "dtrain.train", *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return run_dir

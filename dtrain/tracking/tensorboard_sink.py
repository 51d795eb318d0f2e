"""TensorBoard as a sink: ``tensorboard --logdir runs`` shows a run under the names of metrics.jsonl.

Each start adds an event file to ``<run.dir>/tensorboard``. A later file states the step at which it begins, and
TensorBoard ignores what earlier files have from that step on. So a repeated step is shown once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from dtrain.runs.records import Record

_FLUSH_SECONDS = 10  # a killed run loses at most this much here


class TensorBoardSink:
    """Writes event files.

    Args:
        folder: Created if it does not exist.
        config: Shown as text: the resolved config, without secrets, in plain containers.
        resumed_step: The last valid step of earlier starts; 0 for a new start.

    Raises:
        OSError: Here and in all methods, on a write failure.
    """

    def __init__(self, folder: Path, config: dict[str, Any], resumed_step: int) -> None:
        # A new start may log an evaluation at step 0 again.
        begins = resumed_step + 1 if resumed_step > 0 else 0
        self._writer = SummaryWriter(str(folder), purge_step=begins, flush_secs=_FLUSH_SECONDS)
        self._text("config", yaml.safe_dump(config, sort_keys=False), begins)

    def log(self, record: Record) -> None:
        """Adds a scalar for each metric."""
        step, seconds = int(record["step"]), float(record["time"])
        for name, value in record.items():
            if name not in ("step", "time"):
                self._writer.add_scalar(name, value, step, walltime=seconds)

    def media(self, step: int, name: str, path: Path) -> None:
        """Adds a picture or a text."""
        if path.suffix == ".txt":
            self._text(f"media/{name}", path.read_text(encoding="utf-8"), step)
        else:
            with Image.open(path) as picture:
                self._writer.add_image(f"media/{name}", np.asarray(picture.convert("RGB")), step, dataformats="HWC")

    def alert(self, text: str) -> None:
        """Does nothing: TensorBoard has no alerts."""

    def finish(self, state: str, reason: str | None = None) -> None:
        """Writes the rest and closes the file."""
        self._writer.close()

    def _text(self, name: str, text: str, step: int) -> None:
        # TensorBoard renders texts as Markdown; indentation makes them code blocks, which are shown unchanged.
        self._writer.add_text(name, "".join(f"    {line}\n" for line in text.splitlines()), step)

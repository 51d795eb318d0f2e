"""TensorBoard as a sink: ``tensorboard --logdir runs`` shows a run under the names of metrics.jsonl.

Each start adds a file of events to ``<run.dir>/tensorboard``. TensorBoard lets go of what earlier files have from the step
on at which a later one says that it begins, so a step that was trained again is there once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from dtrain.tracking.record import Record

#: Seconds of records that a killed run may lose here.
_FLUSH_EVERY = 10


class TensorBoardSink:
    """Writes event files.

    Args:
        folder: Where to; made if it is not there.
        config: Shown as a text: the resolved config, without secrets, in plain containers.
        resumed_step: The last step of earlier starts that counts; 0 for a start from nothing.

    Raises:
        OSError: Here and later, if the disk refuses.
    """

    def __init__(self, folder: Path, config: dict[str, Any], resumed_step: int) -> None:
        # A start from nothing may log an evaluation at step 0 again.
        begins = resumed_step + 1 if resumed_step > 0 else 0
        self._writer = SummaryWriter(str(folder), purge_step=begins, flush_secs=_FLUSH_EVERY)
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

    def finish(self, state: str, reason: str | None = None) -> None:
        """Writes what is left."""
        self._writer.close()

    def _text(self, name: str, text: str, step: int) -> None:
        # TensorBoard reads texts as Markdown; indented they are code, whatever they hold.
        self._writer.add_text(name, "".join(f"    {line}\n" for line in text.splitlines()), step)

"""Pictures and texts of a run: what a task shows after an evaluation, and confusion matrices.

They are drawn on rank 0, in the last evaluation and before that at most once a minute: drawing one takes as long as many a
step of a small model, and a run of an hour has enough of them. A fault in it costs no checkpoint: the run is saved first.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from dtrain.data import Batch
from dtrain.data.class_names import class_names
from dtrain.training.loaders import eval_loader
from dtrain.training.parts import Parts
from dtrain.training.result import Evaluation

SECONDS_BETWEEN = 60.0


@runtime_checkable
class IllustratingTask(Protocol):
    """A task that has something to show after an evaluation, such as a picture of what the model does."""

    def illustrate(
        self, model: nn.Module, evaluation: Evaluation, samples: Iterable[Batch]
    ) -> Mapping[str, bytes | str]:
        """Called on rank 0 alone, in evaluation mode, without gradients, under autocast.

        Args:
            model: The bare model. The other ranks do not run it, so it must not talk to them.
            evaluation: What was found, with the task's tables.
            samples: The evaluation set from its beginning, on the device, in stored order and whole, whatever the number of
                ranks. Nothing is read before it is asked for; take as few as will do.

        Returns:
            A name, of letters, digits, ``_``, ``-`` and ``.``, to the bytes of a PNG file or to a text.
        """
        ...


class Illustrations:
    """Draws, when it is time to.

    Args:
        parts: The objects of the run.
        show: Takes the step, a name, and the bytes of a PNG file or a text.
    """

    def __init__(self, parts: Parts, show: Callable[[int, str, bytes | str], None]) -> None:
        self._parts = parts
        self._show = show
        self._on = parts.world.rank == 0 and parts.cfg.tracker.media
        self._drawn_at = time.monotonic()
        # On every rank, and now: names that cannot be read shall not end a run that has nearly come through.
        self._class_names = class_names(parts.cfg.data) if parts.cfg.tracker.media else None

    def after(self, evaluation: Evaluation, *, last: bool) -> None:
        """Shows what there is to be seen after an evaluation at this step.

        Args:
            evaluation: What it found.
            last: Whether the run ends here.
        """
        if not self._on or not (last or time.monotonic() - self._drawn_at > SECONDS_BETWEEN):
            return
        for name, content in self._drawn(evaluation).items():
            self._show(self._parts.step.step, name, content)
        self._drawn_at = time.monotonic()

    def _drawn(self, evaluation: Evaluation) -> dict[str, bytes | str]:
        parts = self._parts
        shown: dict[str, bytes | str] = {}
        if "confusion" in evaluation.tables:
            # Here because matplotlib takes a second that a run without pictures should not pay.
            from dtrain.tracking.confusion import confusion_picture

            shown["confusion"] = confusion_picture(evaluation.tables["confusion"], self._class_names)
        if isinstance(parts.task, IllustratingTask):
            model = parts.ema.averaged() if parts.ema is not None else parts.model
            was_training = model.training
            model.eval()
            try:
                with torch.inference_mode(), parts.precision.autocast(parts.world.device.type):
                    drawn = parts.task.illustrate(model, evaluation, self._samples())
            finally:
                model.train(was_training)
            if not isinstance(drawn, Mapping):
                raise TypeError(
                    f"{type(parts.task).__name__}.illustrate returned a {type(drawn).__name__}, want names and what they "
                    "show: {'fit': png_bytes, 'answers': 'a text'}, or {} for nothing."
                )
            shown |= drawn
        return shown

    def _samples(self) -> Iterator[Batch]:
        parts, cfg = self._parts, copy.deepcopy(self._parts.cfg)
        cfg.data.num_workers = 0
        cfg.train.micro_batch_size = parts.train_loader.rows_per_micro_batch
        loader = eval_loader(cfg, replace(parts.world, rank=0, size=1), parts.precision)
        if loader is None:
            return
        try:
            for batch in loader.epoch(0):
                yield batch.to(parts.world.device)
        finally:
            loader.close()

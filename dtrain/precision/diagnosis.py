"""Where the numbers of a step first stop being finite; looked for only while steps are being skipped.

* A *streak* is a row of skipped steps. Its first skip arms the diagnosis: hooks on every module and parameter of the bare
  model, which then runs uncompiled. The first applied step takes them off; without a streak there are none.
* A *sighting* is what a hook notes: a name, and which rows are not finite. It stays on the device, so nothing waits.
* A *finding* is the sightings of this rank's first bad micro-batch as text. Only an abort, and the line that a streak
  leaves in the rank's log, read one.

The hooks of parameters see this rank's own gradients: after the all-reduce every rank has the same infinities, whoever
made them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dtrain.precision.names import plain_name, some
from dtrain.precision.nested import tensors
from dtrain.precision.scripted import hookable

# A loss scale that finds its level skips one or two steps in a row.
_LOGGED_STREAK = 3
# What a text names at most.
_NAMED_PARAMETERS = 3
_NAMED_SAMPLES = 8
_NAMED_RANKS = 8
# What torch.isfinite can look at; the 8-bit types it cannot.
_CHECKED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
logger = logging.getLogger("dtrain")


class SkipDiagnosis:
    """Looks for the origin of a streak of skipped steps, on this rank.

    Args:
        model: The bare model, not wrapped in DDP; compiled or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._seen: list[_MicroBatch] = []  # of the last two windows
        self._current: _MicroBatch | None = None

    @property
    def armed(self) -> bool:
        """Whether hooks are on the model."""
        return bool(self._handles)

    def follow(self, consecutive_skips: int) -> None:
        """Arms after the first skip of a streak, disarms after it.

        Args:
            consecutive_skips: Steps skipped in a row up to the newest one that was voted on.
        """
        if consecutive_skips and not self.armed:
            self._arm()
        elif not consecutive_skips and self.armed:
            self._disarm()
        if consecutive_skips == _LOGGED_STREAK:
            finding = self.finding() or "everything was finite"
            logger.warning("%d steps in a row were skipped; on this rank: %s", consecutive_skips, finding)

    def micro_batch(self, step: int, number: int, sample_keys: Sequence[str]) -> AbstractContextManager[None]:
        """Forward and backward of a micro-batch run inside; without a streak it does nothing.

        Args:
            step: Attempted step, from 1.
            number: Micro-batch of its window, from 0.
            sample_keys: Key of each row; ``""`` where it is masked.
        """
        return self._watched(_MicroBatch(step, number, sample_keys)) if self.armed else nullcontext()

    def loss(self, loss_sum: Tensor) -> None:
        """Takes note of a micro-batch's loss, shape ``[]``."""
        if self._current is not None:
            self._current.loss = _bad_rows(loss_sum, 1)

    def finding(self) -> str | None:
        """What was seen first in the earliest bad micro-batch of the last two windows; None if all of it was finite.

        Waits for the device.
        """
        return next((text for seen in self._seen if (text := seen.text()) is not None), None)

    def findings(self, world_size: int) -> list[str]:
        """Collective. A line for each rank that has a finding, or one that says why there is none; equal on all ranks."""
        texts: list[str | None] = [self.finding()]
        if world_size > 1:
            texts = [None] * world_size
            dist.all_gather_object(texts, self.finding())
        found = [f"rank {rank}, {text}" for rank, text in enumerate(texts) if text is not None]
        if found:
            more = len(found) - _NAMED_RANKS
            return found[:_NAMED_RANKS] + ([f"and {more} more ranks"] if more > 0 else [])
        if not self._seen:
            return [
                "Where it began is not known: that is looked for after the first skip. Raise train.max_consecutive_skips."
            ]
        return [
            "On every rank each output, loss and gradient is finite by itself: their sum over micro-batches and ranks, "
            "or its norm, is not."
        ]

    @contextmanager
    def _watched(self, micro_batch: _MicroBatch) -> Iterator[None]:
        self._seen = [*(seen for seen in self._seen if seen.step >= micro_batch.step - 1), micro_batch]
        self._current = micro_batch
        try:
            # Compiled code was traced without the hooks and would not call them.
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            self._current = None

    def _arm(self) -> None:
        for name, module in hookable(self._model):
            note = partial(self._note_module, f"{plain_name(name) or 'the model'} ({type(module).__name__})")
            self._handles.append(module.register_forward_hook(note, with_kwargs=True))
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(partial(self._note_gradient, plain_name(name))))

    def _disarm(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._seen = [], []

    def _note_module(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._current is not None:
            rows = len(self._current.sample_keys)
            self._current.modules.append((name, _bad_rows((args, kwargs), rows), _bad_rows(output, rows)))

    def _note_gradient(self, name: str, gradient: Tensor) -> None:
        if self._current is not None:
            self._current.gradients.append((name, _bad_rows(gradient._values() if gradient.is_sparse else gradient, 1)))


@dataclass
class _MicroBatch:
    """The sightings of one micro-batch. Masks are bool on the device, of shape ``[rows]`` or, of loss and gradients, ``[1]``.

    Attributes:
        step: Attempted step, from 1.
        number: Micro-batch of its window.
        sample_keys: Key of each row.
        modules: Name, bad rows of the inputs and of the outputs of each call, in the order in which the calls ended.
        loss: Whether the loss is bad.
        gradients: Name of each parameter and whether its gradient is bad, in the order of the backward.
    """

    step: int
    number: int
    sample_keys: Sequence[str]
    modules: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    loss: Tensor | None = None
    gradients: list[tuple[str, Tensor]] = field(default_factory=list)

    def text(self) -> str | None:
        """What went wrong first, and for which samples; None if everything is finite."""
        sightings = []
        rows = [True] * len(self.sample_keys)
        for name, given, made in self.modules:
            if made.any():
                state = "not finite either" if given.any() else "finite"
                sightings.append(f"the output of {name}, whose input is {state}")
                rows = made.tolist()
                break
        if not sightings and self.loss is not None and self.loss.any():
            sightings.append("the loss, though the output of every module is finite")
        gradients = [name for name, bad in self.gradients if bad.any()]
        if gradients:
            sightings.append(f"the gradient of {some(gradients, _NAMED_PARAMETERS)}")
        if not sightings:
            return None
        valid = [bool(key) for key in self.sample_keys]
        keys = [key for key, bad in zip(self.sample_keys, rows, strict=True) if key and bad]
        return (
            f"step {self.step}, micro-batch {self.number}: first not finite: {', then '.join(sightings)}; "
            f"in {len(keys)} of {sum(valid)} samples: {some(keys, _NAMED_SAMPLES)}"
        )


@torch.no_grad()
def _bad_rows(value: Any, rows: int) -> Tensor:
    """Which rows of ``value``, a nest of tensors, are not finite: bool, shape ``[rows]``.

    A tensor whose first axis is not that of the rows counts for all of them.
    """
    found = []
    for tensor in tensors(value):
        if tensor.dtype not in _CHECKED:
            continue
        not_finite = torch.isfinite(tensor).logical_not()
        has_rows = tensor.dim() > 0 and len(tensor) == rows
        found.append(not_finite.unsqueeze(-1).flatten(1).any(dim=1) if has_rows else not_finite.any().expand(rows))
    return reduce(torch.logical_or, found) if found else torch.zeros(rows, dtype=torch.bool)

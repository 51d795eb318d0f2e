"""Finds the first module, loss, gradient or buffer that is not finite while steps are being skipped, and explains the skips.

* A *streak* is a series of consecutive skipped steps. Its first skip arms the diagnosis: hooks are registered on every
  module and parameter of the bare model, which then runs uncompiled. The first applied step removes them; without a streak
  there are no hooks and no cost.
* A hook records a name and a mask of the rows that are not finite. The mask stays on the device, so that nothing waits.
* A *finding* is a text about the first micro-batch of this rank that has a non-finite value. It is computed only for the
  message that ends a run and for the log line of the third skip.

The parameter hooks see this rank's own gradients. After the all-reduce all ranks have the same infinities, no matter which rank
they came from.
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

from dtrain.precision.modules import first_names, hookable, plain_name, tensors
from dtrain.precision.vote import StepStats

# A loss scale that is settling skips one or two steps in a row; a third one is worth a log line.
_LOGGED_STREAK = 3
# The most names that a text lists.
_NAMED_PARAMETERS = 3
_NAMED_SAMPLES = 8
_NAMED_RANKS = 8
#: The dtypes that torch.isfinite supports; the 8-bit ones are missing.
CHECKED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
_DOCTOR = (
    "`dtrain doctor numerics` with the arguments of this run, or with its run.dir=DIR, names the operation and "
    "its line."
)
logger = logging.getLogger("dtrain")


class SkipDiagnosis:
    """Looks for the origin of a streak of skipped steps on this rank.

    Args:
        model: The bare model, not wrapped in DDP; compiled or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._seen: list[_MicroBatch] = []  # in the last two accumulation windows
        self._current: _MicroBatch | None = None
        self._gathered: set[int] = set()  # ids of the gathered parameters that have a hook

    @property
    def armed(self) -> bool:
        """Whether hooks are registered on the model."""
        return bool(self._handles)

    def follow(self, consecutive_skips: int) -> None:
        """Registers the hooks after the first skip of a streak, and removes them after the streak.

        Args:
            consecutive_skips: Number of consecutive skipped steps, up to and including the last settled step.
        """
        if consecutive_skips and not self.armed:
            self._arm()
        elif not consecutive_skips and self.armed:
            self._disarm()
        if consecutive_skips == _LOGGED_STREAK:
            finding = self.finding() or "everything was finite"
            logger.warning("%d steps in a row were skipped; on this rank: %s", consecutive_skips, finding)

    def micro_batch(self, step: int, number: int, sample_keys: Sequence[str]) -> AbstractContextManager[None]:
        """Context manager around forward and backward of a micro-batch; does nothing unless armed.

        Args:
            step: Number of the attempted step, from 1.
            number: Number of the micro-batch in its accumulation window, from 0.
            sample_keys: Key of each row; ``""`` where the row is masked.
        """
        return self._watched(_MicroBatch(step, number, sample_keys)) if self.armed else nullcontext()

    def loss(self, loss_sum: Tensor) -> None:
        """Records the loss of the current micro-batch, shape ``[]``."""
        if self._current is not None:
            self._current.loss = _bad_rows(loss_sum, 1)

    def finding(self) -> str | None:
        """The finding of the earliest micro-batch of the last two windows that has one; None if all values were finite.

        Waits for the device.
        """
        return next((text for seen in self._seen if (text := seen.text()) is not None), None)

    def findings(self, world_size: int) -> list[str]:
        """Collective. One line per rank with a finding, or one line with the reason why there is none; equal on all ranks."""
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
                "The origin is not known, because it is looked for after the first skip only. Raise "
                "train.max_consecutive_skips."
            ]
        return [
            "On every rank each output, loss, gradient and buffer is finite by itself; the sum of the gradients over "
            "micro-batches and ranks, or its norm, is not."
        ]

    def explain_skips(self, step: int, skipped: int, streak: int, ranks: int) -> str:
        """Collective. How many steps were skipped, why, and the remedy, equal on all ranks.

        Args:
            step: Attempted steps.
            skipped: How many of them were skipped.
            streak: How many of these were the last ones.
            ranks: Number of ranks.
        """
        counted = f"all {step}" if skipped == step else f"{skipped} of {step}"
        reasons = ["a loss, gradient or buffer was not finite, no row was valid, or a spike was skipped"]
        if streak:
            reasons += [f"in the last {streak} steps:", *self.findings(ranks)]
        return f"{counted} steps of this run were skipped: " + "\n".join([*reasons, _DOCTOR])

    def explain_streak(self, step: int, streak: int, stats: StepStats, *, is_fp16: bool, ranks: int) -> str:
        """Collective. Why a streak ends the run, and the remedy, equal on all ranks.

        Args:
            step: Attempted steps.
            streak: Length of the streak.
            stats: Of the last step.
            is_fp16: Whether the run computes in fp16.
            ranks: Number of ranks.
        """
        counted = f"{streak} steps in a row were skipped, the last one is step {step}: "
        if not stats.overflowed_ranks:
            return (
                f"{counted}none had a valid row. All samples are masked, bad, or left out by data.exclude: check data.train "
                "and data.fields."
            )
        origin, instead = "\n".join(self.findings(ranks)), ", or try precision=bf16" if is_fp16 else ""
        return (
            f"{counted}a loss, gradient or buffer was not finite, at a loss scale of {stats.loss_scale:g}.\n"
            f"{origin}\nCheck these samples, lower optimizer.lr, set train.clip_norm{instead}. {_DOCTOR}"
        )

    @contextmanager
    def _watched(self, micro_batch: _MicroBatch) -> Iterator[None]:
        self._seen = [*(seen for seen in self._seen if seen.step >= micro_batch.step - 1), micro_batch]
        self._current = micro_batch
        try:
            # Compiled code was traced without the hooks and does not call them.
            before = self._bad_buffers()
            with torch.compiler.set_stance("force_eager"):
                yield
            micro_batch.buffers = [
                (name, bad & ~before[name]) for name, bad in self._bad_buffers().items() if name in before
            ]
        finally:
            self._current = None

    def _arm(self) -> None:
        for name, module in hookable(self._model):
            record = partial(self._record_module, f"{plain_name(name) or 'the model'} ({type(module).__name__})")
            self._handles.append(module.register_forward_hook(record, with_kwargs=True))
            if any(_is_part(parameter) for parameter in module._parameters.values()):
                self._handles.append(module.register_forward_pre_hook(partial(self._watch_gathered, plain_name(name))))
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and not _is_part(parameter):
                self._handles.append(parameter.register_hook(partial(self._record_gradient, plain_name(name))))

    def _disarm(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._seen, self._gathered = [], [], set()

    def _watch_gathered(self, name: str, module: nn.Module, args: Any) -> None:
        """Of a sharded model: registers the hooks of a module's parameters, which are gathered for its forward only."""
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad and id(parameter) not in self._gathered:
                self._gathered.add(id(parameter))
                record = partial(self._record_gradient, f"{name}.{key}" if name else key)
                self._handles.append(parameter.register_hook(record))

    def _record_module(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._current is not None:
            rows = len(self._current.sample_keys)
            self._current.modules.append((name, _bad_rows((args, kwargs), rows), _bad_rows(output, rows)))

    def _bad_buffers(self) -> dict[str, Tensor]:
        return {plain_name(name): _bad_rows(buffer, 1) for name, buffer in self._model.named_buffers()}

    def _record_gradient(self, name: str, gradient: Tensor) -> None:
        if self._current is not None:
            self._current.gradients.append((name, _bad_rows(gradient._values() if gradient.is_sparse else gradient, 1)))


@dataclass
class _MicroBatch:
    """The records of one micro-batch. Masks are bool tensors on the device: True is not finite."""

    step: int
    number: int
    sample_keys: Sequence[str]
    # Name, mask of the inputs and mask of the outputs of each call, in the order in which the calls ended; shape [rows].
    modules: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    loss: Tensor | None = None  # mask, shape [1]
    # Name of each parameter and mask of its gradient, shape [1], in the order of the backward.
    gradients: list[tuple[str, Tensor]] = field(default_factory=list)
    # Name of each buffer and mask of whether it was finite before the micro-batch and is no longer, shape [1].
    buffers: list[tuple[str, Tensor]] = field(default_factory=list)

    def text(self) -> str | None:
        """The finding; None if everything is finite."""
        parts = []
        rows = [True] * len(self.sample_keys)
        for name, inputs, outputs in self.modules:
            if outputs.any():
                state = "not finite either" if inputs.any() else "finite"
                parts.append(f"the output of {name}, whose input is {state}")
                rows = outputs.tolist()
                break
        if not parts and self.loss is not None and self.loss.any():
            parts.append("the loss, though the output of every module is finite")
        gradients = [name for name, bad in self.gradients if bad.any()]
        if gradients:
            parts.append(f"the gradient of {first_names(gradients, _NAMED_PARAMETERS)}")
        buffers = [name for name, bad in self.buffers if bad.any()]
        if buffers:
            parts.append(f"the buffer {first_names(buffers, _NAMED_PARAMETERS)}")
        if not parts:
            return None
        valid = [bool(key) for key in self.sample_keys]
        keys = [key for key, bad in zip(self.sample_keys, rows, strict=True) if key and bad]
        return (
            f"step {self.step}, micro-batch {self.number}: first not finite: {', then '.join(parts)}; "
            f"in {len(keys)} of {sum(valid)} samples: {first_names(keys, _NAMED_SAMPLES)}"
        )


def _is_part(parameter: Tensor | None) -> bool:
    """Whether it is this rank's part of a parameter (a DTensor), which is not in the graph of the backward."""
    return hasattr(parameter, "device_mesh")


@torch.no_grad()
def _bad_rows(value: Any, rows: int) -> Tensor:
    """Mask of the rows of ``value``, which may be nested, that are not finite: bool, shape ``[rows]``.

    A tensor whose first axis does not have ``rows`` elements counts for all rows.
    """
    found = []
    for tensor in tensors(value):
        if tensor.dtype not in CHECKED:
            continue
        not_finite = torch.isfinite(tensor).logical_not()
        has_rows = tensor.dim() > 0 and len(tensor) == rows
        found.append(not_finite.unsqueeze(-1).flatten(1).any(dim=1) if has_rows else not_finite.any().expand(rows))
    return reduce(torch.logical_or, found) if found else torch.zeros(rows, dtype=torch.bool)

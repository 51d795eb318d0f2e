"""Where a cast model leaves its fp32 original: both run on the same rows, and their modules are compared in the order in
which they ran."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.deployment.comparison import absolute_error
from dtrain.deployment.folding import Pair
from dtrain.deployment.program import Program


@dataclass(frozen=True)
class Departure:
    """A module whose output is not that of fp32.

    Attributes:
        module: Its name in the model.
        error: The largest of its outputs' errors, as a part of the largest fp32 output; infinite for an overflow.
    """

    module: str
    error: float


@torch.inference_mode()
def departures(original: Program, exported: Program, rows: Tensor, folded: Iterable[Pair]) -> list[Departure]:
    """The modules of a model in the order in which they are done, the inner ones before the outer.

    Args:
        original: The fp32 model, with nothing folded.
        exported: The same model, folded and cast.
        rows: What goes into both.
        folded: Pairs of convolution and BatchNorm. Of these, the place of the BatchNorm has the output of both in either
            model; that of the convolution is left out.

    Returns:
        A departure for each call of a module that returns floats.
    """
    convolutions = {conv for conv, _ in folded}
    wanted: dict[str, deque[Tensor]] = defaultdict(deque)
    found: list[Departure] = []

    def note(name: str, output: Tensor) -> None:
        # A later operation may change it in place.
        wanted[name].append(output.clone())

    def contrast(name: str, output: Tensor) -> None:
        if not wanted[name]:
            return  # it was not called in fp32
        reference = wanted[name].popleft()
        if reference.shape != output.shape or not reference.numel():
            return
        finite = reference[reference.isfinite()].float().abs()
        largest = finite.max().item() if finite.numel() else 0.0
        error = absolute_error(output, reference).max().item()
        found.append(Departure(name, error / largest if largest else error))

    for program, look in ((original, note), (exported, contrast)):
        handles = [
            module.register_forward_hook(partial(_look, look, name))
            for name, module in program.model.named_modules()
            if name and name not in convolutions
        ]
        try:
            program(rows)
        finally:
            for handle in handles:
                handle.remove()
    return found


def _look(look: Callable[[str, Tensor], None], name: str, module: nn.Module, args: Any, output: Any) -> None:
    for part in output if isinstance(output, (tuple, list)) else (output,):
        if isinstance(part, Tensor) and part.is_floating_point():
            look(name, part)

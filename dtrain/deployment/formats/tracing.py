"""A program as a graph, which needs no code of its model: what every traced format begins with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dtrain.config.errors import ConfigError
from dtrain.deployment.program import Program

_REASON_CHARACTERS = 300


def trace(form: str, program: Program, example: Tensor) -> torch.export.ExportedProgram:
    """Traces a program.

    Args:
        form: Name of the format, for the error.
        program: In eval mode.
        example: Rows as they will come; their number stays free.

    Raises:
        ConfigError: If torch cannot; says why.
    """
    # torch takes a length of 1 for a constant.
    rows = example if len(example) > 1 else example.repeat(2, *[1] * (example.dim() - 1))
    with refused(form, program.model, "trace"):
        return torch.export.export(program, (rows,), dynamic_shapes=({0: torch.export.Dim("rows")},))


@contextmanager
def refused(form: str, model: nn.Module, verb: str) -> Iterator[None]:
    """Turns torch's refusal into a message.

    Raises:
        ConfigError: If the block raises anything.
    """
    try:
        yield
    except Exception as error:  # a forward that meets a symbolic tensor may raise anything
        raise ConfigError(
            f"export.format={form}: torch cannot {verb} {type(model).__name__} ({short(error)}). If its forward branches on "
            "values of tensors or on the number of rows, write it with torch.where; or use export.format=safetensors."
        ) from error


def short(error: BaseException) -> str:
    """Kind and first words of an error; torch adds pages of advice."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_REASON_CHARACTERS]}{'...' if len(text) > _REASON_CHARACTERS else ''}"

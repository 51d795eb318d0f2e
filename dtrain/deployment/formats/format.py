"""What is asked of a form in which a model is stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from dtrain.deployment.program import Program

if TYPE_CHECKING:  # a description names its format
    from dtrain.deployment.description import Description


class Format(ABC):
    """A form in which a model is stored, in one file.

    Attributes:
        name: What ``export.format`` calls it.
        file: Name of the file that holds the model; no other format's.
        dtypes: What its weights may be.
        traced: It is made by running the model on example rows, and takes only rows like these; else it needs the model's
            code, and takes what that takes.
        holds_code: It has code of its own, which could do anything.
        in_torch: torch runs it; else a runtime that holds weights in a form of its own.
    """

    name: ClassVar[str]
    file: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]] = ("fp32", "bf16", "fp16")
    traced: ClassVar[bool] = True
    holds_code: ClassVar[bool] = False
    in_torch: ClassVar[bool] = True

    def check(self, dtype: str) -> None:  # noqa: B027 - most have nothing to look for
        """Looks, before anything is done, whether an export can be made here.

        Args:
            dtype: Of the weights.

        Raises:
            ConfigError: If something is missing here, or the format has no such weights.
        """

    def runs_on(self, device: torch.device) -> torch.device:
        """Where it runs on a machine whose best device is this one."""
        return device

    def versions(self) -> dict[str, str]:
        """What made it, beside dtrain and torch."""
        return {}

    @abstractmethod
    def write(self, program: Program, example: Tensor | None, path: Path) -> None:
        """Writes a program.

        Args:
            program: In eval mode, its weights cast.
            example: Rows as they will come, on the program's device; None only if the format is not ``traced``.
            path: Named as ``file``.

        Raises:
            ConfigError: If it cannot be brought into this form; says why.
            OSError: If the disk refuses.
        """

    @abstractmethod
    def read(self, path: Path, description: Description, device: torch.device) -> Callable[[Tensor], Tensor]:
        """What ``write`` wrote, ready to be called with rows on the device; gives fp32 outputs there.

        Args:
            path: The file.
            description: Of the artefact.
            device: Where to.

        Raises:
            ConfigError: If it cannot be read, or not for this device.
        """

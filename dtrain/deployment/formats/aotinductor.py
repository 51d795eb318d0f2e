"""``export.format=aotinductor``: a graph compiled for one kind of device, which ``torch._inductor.aoti_load_package(path)``
reads without dtrain.

It is machine code, and does not look at what it is given.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import BadZipFile

import torch
from torch import Tensor

from dtrain.config.errors import ConfigError
from dtrain.deployment.formats.format import Format
from dtrain.deployment.formats.pt2 import unreadable
from dtrain.deployment.formats.tracing import refused, trace
from dtrain.deployment.program import Program

if TYPE_CHECKING:
    from dtrain.deployment.description import Description


class AotInductor(Format):
    """A shared library in torch's package."""

    name = "aotinductor"
    file = "model.compiled.pt2"
    holds_code = True

    def check(self, dtype: str) -> None:
        """Looks for the C++ compiler.

        Raises:
            ConfigError: If there is none.
        """
        # Takes a second, which those who compile nothing need not wait; so does torch._inductor, which torch imports at
        # its use.
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise ConfigError(
                f"export.format={self.name} compiles C++, and no compiler works here ({error}). Install g++ or clang++, name "
                "one in the environment variable CXX, or use export.format=pt2."
            ) from error

    def write(self, program: Program, example: Tensor | None, path: Path) -> None:
        """As ``Format.write``."""
        assert example is not None
        graph = trace(self.name, program, example)
        with refused(self.name, program.model, "compile"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's, about itself
            torch._inductor.aoti_compile_and_package(graph, package_path=str(path))

    def read(self, path: Path, description: Description, device: torch.device) -> Callable[[Tensor], Tensor]:
        """As ``Format.read``."""
        exported_on = description.device
        if exported_on != device.type:
            raise ConfigError(
                f"{path} is compiled for {exported_on}, the device is {device.type}. Use --device={exported_on}, or export "
                f"again where there is a {device.type}."
            )
        index = -1 if device.index is None else device.index
        try:
            return torch._inductor.aoti_load_package(str(path), device_index=index)
        except (RuntimeError, ValueError, KeyError, AssertionError, BadZipFile) as error:
            raise unreadable(path, description, device, error) from error

"""``export.format=pt2``: torch's own file for a graph, which ``torch.export.load(path).module()`` reads without dtrain.

It is code, as a Python module is: torch runs strings that the file holds. Nothing in it is pickled, however:
``torch.export.save`` would pickle the example inputs, so they are left out.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import BadZipFile

import torch
from torch import Tensor
from torch.export.passes import move_to_device_pass

from dtrain.config.errors import ConfigError
from dtrain.deployment.formats.format import Format
from dtrain.deployment.formats.tracing import short, trace
from dtrain.deployment.program import Program

if TYPE_CHECKING:
    from dtrain.deployment.description import Description


class Pt2(Format):
    """A graph that any torch of the same or a later version runs, on any device."""

    name = "pt2"
    file = "model.pt2"
    holds_code = True

    def write(self, program: Program, example: Tensor | None, path: Path) -> None:
        """As ``Format.write``."""
        assert example is not None
        graph = trace(self.name, program, example)
        graph.example_inputs = None
        with warnings.catch_warnings():
            # Weights in channels_last layout are dense, so the storage that is written is all of them.
            warnings.filterwarnings("ignore", message="No complete tensor found in the group")
            # By way of memory: where the disk refuses, torch ends the process.
            buffer = io.BytesIO()
            torch.export.save(graph, buffer)
        path.write_bytes(buffer.getbuffer())

    def read(self, path: Path, description: Description, device: torch.device) -> Callable[[Tensor], Tensor]:
        """As ``Format.read``."""
        try:
            graph = torch.export.load(path)
            if description.device != device.type:
                graph = move_to_device_pass(graph, device)
            return graph.module()
        except (RuntimeError, ValueError, KeyError, AssertionError, BadZipFile) as error:
            raise unreadable(path, description, device, error) from error


def unreadable(path: Path, description: Description, device: torch.device, error: Exception) -> ConfigError:
    """What to say where torch cannot read a program."""
    return ConfigError(
        f"{path}, exported on {description.device}, cannot be read by torch {torch.__version__} for {device.type} "
        f"({short(error)}). Export again with this version, on this kind of device."
    )

"""``export.format=safetensors``: weights, and a model that is built by its ``_target_`` to hold them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError
from torch import Tensor

from dtrain.config.errors import ConfigError
from dtrain.deployment.casting import cast
from dtrain.deployment.folding import fold
from dtrain.deployment.formats.format import Format
from dtrain.deployment.program import Program
from dtrain.precision import Precision
from dtrain.training.build import build_model
from dtrain.training.state import host_copy, load_module

if TYPE_CHECKING:
    from dtrain.deployment.description import Description


class Safetensors(Format):
    """The smallest form, which runs wherever the model's code does."""

    name = "safetensors"
    file = "model.safetensors"
    traced = False

    def write(self, program: Program, example: Tensor | None, path: Path) -> None:
        """As ``Format.write``."""
        try:
            safetensors.torch.save_file(host_copy(program.model.state_dict()), path)
        except SafetensorError as error:
            raise OSError(str(error)) from error

    def read(self, path: Path, description: Description, device: torch.device) -> Callable[[Tensor], Tensor]:
        """As ``Format.read``; also raises ``ConfigError`` if the model's code has changed since the export."""
        try:
            tensors = safetensors.torch.load_file(path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read ({error}). Export again.") from error
        node, channels_last = OmegaConf.create(description.model), description.channels_last
        model = build_model(node, device, channels_last).eval().requires_grad_(False)
        try:
            fold(model, description.folded)
        except AttributeError as error:
            raise ConfigError(
                f"{path.parent}: the model that {description.model.get('_target_')} builds here has changed since the export "
                f"({error}). Use the code that it was exported with."
            ) from error
        dtype = Precision(description.dtype).compute_dtype
        cast(model, dtype, description.keep_fp32)
        load_module(model, tensors, str(path.parent))
        return Program(model, description.input, dtype, channels_last)

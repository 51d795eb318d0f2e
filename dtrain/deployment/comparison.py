"""How far an artefact is from the fp32 model it was made of, on rows of the evaluation set.

The fp32 outputs are taken from the model as it was trained, before anything is folded or cast. The artefact's own come
from a fresh process that knows nothing but the folder, so that what is compared is what a user will load.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from dtrain.config.errors import ConfigError
from dtrain.data import Batch, ShardLoader
from dtrain.data.fields import Field
from dtrain.deployment.image_input import ImageInput

#: Rows of one forward in the fresh process.
ROWS = 64


@dataclass(frozen=True)
class Samples:
    """Rows of the evaluation set and what the fp32 model makes of them.

    Attributes:
        image: The image field that the model takes; None if it takes something else.
        rows: What goes in: an image as it is on the wire, uint8 ``[rows, height, width, 3]``, or the model's argument.
        outputs: fp32, ``[rows, ...]``.
    """

    image: ImageInput | None
    rows: Tensor
    outputs: Tensor


class NotComparable(ValueError):
    """The task does not use its model as a function of one tensor; the text says what it does."""


class _Recorder(nn.Module):
    """Stands in for the model and notes what the task does with it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self._model(*args, **kwargs)
        self.calls.append((args, kwargs, output))
        return output


@torch.inference_mode()
def sample(
    model: nn.Module,
    task: Callable[[nn.Module, Batch], Any],
    loader: ShardLoader,
    images: Mapping[str, Field],
    device: torch.device,
    limit: int,
) -> Samples:
    """Runs the task on the first rows of the evaluation set.

    Args:
        model: In eval mode and fp32.
        task: Tells what the model is called with.
        loader: Of the evaluation set, one rank, wire dtypes of fp32.
        images: The image fields by name.
        device: Where the model is.
        limit: How many rows at most.

    Raises:
        NotComparable: If the model is not called once a batch, with one tensor, for one tensor of as many rows.
        ConfigError: If the evaluation set has no readable sample.
    """
    taken: set[str | None] = set()
    rows: list[Tensor] = []
    outputs: list[Tensor] = []
    for batch in loader.epoch(0):
        if not batch.valid.any():
            continue
        recorder = _Recorder(model)
        moved = batch.to(device)
        task(recorder, moved)
        argument, output = _single_call(recorder, len(batch.valid))
        name = next((name for name in images if moved.get(name) is argument), None)
        taken.add(name)
        rows.append((batch[name] if name is not None else argument.cpu())[batch.valid])
        outputs.append(output.float().cpu()[batch.valid])
        if sum(map(len, rows)) >= limit:
            break
    if not rows:
        raise ConfigError(
            "data.eval: no sample could be read. Give another data.eval, or data.eval=null to go without."
        )
    shapes = {tuple(part.shape[1:]) for part in rows}
    if len(shapes) > 1 or len(taken) > 1:
        raise NotComparable(f"its input has several shapes, such as {' and '.join(map(str, sorted(shapes)[:2]))}")
    name = taken.pop()
    image = ImageInput.of(images[name], (rows[0].shape[1], rows[0].shape[2])) if name is not None else None
    return Samples(image, torch.cat(rows)[:limit], torch.cat(outputs)[:limit])


def compare(folder: Path, samples: Samples, device: torch.device) -> dict[str, Any]:
    """Runs the artefact in a fresh process and compares.

    Args:
        folder: The artefact.
        samples: Rows and fp32 outputs.
        device: Where the artefact shall run.

    Returns:
        ``samples``, ``max_abs_error`` and ``mean_abs_error`` of the outputs, ``max_abs_output`` of the fp32 ones to judge
        them by, ``top1_agreement`` where the outputs are ``[rows, classes]``, ``device``.

    Raises:
        ConfigError: If the artefact does not run, or an output is not finite.
    """
    with tempfile.TemporaryDirectory(prefix="dtrain-export-") as scratch:
        rows, result = Path(scratch) / "rows.safetensors", Path(scratch) / "outputs.safetensors"
        safetensors.torch.save_file({"rows": samples.rows.contiguous()}, rows)
        command = [sys.executable, "-m", "dtrain.deployment.replay", str(folder), str(rows), str(result), str(device)]
        # The fresh process shall find the user's own modules where this one found them.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(
                "export: the artefact cannot be used, loaded from disk in a fresh process:\n"
                + "".join(f"    {line}\n" for line in done.stderr.strip().splitlines()[-8:])
                + "  Does forward make tensors of a fixed dtype (torch.zeros where x.new_zeros is meant)? Keep that module "
                "in fp32 with precision.keep_fp32, or export.dtype=fp32."
            )
        got = safetensors.torch.load_file(result)["outputs"]
    if not got.isfinite().all() and samples.outputs.isfinite().all():
        raise ConfigError(
            f"export: {int((~got.isfinite()).sum())} of {got.numel()} outputs are not finite, those of the fp32 model are: "
            "an activation leaves the range of the dtype. Use export.dtype=bf16, or keep the module in fp32 with "
            "precision.keep_fp32."
        )
    error = (got.double() - samples.outputs.double()).abs()
    report: dict[str, Any] = {
        "samples": len(got),
        "max_abs_error": error.max().item(),
        "mean_abs_error": error.mean().item(),
        "max_abs_output": samples.outputs.abs().max().item(),
        "device": str(device),
    }
    if got.dim() == 2 and got.shape[1] > 1:
        report["top1_agreement"] = (got.argmax(1) == samples.outputs.argmax(1)).double().mean().item()
    return report


def _single_call(recorder: _Recorder, rows: int) -> tuple[Tensor, Tensor]:
    if len(recorder.calls) != 1:
        raise NotComparable(f"the task calls it {len(recorder.calls)} times a batch")
    args, kwargs, output = recorder.calls[0]
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
        raise NotComparable(f"the task calls it with {len(args) + len(kwargs)} arguments, not with one tensor")
    if not isinstance(output, Tensor) or output.dim() == 0 or len(output) != rows:
        raise NotComparable(f"it returns {type(output).__name__}, not one tensor with a row for each sample")
    return args[0], output

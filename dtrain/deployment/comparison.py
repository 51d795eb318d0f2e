"""How far an artefact is from the fp32 model it was made of, on rows of the evaluation set.

The fp32 outputs are taken from the model as it was trained, before anything is folded or cast. The artefact's own come
from a fresh process that knows nothing but the folder, so that what is compared is what a user will load.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from dtrain.config.errors import ConfigError
from dtrain.deployment.samples import Samples
from dtrain.deployment.tolerance import Tolerance

#: Rows of one forward in the fresh process.
ROWS = 64


@dataclass(frozen=True)
class Comparison:
    """An artefact beside fp32.

    Attributes:
        device: Where it ran.
        errors: Of its outputs, absolute, fp32 ``[rows, ...]``; infinite where an output is not finite and that of fp32 is.
        largest: Magnitude of the largest finite fp32 output.
        top1_agreement: Share of the rows with the same best class; None where the outputs are not ``[rows, classes]``.
        metrics: Of both: name to (fp32, artefact).
    """

    device: torch.device
    errors: Tensor
    largest: float
    top1_agreement: float | None
    metrics: dict[str, tuple[float, float]]

    @classmethod
    def of(cls, outputs: Tensor, samples: Samples, device: torch.device) -> Comparison:
        """Compares outputs of an artefact, fp32 ``[rows, ...]``, with those of fp32.

        Args:
            outputs: Of the artefact.
            samples: Rows and fp32 outputs.
            device: Where the artefact ran.

        Raises:
            ConfigError: If the shapes differ.
        """
        wanted = samples.outputs
        if outputs.shape != wanted.shape:
            raise ConfigError(
                f"export: the artefact's outputs are {list(outputs.shape)}, those of the fp32 model {list(wanted.shape)}. "
                "Does the model's output depend on its dtype? Use export.dtype=fp32."
            )
        agreement = None
        if wanted.dim() == 2 and wanted.shape[1] > 1:
            agreement = (outputs.argmax(1) == wanted.argmax(1)).double().mean().item()
        finite = wanted[wanted.isfinite()]
        got = samples.metrics_of(outputs)
        return cls(
            device,
            absolute_error(outputs, wanted),
            finite.abs().max().item() if finite.numel() else 0.0,
            agreement,
            {name: (value, got[name]) for name, value in samples.metrics.items()},
        )

    def beyond(self, tolerance: Tolerance) -> list[str]:
        """What is beyond tolerance, a line for each; infinities alone where there are any."""
        if overflown := int(self.errors.isinf().sum()):
            return [
                f"{overflown} of {self.errors.numel()} outputs are not finite, those of the fp32 model are: an activation "
                "leaves the range of the dtype"
            ]
        lines = []
        error = self.errors.max().item()
        if error > tolerance.outputs * self.largest:
            lines.append(
                f"max error {error:.3g} of an output, with fp32 outputs up to {self.largest:.3g}: more than "
                f"export.tolerance={tolerance.outputs:g} of them"
            )
        lines += [
            f"{name} {got:.5g}, {wanted:.5g} in fp32: more than export.max_metric_difference="
            f"{tolerance.metrics:g} apart"
            for name, (wanted, got) in self.metrics.items()
            if not abs(got - wanted) <= tolerance.metrics
        ]
        return lines

    def worst(self, rows: int) -> Tensor:
        """Numbers of the rows with the largest errors, int64."""
        return self.errors.reshape(len(self.errors), -1).amax(1).topk(min(rows, len(self.errors))).indices

    def report(self, tolerance: Tolerance) -> dict[str, Any]:
        """For ``report.json``."""
        largest_error = self.errors.max().item()
        report: dict[str, Any] = {
            "samples": len(self.errors),
            "max_abs_error": largest_error,
            "mean_abs_error": self.errors.double().mean().item(),
            "max_abs_output": self.largest,
            "relative_error": largest_error / self.largest if self.largest else largest_error,
            "metrics": {
                name: {"fp32": wanted, "exported": got, "difference": got - wanted}
                for name, (wanted, got) in self.metrics.items()
            },
            "tolerance": {"outputs": tolerance.outputs, "metrics": tolerance.metrics},
            "device": str(self.device),
        }
        if self.top1_agreement is not None:
            report["top1_agreement"] = self.top1_agreement
        return report


def absolute_error(got: Tensor, wanted: Tensor) -> Tensor:
    """Elementwise, fp32; 0 where both are the same infinity, infinite where just ``got`` is not finite."""
    wanted, got = wanted.float(), got.float()
    error = (got - wanted).abs().masked_fill(got == wanted, 0)
    return error.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(wanted.isnan(), 0)


def compare(folder: Path, samples: Samples, device: torch.device) -> Comparison:
    """Runs the artefact in a fresh process and compares.

    Args:
        folder: The artefact.
        samples: Rows and fp32 outputs.
        device: Where the artefact runs.

    Raises:
        ConfigError: If the artefact does not run.
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
        return Comparison.of(safetensors.torch.load_file(result)["outputs"], samples, device)

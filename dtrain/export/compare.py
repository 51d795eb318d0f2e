"""Compares an artefact with its fp32 model, and refuses it if they differ by more than the tolerance.

* The reference is the output of the trained model before folding and casting. The artefact runs in its own process, which loads
  it from disk, as a user will.
* ``Tolerance`` limits the error of each output and the difference of each metric.
* If the artefact is refused, both models run in this process with hooks on every module. Their ``ModuleError`` list shows which
  module is the first beyond the tolerance.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.config.schema import ExportConfig
from dtrain.errors import ConfigError
from dtrain.export.description import Description
from dtrain.export.fold_cast import Pair
from dtrain.export.formats import FORMATS
from dtrain.export.probe import Probe
from dtrain.export.program import Program
from dtrain.export.reference import ReferenceRows

# Default limits of the output error: ten units in the last place of fp16 and bf16 (ResNet-9, 18, 50 and GPT reach two). The
# fp32 limit allows for kernels that sum in a different order than in training; they reach 6e-7.
_OUTPUTS = {"fp32": 1e-3, "fp16": 0.01, "bf16": 0.08}
_METRICS = {"fp32": 0.001, "fp16": 0.01, "bf16": 0.02}
# Two samples may change their class without exceeding the default limit of a metric.
_CHANGED_SAMPLES = 2
# Rows on which modules are compared; few, because all activations of a large model are stored.
_WORST_ROWS = 4


@dataclass(frozen=True)
class Tolerance:
    """Limits beyond which an export is refused.

    Attributes:
        outputs: Largest error of an output, as a fraction of the largest fp32 output.
        metrics: Largest absolute difference of a metric, such as 0.01 of accuracy or loss.
    """

    outputs: float
    metrics: float

    @classmethod
    def from_config(cls, options: ExportConfig, samples: int) -> Tolerance:
        """The limits of the config, or else the defaults of its dtype for a comparison on ``samples`` rows.

        Raises:
            ConfigError: If a limit is negative, NaN or infinite.
        """
        for key in ("tolerance", "max_metric_difference"):
            value = getattr(options, key)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(
                    f"export.{key}: got {value}, want a number from 0 on, or null for the dtype's default."
                )
        metrics = max(_METRICS[options.dtype], _CHANGED_SAMPLES / max(samples, 1))
        return cls(
            _OUTPUTS[options.dtype] if options.tolerance is None else options.tolerance,
            metrics if options.max_metric_difference is None else options.max_metric_difference,
        )


@dataclass(frozen=True)
class Comparison:
    """Errors of an artefact against fp32.

    Attributes:
        device: Device on which the artefact ran.
        errors: Absolute errors of its outputs, fp32 ``[rows, ...]``; infinite where only the fp32 output is finite.
        largest: Magnitude of the largest finite fp32 output.
        top1_agreement: Share of rows with the same best class; None if the outputs are not ``[rows, classes]``.
        metrics: Name to (value in fp32, value of the artefact).
    """

    device: torch.device
    errors: Tensor
    largest: float
    top1_agreement: float | None
    metrics: dict[str, tuple[float, float]]

    @classmethod
    def measure(cls, outputs: Tensor, reference: ReferenceRows, device: torch.device) -> Comparison:
        """Compares outputs of an artefact that ran on ``device``, fp32 ``[rows, ...]``, with the fp32 model's.

        Raises:
            ConfigError: If the shapes differ.
        """
        expected = reference.outputs
        if outputs.shape != expected.shape:
            raise ConfigError(
                f"export: the artefact's outputs are {list(outputs.shape)}, the fp32 model's are {list(expected.shape)}. "
                "Does the shape of the model's output depend on its dtype? Use export.dtype=fp32."
            )
        agreement = None
        if expected.dim() == 2 and expected.shape[1] > 1:
            agreement = (outputs.argmax(1) == expected.argmax(1)).double().mean().item()
        metrics = reference.metrics_of(outputs)
        return cls(
            device,
            _absolute_error(outputs, expected),
            _largest_finite(expected),
            agreement,
            {name: (value, metrics[name]) for name, value in reference.metrics.items()},
        )

    def beyond(self, tolerance: Tolerance) -> list[str]:
        """One line for each exceeded limit; if outputs overflow, only their number."""
        if overflows := int(self.errors.isinf().sum()):
            return [
                f"{overflows} of {self.errors.numel()} outputs are not finite although the fp32 model's are: an "
                "activation overflows the dtype"
            ]
        lines = []
        error = self.errors.max().item()
        if error > tolerance.outputs * self.largest:
            lines.append(
                f"max error {error:.3g} of an output, with fp32 outputs up to {self.largest:.3g}: more than "
                f"export.tolerance={tolerance.outputs:g} of them"
            )
        lines += [
            f"{name} {value:.5g}, {in_fp32:.5g} in fp32: the difference is more than export.max_metric_difference="
            f"{tolerance.metrics:g}"
            for name, (in_fp32, value) in self.metrics.items()
            if not abs(value - in_fp32) <= tolerance.metrics  # also true for NaN
        ]
        return lines

    def worst(self, rows: int) -> Tensor:
        """Indexes of the ``rows`` rows with the largest errors, int64, largest first."""
        return self.errors.reshape(len(self.errors), -1).amax(1).topk(min(rows, len(self.errors))).indices

    def report(self, tolerance: Tolerance) -> dict[str, Any]:
        """The part ``comparison`` of ``report.json``."""
        largest_error = self.errors.max().item()
        report: dict[str, Any] = {
            "samples": len(self.errors),
            "max_abs_error": largest_error,
            "mean_abs_error": self.errors.double().mean().item(),
            "max_abs_output": self.largest,
            "relative_error": largest_error / self.largest if self.largest else largest_error,
            "metrics": {
                name: {"fp32": in_fp32, "exported": value, "difference": value - in_fp32}
                for name, (in_fp32, value) in self.metrics.items()
            },
            "tolerance": {"outputs": tolerance.outputs, "metrics": tolerance.metrics},
            "device": str(self.device),
        }
        if self.top1_agreement is not None:
            report["top1_agreement"] = self.top1_agreement
        return report


def compare(folder: Path, reference: ReferenceRows, device: torch.device) -> Comparison:
    """Runs an artefact on ``device``, in its own process, and compares its outputs with fp32.

    Raises:
        ConfigError: If the artefact cannot be loaded or fails.
    """
    try:
        # Trusted, because this process exported it from a config that it trusts.
        with Probe(folder, device, trust=True) as probe:
            probe.wait_until_loaded()
            outputs = probe.outputs(reference.inputs)
    except ConfigError as error:
        raise ConfigError(
            f"{error}\n  Does the model's forward create tensors of a fixed dtype (torch.zeros instead of x.new_zeros)? Keep "
            "that module in fp32 with precision.keep_fp32, or use export.dtype=fp32."
        ) from error
    return Comparison.measure(outputs, reference, device)


def require_close(
    comparison: Comparison,
    tolerance: Tolerance,
    description: Description,
    module_errors: Callable[[Tensor], Sequence[ModuleError]],
) -> None:
    """Refuses an artefact that is too far from fp32.

    Args:
        comparison: Comparison of the artefact.
        tolerance: The limits.
        description: Description of the artefact.
        module_errors: Maps indexes of reference rows, int64 ``[n]``, to the errors of the modules on them, in order of
            execution; called only for an artefact that is refused.

    Raises:
        ConfigError: If a limit is exceeded; names the first module that exceeds it, and the remedies.
    """
    problems = comparison.beyond(tolerance)
    if not problems:
        return
    raise ConfigError(
        f"export: in {description.dtype} the model is too far from fp32 on {len(comparison.errors)} samples, so it was "
        "not written.\n"
        + "".join(f"    {line}\n" for line in problems)
        + _cause_and_remedies(comparison, module_errors(comparison.worst(_WORST_ROWS)), tolerance, description)
    )


@dataclass(frozen=True)
class ModuleError:
    """Error of one call of a module against fp32.

    Attributes:
        module: Its name in the model; empty for the model itself.
        error: Largest absolute error of its outputs, as a fraction of the largest fp32 output; infinite for an overflow.
    """

    module: str
    error: float


@torch.inference_mode()
def compare_modules(original: Program, exported: Program, inputs: Tensor, folded: Iterable[Pair]) -> list[ModuleError]:
    """Runs two models on the same rows and compares the outputs of their modules.

    Args:
        original: The fp32 model, nothing folded.
        exported: The same model, folded and cast.
        inputs: Rows for both, on their device.
        folded: The folded pairs. The output of a pair is compared at its BatchNorm, and its convolution is left out.

    Returns:
        An error for each call of a module that returns floating-point tensors, in the order in which the calls end: inner
        modules before outer ones, the model itself last.
    """
    convolutions = {conv for conv, _ in folded}
    references: dict[str, deque[Tensor]] = defaultdict(deque)
    errors: list[ModuleError] = []

    def record(name: str, output: Tensor) -> None:
        references[name].append(output.clone())  # a later operation may change the output in place

    def compare_with_record(name: str, output: Tensor) -> None:
        if not references[name]:
            return  # the original did not make this call
        reference = references[name].popleft()
        if reference.shape != output.shape or not reference.numel():
            return
        largest = _largest_finite(reference.float())
        error = _absolute_error(output, reference).max().item()
        errors.append(ModuleError(name, error / largest if largest else error))

    def hook(action: Callable[[str, Tensor], None], name: str, module: nn.Module, args: Any, output: Any) -> None:
        for part in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(part, Tensor) and part.is_floating_point():
                action(name, part)

    for program, action in ((original, record), (exported, compare_with_record)):
        handles = [
            module.register_forward_hook(partial(hook, action, name))
            for name, module in program.model.named_modules()
            if name not in convolutions
        ]
        try:
            program(inputs)
        finally:
            for handle in handles:
                handle.remove()
    return errors


def _absolute_error(outputs: Tensor, expected: Tensor) -> Tensor:
    """Elementwise, fp32; 0 where both are equal or ``expected`` is NaN, else infinite where one of them is not finite."""
    outputs, expected = outputs.float(), expected.float()
    error = (outputs - expected).abs().masked_fill(outputs == expected, 0)
    return error.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(expected.isnan(), 0)


def _largest_finite(outputs: Tensor) -> float:
    finite = outputs[outputs.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _cause_and_remedies(
    comparison: Comparison, found: Sequence[ModuleError], tolerance: Tolerance, description: Description
) -> str:
    """Two lines: the module or the conversion that causes the error, and the remedies."""
    errors = [error for error in found if error.module]
    in_torch = max((error.error for error in found if not error.module), default=math.inf)
    beyond = comparison.errors.max().item() > tolerance.outputs * comparison.largest  # otherwise only a metric is
    form = FORMATS[description.stored_as]
    wider = "bf16 or fp32" if description.dtype == "fp16" and "bf16" in form.dtypes else "fp32"
    remedies = [f"use export.dtype={wider}"]
    first = next((found for found in errors if found.error > tolerance.outputs), None)
    wrong = first or max(errors, key=lambda found: found.error, default=None)
    if description.dtype == "fp32":
        cause = "No weight was rounded: the conversion is wrong, or the tolerance is below the rounding errors of fp32."
        remedies = ["use export.format=safetensors"]
        if not form.traced:
            remedies = [
                "store tensors that the model's constructor draws as parameters or buffers, which alone are in the file"
            ]
        if description.folded:
            remedies.append("use export.fold=false")
    elif form.traced and beyond and in_torch <= tolerance.outputs:
        constants = ", such as a constant above 65,504, which becomes infinite" if description.dtype == "fp16" else ""
        cause = (
            f"In torch, as with export.format=safetensors, the model in {description.dtype} is within export.tolerance on the "
            f"worst of these samples: the conversion to {form.name} is at fault{constants}."
        )
        remedies.insert(0, "use export.format=safetensors")
    elif wrong is None:
        cause = "The model has no submodules to compare."
    else:
        name, error = wrong.module, "its outputs overflow"
        if math.isfinite(wrong.error):
            error = f"an error of {wrong.error:.2g} of its largest output"
        # The convolution of a folded pair is named as well, because the pair would otherwise be folded.
        modules = ",".join([*(conv for conv, norm in description.folded if norm == name), name])
        first_or_worst = f"The first module beyond export.tolerance is {name}"
        if first is None:
            first_or_worst = f"No module is beyond export.tolerance; {name} is the worst"
        cause = f"{first_or_worst}: {error}."
        remedies.insert(0, f"keep it in fp32: 'precision.keep_fp32=[{modules}]'")
    if comparison.errors.isfinite().all():
        remedies.append("or raise the tolerance, if this is good enough")
    return f"  {cause}\n  Remedies: {'; '.join(remedies)}."

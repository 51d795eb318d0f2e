"""Whether an artefact is good enough, and if it is not, where it goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from dtrain.config.errors import ConfigError
from dtrain.deployment.comparison import Comparison
from dtrain.deployment.description import Description
from dtrain.deployment.divergence import Departure
from dtrain.deployment.tolerance import Tolerance

# Enough to show where, few enough for the activations of large models.
_ROWS = 4


def require_close(
    comparison: Comparison,
    tolerance: Tolerance,
    description: Description,
    departures: Callable[[Tensor], Sequence[Departure]],
) -> None:
    """Accepts an artefact that is close to fp32.

    Args:
        comparison: Of the artefact.
        tolerance: What it is measured by.
        description: Of the artefact.
        departures: Gives the modules' departures for rows of the samples, named by their numbers; asked only if it is refused.

    Raises:
        ConfigError: If it is beyond tolerance; names the first module, in order of execution, that is.
    """
    problems = comparison.beyond(tolerance)
    if not problems:
        return
    raise ConfigError(
        f"export: in {description.dtype} the model is too far from fp32 on {len(comparison.errors)} samples, so it was "
        "not written.\n"
        + "".join(f"    {line}\n" for line in problems)
        + _culprit(departures(comparison.worst(_ROWS)), tolerance, description)
    )


def _culprit(found: Sequence[Departure], tolerance: Tolerance, description: Description) -> str:
    """Where it goes wrong and what to do, two lines."""
    wider = "bf16 or fp32" if description.dtype == "fp16" and "bf16" in description.format.dtypes else "fp32"
    remedies = [f"use export.dtype={wider}"]
    beyond = next((departure for departure in found if departure.error > tolerance.outputs), None)
    worst = max(found, key=lambda departure: departure.error, default=None)
    if description.dtype == "fp32":
        where = "No weight was rounded: the conversion is at fault, or the tolerance is finer than sums in fp32."
        remedies = ["use export.format=safetensors"] if description.format.traced else []
    elif beyond is not None:
        where = f"The first module beyond is {beyond.module}: {_size(beyond.error)}."
        remedies.insert(0, _keep(beyond.module, dict(description.folded)))
    elif worst is not None:
        where = f"No module is beyond export.tolerance; {worst.module} is the worst: {_size(worst.error)}."
        remedies.insert(0, _keep(worst.module, dict(description.folded)))
    else:
        where = "The model has no modules to look into."
    remedies.append(f"{'or ' if remedies else ''}raise the tolerance, if this is good enough")
    return f"  {where}\n  Remedies: {'; '.join(remedies)}."


def _keep(module: str, folded: Mapping[str, str]) -> str:
    # What was folded into a convolution has to be kept as well, or the two would not be one in fp32.
    names = [*(conv for conv, norm in folded.items() if norm == module), module]
    return f"keep it in fp32: 'precision.keep_fp32=[{','.join(names)}]'"


def _size(error: float) -> str:
    return "its outputs overflow" if error == float("inf") else f"an error of {error:.2g} of its largest output"

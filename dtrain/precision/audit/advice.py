"""From measured ranges to what to set: the first loss scale, and the modules to keep in fp32."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dtrain.precision.audit.magnitudes import SIXTEEN_BIT
from dtrain.precision.audit.report import ModuleReport, Report
from dtrain.precision.audit.scope import MODEL, TASK
from dtrain.precision.audit.text import magnitude, short

#: Gradients of other batches and later steps are larger by a few times.
HEADROOM = 8.0


@dataclass(frozen=True)
class ScaleAdvice:
    """A first loss scale.

    Attributes:
        scale: The largest power of two that keeps gradients ``HEADROOM`` times as large as the largest in fp16's range,
            within the bounds of the config.
        largest: The largest gradient, unscaled.
        owner: The module that has it.
        lost: Share of the gradients above zero that fp16 would make zero without a scale.
        lost_scaled: The same with it.
        small: Share of the gradients above zero that fp16 would keep with fewer bits without a scale.
        small_scaled: The same with it.
    """

    scale: float
    largest: float
    owner: str
    lost: float
    lost_scaled: float
    small: float
    small_scaled: float

    @property
    def rescued(self) -> float:
        """Share of the otherwise lost gradients that the scale keeps; 1 if none would be lost."""
        return 1 - self.lost_scaled / self.lost if self.lost else 1.0


@dataclass(frozen=True)
class Keep:
    """A module that should compute in fp32, and why."""

    name: str
    reason: str


def advise_scale(report: Report, minimum: float = 1.0, maximum: float = 2.0**24) -> ScaleAdvice | None:
    """The first loss scale for fp16; None if no gradient is above zero.

    Args:
        report: What was measured.
        minimum: Smallest scale allowed.
        maximum: Largest scale allowed.
    """
    gradients = report.gradients
    ideal = gradients.scale_for_fp16(HEADROOM)
    if ideal is None:
        return None
    scale = min(max(ideal, 2.0 ** math.ceil(math.log2(minimum))), 2.0 ** math.floor(math.log2(maximum)))
    return ScaleAdvice(
        scale=scale,
        largest=gradients.largest,
        owner=max(report.modules, key=lambda module: module.gradients.largest).name,
        lost=gradients.share(gradients.lost_in_fp16(1.0)),
        lost_scaled=gradients.share(gradients.lost_in_fp16(scale)),
        small=gradients.share(gradients.small_in_fp16(1.0)),
        small_scaled=gradients.share(gradients.small_in_fp16(scale)),
    )


def modules_to_keep(report: Report, dtype: torch.dtype) -> list[Keep]:
    """Modules that a run in ``dtype`` should keep in fp32.

    A module that makes values too large is kept, and so is one whose products take them in: it would cast them down first.
    Modules inside a kept one are not named.

    Args:
        report: What was measured; where it ran in 16 bits, only modules that did so too are named.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
    """
    keep: list[Keep] = []
    for module in report.modules:
        reason = _reason(module, dtype) if module.name != TASK and _is_lowered(module, report) else None
        if reason is not None:
            keep.append(Keep(module.name, reason))
    names = [one.name for one in keep]
    return [one for one in keep if not any(one.name.startswith(f"{name}.") for name in names)]


def keep_line(report: Report, keep: list[Keep]) -> str | None:
    """What to put on the command line, with the patterns that are there already; None if it would say nothing new."""
    names = [one.name for one in keep if one.name != MODEL]
    return f"'precision.keep_fp32=[{','.join([*report.keep_fp32, *names])}]'" if names else None


def advice(report: Report, minimum: float = 1.0, maximum: float = 2.0**24) -> dict[str, Any]:
    """All of it as plain data: ``loss_scale``, null if there is none, and ``keep_fp32`` for fp16 and bf16."""
    scale = advise_scale(report, minimum, maximum)
    return {
        "loss_scale": None if scale is None else asdict(scale) | {"rescued": scale.rescued},
        "keep_fp32": {short(dtype): [asdict(one) for one in modules_to_keep(report, dtype)] for dtype in SIXTEEN_BIT},
    }


def _is_lowered(module: ModuleReport, report: Report) -> bool:
    if report.compute_dtype.itemsize > 2:
        return True  # nobody knows yet what autocast would do with it
    return any(dtype.itemsize <= 2 for dtype in (*module.compute, *module.operations.outputs))


def _reason(module: ModuleReport, dtype: torch.dtype) -> str | None:
    ranges, info, name = module.ranges, torch.finfo(dtype), short(dtype)
    end = f"{name} ends at {info.max:g}"
    activations, gradients = ranges.activations, module.gradients
    if activations.casts[dtype].overflow:
        return f"activations up to {magnitude(activations.largest)}; {end}"
    if _overflows(ranges.operands, dtype):
        return f"its products take values up to {magnitude(ranges.operands)}; {end}"
    if gradients.casts[dtype].overflow:
        return f"gradients up to {magnitude(gradients.largest)} overflow {name} even without a loss scale"
    if 0 < activations.largest < info.tiny:
        return (
            f"no activation is above {magnitude(activations.largest)}; {name} loses bits below {magnitude(info.tiny)}"
        )
    return None


def _overflows(value: float, dtype: torch.dtype) -> bool:
    return bool(torch.tensor(value).to(dtype).isinf())

"""What to do about a report: a few lines under the tables, those to copy ready for the command line."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import torch

from dtrain.precision.audit.advice import Keep, advise_scale, keep_line, modules_to_keep
from dtrain.precision.audit.finding import Finding
from dtrain.precision.audit.report import Report
from dtrain.precision.audit.scope import MODEL
from dtrain.precision.audit.text import magnitude, percent, short
from dtrain.precision.names import some

_KINDS = {
    "created": ("made in fp32", "make it like its input, as x.new_zeros(...) does, or give dtype=x.dtype"),
    "promoted": ("promoted to fp32", "one operand is fp32; cast it if that is not meant (in a residual stream it is)"),
    "product": ("products in fp32", "these gain nothing from the precision of the run"),
    "constant": (
        "beyond fp16",
        "fp16 ends at 65504: mask with -inf, or with torch.finfo(x.dtype).min where a whole row may be masked",
    ),
    "fixed": ("fixed 16 bits", "no precision of the run changes these: leave it to autocast, or say x.to(other.dtype)"),
    "raised": ("left in fp32", "cast up and handed on so: end with .to(x.dtype), if only the values between need fp32"),
    "in place": (
        "dtype of weights",
        "changed by the forward, for good: use a copy, w.to(x.dtype), or leave it to autocast",
    ),
}
# Lines of a kind, and modules on a line.
_LINES, _NAMED = 8, 3


def summary(report: Report, min_scale: float = 1.0, max_scale: float = 2.0**24) -> dict[str, str]:
    """Rows for ``print_banner``.

    Args:
        report: The report.
        min_scale: Smallest loss scale allowed.
        max_scale: Largest loss scale allowed.
    """
    low = f"{percent(report.low_share) or '0%'} of the forward's FLOPs in 16 bits" if report.flops else "none counted"
    lines = {"FLOPs": low, "loss scale": _scale(report, min_scale, max_scale)}
    own = [report.compute_dtype] if report.compute_dtype.itemsize == 2 else []
    for dtype in dict.fromkeys([*own, torch.float16, torch.bfloat16]):
        lines[short(dtype)] = _keep(report, modules_to_keep(report, dtype))
    broken = [module.name for module in report.modules if module.ranges.activations.nan]
    if broken:
        lines["NaN in fp32"] = f"{', '.join(broken)}: no precision cures that"
    return lines | code(report)


def code(report: Report) -> dict[str, str]:
    """The rows of ``summary`` that are about the model's code; what a failed run has found is in them already."""
    lines = {}
    for kind, (heading, advice) in _KINDS.items():
        found = _findings({finding: times for finding, times in report.findings.items() if finding.kind == kind})
        if found:
            lines[heading] = "\n".join([advice, *found])
    return lines


def _scale(report: Report, minimum: float, maximum: float) -> str:
    advice = advise_scale(report, minimum, maximum)
    if advice is None:
        return "no gradient is above zero, so there is nothing to scale"
    line = f"precision.loss_scale.init={advice.scale:.10g}, with precision=fp16"
    largest = f"the largest gradient is {magnitude(advice.largest)}, in {advice.owner}"
    if not advice.lost + advice.small:
        return f"{line}: {largest}; all are normal numbers of fp16 even without a scale"
    rescued = f" ({percent(advice.rescued) or '0%'} of those rescued)" if advice.lost else ""
    return (
        f"{line}: {largest}\n"
        f"fp16 makes zero of {_share(advice.lost)} of the gradients, scaled of {_share(advice.lost_scaled)}{rescued}\n"
        f"and keeps fewer bits of {_share(advice.small)}, scaled of {_share(advice.small_scaled)}"
    )


def _share(share: float) -> str:
    return percent(share) or "none"


def _keep(report: Report, keep: list[Keep]) -> str:
    if not keep:
        return "nothing overflows: no module needs precision.keep_fp32"
    line = keep_line(report, keep)
    reasons = [f"{one.name}: {one.reason}" for one in keep]
    if any(one.name == MODEL for one in keep):
        reasons.append(f"{MODEL} has no name to put in precision.keep_fp32: move that code into a submodule")
    return "\n".join([line, *reasons] if line else reasons)


def _findings(found: Mapping[Finding, int]) -> list[str]:
    """A line for each place: what is there, and in which modules."""
    places: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for finding, times in found.items():
        shape = f" [{', '.join(map(str, finding.shape))}]"
        places[finding.operation + shape, finding.where, finding.note][finding.owner] += times
    lines = [
        ", ".join(part for part in place if part) + f": {some(list(owners), _NAMED)}, {owners.total()} times"
        for place, owners in places.items()
    ]
    rest = len(lines) - _LINES
    return [*lines[:_LINES], *([f"and {rest} more: --json FILE has all"] if rest > 0 else [])]

"""Shows a report as tables, with advice and the settings to copy to the command line.

* ``print_tables`` prints what every module computes in and how large its values are.
* ``summary`` returns a few rows to print below the tables: the share of FLOPs in 16 bits, the first loss scale, modules to
  keep in fp32, and findings in the model's code.
* ``advice`` returns the advice as plain data, for ``--json``.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtrain.precision.audit.audit import ModuleReport, Report
from dtrain.precision.audit.module_stack import MODEL, TASK, PrecisionFinding
from dtrain.precision.audit.operation_ranges import BACKWARD, SIXTEEN_BIT, OperationRange, OperationSite
from dtrain.precision.audit.recorders import Magnitudes
from dtrain.precision.modules import dtype_name, first_names

#: How much larger than the largest measured gradient the gradients of other batches and later steps may be.
HEADROOM = 8.0
#: Smallest share of results flushed to zero that is reported.
FLUSHED = 0.01
#: With more modules than this, modules whose names differ in one number share a row.
GROUP_ABOVE = 40

_KINDS = {
    "created": ("made in fp32", "create it with the dtype of its input: x.new_zeros(...), or dtype=x.dtype"),
    "promoted": (
        "promoted to fp32",
        "one operand is fp32; cast it unless that is intended (in a residual stream it is)",
    ),
    "product": ("products in fp32", "these products do not profit from the precision of the run"),
    "constant": (
        "beyond fp16",
        "the largest fp16 number is 65504: mask with -inf, or with torch.finfo(x.dtype).min where a whole row may be masked",
    ),
    "naive": (
        "unstable form",
        "for large inputs it overflows, or takes the logarithm of zero, in 16 bits much earlier than in fp32",
    ),
    "fixed": (
        "fixed 16 bits",
        "written in the code for every precision: leave it to autocast, or write x.to(other.dtype)",
    ),
    "raised": (
        "left in fp32",
        "cast to fp32 and returned: end with .to(x.dtype) if only intermediate values need fp32",
    ),
    "in place": (
        "dtype of weights",
        "the forward changes the weights for good: use a copy, w.to(x.dtype), or leave it to autocast",
    ),
}
_OVERFLOW = (
    "compute it in fp32 (x.float()), or in a stable form: softmax, log_softmax, logsumexp, cross_entropy, logsigmoid, "
    "binary_cross_entropy_with_logits"
)
_FLUSHED = (
    "harmless in a softmax; code that divides by these results, or takes their logarithm, needs fp32 or a stable form"
)
# Most lines per kind of finding, and most modules per line.
_LINES, _NAMED = 8, 3
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a name that is a number, as in nn.Sequential
_EFFECTS = {"lost": ("lost", "yellow"), "subnormal": ("subn.", ""), "overflow": ("overfl.", "bold red")}
_LEGEND = """zero: share of all values. lost, subn., overfl.: shares of the other values that a cast to 16 bits makes zero,
subnormal (fewer bits) or infinite. Gradients are taken with respect to a module's outputs and its own parameters.
"""


def summary(
    report: Report, min_scale: float = 1.0, max_scale: float = 2.0**24, skipped: tuple[int, int] = (0, 0)
) -> dict[str, str]:
    """The advice and the findings of a report, as rows for ``print_banner``.

    Args:
        report: The report.
        min_scale: Smallest loss scale that the config allows.
        max_scale: Largest loss scale that the config allows.
        skipped: Number of skipped steps, and of all steps.
    """
    low = f"{percent(report.low_share) or '0%'} of the forward's FLOPs in 16 bits" if report.flops else "none counted"
    lines = {"FLOPs": low, "loss scale": _scale(report, min_scale, max_scale)}
    own = [report.compute_dtype] if report.compute_dtype.itemsize == 2 else []
    if skipped[0]:
        lines["skipped"] = f"{skipped[0]} of {skipped[1]} steps: {_cause(report)}"
    for dtype in dict.fromkeys([*own, torch.float16, torch.bfloat16]):
        lines[dtype_name(dtype)] = _keep(report, dtype)
        if places := overflows(report, dtype):
            lines[f"overflow in {dtype_name(dtype)}"] = _listed(_OVERFLOW, [_overflow(*one, dtype) for one in places])
        if places := flushed(report, dtype):
            lines[f"zero in {dtype_name(dtype)}"] = _listed(_FLUSHED, [_flushed(*one, dtype) for one in places])
    if report.scripted:
        lines["ScriptModule"] = (
            f"{first_names(report.scripted, _NAMED)}: measured as one module, because its code does not run in Python"
        )
    with_nan = [module.name for module in report.modules if module.ranges.activations.nan]
    if with_nan:
        lines["NaN in fp32"] = f"{', '.join(with_nan)}: not a matter of precision"
    return lines | code_findings(report)


def code_findings(report: Report) -> dict[str, str]:
    """The rows of ``summary`` about the model's code; also useful if the run failed before its report was complete."""
    lines = {}
    for kind, (heading, advice) in _KINDS.items():
        found = _findings({finding: times for finding, times in report.findings.items() if finding.kind == kind})
        if found:
            lines[heading] = "\n".join([advice, *found])
    return lines


@dataclass(frozen=True)
class ScaleAdvice:
    """A first loss scale for fp16.

    Attributes:
        scale: The largest power of two that keeps ``HEADROOM`` times the largest gradient in fp16's range, within the
            bounds of the config.
        largest: Magnitude of the largest gradient, unscaled.
        owner: Name of the module that has it.
        lost: Share of the gradients other than zero that fp16 would make zero without a scale.
        lost_scaled: The same share with ``scale``.
        small: Share of the gradients other than zero that would be subnormal in fp16 without a scale.
        small_scaled: The same share with ``scale``.
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
        """Share of the gradients lost without a scale that the scale keeps; 1 if none would be lost."""
        return 1 - self.lost_scaled / self.lost if self.lost else 1.0


@dataclass(frozen=True)
class Keep:
    """A module that should compute in fp32, and the reason."""

    name: str
    reason: str


def advise_scale(report: Report, minimum: float = 1.0, maximum: float = 2.0**24) -> ScaleAdvice | None:
    """The first loss scale for fp16; None if all gradients are zero.

    Args:
        report: The report.
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

    These are modules whose outputs, or results of operations in their forward, are too large for ``dtype``, and modules whose
    products have too large inputs, which autocast would cast down. Modules inside a module of the list are left out.

    Args:
        report: The report. Of a run in 16 bits, only modules that computed in 16 bits are considered.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
    """
    keep: list[Keep] = []
    inside = {
        place.owner: (place, found) for place, found in reversed(overflows(report, dtype)) if place.where != BACKWARD
    }
    for module in report.modules:
        reason = _reason(module, dtype) if module.name != TASK and _is_lowered(module, report) else None
        if reason is None and module.name != TASK and module.name in inside:
            reason = _overflow(*inside[module.name], dtype).replace(f", in {module.name}", "", 1)
        if reason is not None:
            keep.append(Keep(module.name, reason))
    names = [one.name for one in keep]
    return [one for one in keep if not any(one.name.startswith(f"{name}.") for name in names)]


def overflows(report: Report, dtype: torch.dtype) -> list[tuple[OperationSite, OperationRange]]:
    """The operations of the forward that overflow in ``dtype``, in their order; without any, the operations of the backward.

    Args:
        report: The report. Of a run in 16 bits, only operations that computed in 16 bits are considered.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
    """
    # Numbers that are written in the code, such as -1e9, are separate findings, with a different remedy.
    constants = {finding.where for finding in report.findings if finding.kind == "constant"}
    # After an overflow in the forward, what the backward computes means nothing.
    spoilt = any(found.overflowed for place, found in report.operations.items() if place.where != BACKWARD)
    return [
        (place, found)
        for place, found in report.operations.items()
        if not found.in_fp32
        and place.where not in constants
        and not (spoilt and place.where == BACKWARD)
        and ((found.overflowed and dtype in found.dtypes) or (found.infinite[dtype] and _is_low(place, found, report)))
    ]


def flushed(report: Report, dtype: torch.dtype) -> list[tuple[OperationSite, OperationRange]]:
    """The operations of which ``dtype`` would make at least ``FLUSHED`` of the results zero, most first; see ``overflows``."""
    places = [
        (place, found)
        for place, found in report.operations.items()
        if found.lost_share(dtype) >= FLUSHED and _is_low(place, found, report)
    ]
    return sorted(places, key=lambda one: -one[1].lost_share(dtype))


def keep_line(report: Report, keep: list[Keep]) -> str | None:
    """The override for the command line, with the present patterns of the config; None if there is no new one."""
    names = [one.name for one in keep if one.name not in (MODEL, *report.scripted)]
    return f"'precision.keep_fp32=[{','.join([*report.keep_fp32, *names])}]'" if names else None


def advice(report: Report, minimum: float = 1.0, maximum: float = 2.0**24) -> dict[str, Any]:
    """The advice as plain data: ``loss_scale`` (None if all gradients are zero), and ``keep_fp32`` for fp16 and bf16."""
    scale = advise_scale(report, minimum, maximum)
    return {
        "loss_scale": None if scale is None else asdict(scale) | {"rescued": scale.rescued},
        "keep_fp32": {
            dtype_name(dtype): [asdict(one) for one in modules_to_keep(report, dtype)] for dtype in SIXTEEN_BIT
        },
    }


def print_tables(report: Report, console: Console, every_module: bool = False) -> None:
    """Prints the tables and a legend. Many modules are grouped by kind, unless ``every_module`` is set."""
    shown = rows(report, every_module)
    console.print(_dtype_table(report, shown))
    console.print(_range_table("Activations, in fp32", shown, lambda module: module.ranges.activations))
    console.print(_range_table("Gradients of the mean loss, in fp32, unscaled", shown, lambda module: module.gradients))
    console.print(Text(_LEGEND), soft_wrap=True)


@dataclass
class Row:
    """A table row: one module, or several of the same kind."""

    name: str
    modules: list[ModuleReport] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The name, with the number of modules if there are several."""
        return self.name if len(self.modules) == 1 else f"{self.name} x{len(self.modules)}"

    def flops(self) -> int:
        """FLOPs of all modules of the row."""
        return sum(module.flops for module in self.modules)

    def merged(self, choose: Callable[[ModuleReport], Magnitudes]) -> Magnitudes:
        """The chosen values of all modules of the row, merged."""
        return Magnitudes.total(map(choose, self.modules))


def rows(report: Report, every_module: bool = False) -> list[Row]:
    """The rows of the tables: one per module, or per kind of module if there are more than ``GROUP_ABOVE`` of them."""
    if every_module or len(report.modules) <= GROUP_ABOVE:
        return [Row(module.name, [module]) for module in report.modules]
    families = _families([module.name for module in report.modules])
    grouped: dict[tuple[object, ...], Row] = {}
    for module in report.modules:
        name = families[module.name]
        key = (name, module.kind, module.kept, *_dtypes(module))
        grouped.setdefault(key, Row(name)).modules.append(module)
    for row in grouped.values():
        if len(row.modules) == 1:
            row.name = row.modules[0].name
    return list(grouped.values())


def _dtype_table(report: Report, shown: Sequence[Row]) -> Table:
    """Compute, output and gradient dtypes, and FLOPs."""
    table = _table("Dtypes and FLOPs", "module", "class", "computes in", "output", "gradient")
    for heading in ("FLOPs", "in 16 bits"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in shown:
        first = row.modules[0]
        flops, low = row.flops(), sum(module.low_flops for module in row.modules)
        table.add_row(
            Text(row.label),
            Text(f"{first.kind} (kept)" if first.kept else first.kind),
            *_dtypes(first),
            percent(flops / report.flops) if report.flops else "",
            (percent(low / flops) or "0%") if flops else "",
        )
    return table


def _range_table(title: str, shown: Sequence[Row], choose: Callable[[ModuleReport], Magnitudes]) -> Table:
    """Magnitudes in fp32 and the effect of casts on the chosen values; bf16 only if it would change one."""
    values = [(row.label, magnitudes) for row in shown if (magnitudes := row.merged(choose)).count]
    table = _table(title, "\nmodule")
    for heading in ("\nsmallest .. largest", "\nzero"):
        table.add_column(heading, justify="right", no_wrap=True)
    cells = [
        [Text(label), Text(value_range(magnitudes)), Text(percent(magnitudes.zeros / magnitudes.count))]
        for label, magnitudes in values
    ]
    for dtype in SIXTEEN_BIT:
        if dtype == torch.bfloat16 and not any(found.casts[dtype].total() for _, found in values):
            continue
        for effect, (heading, style) in _EFFECTS.items():
            table.add_column(f"{dtype_name(dtype)}\n{heading}", justify="right", no_wrap=True)
            for line, (_, magnitudes) in zip(cells, values, strict=True):
                share = magnitudes.share(magnitudes.casts[dtype][effect])
                line.append(Text(percent(share), style=style))
    for line in cells:
        table.add_row(*line)
    return table


def dtype_names(found: Iterable[torch.dtype]) -> str:
    """``bf16``, or ``bf16+fp32`` for several dtypes; "" for none."""
    return "+".join(map(dtype_name, found))


def magnitude(value: float) -> str:
    """``0.23``, ``1.1e-5``, ``3.4e38``."""
    if value == 0 or 1e-2 <= value < 1e4:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def value_range(magnitudes: Magnitudes) -> str:
    """``1.1e-5 .. 0.23``: smallest magnitude above zero and largest magnitude; then ``inf`` and ``NaN`` if there are any."""
    text = f"{magnitude(magnitudes.smallest)} .. {magnitude(magnitudes.largest)}" if magnitudes.nonzero else ""
    marks = [name for name, number in (("inf", magnitudes.infinite), ("NaN", magnitudes.nan)) if number]
    return " ".join([text, *marks]).strip()


def percent(share: float) -> str:
    """``12.3%``; "" for 0, and never 0% or 100% for a share that is only close to it."""
    if share == 0:
        return ""
    if share < 1e-4:
        return "<.01%"
    if 0.999 < share < 1:
        return ">99.9%"
    return f"{100 * share:.3g}%" if share >= 1e-3 else f"{100 * share:.2f}%"


def _scale(report: Report, minimum: float, maximum: float) -> str:
    advice = advise_scale(report, minimum, maximum)
    if advice is None:
        return "no gradient is above zero, so there is nothing to scale"
    line = f"precision.loss_scale.init={advice.scale:.10g}, with precision=fp16"
    largest = f"the largest gradient is {magnitude(advice.largest)}, in {advice.owner}"
    if not advice.lost + advice.small:
        return f"{line}: {largest}; all gradients are normal numbers in fp16 even without a scale"
    rescued = f" ({percent(advice.rescued) or '0%'} of those rescued)" if advice.lost else ""
    return (
        f"{line}: {largest}\n"
        f"zero in fp16: {_share(advice.lost)} of the gradients, with this scale {_share(advice.lost_scaled)}{rescued}\n"
        f"subnormal in fp16: {_share(advice.small)}, with this scale {_share(advice.small_scaled)}"
    )


def _share(share: float) -> str:
    return percent(share) or "none"


def _keep(report: Report, dtype: torch.dtype) -> str:
    keep, places = modules_to_keep(report, dtype), [place for place, _ in overflows(report, dtype)]
    if not keep:
        if any(place.where != BACKWARD for place in places):
            return "precision.keep_fp32 cannot help, because the task's own code overflows; see the next lines"
        if places:
            return "the backward overflows at this loss scale, see the next lines; no module needs precision.keep_fp32"
        return "nothing overflows: no module needs precision.keep_fp32"
    line = keep_line(report, keep)
    reasons = [f"{one.name}: {one.reason}" for one in keep]
    if scripted := [one.name for one in keep if one.name in report.scripted]:
        reasons.append(
            f"precision.keep_fp32 refuses ScriptModules: build {first_names(scripted, _NAMED)} without torch.jit"
        )
    elif any(one.name == MODEL for one in keep):
        reasons.append(f"{MODEL} has no name that precision.keep_fp32 could match: move that code into a submodule")
    return "\n".join([line, *reasons] if line else reasons)


def _cause(report: Report) -> str:
    """Why steps were skipped, as far as the operations of the configured pass show it."""
    origins = [(place, found) for place, found in report.operations.items() if found.overflowed]
    if not origins:
        return "no single operation overflowed; a sum over micro-batches, or the gradient norm, did"
    forward = [one for one in origins if one[0].where != BACKWARD]
    place, found = (forward or origins)[0]
    if found.in_fp32:
        return (
            f"{_described(place)} is not finite in fp32 either: the cause is the data or the model, not the precision"
        )
    if forward:
        return f"{_described(place)} overflows in the forward"
    return f"{_described(place)} overflows, because the loss scale is too large for these gradients: see the line 'loss scale'"


def _described(place: OperationSite) -> str:
    if place.where == BACKWARD:
        return f"{place.operation} in the backward of {place.owner}"
    return f"{place.operation}{f', {place.where}' if place.where else ''}, in {place.owner}"


def _overflow(place: OperationSite, found: OperationRange, dtype: torch.dtype) -> str:
    name = dtype_name(dtype)
    smallest, largest = found.inputs.smallest, found.inputs.largest
    inputs = f"from inputs {magnitude(smallest)} .. {magnitude(largest)}" if largest else "from zeros"
    if not found.infinite[dtype]:
        return f"{_described(place)}: {found.overflowed} results in {name} are not finite, {inputs}"
    results = f"results up to {magnitude(found.outputs.largest)}"
    return f"{_described(place)}: {results} {inputs}; the largest {name} number is {torch.finfo(dtype).max:g}"


def _flushed(place: OperationSite, found: OperationRange, dtype: torch.dtype) -> str:
    results = f"{magnitude(found.outputs.smallest)} .. {magnitude(found.outputs.largest)}"
    return f"{_described(place)}: {percent(found.lost_share(dtype))} of results {results} become zero"


def _listed(advice: str, lines: list[str]) -> str:
    rest = len(lines) - _LINES
    return "\n".join([advice, *lines[:_LINES], *([f"and {rest} more; --json FILE lists all"] if rest > 0 else [])])


def _is_low(place: OperationSite, found: OperationRange, report: Report) -> bool:
    """Whether an operation computes in 16 bits, or might in a lower precision than the run's."""
    if report.compute_dtype.itemsize == 2:
        return any(dtype.itemsize == 2 for dtype in found.dtypes)
    # Autocast computes losses in fp32, and so do modules that are kept in it.
    return place.owner != TASK and not any(module.kept for module in report.modules if module.name == place.owner)


def _findings(found: Mapping[PrecisionFinding, int]) -> list[str]:
    """One line per place in the code: operation, line, note, and the modules that ran it."""
    places: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for finding, times in found.items():
        shape = f" [{', '.join(map(str, finding.shape))}]"
        places[finding.operation + shape, finding.where, finding.note][finding.owner] += times
    lines = [
        ", ".join(part for part in place if part) + f": {first_names(list(owners), _NAMED)}, {owners.total()} times"
        for place, owners in places.items()
    ]
    rest = len(lines) - _LINES
    return [*lines[:_LINES], *([f"and {rest} more; --json FILE lists all"] if rest > 0 else [])]


def _is_lowered(module: ModuleReport, report: Report) -> bool:
    if report.compute_dtype.itemsize > 2:
        return True  # the run was not lowered, so any module might be
    return any(dtype.itemsize <= 2 for dtype in (*module.compute, *module.operations.outputs))


def _reason(module: ModuleReport, dtype: torch.dtype) -> str | None:
    ranges, info, name = module.ranges, torch.finfo(dtype), dtype_name(dtype)
    limit = f"the largest {name} number is {info.max:g}"
    activations, gradients = ranges.activations, module.gradients
    if activations.casts[dtype]["overflow"]:
        return f"activations up to {magnitude(activations.largest)}; {limit}"
    if _overflows(ranges.operands, dtype):
        return f"inputs of its products up to {magnitude(ranges.operands)}; {limit}"
    if gradients.casts[dtype]["overflow"]:
        return f"gradients up to {magnitude(gradients.largest)} overflow {name} even without a loss scale"
    if 0 < activations.largest < info.tiny:
        return (
            f"no activation is above {magnitude(activations.largest)}; {name} loses bits below {magnitude(info.tiny)}"
        )
    return None


def _overflows(value: float, dtype: torch.dtype) -> bool:
    return bool(torch.tensor(value).to(dtype).isinf())


def _families(names: Sequence[str]) -> dict[str, str]:
    """Each name with its most variable number as ``*``: ``blocks.*.mlp.0`` for ``blocks.3.mlp.0``."""
    alike: dict[str, list[list[str]]] = defaultdict(list)
    for name in names:
        alike[_NUMBER.sub("*", name)].append(_NUMBER.findall(name))
    places = {
        pattern: max(range(len(found[0])), key=lambda place: len({numbers[place] for numbers in found}), default=-1)
        for pattern, found in alike.items()
    }
    return {name: _starred(name, places[_NUMBER.sub("*", name)]) for name in names}


def _starred(name: str, place: int) -> str:
    counted = count()
    return _NUMBER.sub(lambda number: "*" if next(counted) == place else number[0], name)


def _dtypes(module: ModuleReport) -> tuple[str, str, str]:
    operations = module.operations
    return dtype_names(module.compute), dtype_names(operations.outputs), dtype_names(operations.gradients)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold", vertical="top")
    return table

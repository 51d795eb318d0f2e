"""What an audit found: one row a module, and what it says about the model as a whole."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from dtrain.precision.audit.finding import Finding
from dtrain.precision.audit.magnitudes import Magnitudes
from dtrain.precision.audit.operations import Operations
from dtrain.precision.audit.ranges import Ranges
from dtrain.precision.audit.text import short


@dataclass
class ModuleReport:
    """One module.

    Attributes:
        name: Its qualified name; ``(model)`` for the outermost, ``(task)`` for the code around it.
        kind: Its class.
        kept: Whether it computes in fp32 because the config says so.
        operations: What it did in the configured run.
        ranges: What its values are in fp32.
    """

    name: str
    kind: str
    kept: bool
    operations: Operations
    ranges: Ranges

    @property
    def compute(self) -> list[torch.dtype]:
        """Dtypes of its matrix products and convolutions, else of its other operations; most used first."""
        counted = self.operations.products or self.operations.others
        return [dtype for dtype, _ in counted.most_common()]

    @property
    def flops(self) -> int:
        """FLOPs of its own in the audited forward passes."""
        return self.operations.products.total()

    @property
    def low_flops(self) -> int:
        """Those in 16 bits."""
        return sum(number for dtype, number in self.operations.products.items() if dtype.itemsize <= 2)

    @property
    def gradients(self) -> Magnitudes:
        """Of its outputs and parameters."""
        return self.ranges.gradients

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        operations, ranges = self.operations, self.ranges
        return {
            "name": self.name,
            "class": self.kind,
            "kept_fp32": self.kept,
            "compute": [short(dtype) for dtype in self.compute],
            "output": [short(dtype) for dtype in operations.outputs],
            "gradient": [short(dtype) for dtype in operations.gradients],
            "flops": {short(dtype): number for dtype, number in operations.products.items()},
            "other_operations": {short(dtype): number for dtype, number in operations.others.items()},
            "largest_operand": ranges.operands,
            "activations": ranges.activations.to_json(),
            "output_gradients": ranges.output_gradients.to_json(),
            "parameter_gradients": ranges.parameter_gradients.to_json(),
        }


@dataclass
class Report:
    """A model.

    Attributes:
        precision: Name of the precision it ran in.
        compute_dtype: What autocast computed in.
        keep_fp32: The patterns it ran with.
        device: Where it ran.
        modules: In the order of their first operations; without those that have neither operations nor gradients.
        findings: Where the code goes another way than the config says, and how often.
    """

    precision: str
    compute_dtype: torch.dtype
    keep_fp32: tuple[str, ...]
    device: str
    modules: list[ModuleReport] = field(default_factory=list)
    findings: Counter[Finding] = field(default_factory=Counter)

    @property
    def flops(self) -> int:
        """FLOPs of all modules."""
        return sum(module.flops for module in self.modules)

    @property
    def low_share(self) -> float:
        """Share of the FLOPs that are in 16 bits; 0 if there are none."""
        return sum(module.low_flops for module in self.modules) / self.flops if self.flops else 0.0

    @property
    def gradients(self) -> Magnitudes:
        """Of all modules."""
        together = Magnitudes()
        for module in self.modules:
            together.merge(module.gradients)
        return together

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "precision": self.precision,
            "keep_fp32": list(self.keep_fp32),
            "device": self.device,
            "torch": torch.__version__,
            "flops": self.flops,
            "low_precision_share": self.low_share,
            "modules": [module.to_json() for module in self.modules],
            "findings": [asdict(finding) | {"times": times} for finding, times in self.findings.items()],
        }

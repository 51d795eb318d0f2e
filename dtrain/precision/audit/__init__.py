"""The numerics audit: what every module of a model computes in, how large its values are, what to set, and which lines
of its code go another way."""

from dtrain.precision.audit.audit import NumericsAudit
from dtrain.precision.audit.report import ModuleReport, Report

__all__ = ["ModuleReport", "NumericsAudit", "Report"]

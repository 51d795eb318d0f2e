"""The numerics audit: what every module of a model computes in, how large its values are, and what to set."""

from dtrain.precision.audit.audit import NumericsAudit
from dtrain.precision.audit.report import ModuleReport, Report

__all__ = ["ModuleReport", "NumericsAudit", "Report"]

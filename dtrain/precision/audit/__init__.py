"""The numerics audit of ``doctor numerics``.

It runs a model for a few steps and reports the dtypes and value ranges of each module, the settings that it advises, and code
that is correct in fp32 only.

In reading order: ``audit`` (the two passes and their report), ``module_stack`` (which module and line an operator belongs to),
``recorders`` (dtypes, FLOPs and ranges of modules), ``operation_ranges`` (ranges of single operations), ``lint`` (findings in
the model's code), ``summary`` (tables and advice).
"""

from dtrain.precision.audit.audit import ModuleReport, NumericsAudit, Report

__all__ = ["ModuleReport", "NumericsAudit", "Report"]

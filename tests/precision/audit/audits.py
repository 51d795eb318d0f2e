"""Runs the numerics audit on one step of a small model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.precision import Precision
from dtrain.precision.audit import NumericsAudit, Report
from dtrain.precision.audit.module_stack import PrecisionFinding

CPU = torch.device("cpu")


def audited(
    model: nn.Module,
    inputs: Tensor | Sequence[Tensor],
    precision: str = "bf16",
    keep_fp32: Sequence[str] = (),
    loss: Callable[[Tensor], Tensor] = torch.sum,
) -> Report:
    """The report on one step of ``loss(model(*inputs))``."""
    policy = Precision(precision, tuple(keep_fp32))
    kept = policy.wrap_keep_fp32(model)
    audit = NumericsAudit(model, precision=policy, device=CPU, kept=kept)
    arguments = [inputs] if isinstance(inputs, Tensor) else inputs
    task = audit.watched(lambda: loss(model(*arguments)))
    with audit.fp32_pass():
        task().backward()
    with audit.configured_pass():
        with policy.autocast("cpu"):
            total = task()
        total.backward()
    return audit.report()


def findings(report: Report, kind: str) -> list[PrecisionFinding]:
    return [finding for finding in report.findings if finding.kind == kind]


def source_line(function: Callable[..., Any], text: str) -> str:
    """``file:line`` of the line of ``function`` that contains ``text``, as the audit writes it."""
    lines, first = inspect.getsourcelines(function)
    number = next(i for i, line in enumerate(lines) if text in line)
    path = Path(inspect.getsourcefile(function) or "")
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{first + number}"

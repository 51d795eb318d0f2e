"""What this rank's device can compute, as the trainer's own precision policy sees it."""

from __future__ import annotations

import warnings
from dataclasses import asdict

import torch

from dtrain.config.errors import ConfigError
from dtrain.diagnosis.finding import Finding
from dtrain.precision import Precision
from dtrain.precision.kernels import self_test

PRESETS = ("fp32", "tf32", "bf16", "fp16")


def precisions(device: torch.device) -> list[Finding]:
    """A finding for each preset, and one for the operators that scaled gradients need. Leaves the process in fp32."""
    findings = []
    for name in PRESETS:
        subject = f"precision={name}"
        try:
            said = Precision(name).apply(device)
        except ConfigError as error:
            findings.append(Finding(subject, str(error), "error", "Choose another precision on this machine"))
            continue
        findings += [Finding(subject, text.removeprefix(f"{subject}: "), "warning") for text in said]
        if not said:
            findings.append(
                Finding(subject, f"computes in {str(Precision(name).compute_dtype).removeprefix('torch.')}")
            )
    Precision("fp32").apply(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said below
        failed = [name for name, passed in asdict(self_test(device.type)).items() if not passed]
    if failed:
        text = f"{', '.join(failed)} does not behave as in torch 2.9 to 2.13, so slower ways are taken"
        findings.append(Finding("fp16 operators", text, "warning", "Use the torch version of the constraints file"))
    else:
        findings.append(Finding("fp16 operators", "torch's own behave as expected"))
    return findings

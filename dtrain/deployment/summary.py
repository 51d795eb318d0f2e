"""What a person wants to know of an export."""

from __future__ import annotations

from typing import Any

from dtrain.deployment.description import Description


def summary(description: Description, report: dict[str, Any]) -> dict[str, str]:
    """Name to value, for ``print_banner``.

    Args:
        description: Of the artefact.
        report: What ``report.json`` holds.
    """
    source, found = description.source, report["comparison"]
    before, after = report["bytes"]["fp32"], report["bytes"]["exported"]
    lines = {
        "from": f"step {source['checkpoint_step']} of {source['run']}, {source['weights']} weights",
        "weights": f"{description.dtype}, {after:,} bytes, {after / before:.2f} of fp32"
        + (f" (fp32 kept in {', '.join(description.keep_fp32)})" if description.keep_fp32 else ""),
        "file": f"{description.file}, {report['bytes']['file']:,} bytes"
        + (f", takes {description.rows}" if description.rows is not None else "")
        + ("; holds code: elsewhere dtrain.predict wants --trust" if description.format.holds_code else ""),
        "BatchNorm": f"not folded: {report['not_folded']}" if report["not_folded"] else f"{report['folded']} folded",
    }
    if report["became_zero"]:
        names = ", ".join(f"{name} ({count})" for name, count in report["became_zero"].items())
        lines["became zero"] = names
    if found is None:
        return lines | {"not compared": report["not_compared"]}
    lines["outputs"] = (
        f"max error {found['max_abs_error']:.2e}, mean {found['mean_abs_error']:.2e} (fp32 outputs up to "
        f"{found['max_abs_output']:.3g}), {found['samples']} samples in a fresh process on {found['device']}"
    )
    if "top1_agreement" in found:
        lines["top-1"] = f"{found['top1_agreement']:.2%} as in fp32"
    return lines | {
        name: f"{values['exported']:.4f}, fp32 {values['fp32']:.4f} (difference {values['difference']:+.4f})"
        for name, values in found["metrics"].items()
    }

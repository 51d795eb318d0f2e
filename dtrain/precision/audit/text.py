"""Numbers and dtypes as short as a table wants them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dtrain.precision.audit.magnitudes import Magnitudes


def short(dtype: torch.dtype) -> str:
    """``fp32``, ``bf16``, ``fp16``, ``fp64``."""
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def dtypes(found: Iterable[torch.dtype]) -> str:
    """``bf16``, or ``bf16+fp32`` where there are several; "" for none."""
    return "+".join(map(short, found))


def magnitude(value: float) -> str:
    """``0.23``, ``1.1e-5``, ``3.4e38``."""
    if value == 0 or 1e-2 <= value < 1e4:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def spread(magnitudes: Magnitudes) -> str:
    """``1.1e-5 .. 0.23``: the smallest magnitude above zero and the largest; with a sign for what is not finite."""
    text = f"{magnitude(magnitudes.smallest)} .. {magnitude(magnitudes.largest)}" if magnitudes.nonzero else ""
    marks = [name for name, number in (("inf", magnitudes.infinite), ("NaN", magnitudes.nan)) if number]
    return " ".join([text, *marks]).strip()


def percent(share: float) -> str:
    """``12.3%``; "" for nothing, and never 0% or 100% for what is only close to it."""
    if share == 0:
        return ""
    if share < 1e-4:
        return "<.01%"
    if 0.999 < share < 1:
        return ">99.9%"
    return f"{100 * share:.3g}%" if share >= 1e-3 else f"{100 * share:.2f}%"

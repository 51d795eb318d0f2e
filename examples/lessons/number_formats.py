"""Lesson: what fp32, tf32, bf16 and fp16 can represent.

    python examples/lessons/number_formats.py [--out FOLDER]

Prints the range and precision of each format and how it rounds some numbers; draws the distance between neighbouring numbers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from lesson import Figure, finish, parser

#: Bits of exponent and of mantissa, without the sign. tf32 exists inside of matrix units only; in memory it is fp32.
FORMATS = {"fp32": (8, 23), "tf32": (8, 10), "bf16": (8, 7), "fp16": (5, 10)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COLOURS = {"fp32": "#56B4E9", "tf32": "#009E73", "bf16": "#D55E00", "fp16": "#000000"}


def limits(exponent: int, mantissa: int) -> tuple[float, float, float, float]:
    """Largest, smallest normal and smallest positive number, and the relative distance of two neighbours."""
    bias = 2 ** (exponent - 1) - 1
    largest = (2 - 2.0**-mantissa) * 2.0**bias
    return largest, 2.0 ** (1 - bias), 2.0 ** (1 - bias - mantissa), 2.0**-mantissa


def main(out: Path) -> None:
    """Prints two tables and draws the picture."""
    print(f"{'':6}{'bits':>6}{'largest':>12}{'normal from':>13}{'smallest':>11}{'distance at 1':>15}{'digits':>8}")
    for name, (exponent, mantissa) in FORMATS.items():
        largest, normal, smallest, distance = limits(exponent, mantissa)
        if name in DTYPES:  # torch agrees
            info = torch.finfo(DTYPES[name])
            assert (info.max, info.tiny, info.smallest_normal, info.eps) == (largest, normal, normal, distance)
        digits = np.log10(2 / distance)
        bits = 1 + exponent + mantissa
        print(f"{name:6}{bits:6}{largest:12.4g}{normal:13.3g}{smallest:11.3g}{distance:15.3g}{digits:8.1f}")

    print(f"\n{'number':>12}" + "".join(f"{name:>16}" for name in DTYPES))
    for number in (1 / 3, 1 + 1 / 512, 2049.0, 70_000.0, 1e-5, 1e-8, 1e-30):
        values = [torch.tensor(number, dtype=torch.float64).to(dtype).item() for dtype in DTYPES.values()]
        print(f"{number:12.7g}" + "".join(f"{value:16.7g}" for value in values))

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, (exponent, mantissa) in FORMATS.items():
        largest, normal, smallest, _ = limits(exponent, mantissa)
        magnitude = np.exp2(np.arange(np.log2(smallest), np.log2(largest) + 0.01, 0.02))
        distance = np.exp2(np.floor(np.log2(np.maximum(magnitude, normal))) - mantissa)
        axes.plot(magnitude, distance / magnitude, color=COLOURS[name], linewidth=1.6, label=name)
        axes.plot(magnitude[-1], distance[-1] / magnitude[-1], "|", color=COLOURS[name], markersize=14)
    axes.annotate(
        "fp16 ends\nat 65,504", (65_504, 3e-4), xytext=(65_504, 2e-5), ha="center", arrowprops={"arrowstyle": "->"}
    )
    axes.set(xscale="log", yscale="log", xlim=(1e-10, 1e7), ylim=(3e-8, 2))
    axes.set(xlabel="number", ylabel="distance to the next number / number")
    axes.set_title("Distance between neighbouring numbers: fp16 is finer than bf16 from 8e-6 to 65,504")
    axes.legend()
    finish(
        figure,
        out / "number_formats.png",
        "bf16 is fp32 with 16 bits of the mantissa cut off: the same range, two to three decimal digits.",
        "fp16 has eight times finer steps, but ends at 65,504, and below 6e-5 its steps no longer shrink with the number.",
        "So bf16 fails by rounding, and fp16 by numbers that become inf or zero.",
    )


if __name__ == "__main__":
    main(parser(__doc__).parse_args().out)

"""How large the values of some tensors are, and what a cast to a 16-bit type would do to them.

* A value is *lost* if the cast makes zero of it, *subnormal* if it survives with fewer bits than the type's others, and
  it *overflows* if it becomes infinite. All three are counted by doing the cast on fp32 values, not from a formula.
* Shares are shares of the finite values that are not zero: zeros (of a ReLU, of a masked row) are not at risk.
* The histogram over powers of two answers what a loss scale would change, without looking at the values again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: The types that a cast is tried for.
SIXTEEN_BIT = (torch.float16, torch.bfloat16)

_FP16_MAX = torch.finfo(torch.float16).max
# Half of fp16's smallest subnormal, 2**-24: what is not larger is rounded to zero, ties included.
_FP16_LOST = -25
_FP16_NORMAL = -14
# fp32 magnitudes lie in (2**-150, 2**128]; bin i of the histogram holds those in (2**(i - 151), 2**(i - 150)].
_BINS, _OFFSET = 279, 150
_PIECE = 2**24


@dataclass
class Cast:
    """What a cast to a 16-bit type does: numbers of values.

    Attributes:
        lost: Became zero.
        subnormal: Became subnormal.
        overflow: Became infinite.
    """

    lost: int = 0
    subnormal: int = 0
    overflow: int = 0


@dataclass
class Magnitudes:
    """Magnitudes of the values of all tensors that were added.

    Attributes:
        count: Values.
        zeros: Those that are zero.
        infinite: Those that are infinite.
        nan: Those that are NaN.
        largest: Largest finite magnitude; 0 if there is none.
        smallest: Smallest finite magnitude above zero; inf if there is none.
        casts: For each of ``SIXTEEN_BIT``.
        histogram: Numbers of finite values that are not zero by power of two; int64, shape ``[279]``, on the CPU.
    """

    count: int = 0
    zeros: int = 0
    infinite: int = 0
    nan: int = 0
    largest: float = 0.0
    smallest: float = math.inf
    casts: dict[torch.dtype, Cast] = field(default_factory=lambda: {dtype: Cast() for dtype in SIXTEEN_BIT})
    histogram: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.int64))

    @property
    def nonzero(self) -> int:
        """Finite values that are not zero."""
        return self.count - self.zeros - self.infinite - self.nan

    @torch.no_grad()
    def add(self, tensor: Tensor) -> None:
        """Adds the values of a floating tensor of any shape; waits for its device."""
        # In pieces, since a run may leave little memory.
        for piece in tensor.detach().flatten().split(_PIECE):
            self._add(piece.float().abs())

    def _add(self, size: Tensor) -> None:
        values = size[size.isfinite() & (size > 0)]
        self.count += size.numel()
        self.zeros += int((size == 0).sum())
        self.infinite += int(size.isinf().sum())
        self.nan += int(size.isnan().sum())
        if not values.numel():
            return
        self.largest = max(self.largest, float(values.max()))
        self.smallest = min(self.smallest, float(values.min()))
        for dtype, cast in self.casts.items():
            after = values.to(dtype)
            cast.lost += int((after == 0).sum())
            cast.subnormal += int(((after > 0) & (after < torch.finfo(dtype).tiny)).sum())
            cast.overflow += int(after.isinf().sum())
        mantissa, exponent = torch.frexp(values)
        # frexp puts a power of two at the bottom of its bin, rounding to zero takes it along with those below.
        bins = exponent.long() - (mantissa == 0.5).long() + _OFFSET
        self.histogram += torch.bincount(bins, minlength=_BINS).cpu()

    def merge(self, other: Magnitudes) -> None:
        """Adds what was added to ``other``."""
        self.count += other.count
        self.zeros += other.zeros
        self.infinite += other.infinite
        self.nan += other.nan
        self.largest = max(self.largest, other.largest)
        self.smallest = min(self.smallest, other.smallest)
        for dtype, cast in self.casts.items():
            cast.lost += other.casts[dtype].lost
            cast.subnormal += other.casts[dtype].subnormal
            cast.overflow += other.casts[dtype].overflow
        self.histogram += other.histogram

    def share(self, number: int) -> float:
        """``number`` of values as a share of the finite ones that are not zero; 0 if there are none."""
        return number / self.nonzero if self.nonzero else 0.0

    def lost_in_fp16(self, scale: float) -> int:
        """How many values fp16 would lose if all were multiplied by ``scale`` first.

        Args:
            scale: A power of two.
        """
        return int(self.histogram[: max(_FP16_LOST - int(math.log2(scale)) + _OFFSET + 1, 0)].sum())

    def small_in_fp16(self, scale: float) -> int:
        """How many values fp16 would keep, but at or below its smallest normal number, after the same.

        Args:
            scale: A power of two.
        """
        first, last = (max(power - int(math.log2(scale)) + _OFFSET + 1, 0) for power in (_FP16_LOST, _FP16_NORMAL))
        return int(self.histogram[first:last].sum())

    def scale_for_fp16(self, headroom: float) -> float | None:
        """The largest power of two that keeps all values in fp16's range; None if there are no values.

        Args:
            headroom: How many times larger than now the largest value may become.
        """
        if not self.nonzero:
            return None
        return float(2.0 ** math.floor(math.log2(_FP16_MAX / headroom / self.largest)))

    def to_json(self) -> dict[str, Any]:
        """Counts, range and shares as plain data; ``smallest`` is null if there is no finite value but zero."""
        return {
            "count": self.count,
            "zeros": self.zeros,
            "infinite": self.infinite,
            "nan": self.nan,
            "largest": self.largest,
            "smallest": self.smallest if self.nonzero else None,
            **{
                name: {key: self.share(number) for key, number in vars(self.casts[dtype]).items()}
                for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16))
            },
        }

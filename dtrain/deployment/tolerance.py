"""How far an artefact may be from fp32."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dtrain.config.errors import ConfigError
from dtrain.config.schema import ExportConfig

# Ten units in the last place of fp16 and bf16; measured on ResNet-9, 18, 50 and GPT: up to two. fp32 has room for kernels
# that sum in another order than those of the training; measured: 6e-7.
_OUTPUTS = {"fp32": 1e-3, "fp16": 0.01, "bf16": 0.08}
_METRICS = {"fp32": 0.001, "fp16": 0.01, "bf16": 0.02}
_SAMPLES_OF_NOISE = 2


@dataclass(frozen=True)
class Tolerance:
    """What an export is refused beyond.

    Attributes:
        outputs: Error of an output, as a part of the largest fp32 output.
        metrics: Difference of a metric, such as 0.01 for a hundredth of accuracy, or of loss.
    """

    outputs: float
    metrics: float

    @classmethod
    def of(cls, export: ExportConfig, samples: int) -> Tolerance:
        """What the config says, or the defaults of the dtype.

        Args:
            export: The config.
            samples: How many rows are compared, 0 for none; by default two of them may change their class.

        Raises:
            ConfigError: If one is no number from 0 on.
        """
        for key in ("tolerance", "max_metric_difference"):
            value = getattr(export, key)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(
                    f"export.{key}: got {value}, want a number from 0 on, or null for the dtype's default."
                )
        noise = max(_METRICS[export.dtype], _SAMPLES_OF_NOISE / max(samples, 1))
        return cls(
            _OUTPUTS[export.dtype] if export.tolerance is None else export.tolerance,
            noise if export.max_metric_difference is None else export.max_metric_difference,
        )

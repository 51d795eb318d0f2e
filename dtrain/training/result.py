"""What an evaluation found: metrics, which are numbers, and tables of counts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from dtrain.config.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Evaluation(Mapping[str, float]):
    """The result of an evaluation, equal on all ranks; as a mapping it is its metrics.

    Attributes:
        metrics: ``loss``, the task's metrics, ``samples`` and ``bad_samples``, and what the task concludes from them.
        tables: The task's tables, summed over all valid samples of all ranks: int64, on the CPU.
    """

    metrics: Mapping[str, float]
    tables: Mapping[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics)

    def __len__(self) -> int:
        return len(self.metrics)

    def record(self) -> dict[str, float]:
        """The metrics by their names in metrics.jsonl."""
        return {f"eval/{name}": value for name, value in self.metrics.items()}

    @property
    def not_finite(self) -> list[str]:
        """Names of the metrics that are infinite or not a number."""
        return [name for name, value in self.metrics.items() if not math.isfinite(value)]


class NotFinite(ConfigError):
    """The loss of an evaluation is infinite or not a number.

    Attributes:
        evaluation: All the same, what was found.
    """

    def __init__(self, message: str, evaluation: Evaluation) -> None:
        super().__init__(message)
        self.evaluation = evaluation

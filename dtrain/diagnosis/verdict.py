"""What limits a run, from the time that each of its parts takes alone: arithmetic, no measuring.

* A loader and a step work at the same time, so a step of the run takes as long as the slower of the two (without workers
  they take turns: as long as both), and saves come on top: that is *expected*. What it takes longer than that, the two take
  away from each other: *cores*.
* The *gain* of a part is how many times faster the run were if that part cost nothing.
* *Waste* is what the model does not need: waiting for data, communication, saves, cores. The largest of them is the limit
  if its gain is worth the trouble. If none is, the model is the limit, as it should be; or loader and step are *balanced*,
  so that none of them is worth speeding up without the other.
"""

from __future__ import annotations

from dataclasses import dataclass

#: A gain that is worth the trouble, and more than the noise of a measure.
WORTH = 1.25


@dataclass(frozen=True)
class Times:
    """Seconds of one optimizer step, as the slowest rank sees them.

    Attributes:
        data: The loaders alone.
        compute: The step alone, without communication between ranks.
        step: The step alone, with it.
        together: Loader and step.
        save: What saves make the loop wait, spread over the steps.
        at_once: Whether the loader works while the step does, as one with workers.
    """

    data: float
    compute: float
    step: float
    together: float
    save: float = 0.0
    at_once: bool = True

    @property
    def expected(self) -> float:
        """The step of a run whose parts do not disturb each other."""
        return self.of_both(self.data, self.step) + self.save

    @property
    def actual(self) -> float:
        """The step of the run."""
        return self.together + self.save

    def of_both(self, data: float, step: float) -> float:
        """A step of the run without saves, if the loader took ``data`` and the step ``step``."""
        return max(data, step) if self.at_once else data + step


@dataclass(frozen=True)
class Verdict:
    """What limits a run.

    Attributes:
        limit: ``data``, ``communication``, ``saves``, ``cores``, ``model`` or ``balanced``.
        gains: Part to how many times faster the run were without it, the largest waste first, the model last.
    """

    limit: str
    gains: dict[str, float]

    def worthwhile(self) -> list[str]:
        """The waste that is worth looking at, the largest first."""
        return [part for part, gain in self.gains.items() if gain >= WORTH and part != "model"]


def judge(times: Times) -> Verdict:
    """What limits a run whose parts take ``times``."""
    communication = max(times.step - times.compute, 0.0)
    waste = {
        "data": times.expected / (times.step + times.save),
        "communication": times.expected / (times.of_both(times.data, times.compute) + times.save),
        "saves": times.expected / (times.expected - times.save),
        "cores": times.actual / times.expected,
    }
    gains = {part: max(waste[part], 1.0) for part in sorted(waste, key=lambda part: -waste[part])}
    gains["model"] = max(times.expected / (times.of_both(times.data, communication) + times.save), 1.0)
    largest = next(iter(gains))
    if gains[largest] >= WORTH:
        return Verdict(largest, gains)
    # The loader has no reserve: were the step faster, it would wait for it.
    return Verdict("balanced" if times.data * WORTH > times.step else "model", gains)


def save_stall(copy: float, write: float, interval: float) -> float:
    """Share of a run's time that its saves take.

    Args:
        copy: Seconds to copy everything to host memory, for which the loop waits.
        write: Seconds until a copy is safe on the disk. A save waits for the one before.
        interval: Seconds of training between two saves; infinite if there are none.
    """
    return (copy + max(write - interval, 0.0)) / interval

"""Everything that a run directory tells, read once for the whole report."""

from __future__ import annotations

from dataclasses import dataclass

from dtrain.tracking.history import History
from dtrain.tracking.report.evaluations import Evaluation, evaluations
from dtrain.tracking.report.health import Health, health
from dtrain.tracking.report.media import Medium, media
from dtrain.tracking.report.times import Times
from dtrain.tracking.report.trouble import BadSamples, Hang, Message, bad_samples, hangs, messages


@dataclass(frozen=True, eq=False)
class Evidence:
    """A run.

    Attributes:
        history: Metrics, status and config; its gaps name what is missing everywhere.
        times: Where its time went; None if it has not recorded that.
        bad: Its bad samples.
        hangs: Where its ranks were when it hung.
        messages: Warnings and errors of its ranks.
        media: Its newest pictures and texts.
        evaluations: Results of ``dtrain.evaluate``.
        health: What all of this means.
    """

    history: History
    times: Times | None
    bad: BadSamples
    hangs: list[Hang]
    messages: list[Message]
    media: list[Medium]
    evaluations: list[Evaluation]
    health: Health

    @classmethod
    def of(cls, history: History, now: float) -> Evidence:
        """Reads what is there.

        Args:
            history: The run.
            now: Unix seconds of the report.
        """
        times, path, gaps = Times.of(history), history.path, history.gaps
        hung = hangs(path, gaps)
        return cls(
            history,
            times,
            bad_samples(path, gaps),
            hung,
            messages(path, gaps),
            media(path, gaps),
            evaluations(path, gaps),
            health(history, times, hung, now),
        )

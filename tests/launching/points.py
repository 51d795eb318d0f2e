"""Points for tests, composed as the command line does."""

from __future__ import annotations

from dtrain.config import app
from dtrain.launching.point import Point, told_apart


def compose(*arguments: str) -> list[Point]:
    """What a command line of ``dtrain.launch`` means, before a sweep's points are told apart."""
    points: list[Point] = []
    app.run(lambda composed: points.append(Point.of(composed)), arguments)
    return points


def sweep(*arguments: str) -> list[Point]:
    """The points of a ``--multirun``."""
    return told_apart(compose("--multirun", *arguments))


def single(*arguments: str) -> Point:
    """The only point of a command line."""
    (point,) = compose(*arguments)
    return point

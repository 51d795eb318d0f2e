"""Jobs for tests, composed as the command line does."""

from __future__ import annotations

from dtrain.command_line import run
from dtrain.launch.job import Job, with_unique_dirs


def compose(*arguments: str) -> list[Job]:
    """The jobs of a command line of ``dtrain.launch``, before they get unique directories."""
    jobs: list[Job] = []
    run(lambda composed: jobs.append(Job.from_composed(composed)), arguments)
    return jobs


def sweep(*arguments: str) -> list[Job]:
    """The jobs of a ``--multirun``."""
    return with_unique_dirs(compose("--multirun", *arguments))


def single(*arguments: str) -> Job:
    """The only job of a command line."""
    (job,) = compose(*arguments)
    return job

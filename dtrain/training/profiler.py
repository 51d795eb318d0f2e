"""A profile of a few steps, by ``torch.profiler``: a trace to look at and a page of text. Off, it is not there at all."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from dtrain.config.errors import ConfigError
from dtrain.config.schema import ProfileConfig
from dtrain.distributed.world import World
from dtrain.tracking.trace import TraceSummary
from dtrain.training import spans

FOLDER = "profile"
_MANY_STEPS = 100  # a trace of these is hundreds of megabytes
logger = logging.getLogger("dtrain")


class StepProfiler:
    """Profiles a window of attempted steps on this rank; what goes wrong with it is said once and ends no run.

    The step before the window is profiled, too, and thrown away: it pays for the profiler's own start.

    Args:
        first: First attempted step of the window, from 1.
        last: Last one.
        run_dir: The run's directory.
        rank: This process.
        device: Where it computes.
        note: Told where the profile is.
    """

    def __init__(
        self, first: int, last: int, run_dir: Path, rank: int, device: torch.device, note: Callable[[str], None]
    ) -> None:
        self._first, self._last = first, last
        self._folder = run_dir / FOLDER
        self._rank = rank
        self._device = device
        self._note = note
        self._profile: profile | None = None
        self._span: AbstractContextManager[object] = nullcontext()  # that the step is in
        self._steps = 0

    @classmethod
    def of(
        cls, cfg: ProfileConfig, step: int, run_dir: Path, world: World, note: Callable[[str], None]
    ) -> StepProfiler | None:
        """The profiler of this rank, or None if it has nothing to do.

        Args:
            cfg: What is asked for.
            step: Attempted steps so far; what lies behind is not profiled.
            run_dir: The run's directory.
            world: The ranks.
            note: Told where the profile is.

        Raises:
            ConfigError: If there are no such steps or ranks.
        """
        if cfg.steps is None:
            return None
        if len(cfg.steps) != 2 or not 1 <= cfg.steps[0] <= cfg.steps[1] < cfg.steps[0] + _MANY_STEPS:
            raise ConfigError(
                f"profile.steps: got {list(cfg.steps)}, want the first and the last attempted step of a window of at most "
                f"{_MANY_STEPS}, such as [101,105]."
            )
        if missing := [rank for rank in cfg.ranks if not 0 <= rank < world.size]:
            raise ConfigError(f"profile.ranks: got {missing[0]}, the run has ranks 0 to {world.size - 1}.")
        first, last = cfg.steps
        if world.rank not in cfg.ranks or last <= step:
            return None
        return cls(max(first, step + 1), last, run_dir, world.rank, world.device, note)

    def before(self, step: int) -> None:
        """The attempted step ``step`` begins."""
        if self._profile is None and self._first - 1 <= step <= self._last:
            self._guarded(self._start, step)
        if self._profile is not None:
            self._span = spans.span(spans.STEP)
            self._span.__enter__()

    def after(self, step: int) -> None:
        """The attempted step ``step`` is done."""
        if self._profile is None:
            return
        self._span.__exit__(None, None, None)
        self._profile.step()
        self._steps += self._first <= step
        if step >= self._last:
            self._guarded(self._finish)

    def close(self) -> None:
        """Writes what there is of a window that the run did not get to the end of."""
        if self._profile is not None and self._steps:
            self._guarded(self._finish)
        elif self._profile is not None:
            self._guarded(self._stop)

    def _start(self, step: int) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        warmup = int(step < self._first)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=warmup, active=self._last - step + 1 - warmup, repeat=1),
        )
        spans.watch(True)
        self._profile.start()

    def _finish(self) -> None:
        stopped = self._stop()
        self._folder.mkdir(exist_ok=True)
        last = self._first + self._steps - 1
        path = self._folder / f"rank-{self._rank:05d}-steps-{self._first:09d}-{last:09d}.json.gz"
        aside = path.with_name(f".{path.name}")
        stopped.export_chrome_trace(str(aside))
        os.replace(aside, path)
        title = f"steps {self._first} to {last} of rank {self._rank}"
        page = TraceSummary.read(path, spans.STEP, spans.PARTS).text(title)
        path.with_name(path.name.removesuffix(".json.gz") + ".txt").write_text(f"{page}\n", encoding="utf-8")
        logger.info("profile of %s", page)
        self._note(f"profile of {title}: {path} (https://ui.perfetto.dev opens it), and a summary beside it")

    def _stop(self) -> profile:
        stopped, self._profile = self._profile, None
        assert stopped is not None
        spans.watch(False)
        stopped.stop()
        return stopped

    def _guarded(self, function: Callable[..., object], *args: object) -> None:
        try:
            function(*args)
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            self._profile, self._first = None, self._last + 2  # not again
            spans.watch(False)
            logger.warning("the profile of steps up to %d was not made: %s", self._last, error)
            self._note(f"WARNING: no profile ({type(error).__name__}: {error})")

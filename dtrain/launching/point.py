"""A run to start, and the command line of ``dtrain.train`` that means it anywhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf

from dtrain.config.app import Composed, require_choice
from dtrain.config.errors import ConfigError
from dtrain.config.run import Run
from dtrain.config.schema import LaunchConfig

# Said anew below, or of no meaning for what is started.
_NOT_FORWARDED = ("run.dir", "launch.dry_run")
_LEAST = {
    "nodes": 1,
    "min_nodes": 1,
    "processes_per_node": 1,
    "gpus_per_node": 0,
    "cpus_per_process": 1,
    "stop_seconds": 1,
    "max_running": 1,
}


@dataclass(frozen=True)
class Point:
    """One run of a launch.

    Attributes:
        run: The run; its directory may not exist yet.
        launch: How it is to be started.
        varied: The overrides in which it differs from the other points of its sweep; empty without a sweep.
    """

    run: Run
    launch: LaunchConfig
    varied: tuple[str, ...] = ()

    @classmethod
    def of(cls, composed: Composed) -> Point:
        """The run that a composed config describes.

        Raises:
            ConfigError: If there is nothing to train, a count is impossible, or its directory belongs to another run.
        """
        require_choice(composed)
        launch = OmegaConf.to_object(composed.cfg.launch)
        assert isinstance(launch, LaunchConfig)
        for name, least in _LEAST.items():
            value = getattr(launch, name)
            if value is not None and value < least:
                raise ConfigError(f"launch.{name}: got {value}, want at least {least}.")
        if launch.min_nodes is not None and launch.min_nodes > launch.nodes:
            raise ConfigError(f"launch.min_nodes: got {launch.min_nodes} for launch.nodes={launch.nodes}.")
        run = Run.of(composed)
        run.changes()
        return cls(run, launch)

    @property
    def arguments(self) -> list[str]:
        """What follows ``-m dtrain.train``: what the user typed, and where the run is."""
        return [*(part for folder in self.run.config_dirs for part in ("--config-dir", folder)), *self.overrides]

    @property
    def overrides(self) -> list[str]:
        """The same without the folders of presets."""
        kept = [override for override in self.run.overrides if _key(override) not in _NOT_FORWARDED]
        return [*kept, assignment("run.dir", str(self.run.dir))]


def told_apart(points: Sequence[Point]) -> list[Point]:
    """The points of a sweep, each with a directory of its own.

    A run's name does not depend on every key (``run.seed`` for one), and ``run.dir`` may be given. Points that would
    share a directory get the overrides in which they differ appended to it: ``runs/digits-1a2b3c4d-run.seed=1``. The
    same sweep started again finds the same directories.

    Raises:
        ConfigError: If two points do not differ at all.
    """
    common = set.intersection(*(set(point.run.overrides) for point in points)) if points else set()
    sweep = [replace(point, varied=tuple(o for o in point.run.overrides if o not in common)) for point in points]
    directories = [point.run.dir for point in sweep]
    sweep = [_renamed(point) if directories.count(point.run.dir) > 1 else point for point in sweep]
    directories = [point.run.dir for point in sweep]
    for point in sweep:
        if directories.count(point.run.dir) > 1:
            raise ConfigError(
                f"--multirun: several points of the sweep would be one run, {point.run.dir}. Take the repeated values "
                "out, or give each point a name: 'run.name=${run.seed}-...'"
            )
    return sweep


def assignment(key: str, value: str) -> str:
    """``key='value'`` as Hydra's command line reads it."""
    return f"{key}={QuotedString(value, Quote.single).with_quotes()}"


def _renamed(point: Point) -> Point:
    suffix = re.sub(r"[^\w.+=-]+", "_", "-".join(point.varied))
    if not suffix:
        return point
    run = point.run
    name = f"{run.name}-{suffix}"
    overrides = [o for o in run.overrides if _key(o) != "run.name"]
    run = replace(
        run,
        name=name,
        dir=run.dir.with_name(f"{run.dir.name}-{suffix}"),
        overrides=(*overrides, assignment("run.name", name)),
    )
    run.changes()
    return replace(point, run=run)


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")

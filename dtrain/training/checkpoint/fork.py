"""``run.fork=DIR@STEP``: a new run that starts from a checkpoint of an existing one.

* Weights, optimizer, counters and loss scale are those of the checkpoint, and so is the position in the data, which must be the
  same data. With ``run.fork_data=restart`` any data are read from epoch 0.
* The state is saved in the directory of the new run before its first step, so that resuming it needs nothing of DIR.
* ``DIR@0`` is a new run with the command line of DIR: the initial weights follow from the seed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dtrain.config.schema import RunConfig
from dtrain.distributed.collectives import from_rank0, on_all_ranks
from dtrain.errors import ConfigError, as_config_error
from dtrain.files import parse_yaml, read_bounded
from dtrain.runs.starts import read_starts
from dtrain.training.checkpoint.checkpoints import Checkpoint, Checkpoints
from dtrain.training.checkpoint.state import TrainState

_KEEP, _RESTART = "keep", "restart"


@dataclass(frozen=True)
class Fork:
    """Where a run branches off.

    Attributes:
        dir: Directory of the other run, absolute.
        step: Step of the checkpoint; 0 is its initial state.
        data: ``keep`` or ``restart``, as ``run.fork_data``.
    """

    dir: str
    step: int
    data: str

    @classmethod
    def parse(cls, run: RunConfig) -> Fork | None:
        """The fork of a config; None without one.

        Raises:
            ConfigError: If ``run.fork`` or ``run.fork_data`` is impossible.
        """
        if run.fork_data not in (_KEEP, _RESTART):
            raise ConfigError(f"run.fork_data: got {run.fork_data!r}, want {_KEEP} or {_RESTART}.")
        if run.fork is None:
            if run.fork_data != _KEEP:
                raise ConfigError(f"run.fork_data={run.fork_data}, but run.fork is not set. Set run.fork=DIR@STEP.")
            return None
        found = re.fullmatch(r"(.+)@(\d+)", run.fork)
        if found is None:
            raise ConfigError(
                f"run.fork: got {run.fork!r}, want DIR@STEP, such as runs/digits@200: the directory of a run, and a step of "
                "which it has a checkpoint, or 0."
            )
        return cls(str(Path(found[1]).expanduser().absolute()), int(found[2]), run.fork_data)

    @property
    def keeps_data(self) -> bool:
        """Whether the run continues in the data of the checkpoint."""
        return self.step > 0 and self.data == _KEEP

    def require(self, optimizer: Any) -> None:
        """Collective. Refuses a fork that is impossible, before anything is built.

        Args:
            optimizer: The config node ``optimizer`` of the new run.

        Raises:
            ConfigError: On every rank, if DIR has no such checkpoint, or the classes of the optimizers differ.
        """
        from_rank0(lambda: self._require(optimizer))
        if self.step:
            self._checkpoints.verify(self.step)

    def _require(self, optimizer: Any) -> None:
        directory = Path(self.dir)
        if not (directory / "config.yaml").is_file():
            raise ConfigError(f"run.fork: {directory} is not a run directory (it has no config.yaml).")
        starts = read_starts(directory)
        begin = starts[0].step if starts else 0
        if self.step == 0 and begin:
            origin = starts[0].fork
            raise ConfigError(
                f"run.fork: {directory} was itself forked, from {origin.get('dir')}@{origin.get('step')}, so it has no step 0. "
                "Name a checkpoint of it, or fork that run."
            )
        steps = self._checkpoints.steps()
        if self.step and self.step not in steps:
            raise ConfigError(
                f"run.fork: {directory} has no checkpoint of step {self.step}, but of {', '.join(map(str, steps)) or 'none'}. "
                "Name one of them, or 0 for the initial state."
            )
        with as_config_error(f"run.fork: {directory / 'config.yaml'} cannot be read"):
            saved = parse_yaml(read_bounded(directory / "config.yaml"))
        theirs = (saved.get("optimizer") or {}).get("_target_") if isinstance(saved, Mapping) else None
        ours = optimizer.get("_target_") if isinstance(optimizer, Mapping) else None
        if self.step and theirs != ours:
            raise ConfigError(
                f"run.fork: {directory} was trained with the optimizer {theirs}, this run has {ours}, which cannot continue "
                "from its state. Use the same class, or begin with its weights only: run.weights_from."
            )

    def load(self) -> Checkpoint:
        """Reads the checkpoint, which ``require`` has verified.

        Raises:
            BadCheckpoint: If it cannot be read.
        """
        return self._checkpoints.load(self.step)

    def restore(self, run: TrainState, checkpoint: Checkpoint) -> str:
        """Collective. Restores the state; returns a description for the banner.

        Args:
            run: The new run.
            checkpoint: From ``load``.

        Raises:
            ConfigError: On every rank, if the checkpoint is from a different model or different data.
        """
        keeps = self.data == _KEEP

        def load() -> None:
            try:
                run.restore(checkpoint, with_data=keeps)
            except ConfigError as error:
                remedy = " To use different data, set run.fork_data=restart." if str(error).startswith("data:") else ""
                raise ConfigError(f"run.fork: {error}{remedy}") from error

        on_all_ranks(load)
        run.totals = replace(run.totals, evaluation_due=False, restarts=0, lost_seconds=0.0, down_seconds=0.0)
        if not keeps:
            run.segments = []  # of different data, or of steps whose order this run does not continue
        run.forked = asdict(self)
        return f"after step {self.step}, forked from {self.dir}" + ("" if keeps else ", with the data from epoch 0")

    @property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(Path(self.dir) / "checkpoints")


def fork_of(run: RunConfig, optimizer: Any) -> Fork | None:
    """Collective. The fork from which a run without a checkpoint begins; None if it begins anew.

    Raises:
        ConfigError: On every rank, if it is impossible.
    """
    fork = Fork.parse(run)
    if fork is not None:
        fork.require(optimizer)
    return fork if fork is not None and fork.step else None

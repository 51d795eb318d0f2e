"""Recomputes a part of a run in memory: dtrain's own build, restore and loop, stopped after the last step, writing nothing.

* The ``run.dir`` of the recomputed run is a temporary folder, so that hooks and logs write there, and trackers are off.
* Where the loop saves, ``ComparedCheckpoints`` compares the state with the recorded checkpoint of that step, and ends the run
  after the last step of the part.
* Samples that could not be read in the run are masked again. One that cannot be read now, but could then, is an error.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from dtrain.config.schema import Config
from dtrain.data import Batch
from dtrain.data.loading.masked_source import as_recorded
from dtrain.distributed.collectives import broadcast_buffers, from_rank0, on_all_ranks
from dtrain.distributed.hang import HangWatch
from dtrain.distributed.stop import StopRequests
from dtrain.distributed.world import World
from dtrain.errors import ConfigError, Explained, as_config_error
from dtrain.replay.plan import Part
from dtrain.replay.recorded import RecordedRun
from dtrain.runs.starts import VOTE
from dtrain.tracking.sinks import NullSinks
from dtrain.training.build import build_run
from dtrain.training.checkpoint.checkpoints import BadCheckpoint, Checkpoint, Checkpoints
from dtrain.training.checkpoint.manager import CheckpointManager
from dtrain.training.checkpoint.resume import EarlierStarts, build_rest, restore
from dtrain.training.checkpoint.state import TrainState
from dtrain.training.checkpoint.tensors import Part as TensorPart
from dtrain.training.checkpoint.tensors import StoredTensor
from dtrain.training.hook_calls import build_hooks
from dtrain.training.loop import Loop
from dtrain.training.monitor.run_logger import RunLogger
from dtrain.training.step import StepOutcome

_END = "the last step to recompute"
# Parts of the state that are compared; the others are times, versions and the results of evaluations.
_COMPARED = ("counters", "optimizer", "loss_scale", "loader")


@dataclass(frozen=True)
class Recomputed:
    """The result of a part, equal on all ranks.

    Attributes:
        votes: ``VOTE``, of the steps of the part.
        checkpoints: Step of a recorded checkpoint to the names of its tensors and states that differ.
        ended: Why it ended before the last step of the part; "" if it did not.
    """

    votes: np.ndarray
    checkpoints: Mapping[int, list[str]] = field(default_factory=dict)
    ended: str = ""


class CheckpointGone(Exception):
    """A checkpoint was deleted, or is broken.

    Args:
        step: Its step.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"the checkpoint of step {step} cannot be read")
        self.step = step


def recompute(
    cfg: Config,
    part: Part,
    run: RecordedRun,
    world: World,
    watch: HangWatch,
    folder: Path,
    *,
    keep: bool,
    on_step: Callable[[int], None] = lambda steps: None,
    look: Look | None = None,
) -> Recomputed:
    """Collective. Recomputes the steps of a part.

    Args:
        cfg: The config of the part's start, with the changes of the command line.
        part: The part.
        run: The records.
        world: The ranks.
        watch: Detects hangs.
        folder: A temporary folder, which all ranks see.
        keep: Whether to save the state after the last step in it, for the next part.
        on_step: Called with 1 after every step.
        look: Called within the last step.

    Raises:
        CheckpointGone: On every rank, if the checkpoint that the part begins from cannot be read.
        ConfigError: On every rank, if a config or the data do not fit the records.
    """
    cfg = _without_effects(cfg, run.dir, folder / "run")
    hooks = on_all_ranks(lambda: build_hooks(cfg))
    state, _ = build_run(cfg, folder / "run", world, with_eval_data=hooks.read_evaluations)
    state.hooks = hooks
    if not state.train_loader.segment():
        raise ConfigError(
            "data.train is a stream, which can only be read from its beginning: its steps cannot be recomputed. Write it to "
            "shards (dtrain pack) to be able to replay a run."
        )
    segments = [each for each in run.segments() if each["step"] <= part.after]
    if segments:
        with as_config_error("data"):
            on_all_ranks(lambda: state.train_loader.read_as(segments[-1]["state"]))
        state.rebuild_schedule()
    if part.from_before:
        kept = Checkpoints(folder / "state")
        begin = on_all_ranks(lambda: kept.load(part.after))
        build_rest(state, begin)
        on_all_ranks(lambda: state.restore(begin))
    elif part.after:
        _restore(state, run, part.after)
    else:
        restore(state, EarlierStarts())
    state.train_loader.source = as_recorded(state.train_loader.source, run.masked())

    from_rank0(lambda: (folder / "run" / "logs").mkdir(parents=True, exist_ok=True))
    logger = _VoteLog(state, part, {step: len(keys) for step, keys in run.bad_samples().items()}, on_step)
    manager = ComparedCheckpoints(state, logger, part.last, run, folder / "state" if keep else None)
    try:
        with StopRequests(None, stuck=watch.declare) as stop:
            hooks.call("on_start", state)
            if look is not None:
                _look_at(state, part.last, look)
            loop = Loop(state, max(state.last_step, part.last), logger, stop, hooks, manager)
            with watch.following(loop.place, folder / "run" / "logs"):
                _, reason = loop.run()
    finally:
        state.train_loader.close()
        if state.eval_loader is not None:
            state.eval_loader.close()
    ended = "" if reason == _END or state.step.step >= part.last else reason or "the run ended"
    return Recomputed(logger.votes(), manager.different, ended)


class Look(Protocol):
    """Callbacks before and after the forward and backward of one step, on every rank."""

    def before(self, run: TrainState, batches: list[Batch]) -> None:
        """Before the forward of the first of this rank's micro-batches; the state must be as before when it returns."""

    def after(self, run: TrainState, batches: list[Batch]) -> None:
        """After the backward of the last one, and before the update."""


def _look_at(state: TrainState, last: int, look: Look) -> None:
    accumulate = state.step.accumulate

    def looked_at(window: Iterable[Batch], micro_batches: int) -> None:
        if state.step.step + 1 != last:
            accumulate(window, micro_batches)
            return
        state.step.accumulate = accumulate  # type: ignore[method-assign]
        batches = list(window)
        look.before(state, batches)
        accumulate(batches, micro_batches)
        look.after(state, batches)

    state.step.accumulate = looked_at  # type: ignore[method-assign, assignment]


def _without_effects(cfg: Config, directory: Path, instead: Path) -> Config:
    """The config without what a replay must not do, none of which changes the result; hooks write to ``instead``."""
    cfg = copy.deepcopy(cfg)
    names = {str(directory), str(directory.absolute()), str(cfg.run.dir)}

    def elsewhere(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: elsewhere(value) for key, value in node.items()}
        if isinstance(node, list):
            return [elsewhere(value) for value in node]
        if isinstance(node, str):
            for name in sorted(names, key=len, reverse=True):
                node = re.sub(rf"{re.escape(name)}(?=/|$)", str(instead), node)
        return node

    cfg.train.hooks = elsewhere(cfg.train.hooks)
    cfg.tracker.name, cfg.tracker.media, cfg.profile.steps, cfg.data.record_keys = "none", False, None, False
    cfg.checkpoint.every_minutes = cfg.run.max_hours = None
    return cfg


def _restore(state: TrainState, run: RecordedRun, step: int) -> None:
    loaded: list[Checkpoint] = []

    def verified() -> bool:
        """Collective. Whether the checkpoint is whole."""
        with suppress(ConfigError):  # an error of any rank is one of all
            run.checkpoints.verify(step)
            return True
        return False

    def all_can(function: Callable[[], None]) -> bool:
        """Collective. Whether every rank can read what ``function`` reads of the checkpoint."""

        def attempt() -> bool:
            try:
                function()
            except (BadCheckpoint, OSError, SafetensorError):
                return False
            return True

        can = [False] * state.world.size
        dist.all_gather_object(can, on_all_ranks(attempt))
        return all(can)

    if not (verified() and all_can(lambda: loaded.append(run.checkpoints.load(step)))):
        raise CheckpointGone(step)
    build_rest(state, loaded[0])
    if not all_can(lambda: state.restore(loaded[0])) or state.step.step != step:
        raise CheckpointGone(step)


class _VoteLog(RunLogger):
    """Keeps the votes of the steps, on every rank; writes nothing."""

    def __init__(self, run: TrainState, part: Part, bad: Mapping[int, int], on_step: Callable[[int], None]) -> None:
        super().__init__(run, part.last, NullSinks())
        self._bad, self._on_step = bad, on_step
        self._votes: list[tuple[float, ...]] = []

    def votes(self) -> np.ndarray:
        """``VOTE``, shape ``[steps]``."""
        return np.array(self._votes, VOTE)

    def step(self, outcome: StepOutcome) -> None:
        it = outcome.stats
        self._votes.append(
            (outcome.step, it.applied, it.loss_sum, it.count, outcome.grad_norm, outcome.lr, it.loss_scale)
        )
        self._on_step(1)
        if it.bad != (then := self._bad.get(outcome.step, 0)):
            raise Explained(
                f"step {outcome.step}: {it.bad} samples cannot be read, in the run it was {then}. They are named above, or in "
                "logs/bad-rank-*.jsonl of the run. Make the data readable as they were."
            )

    def status(self, *, at_most_every: float = 0.0) -> None:
        pass

    def warn(self, text: str) -> None:
        pass  # the run has said it


class ComparedCheckpoints(CheckpointManager):
    """Compares the state with recorded checkpoints where a run would save.

    Args:
        run: The recomputed run.
        listener: As for ``CheckpointManager``.
        last: Step after which the run ends.
        recorded: The records.
        folder: Where the state after the last step is saved; None: nowhere.

    Attributes:
        different: Step of a compared checkpoint to the names of tensors and states that differ, on any rank.
    """

    def __init__(
        self, run: TrainState, listener: RunLogger, last: int, recorded: RecordedRun, folder: Path | None
    ) -> None:
        super().__init__(run, listener)
        self._last, self._recorded, self._keeps = last, recorded, folder is not None
        if folder is not None:
            run.checkpoints = Checkpoints(folder)
        steps = from_rank0(recorded.checkpoints.steps)
        self._recorded_steps = {step for step in steps if step > run.step.step}
        self.different: dict[int, list[str]] = {}

    def is_due_after(self, step: int) -> bool:
        return step == self._last or step in self._recorded_steps or super().is_due_after(step)

    def is_best(self, metrics: dict[str, float]) -> bool:
        return False

    def save(self, metrics: dict[str, float], *, final: bool) -> None:
        step = self._run.step.step
        broadcast_buffers(self._run.model)  # as a save does
        if step in self._recorded_steps:
            names: list[str] | None = []
            if self._run.is_sharded or self._run.world.rank == 0:
                names = _different(self._run.checkpoint({}), self._recorded, step)
            all_names: list[list[str] | None] = [None] * self._run.world.size
            dist.all_gather_object(all_names, names)
            if None not in all_names:
                self.different[step] = sorted({name for each in all_names for name in each or ()})
        if step >= self._last:
            if self._keeps:
                super().save(metrics, final=True)
            self._run.end_early(_END)
        self._saved_step = step

    def save_before_failing(self, metrics: dict[str, float]) -> None:
        pass


def _different(own: Checkpoint, run: RecordedRun, step: int) -> list[str] | None:
    """Names of what differs on this rank; None if the recorded checkpoint cannot be read any more."""
    try:
        recorded = run.checkpoints.load(step)
        saved = json.loads(json.dumps({key: own.state[key] for key in _COMPARED}))
        names = [key for key in _COMPARED if saved[key] != recorded.state.get(key)]
        for group, tensors in own.tensors.items():
            stored = recorded.tensors.get(group, {})
            names += [f"{group}.{name}" for name, tensor in tensors.items() if not _is_equal(tensor, stored.get(name))]
    except (BadCheckpoint, OSError, SafetensorError):
        return None
    return names


def _is_equal(own: Tensor | TensorPart | StoredTensor, recorded: Any) -> bool:
    """Whether all bits of a tensor, or of a rank's part of it, are those of the recorded one."""
    if not isinstance(recorded, StoredTensor):
        return False
    if isinstance(own, TensorPart):
        box = tuple(slice(first, first + n) for first, n in zip(own.offset, own.values.shape, strict=True))
        return own.shape == tuple(recorded.shape) and _bits(own.values, recorded[box])
    assert isinstance(own, Tensor)
    return own.shape == recorded.shape and _bits(own, recorded[...])


def _bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*raw)

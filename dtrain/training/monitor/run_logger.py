"""Records, status, notes and media of a run while it trains, and the banner at its start.

* ``RunLogger`` exists on all ranks; rank 0 writes. A full disk ends no run: a failed write becomes a warning.
* ``MediaLogger`` makes pictures and texts after evaluations: confusion matrices, and the results of an ``IllustratingTask``. It
  works on rank 0, after the last evaluation, and before that at most once a minute, because one picture takes as long as many
  steps of a small model. In a sharded run the task runs on all ranks, which have the model together. The run is saved before,
  so an error in a drawing loses nothing.
"""

from __future__ import annotations

import copy
import logging
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtrain import __version__
from dtrain.config.directions import direction
from dtrain.config.schema import CheckpointConfig
from dtrain.console import print_banner, until_reader_leaves
from dtrain.data import Batch, ShardLoader
from dtrain.data.loading.sample_log import truncate_sample_logs
from dtrain.distributed.collectives import from_rank0
from dtrain.distributed.sharding import is_sharded
from dtrain.distributed.world import World
from dtrain.errors import as_config_error, without_secrets_in
from dtrain.optimizers.groups import parameter_counts
from dtrain.precision.modules import dtype_name
from dtrain.runs.records import Record
from dtrain.runs.run_dir import write_status
from dtrain.runs.run_spec import RunSpec, config_without_secrets
from dtrain.runs.starts import STEPS, Start, StepLog, record_start
from dtrain.tracking.sinks import NullSinks, Sinks, build_sinks, describe_trackers
from dtrain.training.checkpoint.state import TrainState, device_kind
from dtrain.training.checkpoint.uploads import MirrorUploads
from dtrain.training.monitor.communication import run_traffic
from dtrain.training.schedule import cut_short, schedule_horizon
from dtrain.training.setup.batchnorm import fixed_shapes
from dtrain.training.setup.loaders import eval_loader
from dtrain.training.setup.model import CompilerLog
from dtrain.training.step import StepOutcome
from dtrain.training.task import Evaluation, IllustratingTask
from dtrain.urls import redacted

#: Least time between two drawings.
SECONDS_BETWEEN = 60.0
_STATUS_EVERY = 5.0  # seconds
logger = logging.getLogger("dtrain")


class RunLogger:
    """Writes records, status and notes.

    Args:
        run: The run.
        last_step: Attempted step after which the run is finished.
        sinks: Destinations of records and notes.
        steps: Destination of the votes of all steps; None on ranks other than 0.

    Attributes:
        media: Makes media after evaluations.
        uploads: Copies the run to its mirror, on rank 0; None without ``checkpoint.mirror``.
    """

    def __init__(self, run: TrainState, last_step: int, sinks: Sinks | NullSinks, steps: StepLog | None = None) -> None:
        self._run = run
        self._last_step = last_step
        self._sinks = sinks
        self._steps, self._steps_failed = steps, False
        self._spec: RunSpec | None = None  # on rank 0 of a run that is recorded
        self._status_at = float("-inf")
        self._compiler = CompilerLog(run.model, self.note)
        self.uploads: MirrorUploads | None = None
        self.media = MediaLogger(run, sinks)
        run.media_sink = sinks.media

    @classmethod
    def open(cls, run: TrainState, spec: RunSpec, last_step: int) -> RunLogger:
        """Begins the segment of this start. Records the start and opens the sinks on rank 0.

        Records and sample logs of steps that the restored run repeats are cut.

        Args:
            run: The run, restored.
            spec: Name, directory and config.
            last_step: Attempted step after which the run is finished.

        Raises:
            ConfigError: If a sink cannot be opened, or the start not recorded.
        """
        segment = run.begin_segment()
        if run.world.rank != 0:
            return cls(run, last_step, NullSinks())
        truncate_sample_logs(run.run_dir / "logs", run.step.step)
        with as_config_error("run.dir"):
            record_start(run.run_dir, describe_start(run, spec, segment))
            steps = StepLog(run.run_dir, run.step.step)
        with as_config_error("tracker"):
            sinks = build_sinks(
                run.cfg.tracker,
                run.run_dir,
                spec.name,
                config_without_secrets(spec.config),
                run.step.step,
                evaluation_due=run.totals.evaluation_due,
                total_steps=last_step,
            )
        logger = cls(run, last_step, sinks, steps)
        logger._spec = spec
        return logger

    def other_micro_batches(self) -> None:
        """Begins a segment, and records it like a start: from the next step on, micro-batches have other sizes."""
        segment = self._run.begin_segment()
        if self._spec is None:
            return
        try:
            record_start(self._run.run_dir, describe_start(self._run, self._spec, segment))
        except OSError as error:
            self.warn(f"the size of micro-batches could not be recorded ({error}): replays will not know it")

    def step(self, outcome: StepOutcome) -> None:
        """Takes the vote of every step, in their order; ``write_steps`` writes them."""
        if self._steps is not None:
            it = outcome.stats
            lr, scale = outcome.lr, it.loss_scale
            self._steps.add(outcome.step, it.applied, it.loss_sum, it.count, outcome.grad_norm, lr, scale)

    def write_steps(self) -> None:
        """Writes the votes of the steps so far; a failed write becomes a warning, and the next call writes them."""
        if self._steps is None:
            return
        try:
            self._steps.write()
            self._steps_failed = False
        except OSError as error:
            if not self._steps_failed:  # once, not with every record of a full disk
                self._steps_failed = True
                self.warn(f"{STEPS} could not be written ({error}).")

    def record_step(self, record: Record) -> None:
        """Logs the record of a step and messages of the compiler, and updates the status if it is old."""
        self.record(record)
        self.write_steps()
        if self.uploads is not None:
            self.uploads.poll()
        self.status(at_most_every=_STATUS_EVERY)
        self._compiler.report()

    def record(self, record: Record) -> None:
        """Logs one record."""
        self._sinks.log(record)

    def status(self, *, at_most_every: float = 0.0) -> None:
        """Writes ``status.json``: the run is running, and its step.

        Args:
            at_most_every: Does nothing if fewer seconds have passed since the last write.
        """
        if self._run.world.rank != 0 or time.monotonic() - self._status_at < at_most_every:
            return
        entries = self._run.status_entries()
        try:
            write_status(self._run.run_dir, "running", self._run.step.step, last_step=self._last_step, **entries)
        except OSError as error:
            self.warn(f"status.json could not be written ({error}).")
        self._status_at = time.monotonic()

    def saved(self, path: Path, step: int, is_best: bool) -> None:
        """Passes a written checkpoint to the mirror, and to wandb if ``tracker.artifacts`` is set; any thread may call."""
        if self.uploads is not None:
            self.uploads.saved(path, step)
        self._sinks.checkpoint(path, step, is_best)

    def note(self, line: str) -> None:
        """Shows information for the user."""
        self._sinks.note(line)

    def warn(self, text: str) -> None:
        """Shows and logs something that the user should act on; wandb sends an alert."""
        logger.warning(text)
        self._sinks.note(f"WARNING: {text}")
        self._sinks.alert(text)

    def alert(self, text: str) -> None:
        """Sends an alert to the user, if the run has a tracker that does."""
        self._sinks.alert(text)

    def recovered(self, text: str) -> None:
        """Reports that an earlier warning has cleared."""
        logger.info(text)
        self._sinks.note(text)

    def close(self) -> None:
        """Reports the last messages of the compiler."""
        self._compiler.close()

    def finish(self, state: str, reason: str | None) -> None:
        """Ends the sinks with the final state of the run: ``finished``, ``stopped`` or ``failed``."""
        self.write_steps()
        self._sinks.finish(state, reason)


class MediaLogger:
    """Makes pictures and texts after evaluations."""

    def __init__(self, run: TrainState, sinks: Sinks | NullSinks) -> None:
        self._run = run
        self._sinks = sinks
        self._on = run.world.rank == 0 and run.cfg.tracker.media
        self._drawn_at = time.monotonic()

    def after(self, evaluation: Evaluation, *, last: bool) -> None:
        """Makes the media of an evaluation, if it is the last one of the run or a minute has passed.

        Collective in a sharded run, whose ranks have to run the model together.
        """
        due = self._on and (last or time.monotonic() - self._drawn_at > SECONDS_BETWEEN)
        if is_sharded(self._run.model) and isinstance(self._run.task, IllustratingTask):
            due = from_rank0(lambda: due)
        if not due:
            return
        for name, content in self._draw(evaluation).items():
            if self._on:
                self._sinks.media(self._run.step.step, name, content)
        self._drawn_at = time.monotonic()

    def _draw(self, evaluation: Evaluation) -> dict[str, bytes | str]:
        run = self._run
        media: dict[str, bytes | str] = {}
        if "confusion" in evaluation.tables and self._on:
            # Here, because it imports matplotlib, which takes a second.
            from dtrain.runs.evaluation_results import confusion_picture

            media["confusion"] = confusion_picture(evaluation.tables["confusion"], run.class_names)
        if isinstance(run.task, IllustratingTask):
            with run.inference() as model:
                drawn = run.task.illustrate(model, evaluation, evaluation_samples(run))
            if not isinstance(drawn, Mapping):
                raise TypeError(
                    f"{type(run.task).__name__}.illustrate returned a {type(drawn).__name__}, want a mapping of names to "
                    "PNG bytes or texts: {'fit': png_bytes, 'answers': 'a text'}, or {} for none."
                )
            media |= drawn
        return media


def evaluation_samples(run: TrainState, rows: int | None = None) -> Iterator[Batch]:
    """The whole evaluation set in stored order, on this rank alone and on its device.

    Args:
        run: The run.
        rows: Rows of a batch; None: as in training.
    """
    cfg = copy.deepcopy(run.cfg)
    cfg.data.num_workers = 0
    cfg.train.micro_batch_size = rows or run.train_loader.rows_per_micro_batch
    cfg.train.global_batch_size = rows or cfg.train.global_batch_size
    loader = eval_loader(cfg, replace(run.world, rank=0, size=1), run.precision, in_stored_order=True)
    if loader is None:
        return
    try:
        for batch in loader.epoch(0):
            yield batch.to(run.world.device)
    finally:
        loader.close()


def describe_start(run: TrainState, spec: RunSpec, segment: Mapping[str, Any]) -> Start:
    """The record of a start on this device.

    Args:
        run: The run, restored.
        spec: Its command line and config.
        segment: The segment that begins.
    """
    return Start(
        step=run.step.step,
        time=time.time(),
        **spec.command_line(),
        config=spec.with_effect(),
        ranks=run.world.size,
        micro_batch=run.train_loader.rows_per_micro_batch,
        device=device_kind(run.world.device),
        threads=torch.get_num_threads(),
        versions={"dtrain": __version__, "torch": torch.__version__, "python": platform.python_version()},
        code=run.code,
        segment=segment,
        fork=run.forked,
    )


def write_final_status(run: TrainState, state: str, reason: str | None, last_step: int) -> None:
    """Writes the final status.json: on rank 0, and on the first rank of each machine with a run directory of its own.

    Args:
        run: The run.
        state: ``finished`` or ``stopped``.
        reason: Why the run ended early; None if it did not.
        last_step: Attempted step after which the run is finished.
    """
    step = run.step.step
    last_step = step if state == "finished" else last_step  # a hook may have ended the run before
    write_status(run.run_dir, state, step, reason, last_step=last_step, **run.status_entries())


def print_end(run: TrainState, state: str, reason: str | None) -> None:
    """On rank 0: prints state and directory of a run that has ended; arguments as ``write_final_status``."""
    if run.world.rank == 0:
        # A run is not failed because nobody reads its output any more.
        with until_reader_leaves():
            print(f"{state} at step {run.step.step}{f' ({reason})' if reason else ''}: {run.run_dir}", flush=True)


def print_start_banner(spec: RunSpec, run: TrainState, start: str, last_step: int, rows: Mapping[str, str]) -> None:
    """On rank 0: prints the banner of a start.

    Args:
        spec: Name and directory.
        run: The run, restored.
        start: The value of the row ``starts``.
        last_step: Attempted step after which the run is finished.
        rows: Further rows; empty ones are left out.
    """
    if run.world.rank == 0:
        every = banner_rows(spec, run, start, last_step) | {"restarts": run.totals.interruptions(), **rows}
        print_banner("dtrain", {name: without_secrets_in(text) for name, text in every.items() if text})


def banner_rows(spec: RunSpec, run: TrainState, start: str, last_step: int) -> dict[str, str]:
    """The rows that every run has; arguments as in ``print_start_banner``."""
    world, loader, cfg, optimizer = run.world, run.train_loader, run.cfg, run.optimizer
    micro, rows = loader.micro_batches_per_step, loader.rows_per_micro_batch
    masked = world.size * micro * rows - cfg.train.global_batch_size
    # The schedule's own, which ``schedule.horizon`` may have set; a user's schedule may have none.
    horizon = getattr(run.step.schedule, "horizon", schedule_horizon(cfg.train, loader))
    first = loader.steps_in(1)
    typed = isinstance(cfg.schedule, Mapping) and cfg.schedule.get("horizon") is not None
    grown = f" (of the first start, with {first:,} an epoch)" if loader.has_changed and not typed else ""
    fixed = fixed_shapes(run.model)
    cut = cut_short(run.step.schedule, cfg.train, loader, last_step)
    scaled = ", loss scaling" if run.precision.scales_gradients else ""
    if run.precision.compute_dtype == torch.float16 and not scaled:
        scaled = ", no loss scaling"
    return {
        "run": spec.name,
        "directory": str(spec.dir),
        "starts": start,
        "ranks": f"{world.size} on {_device_name(world)}, {world.backend.split(':')[-1]}",
        "precision": f"{run.precision.name} (autocast {dtype_name(run.precision.compute_dtype)}{scaled})",
        "transfer": loader.transfer.describe(),
        "train data": "\n".join(
            [loader.source.summary(), *loader.data_changes, *_mixed(loader, last_step - run.step.step)]
        ),
        "eval data": run.eval_loader.source.summary() if run.eval_loader is not None else "none",
        "workers": f"{loader.num_workers} for each rank"
        + (f" ({loader.workers_reason})" if loader.workers_reason else ""),
        "global batch": f"{cfg.train.global_batch_size} = {_counted(world.size, 'rank')} x "
        f"{_counted(micro, 'micro-batch', 'es')} x {_counted(rows, 'row')}" + (f" ({masked} masked)" if masked else ""),
        "steps": f"{last_step:,} ({loader.steps_per_epoch:,} an epoch), schedule over {horizon:,}{grown}"
        + (f", {cut}" if cut else ""),
        "model": f"{_parameters(run.model)}, {type(optimizer).__name__}"
        + (" (fused)" if optimizer.defaults.get("fused") else ""),
        "groups": _groups(run),
        "best": _best_checkpoint(cfg.checkpoint),
        "BatchNorm": f"masked rows are in its statistics ({fixed})" if fixed else "",
        "communication": run_traffic(run).describe(),
        "records": describe_trackers(cfg.tracker, spec.dir),
        "mirror": redacted(cfg.checkpoint.mirror or ""),
        "versions": f"torch {torch.__version__}, Python {sys.version.split()[0]}",
    }


def _parameters(model: nn.Module) -> str:
    """Such as ``11,181,642 parameters, 5,130 of them trained``."""
    everything, trained = parameter_counts(model)
    return f"{everything:,} parameters" + (f", {trained:,} of them trained" if trained < everything else "")


def _groups(run: TrainState) -> str:
    """Such as ``heads lr 6e-03, default lr 2e-03``; "" if there is one learning rate."""
    groups = zip(run.optimizer.param_groups, run.step.base_lrs, strict=True)
    rates = {str(group.get("name")): rate for group, rate in groups}
    return ", ".join(f"{name} lr {rate:.1e}" for name, rate in rates.items()) if len(set(rates.values())) > 1 else ""


def _best_checkpoint(cfg: CheckpointConfig) -> str:
    """Such as ``smallest eval/loss``; "" if no best checkpoint is kept."""
    if cfg.best is None:
        return ""
    return f"{'largest' if (cfg.best_mode or direction(cfg.best)) == 'max' else 'smallest'} {cfg.best}"


def _mixed(loader: ShardLoader, steps: int) -> list[str]:
    """What the sources of a mixture will give in the next steps."""
    if not (before := loader.samples_by_source()):
        return []
    ahead, epochs = loader.samples_by_source(steps), loader.epochs_by_source(steps)
    total = sum(ahead.values()) - sum(before.values())
    parts = [
        f"{name} {(ahead[name] - before[name]) / max(total, 1):.2%} ({epochs[name]:.3g} epochs by then)"
        for name in ahead
    ]
    return [f"in the next {steps:,} steps: {', '.join(parts)}"]


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"


def _device_name(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"

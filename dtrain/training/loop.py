"""The loop: window, vote, step, commit; log, evaluate, save and stop where all ranks agree to.

Everything that decides when something happens is equal on all ranks: the attempted step, the loader's position, and what
the vote of an earlier step said. The outcome of a step is settled in the next one, after its backward is queued, so that
a GPU is never waited for; where something depends on it (a save, an evaluation, the end), it is settled at once.

An evaluation that a stop interrupts leaves no trace but that it is *due*: the checkpoint says so, and the next start does it
before its first step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from dtrain.config.errors import ConfigError, users_to_fix
from dtrain.data import Batch
from dtrain.data.bad_samples import BadSampleBudget
from dtrain.data.device_copies import DeviceCopies
from dtrain.data.ledger import Ledger
from dtrain.distributed.collectives import equalise_buffers
from dtrain.distributed.hang import BACKSTOP, Place
from dtrain.distributed.process_group import set_timeout
from dtrain.distributed.stop import StopRequests
from dtrain.precision.lowered import LoweredModules
from dtrain.tracking.sinks import NullSinks, Sinks
from dtrain.training.checkpoints import Checkpoints
from dtrain.training.compiler_log import CompilerLog
from dtrain.training.evaluation import Interrupted, evaluate
from dtrain.training.illustration import Illustrations
from dtrain.training.journal import Journal
from dtrain.training.measures import Measures, Timing
from dtrain.training.out_of_memory import out_of_memory_explained
from dtrain.training.parts import Parts
from dtrain.training.profiler import StepProfiler
from dtrain.training.refusals import refuse_mean
from dtrain.training.result import Evaluation
from dtrain.training.saves import Saves
from dtrain.training.seed import seed_generators
from dtrain.training.spans import DATA, span
from dtrain.training.step import Outcome
from dtrain.training.sync_guard import host_syncs_announced

logger = logging.getLogger("dtrain")


class Loop:
    """Trains until the last step, a stop request or an error.

    Args:
        parts: The objects of the run, restored from a checkpoint if there is one.
        last_step: Attempted step after which the run is finished.
        checkpoints: Where checkpoints go.
        sinks: Where records go.
        stop: Requests to stop.

    Raises:
        ConfigError: If ``train.log_every`` is impossible.
    """

    def __init__(
        self, parts: Parts, last_step: int, checkpoints: Checkpoints, sinks: Sinks | NullSinks, stop: StopRequests
    ) -> None:
        # Read once: a node of OmegaConf takes 35 microseconds to say what a key is.
        self._log_every = parts.cfg.train.log_every
        self._eval_every = parts.cfg.train.eval_every
        self._save_every = parts.cfg.checkpoint.every_steps
        if self._log_every < 1:
            raise ConfigError(f"train.log_every: got {self._log_every}, want at least 1.")
        if self._eval_every is not None and self._eval_every < 0:
            raise ConfigError(
                f"train.eval_every: got {self._eval_every}, want a number of steps, 0 for the end only, or null for each epoch."
            )
        self._parts = parts
        self._last_step = last_step
        self._journal = Journal(parts, last_step, sinks)
        self._saves = Saves(parts, checkpoints, self._journal)
        self._stop = stop
        stop.save_takes(lambda: self._saves.seconds)
        progress = parts.progress
        self._measures = Measures(parts)
        self._ledger = Ledger(parts.run_dir / "logs", parts.world.rank, parts.cfg.data.record_keys)
        self._profiler = StepProfiler.of(
            parts.cfg.profile, parts.step.step, parts.run_dir, parts.world, self._journal.note
        )
        self._compiler = CompilerLog(parts.model, self._journal.note)
        self._illustrations = Illustrations(parts, self._journal.media)
        self._to_device = DeviceCopies(parts.world.device)
        self._window = _Window()
        data = parts.cfg.data
        with users_to_fix("data"):
            self._bad_samples = BadSampleBudget(
                data.max_bad, data.max_bad_consecutive, bad=progress.bad_samples, samples=progress.samples
            )
        self._last_bad: dict[str, Any] = {}
        self._timing: Timing | None = None  # of the step that is not settled yet
        self._unlogged: Outcome | None = None  # the last settled step, if no record has it yet
        self._clock = time.monotonic()
        self._first_step = parts.step.step
        self._stopping = self._save_asked = False

    def run(self) -> tuple[str, str | None]:
        """Runs the loop.

        Returns:
            ``("finished", None)`` or ``("stopped", reason)``.

        Raises:
            TooManySkips, TooManyBadSamples, ConfigError: On every rank at the same step.
        """
        step, loader = self._parts.step, self._parts.train_loader
        self._parts.model.train()
        self._journal.status()
        epoch_ended = True  # none is open
        try:
            with self._out_of_memory_explained():
                if self._parts.progress.evaluation_due:
                    self._evaluate_and_save(epoch_ended)
                    # A save has set what a step may take, and this start has not done its first one.
                    set_timeout(self._parts.cfg.parallel.timeout_start)
                while step.step < self._last_step and not self._stopping:
                    if epoch_ended:
                        batches = iter(loader)
                    if self._profiler is not None:
                        self._profiler.before(step.step + 1)
                    self._measures.begin()
                    with self._syncs_announced():
                        self._accumulate(batches)
                    self._settle()  # the step before: its vote is in by now
                    with self._syncs_announced():
                        step.apply(stop=self._stop.reason is not None, save=self._saves.is_due())
                    epoch_ended = self._commit()
                    if self._profiler is not None:
                        self._profiler.after(step.step)
                    if step.step == self._first_step + 1:
                        set_timeout(self._parts.cfg.parallel.timeout_step + BACKSTOP)
                    self._evaluate_and_save(epoch_ended)
                return self._end()
        finally:
            self._ledger.close()
            self._compiler.close()
            if self._profiler is not None:
                self._profiler.close()

    def place(self) -> Place:
        """Where this rank is, for whoever watches it from another thread."""
        step, train, held_out = self._parts.step, self._parts.train_loader, self._parts.eval_loader
        disk = time.monotonic() if self._saves.waits_for_disk else 0.0  # has a time-out of its own
        moved = (step.step, train.samples_handed, held_out.samples_handed if held_out is not None else 0, disk)
        return Place(step.step + 1, list(self._window.keys), moved)

    def _out_of_memory_explained(self) -> AbstractContextManager[None]:
        parts = self._parts
        return out_of_memory_explained(
            lambda: parts.step.step + 1,
            rows=parts.train_loader.rows_per_micro_batch,
            share=-(-parts.cfg.train.global_batch_size // parts.world.size),
            device=parts.world.device,
        )

    # -- one step

    def _syncs_announced(self) -> AbstractContextManager[None]:
        # The first steps load kernels and allocate, which waits for the device and is no news.
        early = self._parts.step.step < self._first_step + self._log_every
        return nullcontext() if early else host_syncs_announced(self._parts.world.device)

    def _accumulate(self, batches: Iterator[Batch]) -> None:
        parts, window = self._parts, self._take_window(batches)
        if parts.step.step or parts.precision.compute_dtype != torch.float32:
            parts.step.accumulate(window, parts.train_loader.micro_batches_per_step)
            return
        with LoweredModules(parts.model, parts.world.device.type) as lowered:
            parts.step.accumulate(window, parts.train_loader.micro_batches_per_step)
        for line in lowered.warnings():
            logger.warning(line)
            self._journal.note(line)

    def _take_window(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The next window's micro-batches, on the device."""
        self._window = _Window()
        for number in range(self._parts.train_loader.micro_batches_per_step):
            asked = time.monotonic()
            with span(DATA):
                batch = next(batches)
            self._window.waited += time.monotonic() - asked
            self._window.keys += [key for key in batch.sample_keys if key]
            self._window.bad += batch.bad
            batch = self._to_device(batch)
            parts = self._parts
            if parts.step.step == number == 0:
                refuse_mean(parts.task, parts.model, batch, parts.precision, parts.world.device)
                for line in parts.train_loader.wire.suggestions(batch):
                    self._journal.note(line)
            first = parts.step.step == self._first_step and number == 0
            if first and (problem := self._measures.count_work(batch)):
                self._journal.note(problem)
            yield batch

    def _commit(self) -> bool:
        """The optimizer step is done (or queued): the position moves. True if that was the epoch's last step."""
        loader, progress, window = self._parts.train_loader, self._parts.progress, self._window
        epoch, _ = loader.position
        used = loader.commit()
        self._ledger.write(self._parts.step.step, window.keys, window.bad)
        self._last_bad = window.bad[-1] if window.bad else self._last_bad
        now = time.monotonic()
        progress.samples += used
        seconds = now - self._clock
        progress.seconds += seconds
        self._timing = Timing(used, seconds, window.waited, self._measures.own_time())
        self._clock = now
        return loader.position[0] != epoch

    def _settle(self) -> None:
        """Reads the outcome of the last step, if that was not done, and logs it; obeys what was voted."""
        outcome, timing = self._parts.step.settle(), self._timing
        if outcome is None or timing is None:
            return
        self._measures.add(outcome, timing)
        tally = outcome.tally
        self._stopping |= tally.stop > 0
        self._save_asked |= tally.save > 0
        self._unlogged = outcome
        if outcome.step % self._log_every == 0 or outcome.step == self._last_step:
            self._log(outcome)
        self._bad_samples.count(tally.samples, tally.bad, self._last_bad)

    def _log(self, outcome: Outcome) -> None:
        self._saves.are_safe(wait=False)
        self._journal.logged(self._position() | self._measures.record(outcome))
        self._unlogged = None
        self._compiler.tell()

    # -- what does not happen in every step

    def _evaluate_and_save(self, epoch_ended: bool) -> None:
        every, step, progress = self._eval_every, self._parts.step.step, self._parts.progress
        last, late = step >= self._last_step, progress.evaluation_due
        evaluation: Evaluation | None = None
        metrics: dict[str, float] = {}
        improved = False
        if late or last or (epoch_ended if every is None else every > 0 and step % every == 0):
            evaluation = self._evaluate()
            if progress.evaluation_due:
                return
            metrics = evaluation.record() if evaluation is not None else {}
            improved = self._saves.is_best(metrics)
        if late or last or improved or self._save_asked or (self._save_every and step % self._save_every == 0):
            self._save(metrics, final=last)
        if evaluation is not None:
            with self._clock_stopped():
                self._illustrations.after(evaluation, last=last)

    def _evaluate(self) -> Evaluation | None:
        """None without data to evaluate on, or if a stop came first: then it is still due."""
        parts, progress, step = self._parts, self._parts.progress, self._parts.step.step
        progress.evaluation_due = False
        if parts.eval_loader is None:
            return None
        self._settle()
        with self._clock_stopped():
            equalise_buffers(parts.model)
            # A task that draws numbers finds the same, whatever this start has done before.
            seed_generators(parts.world.device, parts.cfg.run.seed, step, parts.world.rank)
            try:
                if self._stopping:
                    raise Interrupted
                result = evaluate(
                    parts.ema.averaged() if parts.ema is not None else parts.model,
                    parts.task,
                    parts.eval_loader,
                    world=parts.world,
                    precision=parts.precision,
                    epoch=progress.evaluations,
                    stop=lambda: self._stop.reason is not None,
                )
            except Interrupted:
                self._stopping = progress.evaluation_due = True
                self._journal.note(f"The evaluation after step {step} is left to the next start, which begins with it.")
                return None
            progress.evaluations += 1
            metrics = result.record()
            self._journal.record(self._position() | metrics)
            logger.info("step %d: %s", step, metrics)
        return result

    def _save(self, metrics: dict[str, float], *, final: bool) -> None:
        self._settle()
        with self._clock_stopped():
            self._saves.save(metrics, final=final)
            self._save_asked = False
            self._journal.status()

    @contextmanager
    def _clock_stopped(self) -> Iterator[None]:
        """What happens inside is not part of a step."""
        started = time.monotonic()
        yield
        self._clock += time.monotonic() - started

    def _end(self) -> tuple[str, str | None]:
        self._settle()
        if self._unlogged is not None:
            self._log(self._unlogged)
        self._measures.end()
        self._stop.consume()
        if self._parts.step.step >= self._last_step and not self._parts.progress.evaluation_due:
            return "finished", None
        reasons: list[str | None] = [None] * self._parts.world.size
        dist.all_gather_object(reasons, self._stop.reason)
        self._saves.save_last()
        self._journal.status()
        heard = [f"{reason} (rank {rank})" for rank, reason in enumerate(reasons) if reason]
        return "stopped", ", ".join(heard)

    def _position(self) -> dict[str, float | int]:
        """Where the run is; the last step is settled, and the next one not committed."""
        step, loader = self._parts.step, self._parts.train_loader
        epoch, samples = loader.position
        return {
            "step": step.step,
            "applied_steps": step.applied_steps,
            "epoch": epoch + samples / loader.index.num_samples,
            "samples": self._parts.progress.samples,
            "time": time.time(),
        }


class _Window:
    """What the loader handed over for a step, and how long the loop waited for it."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.bad: list[dict[str, Any]] = []
        self.waited = 0.0

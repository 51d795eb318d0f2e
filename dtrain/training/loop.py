"""The training loop: accumulate, vote, apply or skip, commit; all ranks log, evaluate, save and stop at the same steps.

* Only values that are equal on all ranks decide when something happens: the attempted step, the loader's position, and the vote
  of an earlier step. So no rank waits in a collective that another rank skips.
* A step is *settled* (its outcome is read) after the backward of the next step is queued, so that the host never waits for a
  GPU. Before a save, an evaluation and the end of the run, which depend on the outcome, it is settled at once.
* A step is *committed* when its optimizer update is queued: from then on the loader's position counts its samples as used.
* An evaluation that was interrupted by a stop request is *due*: the checkpoint records this, and a resumed run begins with
  the evaluation.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from bdb import BdbQuit
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist

from dtrain.config.schema import TrainConfig
from dtrain.data import Batch
from dtrain.data.loading.batch import DeviceCopies, Rows
from dtrain.data.loading.sample_log import BadSampleBudget, Limits, SampleLog
from dtrain.distributed.collectives import wait_for_all
from dtrain.distributed.hang import Place
from dtrain.distributed.process_group import is_from_collective, set_timeout
from dtrain.distributed.replicas import ReplicasDiffer
from dtrain.distributed.sharding import is_sharded, local_part
from dtrain.distributed.stop import StopRequests
from dtrain.distributed.store import say_to_all
from dtrain.errors import ConfigError, as_config_error, printable, without_secrets_in
from dtrain.precision.autocast_check import AutocastCheck
from dtrain.tracking.console_sink import evaluation_text
from dtrain.training.breakpoints import without_breakpoints
from dtrain.training.build import wrap
from dtrain.training.checkpoint.manager import CheckpointManager
from dtrain.training.checkpoint.state import TrainState
from dtrain.training.checks import check_mean_loss, unused_parameters_explained
from dtrain.training.evaluation import evaluate_run, metric_names
from dtrain.training.hook_calls import Hooks
from dtrain.training.memory_retry import MemoryRetries, free_memory
from dtrain.training.micro_batch import AUTO, remember
from dtrain.training.monitor.communication import run_traffic
from dtrain.training.monitor.memory import out_of_memory_explained, state_bytes
from dtrain.training.monitor.metrics import StepMetrics, Timing
from dtrain.training.monitor.profiler import StepProfiler
from dtrain.training.monitor.run_logger import RunLogger
from dtrain.training.schedule import cut_short
from dtrain.training.step import DATA, StepOutcome, TooManySkips, profiler_label
from dtrain.training.task import Evaluation, NotFinite
from dtrain.training.unfinished import StepOutOfMemory

logger = logging.getLogger("dtrain")
_MOST_NAMED_BAD = 5  # samples; all are in logs/bad-rank-*.jsonl
_MOST_NAMED_SPIKES = 5  # all are in train/spikes
_PATIENCE = 30.0  # seconds that a rank that fails waits for the others to fail too
_no_warning: AbstractContextManager[None] = nullcontext()


def check_intervals(train: TrainConfig) -> None:
    """Refuses values of ``train.log_every`` and ``train.eval_every``.

    Raises:
        ConfigError: If one of them is impossible.
    """
    if train.log_every < 1:
        raise ConfigError(f"train.log_every: got {train.log_every}, want at least 1.")
    if train.eval_every is not None and train.eval_every < 0:
        raise ConfigError(
            f"train.eval_every: got {train.eval_every}, want a number of steps, 0 for the end only, or null for each epoch."
        )


class Loop:
    """Trains until the last step, a stop request or an error.

    Args:
        run: The run, restored from a checkpoint if there is one.
        last_step: Attempted step after which the run is finished.
        run_logger: Writes records, status and notes.
        stop: Stop requests of this rank.
        hooks: User code to call; its ``on_start`` has been called.
        checkpoints: Saves the run; None: as the config says.

    Raises:
        ConfigError: If ``train.log_every``, ``train.eval_every`` or a limit of bad samples is impossible.
    """

    def __init__(
        self,
        run: TrainState,
        last_step: int,
        run_logger: RunLogger,
        stop: StopRequests,
        hooks: Hooks | None = None,
        checkpoints: CheckpointManager | None = None,
    ) -> None:
        self._log_every = run.cfg.train.log_every
        self._eval_every = run.cfg.train.eval_every
        self._record_keys = run.cfg.data.record_keys
        check_intervals(run.cfg.train)
        self._run = run
        self._last_step = last_step
        self._run_logger = run_logger
        self._hooks = hooks or Hooks()
        self._checkpoints = checkpoints or CheckpointManager(run, run_logger)
        self._stop = stop
        # A time limit must leave room for the final checkpoint, whose duration is known from the earlier ones.
        stop.save_takes(lambda: self._checkpoints.seconds)
        self._metrics = StepMetrics(run, run_logger.warn, run_logger.recovered)
        self._sample_log = SampleLog(run.run_dir / "logs", run.world.rank, run.cfg.data.record_keys)
        self._profiler = StepProfiler.from_config(
            run.cfg.profile, run.step.step, run.run_dir, run.world, run_logger.note, run_traffic(run)
        )
        self._to_device = DeviceCopies(run.world.device)
        self._on_gpu = run.world.device.type == "cuda"
        self._window = _Window()
        data, totals = run.cfg.data, run.totals
        with as_config_error("data"):
            limits = Limits(data.max_bad, data.max_bad_consecutive)
            self._bad_samples = BadSampleBudget(limits, bad=totals.bad_samples, samples=totals.samples)
        self._last_bad: dict[str, Any] = {}
        self._named_bad: set[str] = set()
        self._spikes = 0  # of this start
        self._timing: Timing | None = None  # of the step that is not settled yet
        self._unlogged: StepOutcome | None = None  # the last settled step, if no record includes it yet
        self._clock = time.monotonic()
        self._first_step = run.step.step
        self._epoch = 0  # of the open iterator
        self._stopping = self._save_requested = False
        self._is_accumulating, self._may_be_saved = False, True
        self._evaluated: dict[str, float] = {}  # the last result, and the step before it
        self._evaluated_step = -1
        self._retries = MemoryRetries(run, run_logger.warn)
        self._settles_at_once = run.world.size > 1  # the first step: DDP rebuilds its buckets after it

    def run(self) -> tuple[str, str | None]:
        """Runs the loop.

        Returns:
            ``finished`` or ``stopped``, and why before the last step; None at the last step.

        Raises:
            TooManySkips, TooManyBadSamples, ConfigError: On every rank at the same step.
            OutOfMemory: On the rank whose memory is exhausted.
        """
        step, loader = self._run.step, self._run.train_loader
        self._run.model.train()
        self._run_logger.status()
        epoch_ended = True  # no iterator is open
        try:
            with self._out_of_memory_explained(), unused_parameters_explained(lambda: step.model):
                if self._run.forked:
                    self._save({}, final=True)  # resuming the fork needs nothing of the other run
                if self._run.totals.evaluation_due:
                    self._evaluate_and_save(epoch_ended)
                    # The save has set the time-out of later steps, and the first step of this start is still to come.
                    set_timeout(self._run.cfg.parallel.timeout_start)
                while not self._is_last() and not self._stopping:
                    try:
                        if epoch_ended:
                            batches = iter(loader)
                            self._epoch, _ = loader.position
                        epoch_ended = self._one_step(batches)
                        self._evaluate_and_save(epoch_ended)
                    except StepOutOfMemory:
                        self._begin_again()
                        epoch_ended = True
                        if self._is_last():  # a hook has ended the run in the step before, which is now the last one
                            self._evaluate_and_save(epoch_ended)
                state, reason = self._end()
        except Exception as error:
            self._save_before_failing(error)
            raise
        finally:
            self._sample_log.close()
            self._run_logger.close()
            if self._profiler is not None:
                self._profiler.close()
        self._hooks.call("on_end", self._run, state)
        wait_for_all()  # if a hook fails on one rank, no rank records the end of the run
        return state, reason

    def _one_step(self, batches: Iterator[Batch]) -> bool:
        """One step, whose outcome is read in the next one. Returns whether it was the last one of the epoch.

        Raises:
            StepOutOfMemory: On every rank, if memory ran out in the step that it settles.
        """
        run, step = self._run, self._run.step
        if self._profiler is not None:
            self._profiler.before(step.step + 1)
        self._metrics.begin()
        self._is_accumulating = True
        with self._warn_on_host_sync():
            self._accumulate(batches)
        self._is_accumulating = False
        # Settles the previous step, whose vote has ended while forward and backward of this step were queued.
        self._settle()
        self._may_be_saved = False  # as in _not_to_be_saved, which would take longer in every step
        with self._warn_on_host_sync():
            # Requests are part of the vote, because all ranks must act on them at the same step.
            restarts = run.train_loader.restarts.take_new()
            step.apply(stop=self._stop.reason is not None, save=self._checkpoints.is_due(), worker_restarts=restarts)
            epoch_ended = self._commit()
        self._may_be_saved = True
        if self._profiler is not None:
            self._profiler.after(step.step)
        if step.step == self._first_step + 1:
            # The first step of a start loads kernels and compiles; later ones may take less time.
            set_timeout(run.cfg.parallel.timeout_step)
        if step.step == min(self._first_step + 2, self._last_step):
            self._save_compiled()  # DDP compiles again in the second step, after it has rebuilt its buckets
        if self._settles_at_once:
            self._settle()
            self._settles_at_once = False
        return epoch_ended

    def _save_compiled(self) -> None:
        """On ranks that save what was compiled: gives it to later starts."""
        if self._run.compile_cache is not None:
            for line in self._run.compile_cache.save():
                self._run_logger.note(line)

    def _begin_again(self) -> None:
        """Collective. Moves back to before the step that ran out of memory, with smaller micro-batches."""
        run = self._run
        self._uncommit()  # first, because a line below may end the run, whose state is then saved
        run.step.begin_again(lambda bare: wrap(bare, run.cfg.parallel, run.world, run.cfg.train.deterministic))
        run.train_loader.divide(self._retries.next_rows(self._window.batch))
        self._metrics.follow_model()
        self._sample_log.step_back(run.step.step)
        self._run_logger.other_micro_batches()
        if run.cfg.train.micro_batch_size == AUTO:
            remember(run)
        self._settles_at_once = run.world.size > 1

    def _uncommit(self) -> None:
        """Undoes ``_commit`` of a step that was not applied, because it ran out of memory."""
        run = self._run
        run.train_loader.step_back(run.train_loader.rows_per_micro_batch)
        run.totals.samples -= self._timing.used if self._timing is not None else 0
        self._timing = None

    @contextmanager
    def _not_to_be_saved(self) -> Iterator[None]:
        """An error in the block leaves a state that must not be saved."""
        self._may_be_saved = False
        yield
        self._may_be_saved = True

    def abandon(self) -> None:
        """Drops the window under way after a collective failed: the run is as after its last applied step."""
        self._checkpoints.is_safe()
        self._run.step.abandon()
        # Its record is not written, because that is collective. The count of consecutive skips continues.
        with suppress(TooManySkips, RuntimeError):
            try:
                outcome = self._run.step.settle()
            except StepOutOfMemory:
                self._uncommit()
                return
            if outcome is not None and self._timing is not None:
                self._metrics.add(outcome, self._timing)
                self._run_logger.step(outcome)

    def _save_before_failing(self, error: Exception) -> None:
        """Saves the state after the last applied step before an error ends the run, unless the state may be unsound.

        Rank 0 saves without the others, because all have applied the same steps. A sharded run, whose ranks all save, is saved
        only if the same line has raised the error on each of them, so that none is in a collective.
        """
        run, saves = self._run, self._checkpoints
        diverged = isinstance(error, (TooManySkips, NotFinite)) and run.step.consecutive_skips > 0
        unsound = diverged or isinstance(error, (ReplicasDiffer, BdbQuit))  # BdbQuit may come from anywhere in a step
        if not self._may_be_saved or saves.saved_step == run.step.step or unsound or is_from_collective(error):
            return
        if self._is_accumulating if run.is_sharded else run.world.rank != 0:
            return
        try:
            self.abandon()
            sound = all(bool(local_part(parameter).isfinite().all()) for parameter in run.model.parameters())
            if run.is_sharded:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                said = say_to_all(
                    f"failed-after-{run.step.step}", f"{frame.filename}:{frame.lineno} {sound}", run.world, _PATIENCE
                )
                sound &= said is not None and len({*said}) == 1
            if sound and saves.saved_step != run.step.step:  # the last step may have run out of memory
                self._run_logger.write_steps()
                saves.save_before_failing(self._evaluated if self._evaluated_step == run.step.step else {})
                self._run_logger.note(f"saved after step {run.step.step}; the same command continues there")
        except Exception:  # the error that ends the run is the one to show
            logger.warning("the state after step %d could not be saved", run.step.step, exc_info=True)

    def place(self) -> Place:
        """The progress of this rank. The hang detection calls this from its thread."""
        step, loaders = self._run.step, (self._run.train_loader, self._run.eval_loader)
        progress = (step.step, *(loader.samples_received for loader in loaders if loader is not None))
        return Place(step.step + 1, self._window.keys(), progress, self._checkpoints.waits_for_disk)

    # -- one step

    def _accumulate(self, batches: Iterator[Batch]) -> None:
        run, micro_batches = self._run, self._run.train_loader.micro_batches_per_step
        try:
            self._accumulate_window(batches)
            return
        except Exception as error:
            # Without the error, whose traceback holds what the step has computed so far.
            if not self._retries.take(error, self._window.batch):
                raise
        free_memory(run.world.device)
        for _ in range(micro_batches - len(self._window.rows)):  # the loader counts them
            self._window.rows.append(next(batches).rows)
        run.step.cannot_compute(self._retries.metrics)

    def _accumulate_window(self, batches: Iterator[Batch]) -> None:
        run, window = self._run, self._next_window(batches)
        if run.step.step or run.precision.compute_dtype != torch.float32:
            run.step.accumulate(window, run.train_loader.micro_batches_per_step)
            return
        # The first window of an fp32 run: the model may contain casts or autocast regions.
        with AutocastCheck(run.model, run.world.device.type) as lowered:
            run.step.accumulate(window, run.train_loader.micro_batches_per_step)
        for line in lowered.warnings():
            logger.warning(line)
            self._run_logger.note(line)

    def _next_window(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yields the next window's micro-batches, on the device."""
        run = self._run
        self._window = _Window()
        for number in range(run.train_loader.micro_batches_per_step):
            started = time.monotonic()
            with profiler_label(DATA):
                batch = next(batches)
            self._window.waited += time.monotonic() - started
            self._window.rows.append(batch.rows)
            self._window.bad += batch.bad
            self._window.batch = batch
            batch = self._to_device(batch)
            if run.step.step == number == 0:
                with without_breakpoints(), self._retries.without_check():
                    check_mean_loss(run.task, run.model, batch, run.precision, run.world.device)
                for line in run.train_loader.transfer.suggestions(batch):
                    self._run_logger.note(line)
            first = run.step.step == self._first_step and number == 0
            if first:
                self._retries.rehearse(batch)
                with without_breakpoints(), self._retries.watched():
                    problem = self._metrics.count_flops(batch)
                with without_breakpoints():
                    self._require_metrics(batch)
                if problem:
                    self._run_logger.note(problem)
            yield batch

    def _require_metrics(self, batch: Batch) -> None:
        """Before the first step: refuses names of metrics that no evaluation will have, and metrics that cannot be computed."""
        best = self._run.cfg.checkpoint.best
        wanted = [*([("checkpoint.best", best)] if best is not None else []), *self._hooks.metrics]
        if (wanted or self._run.cfg.train.metrics) and self._run.eval_loader is not None:
            names = metric_names(self._run, batch, [name for _, name in wanted])
            for warning in names.require(wanted):
                self._run_logger.warn(warning)

    def _commit(self) -> bool:
        """Moves the loader's position by the step that was just queued. Returns whether that ended the epoch."""
        loader, totals, window = self._run.train_loader, self._run.totals, self._window
        used = loader.commit()
        # After the commit, so that the log of used samples never has a step that a resumed run repeats.
        keys = window.keys() if self._record_keys else []
        self._sample_log.write(self._run.step.step, keys, window.bad)
        if window.bad:
            self._last_bad = window.bad[-1]
            self._name_bad(window.bad)
        now = time.monotonic()
        totals.samples += used
        seconds = now - self._clock
        totals.seconds += seconds
        self._timing = Timing(used, seconds, window.waited, self._metrics.own_time())
        self._clock = now
        epoch, _ = loader.position
        return epoch != self._epoch

    def _name_bad(self, bad: list[dict[str, Any]]) -> None:
        """Names each of the first samples that this rank cannot read once, on its standard error."""
        for sample in bad:
            if sample["key"] not in self._named_bad and len(self._named_bad) < _MOST_NAMED_BAD:
                self._named_bad.add(sample["key"])
                line = f"bad sample {sample['key']}: {sample['reason']}"
                logger.warning(line)
                sys.stderr.write(f"dtrain: WARNING: {printable(without_secrets_in(line))}\n")

    def _settle(self) -> None:
        """Reads the outcome of the last step, unless that was done already, and acts on it."""
        outcome, timing = self._run.step.settle(), self._timing
        if outcome is None or timing is None:
            return
        self._metrics.add(outcome, timing)
        self._run_logger.step(outcome)
        stats = outcome.stats
        self._stopping |= stats.stop > 0
        self._save_requested |= stats.save > 0
        self._unlogged = outcome
        if stats.spike:
            self._warn_of_spike(outcome)
        self._hooks.call("on_step", self._run, outcome)
        if outcome.step % self._log_every == 0 or outcome.step == self._last_step:
            self._log(outcome)
        # Sums over all ranks, so the budget is exceeded on every rank at the same step.
        self._bad_samples.count(stats.samples, stats.bad, self._last_bad)

    def _warn_of_spike(self, outcome: StepOutcome) -> None:
        self._spikes += 1
        if self._spikes > _MOST_NAMED_SPIKES:
            return
        skipped = ", so the step was skipped" if outcome.stats.skipped_spike else ""
        command = f"dtrain replay run.dir={self._run.run_dir} replay.step={outcome.step} replay.samples=true"
        self._run_logger.warn(
            f"step {outcome.step}: the gradient norm {outcome.grad_norm:.4g} is a spike{skipped}. Its samples: {command}"
            + (". Further spikes are only counted, in train/spikes." if self._spikes == _MOST_NAMED_SPIKES else "")
        )

    def _log(self, outcome: StepOutcome) -> None:
        self._checkpoints.is_safe(wait=False)
        self._run_logger.record_step(self._position() | self._metrics.record(outcome))
        self._unlogged = None

    # -- evaluation, checkpoints and the end

    def _evaluate_and_save(self, epoch_ended: bool) -> None:
        every, step = self._eval_every, self._run.step.step
        last, due = self._is_last(), self._run.totals.evaluation_due
        evaluation = None
        metrics: dict[str, float] = {}
        improved = False
        if due or last or (epoch_ended if every is None else every > 0 and step % every == 0):
            evaluation = self._evaluate()
            if self._run.totals.evaluation_due:
                return  # interrupted: the checkpoint that the stop saves records that it is due
            metrics = evaluation.record() if evaluation is not None else {}
            improved = self._checkpoints.is_best(metrics)
            last = self._is_last()  # a hook may have ended the run in the evaluation
        if due or last or improved or self._save_requested or self._checkpoints.is_due_after(step):
            self._save(metrics, final=last)
        if evaluation is not None:
            with self._clock_stopped():
                self._run_logger.media.after(evaluation, last=last)

    def _evaluate(self) -> Evaluation | None:
        """The result; None without evaluation data, or if a stop request interrupted it, which makes it due."""
        run, totals = self._run, self._run.totals
        totals.evaluation_due = False
        self._settle()  # without evaluation data too, so that hooks are called at the same point of a step
        if run.eval_loader is None:
            return None
        totals.evaluation_due = True  # until it has ended
        with self._clock_stopped():
            result = evaluate_run(run, lambda: self._stop.reason is not None, stopping=self._stopping)
            if result is None:
                self._stopping = True
                self._run_logger.note(
                    f"The evaluation after step {run.step.step} was interrupted by a stop request. It runs first on resume."
                )
                return None
            totals.evaluation_due = False
            totals.evaluations += 1
            if self._evaluated_step < 0:
                self._save_compiled()  # in evaluation mode the graphs are different ones
            metrics = result.record()
            self._evaluated, self._evaluated_step = metrics, run.step.step
            record = self._position() | metrics
            self._run_logger.record(record)
            logger.info("step %d: %s", run.step.step, evaluation_text(record))
            self._hooks.call("on_evaluation", run, result)
        return result

    def _save(self, metrics: dict[str, float], *, final: bool) -> None:
        self._settle()  # the outcome changes counters that are part of the checkpoint
        self._run_logger.write_steps()  # a resumed run does not repeat them
        with self._clock_stopped(), self._not_to_be_saved():
            self._checkpoints.save(metrics, final=final)
            self._save_requested = False
            self._run_logger.status()
            self._call_on_save()

    def _call_on_save(self) -> None:
        self._hooks.call("on_save", self._run, self._run.checkpoints.path(self._run.step.step))

    def _is_last(self) -> bool:
        return self._run.step.step >= self._last_step or self._run.ended_early is not None

    def _end(self) -> tuple[str, str | None]:
        is_last = self._is_last()
        try:
            self._settle()
        except StepOutOfMemory:  # the run stops before this step
            self._begin_again()
        if self._unlogged is not None:
            self._log(self._unlogged)
        self._run_logger.write_steps()
        self._metrics.end()
        if self._run.step.step and not self._run.step.applied_steps:
            self._run_logger.note(f"Nothing was learned: {self._run.step.explain_skips()}")
        self._stop.consume()
        if is_last and not self._run.totals.evaluation_due:
            # At the last step this is done. A hook may have ended the run after a save that is still being written.
            if self._run.ended_early is not None:
                self._save_last()
            run = self._run
            cut = cut_short(run.step.schedule, run.cfg.train, run.train_loader, self._last_step)
            return "finished", run.ended_early or (f"its schedule was {cut}" if cut else None)
        reasons: list[str | None] = [None] * self._run.world.size
        dist.all_gather_object(reasons, self._stop.reason)
        self._save_last()
        self._run_logger.status()
        return "stopped", ", ".join(f"{reason} (rank {rank})" for rank, reason in enumerate(reasons) if reason)

    def _save_last(self) -> None:
        with self._not_to_be_saved():
            saved = self._checkpoints.save_last()
        if saved:
            self._call_on_save()

    def _position(self) -> dict[str, float | int]:
        """The fields of a record that describe the position; only valid between settling a step and committing the next."""
        step, loader = self._run.step, self._run.train_loader
        return {
            "step": step.step,
            "applied_steps": step.applied_steps,
            "epoch": loader.epochs,
            "samples": self._run.totals.samples,
            "time": time.time(),
        }

    @contextmanager
    def _clock_stopped(self) -> Iterator[None]:
        """Excludes the time of the block from the time of steps."""
        started = time.monotonic()
        yield
        self._clock += time.monotonic() - started

    def _warn_on_host_sync(self) -> AbstractContextManager[None]:
        # The first steps load kernels and allocate memory, so they wait for the device in any case.
        if not self._on_gpu or self._run.step.step < self._first_step + self._log_every:
            return _no_warning
        return warn_on_host_sync(self._run.world.device)

    def _out_of_memory_explained(self) -> AbstractContextManager[None]:
        run = self._run
        return out_of_memory_explained(
            lambda: run.step.step + 1,
            rows=lambda: run.train_loader.rows_per_micro_batch,
            share=-(-run.cfg.train.global_batch_size // run.world.size),
            device=run.world.device,
            ranks=run.world.size,
            state=None if is_sharded(run.model) else lambda: state_bytes(run.optimizer, run.model),
            why_not=lambda: self._retries.why_not,
        )


def warn_on_host_sync(device: torch.device) -> AbstractContextManager[None]:
    """Warns of operations in the block that make the host wait for a GPU, with their line (torch's sync debug mode).

    With a fused optimizer dtrain's own step does not wait. A task that calls ``.item()`` does. On a CPU nothing happens.
    """
    return _sync_debug_mode() if device.type == "cuda" else _no_warning


@contextmanager
def _sync_debug_mode() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class _Window:
    """Samples of one accumulation window on this rank, and the seconds that the loop waited for them."""

    def __init__(self) -> None:
        self.rows: list[Rows] = []
        self.batch: Batch | None = None  # the last one, in host memory
        self.bad: list[dict[str, Any]] = []
        self.waited = 0.0

    def keys(self) -> list[str]:
        """Keys of the valid rows."""
        return [key for rows in self.rows for key in rows.keys if key]

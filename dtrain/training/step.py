"""One optimizer step, from the micro-batches of an accumulation window to updated (or unchanged) parameters.

In plain code, with the method of ``TrainStep`` that contains each part::

    for number, batch in enumerate(window):                                    # accumulate()
        seed_generators(seed, step, number, rank)
        with autocast:
            output = task(model, batch)
        loss_sum, count = loss_sum + output.loss_sum, count + output.count     # _add()
        (output.loss_sum * world / nominal * loss_scale).backward()            # _factor(); the last one averages: _sync()
    for parameter in frozen: parameter.grad = None                             # see dtrain.training.setup.freeze

    norm = norm_of(gradients)                                                  # apply(): gradients(), _norm()
    overflow = not all_finite(norm, loss_sum, count, model.buffers())
    overflows, norm, loss_sum, count, *requests = all_reduce(...)              # the vote, see dtrain.precision.vote
    skip = overflows > 0 or count <= 0                                         # or a spike, see dtrain.precision.spike
    coefficient = nominal / count / loss_scale
    coefficient *= min(1, clip_norm / (norm * coefficient))
    lr = base_lr * schedule(applied_steps)
    if skip:
        restore(model.buffers())
    else:
        gradients *= coefficient                                               # unscaled, a mean, and clipped
        optimizer.step()                                                       # _optimize()
        ema.update()
    loss_scale = adapted(loss_scale, overflows)
    step, gradients = step + 1, None

    applied_steps += not skip                                                  # settle()

* An *accumulation window* is the micro-batches of one step. DDP averages its gradients over the ranks in the backward of its
  last micro-batch.
* The *vote* is one all-reduce of control data, including stop and save requests. All ranks get the same sums and therefore take
  the same decision: update the parameters, or *skip* the step.
* *Nominal* is the global batch size, and ``count`` the number of valid rows in the global batch. One multiplication turns
  the gradients into gradients of the mean loss over all valid rows, for any split into ranks and micro-batches.
* With a fused optimizer on a GPU the decision stays on the device. The host queues the step and reads the result of the vote
  one step later, in ``settle``. It waits for the result instead of polling, so that all ranks read it at the same step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.data import Batch
from dtrain.data.order.randomness import seed_generators
from dtrain.distributed.sharding import ShardedWindow, copies_of, is_sharded, local_part
from dtrain.distributed.world import World
from dtrain.errors import ConfigError, Explained, as_config_error
from dtrain.precision import Precision
from dtrain.precision.fused_optimizers import prefill_momentum, reads_found_inf
from dtrain.precision.gradients import (
    drop_gradients,
    local_gradients,
    norm_of,
    parameters_of,
    refuse_unscalable,
    with_shared_gradients,
    zero_gradients,
)
from dtrain.precision.loss_scale import LossScale
from dtrain.precision.reduce_dtype import keeps_views
from dtrain.precision.skip_diagnosis import SkipDiagnosis
from dtrain.precision.spike import SpikeOptions
from dtrain.precision.vote import StepStats, make_vote
from dtrain.training.checks import AveragedBackward, check_loss_scale, check_model
from dtrain.training.setup.batchnorm import ValidRows
from dtrain.training.setup.buffers import BufferGuard
from dtrain.training.setup.ema import Ema
from dtrain.training.setup.freeze import Frozen
from dtrain.training.task import Output, Task, copy_of_task, no_gradient, run_task
from dtrain.training.unfinished import StepOutOfMemory, UnfinishedShardedWindow, UnfinishedWindow

#: The label of a whole step in a profile.
STEP = "step"
#: The labels of its parts, in their order in a step.
DATA, FORWARD, BACKWARD, VOTE, OPTIMIZER = PARTS = ("data", "forward", "backward", "vote", "optimizer")
_no_label: AbstractContextManager[object] = nullcontext()
_profiling = False


def profiler_label(name: str) -> AbstractContextManager[object]:
    """Labels the block as a part of a step while a profile is taken; otherwise costs about 100 ns."""
    return torch.autograd.profiler.record_function(name) if _profiling else _no_label


def switch_labels(on: bool) -> None:
    """Turns labels on or off, for the profiler."""
    global _profiling
    _profiling = on


class TooManySkips(Explained, RuntimeError):
    """More steps in a row were skipped than ``train.max_consecutive_skips`` allows."""


@dataclass(slots=True)  # not frozen: one is made in every step, and frozen ones are slow to construct
class StepOutcome:
    """The result of a step, equal on all ranks.

    Attributes:
        step: Number of the attempted step, from 1.
        applied_steps: Number of applied steps up to and including this one.
        lr: Learning rate of the first parameter group.
        lrs: Learning rates of the named parameter groups, if there are several.
        grad_norm: Norm of the gradient of the mean loss before clipping; NaN if the step was skipped because of an overflow.
        stats: Sums over all ranks (loss, count, metrics, samples, bad samples, requests), and whether the step was applied.
    """

    step: int
    applied_steps: int
    lr: float
    grad_norm: float
    stats: StepStats
    lrs: Mapping[str, float] = field(default_factory=dict)


class TrainStep:
    """Executes accumulation windows and optimizer steps.

    Example:
        >>> import torch
        >>> from dtrain.data import Batch
        >>> from dtrain.distributed.world import World
        >>> from dtrain.precision import Precision
        >>> from dtrain.tasks import Classification
        >>> from dtrain.training.step import TrainStep
        >>> world = World.from_environment({})
        >>> model = torch.nn.Linear(4, 2).to(world.device)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> options = {"precision": Precision("fp32"), "loss_scale": None, "nominal": 2, "schedule": lambda steps: 1.0}
        >>> step = TrainStep(model, Classification(), optimizer, world=world, **options)
        >>> columns = {"image": torch.ones(2, 4), "label": torch.tensor([0, 1])}
        >>> batch = Batch(columns, ["a", "b"], torch.tensor([True, True])).to(world.device)
        >>> step.accumulate([batch], micro_batches=1)
        >>> step.apply()
        >>> step.settle().stats.applied
        True

    Args:
        model: The model, wrapped in DDP or sharded if there are several ranks.
        task: Returns the loss sum and the count of a micro-batch.
        optimizer: The optimizer of the model's parameters.
        world: The ranks.
        precision: Provides autocast for forward and loss.
        loss_scale: Scale of the gradients; None: they are not scaled.
        nominal: Number of rows of a full global batch.
        schedule: ``schedule(applied_steps)`` returns the factor of the learning rate.
        clip_norm: Maximum norm of the gradient of the mean loss; None: no clipping.
        ema: Averaged weights, updated after applied steps; None: no averaging.
        seed: Seeds random operations such as dropout, together with step, micro-batch and rank.
        max_consecutive_skips: After this many skipped steps in a row, every rank raises ``TooManySkips``. None: 50 with a
            loss scale, which skips steps until it has adapted, and 10 without.
        reduce_each: With a sharded model: reduce gradients in each micro-batch instead of only in the last one.
        spikes: Settings for finding, and perhaps skipping, spikes of the gradient norm; None: off.
        frozen: Parameters that are not trained up to a certain step; None: none.

    Attributes:
        model: The argument.
        bare_model: The model without DDP.
        task: The argument; may be replaced between steps.
        base_lrs: Learning rates of the parameter groups, which the schedule multiplies.
        step: Attempted steps so far.
        applied_steps: Settled steps that were not skipped.
        consecutive_skips: Skipped steps since the last applied one.

    Raises:
        ConfigError: If ``clip_norm`` or ``max_consecutive_skips`` is impossible, the model averages gradients itself,
            ``loss_scale`` is a gradient scaler, or the optimizer's gradients cannot be scaled.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        optimizer: torch.optim.Optimizer,
        *,
        world: World,
        precision: Precision,
        loss_scale: LossScale | None,
        nominal: int,
        schedule: Callable[[int], float],
        clip_norm: float | None = None,
        ema: Ema | None = None,
        seed: int = 0,
        max_consecutive_skips: int | None = None,
        reduce_each: bool = False,
        spikes: SpikeOptions | None = None,
        frozen: Frozen | None = None,
    ) -> None:
        check_model(model)
        check_loss_scale(loss_scale)
        with as_config_error("optimizer"):
            refuse_unscalable(optimizer)
        if max_consecutive_skips is None:
            max_consecutive_skips = 50 if loss_scale is not None else 10
        if max_consecutive_skips < 1:
            raise ConfigError(f"train.max_consecutive_skips: got {max_consecutive_skips}, want at least 1, or null.")
        if clip_norm is not None and not clip_norm > 0:
            raise ConfigError(f"train.clip_norm: got {clip_norm}, want a number above 0, or null for no clipping.")
        self.model = model
        self.bare_model: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        self.task = task
        self.optimizer = optimizer
        self.world = world
        self.precision = precision
        self.loss_scale = loss_scale
        self.ema = ema
        self._nominal = nominal
        self.schedule = schedule
        self._clip_norm = clip_norm
        self._seed = seed
        self._max_skips = max_consecutive_skips
        self._vote = make_vote(world.device, world.size, spikes)
        self._scale = loss_scale.scale if loss_scale is not None else torch.ones((), device=world.device)
        self._share = torch.full((), world.size / nominal, device=world.device)
        self._autocast = precision.autocast(world.device.type)
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._has_names = len({group.get("name") for group in optimizer.param_groups} - {None}) > 1
        # On a CPU reading the vote costs nothing, so the host decides.
        self._decides_on_device = world.device.type == "cuda" and reads_found_inf(optimizer)
        bare = self.bare_model
        self._sharded = ShardedWindow(bare, reduce_each) if is_sharded(bare) else None
        # By the number of ranks that hold the same gradient. Gradients of parameters that DDP ignores differ between ranks.
        ignored = getattr(model, "parameters_to_ignore", ()) if bare is not model else ()
        copies = {p: 1 if name in ignored else copies_of(p, world.size) for name, p in bare.named_parameters()}
        self._copies = Counter(copies.values()).most_common(1)[0][0] if copies else world.size
        self._other_copies = {p: number for p, number in copies.items() if number != self._copies}
        # With parallel.offload, gradients and optimizer state are in host memory.
        self._state_device = next((local_part(p).device for p in parameters_of(optimizer)), world.device)
        self._decides_on_device &= self._state_device.type == world.device.type
        self._keeps_views = keeps_views(model, optimizer)
        self._buffers = BufferGuard(bare)
        self._valid_rows = ValidRows(bare)
        self._averaged = AveragedBackward(model)
        self._frozen = frozen
        self._diagnosis = SkipDiagnosis(bare)
        self._unfinished = UnfinishedWindow(model) if self._sharded is None else UnfinishedShardedWindow(model)
        self._exhausted = False  # this rank's memory, in a step that not all ranks know of yet
        self._left = 0  # micro-batches of the window that have not begun
        self._metric_names: list[str] = []
        self._window_counts = _WindowCounts()
        self._unapplied = self._unsettled = self._is_open = False
        self._first_window = True
        self._shared_gradients: list[Tensor] | None = None  # known after the first window
        self.step = 0
        self.applied_steps = 0
        self.consecutive_skips = 0

    # -- one step: accumulate, settle the previous step, apply

    def accumulate(self, window: Iterable[Batch], micro_batches: int, *, first: int = 0) -> None:
        """Runs forward and backward of each micro-batch of an accumulation window; the last backward averages over the ranks.

        Args:
            window: The micro-batches, on the device.
            micro_batches: Their number, equal on all ranks.
            first: Number of the first one; random operations are seeded with it.

        Raises:
            WrongOutput: If the task does not return an ``Output``, or its loss has no gradient.
            RuntimeError: If the number of micro-batches is not ``micro_batches``, so that no backward averaged over the ranks.
        """
        # A skipped step must also restore BatchNorm's running statistics, which the forward changes.
        self._buffers.save()
        self._is_open = True
        if self._sharded is not None:
            self._sharded.begin()
        self._unfinished.begin()
        self._left = micro_batches
        if self._exhausted:
            self.cannot_compute()
            return
        if self._frozen is not None:
            self._frozen.set_batchnorm(self.step)
        # Entering a disabled autocast takes 6 us, and matters only inside an enabled one, in a hand-written loop.
        casts = self.precision.compute_dtype != torch.float32 or torch.is_autocast_enabled(self.world.device.type)
        autocast = self._autocast if casts else nullcontext()
        done = 0
        for number, whole in enumerate(window, first):
            if self._first_window and number == 0 and self.world.size > 1:
                self._valid_rows.observe(self.task, self.bare_model, whole, self.precision)
            # Seeded from the position, not from a saved generator state: a resumed run draws the same dropout, and no
            # generator state is needed in checkpoints.
            seed_generators(self.world.device, self._seed, self.step, number, self.world.rank)
            last = number == first + micro_batches - 1
            with self._valid_rows.for_batch(whole) as batch, self._sync(last), self._observed(number, batch):
                self._unfinished.begin_micro_batch(last)
                self._left -= 1
                with profiler_label(FORWARD), autocast:
                    output = run_task(self.task, self.model, batch)
                # Added up on the device: the vote sends one sum for the whole accumulation window.
                self._add(output)
                self._diagnosis.loss(output.loss_sum)
                with profiler_label(BACKWARD):
                    if last:
                        self._unfinished.begin_backward()
                    # The factor is the incoming gradient of the backward, so no scaled copy of the loss is in the graph.
                    try:
                        output.loss_sum.backward(self._factor())
                    except RuntimeError as error:
                        if output.loss_sum.requires_grad:
                            raise
                        raise no_gradient(self.task) from error
            self._window_counts.add(whole)
            done += 1
        self._first_window = False
        if done != micro_batches:
            # The averaging backward was not the last one, so the ranks' gradients may differ.
            raise RuntimeError(f"accumulate(): got {done} micro-batches, want micro_batches={micro_batches}.")
        if self._shared_gradients is None:  # of all parameters, frozen ones too
            self._shared_gradients = with_shared_gradients(self.optimizer)
        if self._frozen is not None:
            self._frozen.drop_gradients(self.step)
        self._unapplied = done > 0

    def cannot_compute(self, metrics: Collection[str] | None = None) -> None:
        """Takes the place of ``accumulate`` on a rank that ran out of memory; collective with ``accumulate`` on the others.

        All ranks then skip the step, and ``settle`` raises ``StepOutOfMemory`` on each of them.

        Args:
            metrics: Names of the task's metrics, if no micro-batch has had them yet.
        """
        if metrics is not None:
            self._metric_names = sorted(metrics)
        drop_gradients(self.optimizer)
        self._window_counts = _WindowCounts()
        self._vote.cannot_compute(len(self._metric_names))
        self._unfinished.finish(self._left)
        self._exhausted = self._unapplied = True

    def settle(self) -> StepOutcome | None:
        """Reads the vote of the last step; waits for the device if necessary.

        Returns:
            The outcome; None if there is no unsettled step.

        Raises:
            TooManySkips: On every rank, after too many skipped steps in a row.
            StepOutOfMemory: On every rank, if a rank could not compute the step. It was not applied, and is not counted.
        """
        if not self._unsettled:
            return None
        self._unsettled = False
        # These sums are equal on all ranks, so every rank takes the same decisions from them.
        stats = self._vote.step_stats(self._metric_names)
        if stats.out_of_memory:
            self.step -= 1
            if self.loss_scale is not None:
                self.loss_scale.uncount()
            raise StepOutOfMemory(f"step {self.step + 1}")
        self.applied_steps += stats.applied
        if not stats.skipped_spike:  # which says nothing about overflows
            self.consecutive_skips = 0 if stats.applied else self.consecutive_skips + 1
        # After a skip the next steps are observed, to name the module and the samples with the first non-finite value.
        self._diagnosis.follow(self.consecutive_skips)
        lr = float(self.optimizer.param_groups[0]["lr"])
        # The vote has the gradient norm of scale * sum / nominal; the outcome has the gradient norm of the mean loss.
        mean = self._nominal / stats.count / stats.loss_scale if stats.count else 0.0
        outcome = StepOutcome(self.step, self.applied_steps, lr, stats.grad_norm * mean, stats)
        if self._has_names:
            outcome.lrs = {group["name"]: float(group["lr"]) for group in self.optimizer.param_groups}
        if self.consecutive_skips >= self._max_skips:
            is_fp16 = self.precision.compute_dtype == torch.float16
            raise TooManySkips(
                self._diagnosis.explain_streak(
                    self.step, self.consecutive_skips, stats, is_fp16=is_fp16, ranks=self.world.size
                )
            )
        return outcome

    def apply(self, *, stop: bool = False, save: bool = False, worker_restarts: int = 0) -> None:
        """Collective. Votes, then updates the parameters or skips the step.

        Args:
            stop: Whether this rank requests a stop.
            save: Whether this rank requests a checkpoint.
            worker_restarts: How many times this rank has restarted its loader workers since the last step.

        Raises:
            RuntimeError: If the previous step is not settled, or no window was accumulated.
        """
        if self._unsettled:
            raise RuntimeError("apply(): call settle() first, this step's learning rate depends on the previous step.")
        if not self._unapplied:
            raise RuntimeError("apply() without a window: call accumulate() first.")
        self._unapplied = False

        for parameter in self._shared_gradients or ():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()  # or it would be multiplied twice

        # -- this rank's gradients. A norm that is not finite is the overflow flag, so one pass over them gives both.
        by_copies = self.gradients()
        norms = {copies: self._norm(gradients) for copies, gradients in by_copies.items()}
        overflow = (
            self._vote.overflow(norms) if not self._exhausted else torch.zeros_like(self._scale, dtype=torch.bool)
        )
        # A running statistic may become NaN in a forward whose loss and gradients are finite.
        # Not of a rank without memory: an overflow would hide that from the vote.
        if not self._exhausted and (spoilt := self._buffers.not_finite()) is not None:
            overflow = overflow | spoilt

        # -- vote. Stop and save requests are part of it, so all ranks receive them at the same step.
        counts, self._window_counts = self._window_counts, _WindowCounts()
        with profiler_label(VOTE):
            self._vote.all_reduce(
                overflow,
                norms,
                self._scale,
                stop=stop,
                save=save,
                samples=counts.samples,
                bad=counts.bad,
                nbytes=counts.nbytes,
                worker_restarts=worker_restarts,
            )
        skip, overflowed, coefficient, skipped_spike = self._vote.decide(self._scale, self._nominal, self._clip_norm)

        # -- update. The previous step is settled, so the schedule can use the number of applied steps.
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * self.schedule(self.applied_steps)
        with profiler_label(OPTIMIZER):
            for gradients in by_copies.values():
                if gradients and coefficient is not None:
                    # Unscaling, the division by the count and clipping in one multiplication.
                    torch._foreach_mul_(gradients, coefficient.to(self._state_device))
            self._optimize(skip)

        # -- everything else that a skipped step must leave unchanged
        self._buffers.restore(skip)
        if self._keeps_views and counts.micro_batches > 1:
            zero_gradients(self.optimizer)
        else:
            drop_gradients(self.optimizer)
        if self.ema is not None:
            self.ema.update(skip.to(self._state_device))
        if self.loss_scale is not None:
            # ``overflowed``, not ``skip``: a step without valid rows is skipped too, but its cause is not the scale.
            self.loss_scale.update(overflowed, unchanged=skipped_spike)
        self.step += 1
        self._unsettled, self._is_open = True, False

    def drop_window(self) -> None:
        """Drops a window that was not applied: its gradients, its sums and its changes to buffers."""
        if self._is_open:
            self._buffers.restore(torch.ones((), dtype=torch.bool, device=self.world.device))
        self._is_open = self._unapplied = False
        self._vote.drop_window()
        self._window_counts = _WindowCounts()
        drop_gradients(self.optimizer)

    def begin_again(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        """Collective. After ``StepOutOfMemory``: drops the window that was begun since, and wraps the bare model again.

        Args:
            wrap: Wraps the bare model in DDP, if there are several ranks: the old DDP may wait for a backward forever.
        """
        self.abandon()
        self._exhausted, self._first_window, self._shared_gradients = False, True, None
        if self._sharded is not None:
            self._sharded.reset()
            return
        self.model = wrap(self.bare_model)
        self._averaged, self._unfinished = AveragedBackward(self.model), UnfinishedWindow(self.model)

    @property
    def is_rehearsed(self) -> bool:
        """Whether a sharded model's collectives are known, so that ``cannot_compute`` can complete them."""
        return isinstance(self._unfinished, UnfinishedShardedWindow) and self._unfinished.is_recorded

    def rehearse(self, batch: Batch) -> None:
        """Collective. With a sharded model: records the collectives of a micro-batch, for ``cannot_compute``; changes nothing.

        Args:
            batch: A few rows, on the device.
        """
        if not isinstance(self._unfinished, UnfinishedShardedWindow) or self._unfinished.is_recorded:
            return
        assert self._sharded is not None
        seed_generators(self.world.device, self._seed)
        for first, last in ((True, True), (True, False), (False, False), (False, True)):
            if first:
                self._sharded.begin()
            with self._unfinished.record(first, last), self._sharded.micro_batch(last):
                with self._autocast:
                    output = run_task(copy_of_task(self.task), self.model, batch)
                output.loss_sum.backward()
            self._metric_names = sorted(output.metrics)
            drop_gradients(self.optimizer)
        self._sharded.begin()
        self._buffers.restore(torch.ones((), dtype=torch.bool, device=self.world.device))

    def abandon(self) -> None:
        """Drops a window that was not applied, and DDP; the bare model is then as it was after the last applied step."""
        self.drop_window()
        if self.model is not self.bare_model:
            # Drop every reference to the process group, so that its connections close.
            vars(self.model).clear()
            self.model = self.bare_model

    def explain_skips(self) -> str:
        """Collective. How many steps were skipped, why, and the remedy, equal on all ranks; "" if none was."""
        skipped = self.step - self.applied_steps
        if not skipped:
            return ""
        return self._diagnosis.explain_skips(self.step, skipped, self.consecutive_skips, self.world.size)

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """The counters, and the norms that spikes are compared with, for a checkpoint; call ``settle`` before."""
        state = {"step": self.step, "applied_steps": self.applied_steps, "consecutive_skips": self.consecutive_skips}
        return state if self._vote.spikes is None else {**state, "norms": self._vote.spikes.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the counters and norms."""
        self.step = state["step"]
        self.applied_steps = state["applied_steps"]
        self.consecutive_skips = state["consecutive_skips"]
        self._diagnosis.follow(self.consecutive_skips)
        if self._vote.spikes is not None:
            self._vote.spikes.load_state_dict(state.get("norms", []))

    def gradients(self) -> dict[int, list[Tensor]]:
        """This rank's gradients, or its parts of them, grouped by the number of ranks that hold the same values.

        They are multiplied by the loss scale, and divided by the size of a full global batch instead of by the count.
        """
        parameters = parameters_of(self.optimizer)
        if not self._other_copies:
            return {self._copies: local_gradients(parameters)}
        groups: defaultdict[int, list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            groups[self._other_copies.get(parameter, self._copies)].append(parameter)
        return {copies: local_gradients(group) for copies, group in groups.items()}

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        return norm_of(gradients).to(self.world.device) if gradients else torch.zeros((), device=self.world.device)

    def _observed(self, number: int, batch: Batch) -> AbstractContextManager[None]:
        keys = batch.sample_keys if self._diagnosis.armed else []
        return self._diagnosis.micro_batch(self.step + 1, number, keys)

    def _sync(self, last: bool) -> AbstractContextManager[None]:
        if self._sharded is not None:
            return self._sharded.micro_batch(last)
        if not isinstance(self.model, DistributedDataParallel):
            return nullcontext()
        if last:
            return self._averaged
        if self.model.static_graph and self._first_window:
            # DDP records the graph in its first backward, which must average gradients. Averaging equal gradients again in
            # the last micro-batch does not change them.
            return nullcontext()
        return self.model.no_sync()

    def _add(self, output: Output) -> None:
        names = sorted(output.metrics)
        if self._metric_names and names != self._metric_names:
            raise ValueError(
                f"the task returned the metrics {names}, before that {self._metric_names}. Every micro-batch must have "
                "the same metrics, because all ranks add them up. Return a count of 0 where there is nothing to add."
            )
        self._metric_names = names
        pairs = ((output.loss_sum, output.count), *(output.metrics[name] for name in names))
        self._vote.add([value for pair in pairs for value in pair])

    def _factor(self) -> Tensor:
        """The factor of a loss sum: world / nominal, times the loss scale."""
        return self._scale * self._share if self.loss_scale is not None else self._share

    def _optimize(self, skip: Tensor) -> None:
        optimizer = self.optimizer
        # On the host too: fused SGD fails where some parameters have their first gradient later than others.
        if not (prefill_momentum(optimizer) and self._decides_on_device):
            if not skip.item():  # on a GPU with an optimizer that is not fused: the only host sync of the step
                optimizer.step()
            return
        # The contract between torch.amp.GradScaler and fused optimizers: the kernel skips if found_inf is exactly 1.0.
        optimizer.grad_scale, optimizer.found_inf = None, skip.float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


@dataclass
class _WindowCounts:
    """This rank's micro-batches and samples of one accumulation window."""

    micro_batches: int = 0
    samples: int = 0
    bad: int = 0
    nbytes: int = 0

    def add(self, batch: Batch) -> None:
        self.micro_batches += 1
        self.samples += batch.num_valid
        self.bad += len(batch.bad)
        self.nbytes += batch.transfer_bytes

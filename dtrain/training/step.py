"""One optimizer step, from the micro-batches of a window to moved (or unmoved) parameters.

* A *window* is the micro-batches of one step. Gradients are summed over it; DDP averages them over the ranks in the
  backward of its last micro-batch.
* After that backward the ranks *vote*: one all-reduce carries overflow flags, gradient norm, loss sum and count, stop
  requests. From the same word every rank takes the same decision: apply the step, or leave the parameters alone.
* With a fused optimizer on a GPU the decision stays there: the host queues the step and reads the word one step later, in
  ``settle``, always waiting for it and never polling, so that all ranks learn it at the same step.

Order of the arithmetic: the loss sum of a micro-batch is multiplied by ``world / nominal * loss scale``, where nominal is
the global batch size; gradients are then multiplied once, by ``nominal / count / loss scale * clip coefficient``, where
count is that of all valid rows of the global batch. The result is the gradient of the mean over all valid rows for any
split into ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.config.errors import ConfigError, Explained, users_to_fix
from dtrain.data import Batch
from dtrain.distributed.world import World
from dtrain.precision import Precision, kernels
from dtrain.precision.comm_hooks import HookGuard
from dtrain.precision.diagnosis import SkipDiagnosis
from dtrain.precision.host_vote import HostVote
from dtrain.precision.loss_scale import LossScale
from dtrain.precision.momentum import prefill_momentum
from dtrain.precision.nonfinite import drop_gradients, local_gradients, norm_of, refuse_unscalable
from dtrain.precision.vote import Tally, Vote
from dtrain.training.buffers import BufferGuard
from dtrain.training.ema import Ema
from dtrain.training.refusals import AveragedBackward, refuse_model, refuse_scale
from dtrain.training.seed import seed_generators
from dtrain.training.spans import BACKWARD, FORWARD, OPTIMIZER, VOTE, span
from dtrain.training.task import Output, Task, checked


class TooManySkips(Explained, RuntimeError):
    """So many steps in a row were skipped that the run is not learning any more."""


@dataclass(slots=True)  # made in every step, and frozen ones take long to make
class Outcome:
    """A settled step, equal on all ranks.

    Attributes:
        step: Number of the attempted step, from 1.
        applied_steps: Applied steps up to and including it.
        lr: Learning rate of the first parameter group.
        grad_norm: Norm of the gradient of the mean loss before clipping; NaN if the step was skipped for an overflow.
        tally: What was voted.
    """

    step: int
    applied_steps: int
    lr: float
    grad_norm: float
    tally: Tally


class TrainStep:
    """Runs windows and optimizer steps.

    Args:
        model: The model, wrapped in DDP if there are several ranks.
        task: Gives the loss sum and the count of a micro-batch.
        optimizer: Its parameters' gradients are what the vote is about.
        world: The ranks.
        precision: Autocast of forward and loss.
        loss_scale: The scale of the gradients; None where they are not scaled.
        nominal: Rows of a full global batch.
        schedule: Learning-rate factor for a number of applied steps.
        clip_norm: Largest norm of the gradient of the mean loss; None does not clip.
        ema: Moving average that follows the applied steps.
        guard: Of the communication hook that may lose an overflow, or remember one.
        seed: Seeds dropout and the like, together with step, micro-batch and rank.
        max_consecutive_skips: So many skipped steps in a row raise ``TooManySkips`` on every rank. None is 50 with a
            loss scale, which needs some to find its level, and 10 without.

    Raises:
        ConfigError: If ``clip_norm`` or ``max_consecutive_skips`` is impossible, the model averages gradients in a way
            of its own, ``loss_scale`` is a scaler, or the optimizer's gradients cannot be scaled.
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
        guard: HookGuard | None = None,
        seed: int = 0,
        max_consecutive_skips: int | None = None,
    ) -> None:
        refuse_model(model)
        refuse_scale(loss_scale)
        with users_to_fix("optimizer"):
            refuse_unscalable(optimizer)
        self._model = model
        self._task = task
        self._optimizer = optimizer
        self._world = world
        self.loss_scale = loss_scale
        self._nominal = nominal
        self._schedule = schedule
        self._clip_norm = clip_norm
        self._ema = ema
        self._guard = guard
        self._seed = seed
        if max_consecutive_skips is None:
            max_consecutive_skips = 50 if loss_scale is not None else 10
        if max_consecutive_skips < 1:
            raise ConfigError(f"train.max_consecutive_skips: got {max_consecutive_skips}, want at least 1, or null.")
        if clip_norm is not None and not clip_norm > 0:
            raise ConfigError(f"train.clip_norm: got {clip_norm}, want a number above 0, or null for no clipping.")
        self._max_skips = max_consecutive_skips
        on_host = world.device.type == "cpu"
        self._vote: Vote | HostVote = HostVote(world.size) if on_host else Vote(world.device, world.size)
        self._scale = loss_scale.scale if loss_scale is not None else torch.ones((), device=world.device)
        self._share = torch.full((), world.size / nominal, device=world.device)
        self._autocast = precision.autocast(world.device.type)
        self._base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        # On a CPU there is nothing to wait for: the host decides.
        self._decides_on_device = (
            world.device.type == "cuda"
            and getattr(optimizer, "_step_supports_amp_scaling", False)
            and kernels.self_test(world.device.type).fused_skip
        )
        bare = model.module if isinstance(model, DistributedDataParallel) else model
        # Parameters that DDP was told to leave alone are this rank's own: of the one logical norm each rank has a part.
        ignored = getattr(model, "parameters_to_ignore", ()) if bare is not model else ()
        self._own_parameters = [p for name, p in bare.named_parameters() if name in ignored]
        self._buffers = BufferGuard(bare)
        self._averaged = AveragedBackward(model)
        self._diagnosis = SkipDiagnosis(bare)
        self._metric_names: list[str] = []
        self._local = _Local()
        self._unapplied = self._unsettled = False
        self._first_window = True
        self.step = 0
        self.applied_steps = 0
        self.consecutive_skips = 0

    # -- one step: accumulate, settle the one before, apply

    def accumulate(self, window: Iterable[Batch], micro_batches: int) -> None:
        """Forward and backward of every micro-batch of a window; the last backward averages over the ranks.

        Args:
            window: The micro-batches, on the device.
            micro_batches: How many they are, equal on all ranks.

        Raises:
            TypeError: If the task returns something else than an ``Output``.
            RuntimeError: If the window has another number of micro-batches, or its last backward was not averaged.
        """
        self._buffers.keep()
        done = 0
        for number, batch in enumerate(window):
            seed_generators(self._world.device, self._seed, self.step, number, self._world.rank)
            watched = self._diagnosis.micro_batch(self.step + 1, number, batch.sample_keys)
            with self._sync(last=number == micro_batches - 1), watched:
                with span(FORWARD), self._autocast:
                    output = checked(self._task(self._model, batch))
                self._add(output)
                self._diagnosis.loss(output.loss_sum)
                with span(BACKWARD):
                    output.loss_sum.backward(self._factor())
            self._local.add(batch)
            done += 1
        self._first_window = False
        if done != micro_batches:
            # The backward that averages over the ranks was not the last one.
            raise RuntimeError(f"accumulate(): the window had {done} micro-batches, not {micro_batches} as was said.")
        self._unapplied = done > 0

    def settle(self) -> Outcome | None:
        """The outcome of the last applied-for step, waiting for it if need be; None if it was asked for already.

        Raises:
            TooManySkips: On every rank, after too many skipped steps in a row.
        """
        if not self._unsettled:
            return None
        self._unsettled = False
        tally = self._vote.tally(self._metric_names)
        self.applied_steps += tally.applied
        self.consecutive_skips = 0 if tally.applied else self.consecutive_skips + 1
        self._diagnosis.follow(self.consecutive_skips)
        lr = float(self._optimizer.param_groups[0]["lr"])
        mean = self._nominal / tally.count / tally.loss_scale if tally.count else 0.0
        outcome = Outcome(self.step, self.applied_steps, lr, tally.grad_norm * mean, tally)
        if self.consecutive_skips >= self._max_skips:
            raise TooManySkips(self._why_so_many_skips(tally))
        return outcome

    def apply(self, *, stop: bool = False, save: bool = False) -> None:
        """Collective. Votes, then moves the parameters or leaves them alone.

        Args:
            stop: This rank was asked to stop.
            save: This rank wants a checkpoint.
        """
        if self._unsettled:
            raise RuntimeError("apply(): settle() the step before first, it decides this step's learning rate.")
        if not self._unapplied:
            raise RuntimeError("apply() without a window: call accumulate() first.")
        self._unapplied = False
        gradients = local_gradients(self._optimizer)
        norm = self._norm(gradients)
        overflow = self._vote.overflow(norm)
        own = [p.grad for p in self._own_parameters if p.grad is not None]
        if own:
            own_ids = {id(gradient) for gradient in own}
            norm = self._norm([gradient for gradient in gradients if id(gradient) not in own_ids])
        if self._guard is not None:
            overflow = overflow | self._guard.flag()
        local, self._local = self._local, _Local()
        with span(VOTE):
            self._vote.cast(
                overflow,
                norm,
                self._scale,
                stop=stop,
                save=save,
                samples=local.samples,
                bad=local.bad,
                nbytes=local.nbytes,
                own_norm=self._norm(own) if own else None,
            )
        skip, overflowed, coefficient = self._vote.decide(self._scale, self._nominal, self._clip_norm)
        for group, base in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base * self._schedule(self.applied_steps)
        with span(OPTIMIZER):
            if gradients and coefficient is not None:
                torch._foreach_mul_(gradients, coefficient)
            self._optimize(skip)
        self._buffers.restore(skip)
        if self._guard is not None:
            self._guard.reset(skip)
        drop_gradients(self._optimizer)
        if self._ema is not None:
            self._ema.update(skip)
        if self.loss_scale is not None:
            self.loss_scale.update(overflowed)
        self.step += 1
        self._unsettled = True

    @property
    def wrapped(self) -> nn.Module:
        """The model as it is run: in DDP if there are several ranks."""
        return self._model

    # -- state

    def state_dict(self) -> dict[str, int]:
        """Counters, for a checkpoint. Settle first."""
        return {"step": self.step, "applied_steps": self.applied_steps, "consecutive_skips": self.consecutive_skips}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues after ``state``."""
        self.step = state["step"]
        self.applied_steps = state["applied_steps"]
        self.consecutive_skips = state["consecutive_skips"]
        self._diagnosis.follow(self.consecutive_skips)

    def _why_so_many_skips(self, tally: Tally) -> str:
        """Collective."""
        streak = f"{self.consecutive_skips} steps in a row were skipped, the last one is step {self.step}: "
        if not tally.overflow:
            return f"{streak}none had a valid row. All samples are masked or bad: look at data.train and data.fields."
        origin = "\n".join(self._diagnosis.findings(self._world.size))
        instead = ", or try precision=bf16" if self.loss_scale is not None else ""
        return (
            f"{streak}a loss or gradient was not finite, at a loss scale of {tally.loss_scale:g}.\n{origin}\n"
            f"Look at these samples, lower optimizer.lr, set train.clip_norm{instead}."
        )

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        return norm_of(gradients) if gradients else torch.zeros((), device=self._world.device)

    def _sync(self, last: bool) -> AbstractContextManager[None]:
        if not isinstance(self._model, DistributedDataParallel):
            return nullcontext()
        if last:
            return self._averaged
        if self._model.static_graph and self._first_window:
            # DDP learns the graph in its first backward, which has to average; what is averaged twice stays the same.
            return nullcontext()
        return self._model.no_sync()

    def _add(self, output: Output) -> None:
        names = sorted(output.metrics)
        if self._metric_names and names != self._metric_names:
            raise ValueError(
                f"the task returned the metrics {names}, before that {self._metric_names}. Every micro-batch must have "
                "the same ones, since all ranks add them up; count 0 says that there is nothing to add."
            )
        self._metric_names = names
        pairs = ((output.loss_sum, output.count), *(output.metrics[name] for name in names))
        self._vote.add([value for pair in pairs for value in pair])

    def _factor(self) -> Tensor:
        """What a loss sum is multiplied by."""
        return self._scale * self._share if self.loss_scale is not None else self._share

    def _optimize(self, skip: Tensor) -> None:
        optimizer = self._optimizer
        if not (self._decides_on_device and prefill_momentum(optimizer)):
            if not skip.item():  # on a GPU with an optimizer that is not fused, the one wait of the step
                optimizer.step()
            return
        # The contract of fused optimizers (torch.amp.GradScaler): the kernel skips if found_inf is exactly 1.0.
        optimizer.grad_scale, optimizer.found_inf = None, skip.float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


@dataclass
class _Local:
    """What this rank's loader handed over for a window."""

    samples: int = 0
    bad: int = 0
    nbytes: int = 0

    def add(self, batch: Batch) -> None:
        self.samples += len(batch.sample_keys) - batch.sample_keys.count("")
        self.bad += len(batch.bad)
        self.nbytes += batch.wire_bytes

"""A gradient scaler whose overflow checks are all-reduced, so that every rank skips the same steps.

``torch.amp.GradScaler`` does not communicate. If DDP does not average a gradient (parameters outside its buckets, sharded
gradients, several optimizers, local SGD), one rank may skip a step that the others take; their scales then drift apart, and
gradients of different scales are averaged. ``CrossRankGradScaler`` has the same methods and state keys, and sums the overflow
flags of all ranks before each optimizer step.

* The *flag* of a rank is 1.0 if one of its gradients is not finite, else 0.0. The *decision* is 1.0 if any rank's flag is.
* A *round* of an optimizer lasts from one ``update()`` to the next: it is unscaled, then stepped.

dtrain's own training loop uses the vote instead (``dtrain.precision.vote``), which also carries losses and stop requests. Both
are built on ``Agreement`` and ``LossScale``.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.errors import ConfigError
from dtrain.precision.fused_optimizers import prefill_momentum, reads_found_inf
from dtrain.precision.gradients import (
    check_and_unscale_,
    copy_to_device,
    local_gradients,
    parameters_of,
    refuse_shared_gradients,
    refuse_unscalable,
)
from dtrain.precision.loss_scale import LossScale, LossScaleState
from dtrain.precision.vote import Agreement, equal_scales

_DIFFERENT_SCALES = (
    "CrossRankGradScaler: the ranks' loss scales differ, so gradients of different scale were averaged. Load the "
    "scaler's state through load_state_dict on every rank, and give update() the same new_scale everywhere"
)


class CrossRankGradScaler:
    """A replacement for ``torch.amp.GradScaler`` with which all ranks skip the same steps.

    ``step`` and ``load_state_dict`` are collective over ``process_group``. With a fused optimizer the host never waits for
    the device: the optimizer's kernel reads the decision. With other optimizers it waits for one number per step.

    Every rank must call ``step`` the same number of times. A rank that has run out of inputs calls ``scale`` on a zero and then
    ``step`` without gradients.

    Example:
        >>> import torch
        >>> from dtrain.precision import CrossRankGradScaler
        >>> model, scaler = torch.nn.Linear(4, 1), CrossRankGradScaler("cpu", growth_interval=1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        >>> scaler.scale(model(torch.ones(2, 4)).mean()).backward()
        >>> scaler.step(optimizer)  # on every rank, equally often
        >>> scaler.update()
        >>> scaler.get_scale()
        131072.0

    Args:
        device: Device type of the loss, ``"cuda"`` or ``"cpu"``.
        init_scale: First scale.
        growth_factor: The scale is multiplied by this after ``growth_interval`` clean updates in a row.
        backoff_factor: The scale is multiplied by this after ``hysteresis`` overflowing updates.
        growth_interval: Clean updates between two growths.
        hysteresis: Overflowing updates until the scale backs off (Megatron-LM's meaning; 1 is torch's behaviour).
        min_scale: Lower bound. torch has none: its scale decays to zero, and then lets NaN through.
        max_scale: Upper bound.
        process_group: All ranks that share the scale; None: the default group, or this process alone if there is no group.
        enabled: False makes every method a pass-through, as in torch.

    Raises:
        ValueError: If a factor, interval or bound is impossible (names both values), scaling is enabled for a device that is
            not available, or ``process_group`` does not contain this rank.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        process_group: dist.ProcessGroup | None = None,
        enabled: bool = True,
    ) -> None:
        self._enabled = enabled
        self._agreement = Agreement(process_group)
        # On the host until the first loss shows on which of several devices the scale belongs.
        host = torch.device("cpu")
        self._loss_scale = LossScale(
            host, init_scale, growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale
        )
        self._placed = False
        self._rounds: dict[torch.optim.Optimizer, _Round] = {}
        # Optimizers that passed refuse_unscalable(), and whether their own kernel reads the decision.
        self._takes_found_inf: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        if enabled and torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"CrossRankGradScaler: device={device!r}, but CUDA is not available. Pass the device type of the loss, "
                "or enabled=False to train without gradient scaling"
            )
        if enabled and self._agreement.size < 1:
            raise ConfigError("CrossRankGradScaler: process_group does not contain this rank")

    def __getstate__(self) -> dict[str, Any]:
        """For ``pickle`` and ``copy.deepcopy``, between ``update`` and the next ``unscale_`` or ``step``.

        Raises:
            RuntimeError: If an optimizer was unscaled since the last ``update``.
            TypeError: If the scaler has a process group, which cannot be pickled.
        """
        if self._rounds:
            raise RuntimeError(
                "CrossRankGradScaler: it can be pickled only after update(), not between unscale_() and update()"
            )
        if self._agreement.has_own_group:
            raise TypeError(
                "CrossRankGradScaler: it has a process_group, which cannot be pickled. Save state_dict(), and load it into a "
                "scaler that was made with the group of the new process"
            )
        # On the host, as before the first scale(): the process that unpickles it may have a different device.
        loss_scale = copy.copy(self._loss_scale)
        loss_scale.to(torch.device("cpu"))
        own = {"_loss_scale": loss_scale, "_placed": False}
        return {name: value for name, value in vars(self).items() if name != "_takes_found_inf"} | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _takes_found_inf=weakref.WeakKeyDictionary())

    @overload
    def scale(self, outputs: Tensor) -> Tensor: ...

    @overload
    def scale(self, outputs: list[Tensor]) -> list[Tensor]: ...

    @overload
    def scale(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]: ...

    @overload
    def scale(self, outputs: Iterable[Any]) -> Iterable[Any]: ...

    def scale(self, outputs: Any) -> Any:
        """Multiplies a tensor, or every tensor of a nested tuple or list, by the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if not self._placed:
                self._loss_scale.to(outputs.device)
                self._placed = True
            return outputs * copy_to_device(self._loss_scale.scale, outputs.device)
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes)):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise ValueError(f"scale: got {type(outputs).__name__}, want a tensor or an iterable of tensors")

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients of ``optimizer`` by the scale in place and records whether any is not finite.

        Raises:
            RuntimeError: If called twice for an optimizer since the last ``update``, or after its ``step``.
            ValueError: If a parameter is fp16, is listed twice, shares its gradient with a different parameter, or is updated
                inside the backward pass; or if the optimizer's ``step`` expects a scaler.
        """
        if not self._enabled:
            return
        self._require_scaled("unscale_")
        if optimizer not in self._takes_found_inf:
            refuse_unscalable(optimizer)
            refuse_shared_gradients(optimizer)
            self._takes_found_inf[optimizer] = _takes_found_inf(optimizer, self._loss_scale.scale.device)
            # A wrapper such as PostLocalSGDOptimizer does not initialise its base class, and has no place for hooks.
            if hasattr(optimizer, "_optimizer_step_pre_hooks"):
                optimizer.register_step_pre_hook(_StepGuard(weakref.ref(self)))
        if optimizer in self._rounds:
            done = "step()" if self._rounds[optimizer].stepped else "unscale_()"
            raise RuntimeError(f"unscale_() was called after {done} of the same optimizer: call update() in between")
        scale = self._loss_scale.scale
        # Dividing by a scale below 1 may overflow.
        recheck = self._loss_scale.min_scale < 1
        self._rounds[optimizer] = _Round(check_and_unscale_(local_gradients(parameters_of(optimizer)), scale, recheck))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Collective. Calls ``optimizer.step`` unless a rank found a non-finite gradient; unscales first if needed.

        Every rank of the process group must call it the same number of times, whether or not its parameters have gradients.

        Args:
            optimizer: The optimizer.
            args: Arguments of ``optimizer.step``.
            kwargs: Arguments of ``optimizer.step``.

        Returns:
            The result of ``optimizer.step``; None if it was not called.

        Raises:
            RuntimeError: If called twice since the last ``update``, or with a closure; on every rank, if the ranks' scales
                differ.
        """
        if not self._enabled:
            loss: float | None = optimizer.step(*args, **kwargs)
            return loss
        if kwargs.get("closure", args[0] if args else None) is not None:
            raise RuntimeError(
                "step() takes no closure: gradients that a closure makes are neither unscaled nor checked"
            )
        self._require_scaled("step")
        if optimizer not in self._rounds:
            self.unscale_(optimizer)
        round_ = self._rounds[optimizer]
        if round_.stepped:
            raise RuntimeError("step() was called twice for the same optimizer: call update() in between")
        on_device = self._takes_found_inf[optimizer] and prefill_momentum(optimizer)
        round_.found_inf = self._decision(round_.found_inf, on_device)
        round_.stepped = round_.stepping = True
        try:
            if on_device:
                return _step_unless(round_.found_inf, optimizer, args, kwargs)
            return None if round_.found_inf.item() else optimizer.step(*args, **kwargs)
        finally:
            round_.stepping = False

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Grows or reduces the scale, depending on whether steps were skipped since the last update; ends the round.

        Args:
            new_scale: Sets the scale to this value instead; must be the same on every rank.

        Raises:
            RuntimeError: If no step was taken, or an optimizer was unscaled but not stepped.
        """
        if not self._enabled:
            return
        self._require_scaled("update")
        if new_scale is not None:
            self._loss_scale.set(new_scale)
        else:
            if not self._rounds:
                raise RuntimeError("update() found no step since the last update(): call step(optimizer) first")
            if not all(round_.stepped for round_ in self._rounds.values()):
                raise RuntimeError(
                    "update() found an optimizer that was unscaled but not stepped, so the ranks have not agreed on "
                    "its overflow. Call step() on every rank: it skips by itself"
                )
            decisions = [round_.found_inf for round_ in self._rounds.values()]
            self._loss_scale.update(reduce(torch.maximum, decisions))
        self._rounds.clear()

    def get_scale(self) -> float:
        """The scale; 1.0 when disabled. Waits for the device."""
        return float(self._loss_scale.scale.item()) if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """The factor by which the scale grows."""
        return self._loss_scale.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Changes the growth factor; above 1."""
        scale = self._loss_scale
        scale.configure(new_factor, scale.backoff_factor, scale.growth_interval)

    def get_backoff_factor(self) -> float:
        """The factor by which the scale backs off."""
        return self._loss_scale.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Changes the backoff factor; between 0 and 1."""
        scale = self._loss_scale
        scale.configure(scale.growth_factor, new_factor, scale.growth_interval)

    def get_growth_interval(self) -> int:
        """The number of clean updates after which the scale grows."""
        return self._loss_scale.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Changes the growth interval; at least 1."""
        scale = self._loss_scale
        scale.configure(scale.growth_factor, scale.backoff_factor, new_interval)

    def is_enabled(self) -> bool:
        """Whether this scaler scales gradients."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """torch's keys ``scale growth_factor backoff_factor growth_interval _growth_tracker``; ``{}`` when disabled.

        With a hysteresis above 1 also ``_hysteresis_tracker``, which torch's scaler ignores. Waits for the device.
        """
        return self._loss_scale.state_dict() if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Collective. Loads rank 0's state on every rank; the other ranks may pass None.

        A scale outside ``[min_scale, max_scale]`` is clamped with a warning. Does nothing when disabled.

        Raises:
            ValueError: On every rank, if rank 0's state is not a scaler's state.
            RuntimeError: If not every rank takes part.
        """
        if not self._enabled:
            return
        if self._agreement.size == 1:
            self._loss_scale.load_state_dict(state_dict)
            return
        state: LossScaleState | ConfigError
        try:
            state = LossScaleState.from_dict(state_dict)
        except ConfigError as error:
            state = error  # raised below, on every rank, if this is rank 0
        try:
            # Not a broadcast, in which rank 0 would not notice that the others are absent.
            state = self._agreement.gather(state)[0]
        except RuntimeError as error:
            raise RuntimeError(
                f"CrossRankGradScaler.load_state_dict is collective over {self._agreement.size} ranks and not all of them "
                "took part. Call it on every rank; all but rank 0 may pass None"
            ) from error
        if isinstance(state, ConfigError):
            raise state
        self._loss_scale.load(state)

    def _decision(self, flag: Tensor, on_device: bool) -> Tensor:
        """Collective. The decision of all ranks: exactly 1.0 or 0.0, fp32, shape ``[]``."""
        if self._agreement.size == 1:
            return flag
        scale = self._loss_scale.scale.double()
        payload = torch.stack([flag.double(), scale, scale.square()])
        self._agreement.sum_payload(payload)
        flags, total, squares = payload.unbind()
        agree = equal_scales(self._agreement.size, total, squares)
        if on_device and agree.device.type != "cpu":
            torch._assert_async(agree, _DIFFERENT_SCALES)  # the only check that does not wait for the device
        elif not agree.item():
            raise RuntimeError(_DIFFERENT_SCALES)
        # Not the sum: fused kernels compare with 1.0, so that 2.0 (two ranks overflowed) would mean "step".
        return (flags > 0).float()

    def _require_scaled(self, method: str) -> None:
        if not self._placed:
            raise RuntimeError(
                f"{method}() was called before any scale(): the loss has to be scaled before backward, by this scaler and "
                "not by torch.amp.GradScaler: scaler.scale(loss).backward(). A rank without a loss, such as a pipeline "
                "stage, scales a zero: scaler.scale(torch.zeros((), device=device))"
            )


@dataclass
class _Round:
    found_inf: Tensor  # this rank's flag; after ``step`` the decision: fp32, shape []
    stepped: bool = False  # ``step`` was called
    stepping: bool = False  # ``step`` is running


@dataclass(frozen=True)
class _StepGuard:
    """Step pre-hook of an optimizer: refuses a step that does not come from the scaler that unscaled the gradients."""

    scaler: weakref.ref[CrossRankGradScaler]

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        scaler = self.scaler()
        round_ = scaler._rounds.get(optimizer) if scaler is not None else None
        if round_ is not None and not round_.stepping:
            raise RuntimeError(
                f"this {type(optimizer).__name__} was unscaled by CrossRankGradScaler and is now stepped by something "
                "else, such as torch.amp.GradScaler or a call of optimizer.step(): it would not skip where another rank "
                "overflowed, or step twice. Use scaler.step(optimizer) alone, and one scaler for one optimizer"
            )


def _takes_found_inf(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether the optimizer's own kernel skips the step if a flag on ``device`` is 1.0."""
    if not reads_found_inf(optimizer):
        return False
    types = {parameter.device.type for group in optimizer.param_groups for parameter in group["params"]}
    # For parameters on the CPU torch copies the flag to the host without waiting for it, so it would be read too early.
    return "cpu" not in types or device.type == "cpu"


def _step_unless(
    found_inf: Tensor, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float | None:
    """Steps a fused optimizer, whose kernel changes nothing if ``found_inf`` is 1."""
    # A `grad_scale` that the user set on the optimizer still applies; the loss scale is divided out already.
    optimizer.grad_scale = getattr(optimizer, "grad_scale", None)  # type: ignore[attr-defined]
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    try:
        loss: float | None = optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale  # type: ignore[attr-defined]
        del optimizer.found_inf  # type: ignore[attr-defined]
    return loss

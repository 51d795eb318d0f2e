"""A gradient scaler whose inf checks are all-reduced, so that every rank skips the same steps.

``torch.amp.GradScaler`` has no collective: as soon as a gradient is not averaged by DDP (parameters outside its
buckets, sharded gradients, several optimizers, local SGD), one rank skips a step that another takes, their scales drift
apart, and gradients of different scale are averaged. Here each optimizer's local 0/1 flag is summed over the process
group and every rank acts on ``sum > 0``. The methods and state keys are those of ``torch.amp.GradScaler``.

* A *round* is what one optimizer goes through between two updates: unscaled, then stepped.
* A *flag* is this rank's finding, exactly 0.0 or 1.0; the *decision* is what the ranks make of their flags.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.config.errors import ConfigError
from dtrain.precision import kernels
from dtrain.precision.loss_scale import LossScale, LossScaleState
from dtrain.precision.momentum import prefill_momentum
from dtrain.precision.nonfinite import check_and_unscale_, local_gradients, refuse_unscalable, sent
from dtrain.precision.peers import Peers


class CrossRankGradScaler:
    """``torch.amp.GradScaler`` whose ranks decide together.

    Args:
        device: Device type of the loss, ``"cuda"`` or ``"cpu"``.
        init_scale: First scale.
        growth_factor: The scale is multiplied by this after ``growth_interval`` clean updates in a row.
        backoff_factor: The scale is multiplied by this after ``hysteresis`` overflowing updates.
        growth_interval: Clean updates between two growths.
        hysteresis: Overflowing updates until the scale backs off (Megatron-LM's meaning; 1 is torch's behaviour).
        min_scale: The scale never falls below; without a floor torch's scale decays to zero and then lets NaN through.
        max_scale: The scale never grows above.
        process_group: Every rank that shares the scale; None is the default group, or no group where none exists.
        enabled: False makes every method a pass-through, as in torch.

    Raises:
        ValueError: If a factor, interval or bound is impossible; names both values. If scaling is enabled for a device
            that is not there, or ``process_group`` does not contain this rank.

    Attributes:
        peers: The ranks that share the scale.

    ``step`` and ``load_state_dict`` are collective over ``process_group``. With a fused optimizer nothing waits for the
    device: the decision is handed to its kernel. Others wait for one number a step.

    Uneven inputs: every rank steps equally often. Under torch's ``Join`` see ``dtrain.precision.join``.
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
        self.peers = Peers(process_group, torch.device(device))
        # On the host until the first loss shows where it belongs.
        host = torch.device("cpu")
        self._loss_scale = LossScale(
            host, init_scale, growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale
        )
        self._placed = False
        self._rounds: dict[torch.optim.Optimizer, _Round] = {}
        # Optimizers that can be scaled: whether their own kernel takes the decision.
        self._takes_found_inf: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        if enabled and torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"CrossRankGradScaler: device={device!r}, but CUDA is not available. Pass the device type of the loss, "
                "or enabled=False to train without gradient scaling"
            )
        if enabled and self.peers.count < 1:
            raise ConfigError("CrossRankGradScaler: process_group does not contain this rank")

    def scale(self, outputs: Any) -> Any:
        """Multiplies a tensor, or every tensor of a nested tuple or list, by the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if not self._placed:
                self._loss_scale.to(outputs.device)
                self._placed = True
            return outputs * sent(self._loss_scale.scale, outputs.device)
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes)):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise ValueError(f"scale: got {type(outputs).__name__}, want a tensor or an iterable of tensors")

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients of ``optimizer`` by the scale in place and notes whether any is not finite.

        Raises:
            RuntimeError: If called twice for one optimizer since the last ``update``, or after its ``step``.
            ValueError: If a parameter is fp16 or is updated inside the backward pass.
        """
        if not self._enabled:
            return
        self._require_scaled("unscale_")
        if optimizer not in self._takes_found_inf:
            refuse_unscalable(optimizer)
            self._takes_found_inf[optimizer] = _takes_found_inf(optimizer, self._loss_scale.scale.device)
            # A wrapper such as PostLocalSGDOptimizer does not initialise its base class, and has no place for hooks.
            if hasattr(optimizer, "_optimizer_step_pre_hooks"):
                optimizer.register_step_pre_hook(_OnlyOurs(weakref.ref(self)))
        if optimizer in self._rounds:
            done = "step()" if self._rounds[optimizer].stepped else "unscale_()"
            raise RuntimeError(f"unscale_() was called after {done} of the same optimizer: call update() in between")
        scale, may_shrink = self._loss_scale.scale, self._loss_scale.min_scale < 1
        self._rounds[optimizer] = _Round(check_and_unscale_(local_gradients(optimizer), scale, recheck=may_shrink))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Collective. Steps ``optimizer`` if no rank saw a non-finite gradient; unscales first if that was not done.

        Every rank of the process group calls it equally often, whether or not its parameters have gradients.

        Returns:
            What ``optimizer.step`` returned; None where it was not called.

        Raises:
            RuntimeError: If called twice since the last ``update``, given a closure, or the ranks' scales differ.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
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
        round_.found_inf = self.peers.decide(round_.found_inf, self._loss_scale.scale, on_device)
        round_.stepped = round_.stepping = True
        try:
            if on_device:
                return _step_unless(round_.found_inf, optimizer, args, kwargs)
            return None if round_.found_inf.item() else optimizer.step(*args, **kwargs)
        finally:
            round_.stepping = False

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapts the scale to what the steps since the last update found; ends the iteration.

        Args:
            new_scale: Replaces the scale instead; the same on every rank.

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

    def follow(self, optimizers: int = 1) -> None:
        """Collective. Takes part in the steps and the update of the other ranks without having gradients itself.

        Args:
            optimizers: How many the others step before they update.
        """
        if not self._enabled:
            return
        scale = self._loss_scale.scale
        decisions = [self.peers.decide(torch.zeros_like(scale), scale, False) for _ in range(optimizers)]
        self._loss_scale.update(reduce(torch.maximum, decisions))

    def get_scale(self) -> float:
        """The scale (1.0 when disabled). Synchronises with the device."""
        return float(self._loss_scale.scale.item()) if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """What the scale is multiplied by when it grows."""
        return self._loss_scale.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Changes the growth factor; above 1."""
        self._loss_scale.configure(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """What the scale is multiplied by when it backs off."""
        return self._loss_scale.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Changes the backoff factor; between 0 and 1."""
        self._loss_scale.configure(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """Clean updates between two growths."""
        return self._loss_scale.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Changes the growth interval; at least 1."""
        self._loss_scale.configure(growth_interval=new_interval)

    def is_enabled(self) -> bool:
        """Whether gradients are scaled at all."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """torch's five keys: ``scale growth_factor backoff_factor growth_interval _growth_tracker``; ``{}`` if off.

        With a hysteresis above 1 also ``_hysteresis_tracker``, which torch's scaler ignores. Synchronises with the
        device.
        """
        return self._loss_scale.state_dict() if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Collective. Loads rank 0's state on every rank; the other ranks may pass None.

        A scale outside ``[min_scale, max_scale]`` is clamped with a warning. Does nothing when disabled.

        Raises:
            ValueError: On every rank, if rank 0's state is not that of a scaler.
            RuntimeError: If not every rank takes part.
        """
        if not self._enabled:
            return
        if self.peers.count == 1:
            self._loss_scale.load_state_dict(state_dict)
            return
        state, refusal = None, None
        if self.peers.is_first:
            # Raised only once the others know, who would wait for this rank's state otherwise.
            try:
                state = LossScaleState.from_dict(state_dict)
            except ValueError as error:
                refusal = error
        state = self.peers.first_state(state)
        if refusal is not None:
            raise refusal
        if state is None:
            raise ConfigError("CrossRankGradScaler: rank 0 was given no gradient scaler's state; its error says why")
        self._loss_scale.load(state)

    def _require_scaled(self, method: str) -> None:
        if not self._placed:
            raise RuntimeError(
                f"{method}() was called before any scale(): the loss has to be scaled before backward, by this scaler and "
                "not by torch.amp.GradScaler: scaler.scale(loss).backward(). A rank without a loss, such as a pipeline "
                "stage, scales a zero: scaler.scale(torch.zeros((), device=device))"
            )


@dataclass
class _Round:
    """One optimizer since the last update.

    Attributes:
        found_inf: This rank's flag; once stepped, the decision. fp32, shape ``[]``.
        stepped: Whether ``step`` was called.
        stepping: Whether ``step`` is running.
    """

    found_inf: Tensor
    stepped: bool = False
    stepping: bool = False


@dataclass(frozen=True)
class _OnlyOurs:
    """Called by an optimizer before each of its steps: what the scaler unscaled, nobody else steps."""

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
    """Whether the optimizer's own kernel can be told to skip by a flag on ``device``."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if "grad_scaler" in inspect.signature(optimizer.step).parameters:
        # An older contract: such an optimizer asks torch's scaler, and would not look at the flag.
        return False
    types = {parameter.device.type for group in optimizer.param_groups for parameter in group["params"]}
    # torch's optimizers copy the flag to the host without waiting for it.
    arrives = "cpu" not in types or device.type == "cpu"
    return arrives and all(kernels.self_test(type_).fused_skip for type_ in types)


def _step_unless(
    found_inf: Tensor, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float | None:
    """Steps a fused optimizer, which leaves everything as it is where ``found_inf`` is 1."""
    # A `grad_scale` that the user set on the optimizer counts; the loss scale is divided out already.
    optimizer.grad_scale = getattr(optimizer, "grad_scale", None)  # type: ignore[attr-defined]
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale  # type: ignore[attr-defined]
        del optimizer.found_inf  # type: ignore[attr-defined]

"""Measures what a step needs in memory, without needing that memory: on fake tensors.

* A *fake tensor* (``torch._subclasses.FakeTensorMode``) has shape, dtype and device, but no data, so a step of a model of any
  size is measured in seconds. Every result that an operation of forward, backward or optimizer would allocate
  is counted. Temporary memory inside of kernels is not.
* *Activations* are everything that forward and backward allocate except gradients of parameters: tensors saved for the
  backward, and temporary ones. Recomputed ones (``train.checkpoint_activations``) count when they exist.
* *Weight casts* are copies of parameters in the compute dtype, which autocast makes. Sharded models do not need them.

A model or task that reads values (``.item()``, boolean indexing) cannot run on fake tensors. Such a step runs on real tensors.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from dtrain.config.instantiate import by_target
from dtrain.config.schema import Config, ParallelConfig
from dtrain.data import Batch
from dtrain.distributed.sharding import unit_names
from dtrain.distributed.world import World
from dtrain.errors import ConfigError
from dtrain.precision import Precision
from dtrain.training.build import build_ema, build_model, build_task, prepare_model
from dtrain.training.monitor.communication import Unit, sharded_units
from dtrain.training.setup.ema import Ema
from dtrain.training.setup.loaders import corpus_beside
from dtrain.training.setup.model import use_channels_last
from dtrain.training.setup.optimizer import build_optimizer
from dtrain.training.task import run_task


@dataclass(frozen=True)
class ParameterMemory:
    """A parameter.

    Attributes:
        tensor: A tensor of its shape and dtype, without data.
        state: Bytes of the optimizer's tensors that have its shape, and so are sharded with it.
        other_state: Bytes of the optimizer's other tensors for it.
    """

    tensor: Tensor
    state: int
    other_state: int


@dataclass(frozen=True)
class StepMemory:
    """What a step needs, in bytes, on one rank that holds the whole model.

    Attributes:
        rows: Rows of a micro-batch.
        parameters: The parameters.
        units: The units of a sharded model, for each value of ``parallel.gather_dtype``; empty if it cannot be sharded.
        blocks: Names of the modules that are units, without the model itself.
        unshardable: Why it cannot be sharded; ``""`` if it can.
        buffers: All buffers.
        batch: One micro-batch on the device.
        activations: Largest sum of activations, weight casts included.
        activations_sharded: The same without weight casts.
        with_gradients: Largest sum of activations and of the gradients that exist at that time, if the step begins without
            gradients.
        update: Temporary tensors of the optimizer or of the moving average.
        averaged: Whether there is a moving average of the weights.
        is_fake: Whether it was measured on fake tensors.
    """

    rows: int
    parameters: tuple[ParameterMemory, ...]
    units: Mapping[str, Sequence[Unit]]
    blocks: Sequence[str]
    unshardable: str
    buffers: int
    batch: int
    activations: int
    activations_sharded: int
    with_gradients: int
    update: int
    averaged: bool
    is_fake: bool


def measure_step(cfg: Config, precision: Precision, device: torch.device, batch: Batch) -> StepMemory:
    """Builds the model, the task and the optimizer of a run, and measures one micro-batch and one update.

    On fake tensors where that is possible, else on real ones, which need the memory. Arguments as of ``measure_fake_step``.

    Raises:
        ConfigError: If model, task or optimizer cannot be built.
        Exception: Any exception of the task or the model.
    """
    try:
        return measure_fake_step(cfg, precision, device, batch)
    except Exception:  # noqa: BLE001 - anything that does not work on fake tensors
        # If something is wrong with the run itself, this raises its error.
        model = build_model(cfg.model, device, cfg.train.channels_last)
        return _measure(cfg, precision, device, model, batch, is_fake=False)


def measure_fake_step(cfg: Config, precision: Precision, device: torch.device, batch: Batch) -> StepMemory:
    """``measure_step`` on fake tensors only.

    Compiled modules (``train.compile``) run uncompiled, because compiled code hides its operations; they need less.

    Args:
        cfg: The composed config.
        precision: Its precision policy.
        device: The device of the step; its kernels are assumed.
        batch: A micro-batch, on the CPU, in its final dtypes (``Batch.to``).

    Raises:
        Exception: Any exception of model, task and optimizer, also because they cannot run on fake tensors.
    """
    # Models may use tensors that were made outside, such as constants of a module.
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        fake_batch = batch.mapped(fake.from_tensor)
        # Built on the device, because torch cannot move a module of fake tensors.
        with device:
            model = by_target("model", cfg.model)
        if cfg.train.channels_last:
            use_channels_last(model)
        return _measure(cfg, precision, device, model, fake_batch, is_fake=True)


def _measure(
    cfg: Config, precision: Precision, device: torch.device, model: nn.Module, batch: Batch, *, is_fake: bool
) -> StepMemory:
    alone = World(0, 1, 0, 1, device, "gloo", launched=False)
    model = prepare_model(model, replace(cfg.train, compile=False), cfg.parallel, alone)
    precision.wrap_keep_fp32(model)
    model.train()
    ema = build_ema(cfg, model)
    task = build_task(cfg.task, corpus_beside(cfg.data))
    optimizer = build_optimizer(cfg.optimizer, model)
    batch = batch.mapped(lambda tensor: tensor.to(device))

    allocations = Allocations([*model.parameters(), *model.buffers(), *batch.tensors()], model.parameters())
    gc.collect()  # so that the moments of automatic collections do not depend on what the process did before
    with _gradients_forgotten(model, allocations), allocations:
        with precision.autocast(device.type):
            output = run_task(task, model, batch)
        output.loss_sum.backward()
        del output
    update = _update(model, optimizer, ema, device)
    shapes = {parameter: torch.empty_like(parameter, device="meta") for parameter in model.parameters()}
    for parameter, shape in shapes.items():
        shape.requires_grad_(parameter.requires_grad)
    units, blocks, unshardable = _units(model, cfg.parallel, precision)
    return StepMemory(
        rows=len(batch.valid),
        parameters=tuple(_parameter(parameter, shape, optimizer) for parameter, shape in shapes.items()),
        units={
            gather: [Unit([shapes[parameter] for parameter in unit.parameters], unit.gather_dtype) for unit in of_model]  # type: ignore[index]
            for gather, of_model in units.items()
        },
        blocks=blocks,
        unshardable=unshardable,
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        batch=sum(tensor.nbytes for tensor in batch.tensors()),
        activations=allocations.peak,
        activations_sharded=allocations.peak_without_casts,
        with_gradients=allocations.peak_with_gradients,
        update=update,
        averaged=ema is not None,
        is_fake=is_fake,
    )


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema | None, device: torch.device) -> int:
    """Peak temporary bytes of the second optimizer step (the first creates the state), or of an update of the average."""

    def temporary(call: Callable[[], object]) -> int:
        allocations = Allocations()
        with allocations:
            call()
        return allocations.peak

    try:
        optimizer.step()
        most = temporary(optimizer.step)
    except RuntimeError:  # it reads values; its state exists by then
        most = 0
    if ema is not None:
        skip = torch.zeros((), dtype=torch.bool, device=device)
        with suppress(RuntimeError):  # on a CPU it reads `skip`, and updates in place
            ema.update(skip)  # the first one finds the parameters, which would count as new tensors
            most = max(most, temporary(lambda: ema.update(skip)))
    return most


def _units(
    model: nn.Module, parallel: ParallelConfig, precision: Precision
) -> tuple[dict[str, list[Unit]], list[str], str]:
    """The units for each value of ``parallel.gather_dtype``, the names of the blocks, and why the model has none."""
    sharded = ParallelConfig(shard="full", shard_modules=parallel.shard_modules)
    try:
        names = unit_names(model, sharded)
    except ConfigError as error:
        return {}, [], str(error)
    units = {}
    for gather in ("fp32", "compute"):
        units[gather] = sharded_units(model, names, replace(sharded, gather_dtype=gather), precision)
    return units, names[:-1], ""


def _parameter(parameter: nn.Parameter, shape: Tensor, optimizer: torch.optim.Optimizer) -> ParameterMemory:
    state = [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)]
    shaped = sum(value.nbytes for value in state if value.shape == parameter.shape)
    return ParameterMemory(shape, shaped, sum(value.nbytes for value in state) - shaped)


class Allocations(TorchDispatchMode):
    """Follows the storages that operations allocate, until they are freed.

    Args:
        known: Tensors that exist and do not count.
        weights: The tensors among ``known`` whose casts are weight casts.

    Attributes:
        peak: Largest sum of the bytes of storages, without gradients (``forget``).
        peak_without_casts: The same without weight casts.
        peak_with_gradients: The same with gradients.
    """

    def __init__(self, known: Iterable[Tensor] = (), weights: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._known = {_key(tensor) for tensor in known}
        self._weights = {_key(tensor) for tensor in weights}
        self._sizes: dict[int, tuple[str, int]] = {}  # storage -> kind and bytes
        self._now = {"activation": 0, "cast": 0, "gradient": 0}
        self.peak = self.peak_without_casts = self.peak_with_gradients = 0

    def forget(self, gradient: Tensor) -> None:
        """From now on ``gradient`` counts as a gradient."""
        key = _key(gradient)
        if key in self._sizes:
            kind, nbytes = self._sizes[key]
            self._now[kind] -= nbytes
            self._now["gradient"] += nbytes
            self._sizes[key] = ("gradient", nbytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and _key(args[0]) in self._weights
        for value in tree_iter(out):
            if isinstance(value, Tensor):
                self._add(value, "cast" if is_cast else "activation")
        return out

    def _add(self, tensor: Tensor, kind: str) -> None:
        key = _key(tensor)
        if key in self._known or key in self._sizes:
            return
        storage = tensor.untyped_storage()
        self._sizes[key] = (kind, storage.nbytes())
        weakref.finalize(storage, self._freed, key)
        now = self._now
        now[kind] += storage.nbytes()
        without_casts = now["activation"]
        self.peak_without_casts = max(self.peak_without_casts, without_casts)
        self.peak = max(self.peak, without_casts + now["cast"])
        self.peak_with_gradients = max(self.peak_with_gradients, without_casts + now["cast"] + now["gradient"])

    def _freed(self, key: int) -> None:
        kind, nbytes = self._sizes.pop(key)
        self._now[kind] -= nbytes


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _gradients_forgotten(model: nn.Module, allocations: Allocations) -> Iterator[None]:
    def forget(parameter: Tensor) -> None:
        assert parameter.grad is not None
        allocations.forget(parameter.grad)

    handles = [
        parameter.register_post_accumulate_grad_hook(forget)
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

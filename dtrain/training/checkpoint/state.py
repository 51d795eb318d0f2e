"""The state of a run: collects the content of a checkpoint, and restores all of it or nothing.

* ``TrainState`` has the objects of a run. ``checkpoint`` copies their state to the host, ``restore`` loads it.
* ``RunTotals`` are counts and times over all starts of the run.
* The states of hooks are JSON values, so they are part of ``state.json``.
* Model and optimizer state are stored by parameter name, so they do not depend on the order of parameters. Hyper-parameters
  stay as the config sets them.
* In a sharded run each rank copies and restores only the parts that it holds. A checkpoint of a run with a different number of
  ranks, sharded or not, can be restored, because any part can be read from it.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dtrain import __version__
from dtrain.config.schema import Config
from dtrain.data import ShardLoader
from dtrain.distributed.sharding import is_sharded, local_part, own_range, reshard
from dtrain.distributed.world import World
from dtrain.errors import ConfigError, as_config_error
from dtrain.optimizers.groups import parameter_counts
from dtrain.precision import Precision
from dtrain.precision.modules import dtype_name
from dtrain.training.checkpoint.checkpoints import Checkpoint, Checkpoints
from dtrain.training.checkpoint.optimizer_state import changed_groups, group_values, load_optimizer, optimizer_state
from dtrain.training.checkpoint.rest import BuiltRest, Rest
from dtrain.training.checkpoint.tensors import Part, StoredTensor, written_by
from dtrain.training.schedule import last_step
from dtrain.training.setup.compile_cache import CompileCache
from dtrain.training.setup.ema import Ema
from dtrain.training.step import TrainStep
from dtrain.training.task import Task

_MAX_PROBLEMS = 5  # differences that one message lists


class Stateful(Protocol):
    """Something with a state of JSON values, such as all hooks of a run together."""

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state."""


@dataclass(kw_only=True)
class TrainState:
    """The objects of a run. Hooks get it as ``run``.

    Attributes:
        cfg: The composed config.
        run_dir: The run's directory.
        train_loader: This rank's training loader.
        eval_loader: This rank's evaluation loader; None without ``data.eval``.
        step: Executes optimizer steps; holds the model, task, optimizer, EMA, precision and ranks.
        checkpoints: Where the run is saved.
        totals: Counts and times over all starts.
        segments: The segments of all steps, oldest first; see ``dtrain.runs.starts``.
        class_names: The name of each label, if the data have a ``classes.json``.
        code: Git checkouts and their commits, for the checkpoints of rank 0.
        forked: The run and step that this run was forked from, see ``Fork``; {} if it was not forked.
        build_schedule: Builds the schedule again after the data changed; None if the schedule was passed in.
        hooks: The hooks whose states are saved and restored; None without hooks.
        media_sink: Called by ``log_media`` with step, name and content; set by ``RunLogger``.
        rest: The parameters that are never trained, as this start has built them; set by ``resume.build_rest``. None if
            neither the run's checkpoints nor the one to restore leave them out.
        ended_early: The reason given to ``end_early``; None if it was not called.
        compile_cache: Artefacts of ``train.compile``; None if nothing is compiled.
        mirror_status: Returns the state of uploads for status.json, on rank 0; None without ``checkpoint.mirror``.
    """

    cfg: Config
    run_dir: Path
    train_loader: ShardLoader
    eval_loader: ShardLoader | None
    step: TrainStep
    checkpoints: Checkpoints
    totals: RunTotals = field(default_factory=lambda: RunTotals())
    segments: list[dict[str, Any]] = field(default_factory=list)
    class_names: list[str] | None = None
    code: dict[str, str] = field(default_factory=dict)
    forked: dict[str, Any] = field(default_factory=dict)
    build_schedule: Callable[[], Callable[[int], float]] | None = None
    hooks: Stateful | None = None
    media_sink: Callable[[int, str, bytes | str], None] = field(default=lambda step, name, content: None, init=False)
    rest: BuiltRest | None = field(default=None, init=False)
    ended_early: str | None = field(default=None, init=False)
    compile_cache: CompileCache | None = None
    mirror_status: Callable[[], Mapping[str, Any]] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._initial_groups = group_values(self.optimizer)  # before the optimizer changes them

    @property
    def world(self) -> World:
        """Rank, number of ranks and device."""
        return self.step.world

    @property
    def precision(self) -> Precision:
        """The precision policy."""
        return self.step.precision

    @property
    def model(self) -> nn.Module:
        """The bare model, without DDP."""
        return self.step.bare_model

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has only a part of the model's parameters."""
        return is_sharded(self.model)

    @property
    def task(self) -> Task:
        """The task."""
        return self.step.task

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return self.step.optimizer

    @property
    def ema(self) -> Ema | None:
        """The averaged weights; None without ``train.ema_decay``."""
        return self.step.ema

    def averaged(self) -> AbstractContextManager[nn.Module]:
        """Context manager: the model with the averaged weights, if the run has any, else with its own weights."""
        return self.ema.swapped_in() if self.ema is not None else nullcontext(self.model)

    @contextmanager
    def inference(self) -> Iterator[nn.Module]:
        """Context manager: the model of ``averaged`` in evaluation mode, without gradients, under autocast."""
        was_training = self.model.training
        self.model.eval()
        try:
            with self.averaged() as model, torch.no_grad(), self.precision.autocast(self.world.device.type):
                yield model
        finally:
            self.model.train(was_training)

    @property
    def last_step(self) -> int:
        """Attempted step after which the run is finished; read it after ``restore``."""
        return last_step(self.cfg.train, self.train_loader, self.step.step)

    def end_early(self, reason: str) -> None:
        """For hooks: evaluates, saves and ends the run after the current step. Its state is then ``finished``.

        All ranks must call it at the same step. If it is called in ``on_step``, the next step may have begun already; it is
        completed first.

        Args:
            reason: For ``status.json``, such as ``no better eval/loss for 5 evaluations``.
        """
        self.ended_early = reason

    def log_media(self, name: str, content: bytes | str) -> None:
        """For hooks: writes a picture or text of the current step to ``<run.dir>/media`` and the trackers.

        Does nothing on ranks other than 0, and with ``tracker.media=false``.

        Args:
            name: Letters, digits, ``_``, ``-`` and ``.``; different from other media of the step.
            content: The bytes of a PNG file, or a text.

        Raises:
            ValueError: If the name or the content is not allowed.
        """
        if self.cfg.tracker.media:
            self.media_sink(self.step.step, name, content)

    def checkpoint(self, metrics: dict[str, float]) -> Checkpoint:
        """Copies the state to the host: all of it, or in a sharded run the parts that this rank writes.

        The last step must be settled. Only rank 0 needs to call it, unless the run is sharded.

        Args:
            metrics: Metrics of the evaluation at this step; empty without one.

        Raises:
            ConfigError: If the optimizer's state cannot be stored, or, with ``checkpoint.only_trained``, a parameter that is
                left out has changed; names it.
        """
        rest = self._left_out()
        left_out = frozenset(rest.names if rest is not None else ())

        def copied(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor | Part]:
            tensors = {name: tensor for name, tensor in tensors.items() if name not in left_out}
            return host_parts(tensors, self.world) if self.is_sharded else host_copy(tensors)

        reshard(self.model)  # or an evaluation would have left whole parameters, which the optimizer does not know
        tensors, values = optimizer_state(self.optimizer, self.model)
        groups = {"model": copied(self.model.state_dict()), "optimizer": copied(tensors)}
        if self.ema is not None:
            with self.ema.swapped_in() as averaged:
                groups["ema"] = copied(averaged.state_dict())
        scale = self.step.loss_scale
        state: dict[str, Any] = {
            "counters": self.step.state_dict(),
            "optimizer": values,
            "optimizer_groups": changed_groups(self.optimizer, self._initial_groups),
            "loss_scale": scale.state_dict() if scale is not None else None,
            "loader": self.train_loader.state_dict(),
            "segments": self.segments,
            "progress": asdict(self.totals),
            "hooks": self.hooks.state_dict() if self.hooks is not None else {},
            "metrics": metrics,
            "rest": rest.to_state() if rest is not None else None,
            "environment": self._environment() if self.world.rank == 0 else {},
            "versions": {"dtrain": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }
        return Checkpoint(groups, state)

    def _left_out(self) -> BuiltRest | None:
        """What the run's checkpoints leave out; None if they have all parameters."""
        if not self.cfg.checkpoint.only_trained:
            return None
        if self.rest is None:
            raise RuntimeError("checkpoint.only_trained: resume.build_rest or resume.restore was not called")
        return self.rest

    def _environment(self) -> dict[str, Any]:
        """Ranks, device and commits of the code, for those who read the checkpoint."""
        return {
            "ranks": self.world.size,
            "ranks_of_a_machine": self.world.local_size,
            "device": device_kind(self.world.device),
            "code": self.code,
        }

    def restore(self, checkpoint: Checkpoint, *, with_data: bool = True) -> None:
        """Loads a checkpoint; every rank calls it. Call ``resume.build_rest``, which is collective, first.

        Args:
            checkpoint: The checkpoint.
            with_data: Whether the training data continue at the checkpoint's position.

        Raises:
            ConfigError: If it is from a different model, optimizer or dataset, or lacks parameters that this run has built
                differently; names the differences.
        """
        state, saved, rest = checkpoint.state, checkpoint.rest, self._left_out()
        lacks = frozenset(saved.digests if saved is not None else ())
        if self.rest is not None:
            self.rest.require(saved, checkpoint.stored("model"), leaves_out=rest is not None)
        elif saved is not None:
            raise RuntimeError("the checkpoint lacks parameters, and resume.build_rest was not called")
        # The loader first: it compares the dataset's fingerprint, before any tensor is changed.
        if with_data:
            with as_config_error("data"):
                self.train_loader.load_state_dict(state["loader"])
            self.rebuild_schedule()
        load_module(self.model, checkpoint.stored("model"), "the checkpoint", lacks)
        tensors = checkpoint.stored("optimizer")
        load_optimizer(self.optimizer, self.model, tensors, state["optimizer"], state["optimizer_groups"])
        if self.ema is not None:
            # Without an average in the checkpoint (train.ema_decay was null) it starts from the weights.
            average = checkpoint.stored("ema" if "ema" in checkpoint.tensors else "model")
            if rest is not None:  # of which there is no average
                lacks |= {*rest.names}
                average = {name: tensor for name, tensor in average.items() if name not in lacks}
            with self.ema.swapped_in() as averaged:
                load_module(averaged, average, "the checkpoint", lacks)
        if self.step.loss_scale is not None and state["loss_scale"] is not None:
            self.step.loss_scale.load_state_dict(state["loss_scale"])
            scale = self.cfg.precision.loss_scale  # how it adapts is config, which may change between starts
            self.step.loss_scale.configure(
                growth_factor=scale.growth_factor,
                backoff_factor=scale.backoff_factor,
                growth_interval=scale.growth_interval,
            )
        self.step.load_state_dict(state["counters"])
        self.totals = RunTotals(**state["progress"])
        self.segments = state.get("segments", [])
        if self.hooks is not None:
            self.hooks.load_state_dict(state.get("hooks", {}))

    def status_entries(self) -> dict[str, Any]:
        """The entries of status.json besides state and step: times, parameters, and fingerprints of the data."""
        everything, trained = parameter_counts(self.model)
        loaders = {"train": self.train_loader, "eval": self.eval_loader}
        data = {name: loader.index.fingerprint for name, loader in loaders.items() if loader is not None}
        mirror = {"mirror": dict(self.mirror_status())} if self.mirror_status is not None else {}
        return {**self.totals.times(), "parameters": everything, "trained_parameters": trained, "data": data, **mirror}

    def rebuild_schedule(self) -> None:
        """Rebuilds the schedule for the size of the data at the run's first start, which the loader knows by now."""
        if self.build_schedule is not None:
            self.step.schedule = self.build_schedule()

    def begin_segment(self) -> dict[str, Any]:
        """The segment of the steps of this start, which is appended to ``segments`` if it does not continue the last one."""
        segment = {
            "step": self.step.step,
            "ranks": self.world.size,
            "micro_batch": self.train_loader.rows_per_micro_batch,
            **self.train_loader.segment(),
        }
        if self.train_loader.excluded:
            segment["excluded"] = self.train_loader.excluded

        def identity(one: dict[str, Any]) -> str:
            keys, state = ("ranks", "micro_batch", "settings", "excluded"), one.get("state", {})
            # As text, because the deal of a mixture depends on the order of its sources. The data may have grown.
            return json.dumps([*(one.get(key) for key in keys), state.get("data"), state.get("sources")])

        def continues(last: dict[str, Any]) -> bool:
            return identity(last) == identity(segment)

        earlier = [each for each in self.segments if each["step"] < self.step.step]
        every = earlier if earlier and continues(earlier[-1]) else [*earlier, segment]
        self.segments = [*map(_without_shards, every[:-1]), every[-1]]
        return segment


def _without_shards(segment: dict[str, Any]) -> dict[str, Any]:
    """A segment without its list of shards, which is the beginning of the list of the last segment."""
    state = {key: value for key, value in segment.get("state", {}).items() if key != "shards"}
    return segment | ({"state": state} if state else {})


@dataclass
class RunTotals:
    """Counts and times of a run over all its starts.

    Attributes:
        samples: Committed samples.
        seconds: Time spent in the loop.
        skipped_steps: Attempted steps that were not applied.
        bad_samples: Samples that could not be read.
        excluded_samples: Samples that were left out because of ``data.exclude``.
        worker_restarts: How many times ranks restarted their loader workers.
        spikes: Steps whose gradient norm was a spike (``train.spike``).
        spike_grad_norm: Gradient norm of the last spike; 0 before the first.
        evaluations: Finished evaluations.
        evaluation_due: Whether a stop interrupted the evaluation of the last step, so that it must run on resume.
        restarts: Starts that resumed an unfinished run.
        lost_seconds: Training time that was not saved and had to be repeated.
        down_seconds: Time between two starts, in which no process trained.
    """

    samples: int = 0
    seconds: float = 0.0
    skipped_steps: int = 0
    bad_samples: int = 0
    excluded_samples: int = 0
    worker_restarts: int = 0
    spikes: int = 0
    spike_grad_norm: float = 0.0
    evaluations: int = 0
    evaluation_due: bool = False
    restarts: int = 0
    lost_seconds: float = 0.0
    down_seconds: float = 0.0

    def add_restart(self, status: Mapping[str, Any] | None, now: float | None = None) -> None:
        """Adds the cost of the interruption before this start; call it after ``restore``.

        Args:
            status: Content of the previous start's status.json; None without one.
            now: Unix time in seconds; None: the current time.
        """
        if status is None:
            return
        now = time.time() if now is None else now
        self.restarts, self.lost_seconds, self.down_seconds = (
            status.get(name, 0) for name in ("restarts", "lost_seconds", "down_seconds")
        )
        if status["state"] == "finished":  # the run was extended, not interrupted
            return
        self.restarts += 1
        self.lost_seconds += max(0.0, status.get("trained_seconds", 0.0) - self.seconds)
        self.down_seconds += max(0.0, now - status.get("time", now))

    def interruptions(self) -> str:
        """A line for the banner; ``""`` without restarts."""
        if not self.restarts:
            return ""
        return (
            f"{self.restarts}, with {self.lost_seconds:.0f} s of training to repeat and {self.down_seconds:.0f} s between the "
            "starts"
        )

    def times(self) -> dict[str, Any]:
        """The fields of status.json from which the next start computes the cost of an interruption."""
        return {
            "restarts": self.restarts,
            "lost_seconds": round(self.lost_seconds, 3),
            "down_seconds": round(self.down_seconds, 3),
            "trained_seconds": round(self.seconds, 3),
        }


def device_kind(device: torch.device) -> str:
    """The name of a GPU; of a CPU its architecture and the instruction set that torch uses, which decide how it rounds."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"


def host_copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies tensors to the CPU, in their memory layouts; the copies share no memory, as safetensors requires."""
    # One wait for all copies. torch caches the page-locked memory for the next call.
    copies = {name: tensor.detach().to("cpu", copy=True, non_blocking=True) for name, tensor in tensors.items()}
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return copies


def host_parts(tensors: Mapping[str, Tensor], world: World) -> dict[str, Part]:
    """Copies the parts that this rank writes of the tensors of a sharded run to the CPU.

    Args:
        tensors: Those that are no ``DTensor`` are equal on all ranks.
        world: The ranks.
    """
    offsets = {}
    for name, tensor in tensors.items():
        # A rank without rows of a small parameter writes nothing, unless there is nothing to write.
        if written_by(name, tensor, world) and (local_part(tensor).numel() or not tensor.numel()):
            offsets[name] = tuple(each.start for each in own_range(tensor))
    copies = host_copy({name: local_part(tensors[name]) for name in offsets})
    return {name: Part(copies[name], offset, tuple(tensors[name].shape)) for name, offset in offsets.items()}


def load_module(
    module: nn.Module,
    tensors: Mapping[str, Tensor | StoredTensor],
    source: str,
    lacks: Collection[str] = (),
) -> None:
    """Copies parameters and buffers of a saved ``state_dict`` into a bare module.

    Of a sharded module each rank reads and copies only its own part.

    Args:
        module: The module.
        tensors: The ``state_dict``.
        source: Names it in errors.
        lacks: Names of the module that it lacks; they keep their values.

    Raises:
        ConfigError: If names, shapes or kinds of dtype differ, or integers do not fit, before anything is copied.
    """
    if problems := weight_problems(module, tensors, lambda name: name in lacks):
        raise ConfigError(
            f"{source} is from a different model: {problems}. Use the model config that it was saved with, or a new run.dir."
        )
    copy_into(module, tensors)


@torch.no_grad()
def copy_into(module: nn.Module, tensors: Mapping[str, Tensor | StoredTensor]) -> None:
    """Copies a saved ``state_dict``, or a part of it, into a module, without checks; see ``load_module``."""
    own = module.state_dict()
    if not is_sharded(module):
        module.load_state_dict({name: tensor[...] for name, tensor in tensors.items()}, strict=False)
        return
    for name, tensor in tensors.items():
        # One at a time: the rank's part of the model need not be in memory twice.
        local_part(own[name]).copy_(tensor[own_range(own[name])])


def weight_problems(
    module: nn.Module,
    tensors: Mapping[str, Tensor | StoredTensor],
    may_lack: Callable[[str], bool] = lambda name: False,
) -> str:
    """The first few differences in names, shapes and kinds of dtype between a saved ``state_dict`` and a module; ``""``: none.

    ``may_lack(name)`` is true for the names of the module that ``tensors`` may lack.
    """
    own = module.state_dict()
    problems = [f"{name} is missing" for name in own if name not in tensors and not may_lack(name)]
    problems += [f"{name} is unknown to this model" for name in tensors if name not in own]
    problems += [
        f"{name} has shape {list(tensors[name].shape)}, the model has {list(own[name].shape)}"
        for name in own
        if name in tensors and tensors[name].shape != own[name].shape
    ]
    for name in own:
        if name in tensors and _kind(stored := _dtype(tensors[name])) != _kind(own[name].dtype):
            problems.append(f"{name} has dtype {dtype_name(stored)}, the model has {dtype_name(own[name].dtype)}")
        elif name in tensors and (lost := _does_not_fit(tensors[name], stored, own[name].dtype)):
            problems.append(f"{name} has {lost}")
    more = f" and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
    return "; ".join(problems[:_MAX_PROBLEMS]) + more


def _dtype(tensor: Tensor | StoredTensor) -> torch.dtype:
    return tensor[tuple(slice(0, 0) for _ in tensor.shape)].dtype  # of a stored tensor nothing is read


def _does_not_fit(tensor: Tensor | StoredTensor, stored: torch.dtype, own: torch.dtype) -> str:
    """The range of integers that would wrap in dtype ``own``; ``""`` if they fit. Reads values only if ``own`` is narrower."""
    if _kind(own) != "integer" or tensor.shape.numel() == 0:
        return ""
    wanted, given = torch.iinfo(own), torch.iinfo(stored)
    if wanted.min <= given.min and given.max <= wanted.max:
        return ""
    values = tensor[...].detach().cpu().numpy()  # torch has no minimum of unsigned integers above uint8
    low, high = int(values.min()), int(values.max())
    if wanted.min <= low and high <= wanted.max:
        return ""
    return f"values from {low} to {high} in {dtype_name(stored)}, which do not fit the model's {dtype_name(own)}"


def _kind(dtype: torch.dtype) -> str:
    """Equal for dtypes between which a cast keeps what numbers mean. Floats of one byte have a scale elsewhere."""
    if dtype.is_complex or dtype == torch.bool or (dtype.is_floating_point and dtype.itemsize == 1):
        return str(dtype)
    return "float" if dtype.is_floating_point else "integer"


def load_weights(module: nn.Module, checkpoint: Checkpoint, weights: str, built: Rest | None = None) -> str:
    """Loads a checkpoint's weights for use without training.

    Args:
        module: The bare module.
        checkpoint: The checkpoint.
        weights: ``ema``, ``raw``, or ``""``: the moving average if the checkpoint has one.
        built: What the checkpoint lacks, as the module has it; needed if it lacks anything.

    Returns:
        The loaded weights: ``ema`` or ``raw``.

    Raises:
        ConfigError: If the checkpoint has no such weights, they are from a different model, or the module differs in what the
            checkpoint lacks.
    """
    if weights not in ("", "ema", "raw"):
        raise ConfigError(f"weights: got {weights!r}, want ema or raw.")
    kind = weights or ("ema" if "ema" in checkpoint.tensors else "raw")
    if kind == "ema" and "ema" not in checkpoint.tensors:
        raise ConfigError(
            "weights=ema: the checkpoint has no moving average (train.ema_decay was null). Use weights=raw."
        )
    saved = checkpoint.rest
    if saved is not None:
        saved.require(built or Rest({}, "nowhere"))
    lacks = saved.digests if saved is not None else ()
    load_module(module, checkpoint.stored("ema" if kind == "ema" else "model"), "the checkpoint", lacks)
    return kind

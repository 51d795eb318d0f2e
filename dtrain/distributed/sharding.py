"""A model whose parameters are divided among the ranks, by torch's ``fully_shard`` (FSDP2, ``parallel.shard``).

* A *unit* is a module whose parameters are gathered and freed together: every rank receives them before the module's forward
  and backward, and keeps only its own part afterwards. The model itself is the unit of all parameters that no other unit has.
* A *part* (torch: local shard) of a parameter is a range of its first dimension. Gradients, optimizer state and averaged
  weights have the same parts. Parameters are ``DTensor`` objects, whose ``to_local()`` is the part of this rank.
* The *copies* of a gradient are the ranks that hold the same numbers: all ranks with DDP, one with ``shard=full``, one per
  group with ``shard=hybrid``. The squared norm of all gradients is the sum over ranks of ``|part|^2 / copies``.

Parameters are gathered in fp32 by default and cast by autocast, as with DDP, so the losses equal those of DDP.

torch.distributed.fsdp takes 0.7 s to import, so only sharded runs import it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.config.schema import ParallelConfig
from dtrain.distributed.process_group import keep_group
from dtrain.distributed.world import World
from dtrain.errors import ConfigError, Explained

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Keys that only DDP, or only a sharded model, reads.
_OF_DDP = ("bucket_cap_mb", "find_unused_parameters", "static_graph", "gradient_as_bucket_view", "recover")
_OF_SHARDING = ("shard_modules", "shard_size", "gather_dtype", "reduce_after", "offload")
_FSDP = "torch.distributed.fsdp"
_BUFFER_BUCKET = 250 * 2**20  # bytes; as in DDP
_M_MMAP_THRESHOLD = -3  # malloc.h
_LARGE = 2**20  # bytes


def check_options(parallel: ParallelConfig, ranks: int | None, device: torch.device | None = None) -> None:
    """Checks the keys about sharding, before there is a model.

    Args:
        parallel: The config.
        ranks: Number of ranks; None if it is not known yet.
        device: Where ranks compute; None if it is not known yet.

    Raises:
        ConfigError: If a value is unknown, the groups do not divide the ranks, or a key has no effect with ``parallel.shard``.
    """
    choices = {
        "shard": ("none", "full", "hybrid"),
        "gather_dtype": ("fp32", "compute"),
        "reduce_after": ("window", "micro_batch"),
    }
    for key, values in choices.items():
        if getattr(parallel, key) not in values:
            raise ConfigError(f"parallel.{key}: got {getattr(parallel, key)!r}, want one of {', '.join(values)}.")
    defaults, ours = ParallelConfig(), parallel.shard != "none"
    for key in _OF_DDP if ours else _OF_SHARDING:
        if getattr(parallel, key) != getattr(defaults, key):
            whose = "DDP" if ours else "sharded models (parallel=fsdp, parallel=hsdp)"
            raise ConfigError(
                f"parallel.{key}: got {getattr(parallel, key)!r}, but it applies only to {whose}, and "
                f"parallel.shard is {parallel.shard}. Leave it out, or set parallel.shard={'none' if ours else 'full'}."
            )
    if parallel.shard_size is not None:
        if parallel.shard != "hybrid":
            raise ConfigError(
                f"parallel.shard_size: got {parallel.shard_size}, but parallel.shard={parallel.shard} has no groups. Leave "
                "it out, or set parallel.shard=hybrid."
            )
        if parallel.shard_size < 1 or (ranks or parallel.shard_size) % parallel.shard_size:
            among = f", a divisor of the {ranks} ranks" if ranks else ""
            raise ConfigError(
                f"parallel.shard_size: got {parallel.shard_size}, want the number of ranks of a group{among}."
            )
    if parallel.offload and device is not None and device.type == "cpu":
        raise ConfigError("parallel.offload: got true, but the ranks compute on CPUs. Set it to false.")


def check_accumulation(parallel: ParallelConfig, micro_batches: int) -> None:
    """Checks the keys about the reduction of gradients, once the number of micro-batches of a step is known.

    Raises:
        ConfigError: If gradients of several micro-batches would be accumulated in 16 bits.
    """
    if parallel.reduce_dtype != "fp32" and parallel.reduce_after == "window" and micro_batches > 1:
        raise ConfigError(
            f"parallel.reduce_dtype: got {parallel.reduce_dtype} with {micro_batches} micro-batches in a step, which a sharded "
            "model would accumulate in that dtype. Set parallel.reduce_after=micro_batch, or reduce_dtype=fp32."
        )


def shard_model(
    model: nn.Module,
    parallel: ParallelConfig,
    world: World,
    *,
    compute_dtype: torch.dtype = torch.float32,
    kept: Sequence[str] = (),
) -> list[str]:
    """Collective. Shards the bare model in place. Modules, hooks, names and buffers are kept; parameters become DTensors.

    Call it after everything that changes the model, and before anything refers to its parameters. A model on the meta device
    stays there, without memory; its parts can be initialised afterwards.

    Args:
        model: The bare model, equal on all ranks.
        parallel: The config; ``shard`` is not ``none``.
        world: The ranks.
        compute_dtype: The compute dtype of the run's precision, for ``gather_dtype=compute``.
        kept: Names of modules that compute in fp32, whose parameters are then gathered in fp32.

    Returns:
        The names of the units; ``""`` is the model itself.

    Raises:
        ConfigError: If an option is invalid, the ranks cannot be grouped, or the model cannot be sharded.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    check_options(parallel, world.size, world.device)
    units = unit_names(model, parallel)
    if world.device.type == "cpu":
        _return_large_tensors()
    mesh = _mesh(parallel, world)
    # None where nothing is cast: the gradients of fp64 parameters are then reduced in fp64, as with DDP.
    gathered = None if parallel.gather_dtype == "fp32" else compute_dtype
    reduced = _DTYPES[parallel.reduce_dtype]
    low = MixedPrecisionPolicy(
        param_dtype=gathered,
        reduce_dtype=reduced if gathered is not None or reduced != torch.float32 else None,
        cast_forward_inputs=False,  # autocast and the kept modules cast
    )
    exact = MixedPrecisionPolicy(reduce_dtype=low.reduce_dtype, cast_forward_inputs=False)
    offload = CPUOffloadPolicy() if parallel.offload else OffloadPolicy()
    modules = dict(model.named_modules())
    own = {name for name in kept if gathered is not None and any(True for _ in modules[name].parameters())}
    if own:
        _check_parameters(model, [*units, *own])
    # Inner modules first: a unit takes the parameters that no unit inside of it has.
    for name in sorted({*units, *own}, key=lambda name: name.count(".") + bool(name), reverse=True):
        within = any(name == keep or name.startswith(f"{keep}.") for keep in kept)
        policy = exact if within else low
        unit: Any = fully_shard(modules[name], mesh=mesh, mp_policy=policy, offload_policy=offload)
        if world.device.type == "cpu":
            # Sums that are divided afterwards: gloo's own average is a sum in some versions of torch (pytorch/pytorch#162338).
            unit.set_force_sum_reduction_for_comms(True)
    return units


def unit_names(model: nn.Module, parallel: ParallelConfig) -> list[str]:
    """The modules that become units; the last one is ``""``, the model itself.

    Raises:
        ConfigError: If a pattern matches nothing, a parameter belongs to several units or cannot be sharded, or the model is
            sharded already.
    """
    key = "parallel.shard_modules"
    if (found := already_sharded(model)) is not None:
        raise ConfigError(
            f"parallel.shard={parallel.shard}: {found}, and dtrain would shard it again. Build the plain model; "
            f"{key} decides how it is sharded."
        )
    modules = dict(model.named_modules())
    if parallel.shard_modules is None:
        chosen = _repeated_blocks(model)
    else:
        chosen = matching_modules(model, key, parallel.shard_modules)
        for name in chosen:
            if isinstance(modules[name], (nn.ModuleList, nn.ModuleDict)):
                raise ConfigError(
                    f"{key}: {name} is a {type(modules[name]).__name__}, which has no forward. Use {name}.* for its modules."
                )
    units = [*(name for name in chosen if any(True for _ in modules[name].parameters())), ""]
    for name in units:
        if isinstance(modules[name], torch.jit.ScriptModule):
            raise ConfigError(
                f"{key}: {name or 'the model'} is a ScriptModule (torch.jit), which cannot be sharded. Build the model "
                "without torch.jit, or set parallel=ddp."
            )
    _check_parameters(model, units)
    return units


def already_sharded(model: nn.Module) -> str | None:
    """The module or parameter that was sharded before, as the beginning of a sentence; None if there is none."""
    for name, module in model.named_modules():
        kind = next((cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith(_FSDP)), None)
        if kind is not None:
            which = f"the module {name!r} of the model" if name else "the model"
            return f"{which} is sharded already ({kind})"
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            return f"the model's parameter {name} is a DTensor (tensor parallelism or fully_shard)"
    return None


def is_sharded(model: nn.Module) -> bool:
    """Whether ``shard_model`` has sharded this model."""
    fsdp = sys.modules.get(_FSDP)
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; does not import that class."""
    return hasattr(tensor, "device_mesh")


@torch.no_grad()
def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, which shares its memory; any other tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def own_range(tensor: Tensor) -> tuple[slice, ...]:
    """The part of this rank as slices of the whole tensor, for reading only this part of a file."""
    if not is_dtensor(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    # An empty part begins past the end.
    return tuple(slice(min(at, size), at + n) for at, n, size in zip(offset, shape, tensor.shape, strict=True))


def copies_of(parameter: Tensor, ranks: int) -> int:
    """How many of ``ranks`` ranks hold the same part of this parameter's reduced gradient."""
    if not is_dtensor(parameter):
        return ranks
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    parts: int = prod(mesh.size(dim) for dim, placement in enumerate(placements) if not placement.is_replicate())
    return ranks // parts


def small_part(model: nn.Module) -> nn.Parameter:
    """A small parameter with a gradient, sharded like those of ``model``: for a trial step of an optimizer."""
    from torch.distributed.tensor import DTensor

    like: Any = next(parameter for parameter in model.parameters() if is_dtensor(parameter))
    part = torch.zeros(2, 4, dtype=like.dtype, device=like.to_local().device)
    parameter = nn.Parameter(DTensor.from_local(part, like.device_mesh, like.placements, run_check=False))
    parameter.grad = torch.zeros_like(parameter)
    return parameter


def reshard(model: nn.Module) -> None:
    """Frees gathered parameters, which a forward without backward leaves behind; they may be older than the parts."""
    for module in model.modules():
        if is_sharded(module):
            module.reshard()  # type: ignore[operator]


def can_reset(model: nn.Module) -> bool:
    """Whether this torch can use a sharded model again after a failed forward or backward: since 2.13."""
    return hasattr(model, "reset_iter_state")


class ShardedWindow:
    """Communication of a sharded model in the accumulation windows of a step.

    Args:
        model: The sharded model.
        reduce_each: Whether gradients are reduced in each micro-batch; else in the last one.
    """

    def __init__(self, model: nn.Module, reduce_each: bool = False) -> None:
        self._model: Any = model
        self._units: list[Any] = [module for module in model.modules() if is_sharded(module)]
        self._reduce_each = reduce_each
        self._syncs = True
        # By place, because a forward may assign a different tensor.
        self._buffers = [
            (module._buffers, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        for name, parameter in model.named_parameters():
            if not is_dtensor(parameter):
                continue
            # fully_shard gathers parameters as other tensors, so autograd reaches this one only past the reduction.
            trained = parameter.requires_grad
            parameter.requires_grad_(True)  # a frozen one, which a hook may train later, can have no hook
            parameter.register_hook(partial(_refuse_unreduced, name))
            parameter.requires_grad_(trained)

    def begin(self) -> None:
        """Collective. Before the first micro-batch: all ranks get rank 0's buffers, as with DDP."""
        # A forward without backward, of an evaluation or a hook, leaves the model's own unit gathered: with old parameters, if
        # the optimizer has changed its parts since then.
        self._model.reshard()
        if self._buffers and dist.get_world_size() > 1:
            buffers = [place[name] for place, name in self._buffers]
            dist._broadcast_coalesced(dist.group.WORLD, buffers, _BUFFER_BUCKET, 0)  # type: ignore[arg-type]

    def reset(self) -> None:
        """Makes the model ready for a window after a forward or backward of this rank has failed; see ``can_reset``."""
        self._model.reset_iter_state()
        # The backward that failed may have left gradients of gathered parameters, to which the next one would add.
        for unit in self._units:
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None

    def micro_batch(self, last: bool) -> ShardedWindow:
        """Context manager for the forward and backward of a micro-batch."""
        self._model.set_is_last_backward(last)
        syncs = last or self._reduce_each
        if syncs != self._syncs:
            self._syncs = syncs
            for unit in self._units:
                unit.set_requires_gradient_sync(syncs, recurse=False)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if isinstance(error, RuntimeError) and "storage of size 0" in str(error):
            raise ConfigError(
                "parallel.shard: a backward needs parameters that were already freed, as a gradient of a gradient does "
                f"(autograd.grad with create_graph=True): {str(error).splitlines()[0]}. Set parallel=ddp."
            ) from error
        if isinstance(error, RuntimeError) and "DTensor" in str(error):
            raise ConfigError(
                f"parallel.shard_modules: a parameter was used outside of the forward of its unit, where a rank has only a "
                f"part of it ({str(error).splitlines()[0]}). Leave the module that has this parameter out of "
                "parallel.shard_modules, and call the model itself in the task."
            ) from error


class UnreducedGradient(Explained, RuntimeError):
    """A task used a sharded parameter itself, so the gradient of this use would not be averaged over the ranks."""


def _refuse_unreduced(name: str, gradient: Tensor) -> None:
    raise UnreducedGradient(
        f"parallel.shard: the task uses the parameter {name} outside of the model's forward, as a penalty on weights does. The "
        "gradient of this use is not averaged over the ranks, so the result would be wrong. Compute the penalty in the "
        "forward of the module that has the parameter, use weight_decay, or set parallel=ddp."
    )


def matching_modules(model: nn.Module, key: str, patterns: Sequence[str]) -> list[str]:
    """Names of the modules that match one of the patterns (fnmatch; a ``*`` does not match a dot), in the model's order.

    Raises:
        ConfigError: If a pattern matches nothing; names ``key``.
    """
    names = [name for name, _ in model.named_modules() if name]

    def matches(name: str, pattern: str) -> bool:
        return name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)

    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            children = ", ".join(name for name, _ in model.named_children())
            raise ConfigError(f"{key}: {pattern!r} matches no module of the model, which has {children or 'none'}.")
    return [name for name in names if any(matches(name, pattern) for pattern in patterns)]


def _return_large_tensors() -> None:
    """Makes glibc return large tensors to the system when they are freed. It would keep gathered parameters for later."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)


def _mesh(parallel: ParallelConfig, world: World) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    if parallel.shard == "full":
        return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))
    size = parallel.shard_size
    if size is None:
        # Of all machines: ranks with groups of other sizes would wait for each other forever.
        sizes = [0] * world.size
        dist.all_gather_object(sizes, world.local_size)
        size = sizes[0]
        if len(set(sizes)) > 1 or world.size % size:
            found = " or ".join(map(str, sorted(set(sizes))))
            raise ConfigError(
                f"parallel.shard_size: got null, and the machines have {found} ranks, which do not form groups of equal size "
                f"among the {world.size} ranks. Set it to the number of ranks of a group."
            )
    mesh = init_device_mesh(world.device.type, (world.size // size, size), mesh_dim_names=("replicate", "shard"))
    for group in mesh.get_all_groups():
        keep_group(group)
    return mesh


def _repeated_blocks(model: nn.Module) -> list[str]:
    """The elements of lists and sequences of modules of which several have the same class; the outermost ones."""
    blocks: list[str] = []
    for name, module in model.named_modules():
        if any(name == block or name.startswith(f"{block}.") for block in blocks):
            continue
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            classes = Counter(type(child) for child in module if any(True for _ in child.children()))
            prefix = f"{name}." if name else ""
            blocks += [
                f"{prefix}{child_name}"
                for child_name, child in module.named_children()
                if classes[type(child)] > 1 and not isinstance(child, (nn.ModuleList, nn.ModuleDict))
            ]
    return blocks


def _check_parameters(model: nn.Module, units: Sequence[str]) -> None:
    """Refuses parameters that no unit can hold: scalars, complex ones, sparse gradients, several dtypes, and several units."""
    remedy = "Change the model, or set parallel=ddp."
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ConfigError(f"parallel.shard: {name} has sparse gradients, which cannot be sharded. {remedy}")
    owner: dict[int, tuple[str, str]] = {}
    dtypes: dict[str, tuple[str, torch.dtype]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    named = {id(modules[unit]): unit for unit in units}  # a unit that is registered twice is one unit

    def unit_of(name: str) -> str:
        while id(modules[name]) not in named:
            name = name.rpartition(".")[0]
        return named[id(modules[name])]

    places = ((prefix, *item) for prefix, module in modules.items() for item in module._parameters.items())
    for prefix, key, parameter in places:
        if parameter is None:
            continue
        name = f"{prefix}.{key}" if prefix else key
        if parameter.dim() == 0:
            raise ConfigError(
                f"parallel.shard: the parameter {name} is a scalar, which cannot be sharded. Give it the shape [1], or set "
                "parallel=ddp."
            )
        if not parameter.is_floating_point():
            raise ConfigError(
                f"parallel.shard: the parameter {name} is {parameter.dtype}, and only floating-point parameters can be "
                f"sharded. {'Change the model' if parameter.is_complex() else 'Register it as a buffer'}, or set parallel=ddp."
            )
        unit = unit_of(prefix)
        first, other = owner.setdefault(id(parameter), (name, unit))
        if other != unit:
            raise ConfigError(
                f"parallel.shard_modules: {first} and {name} are the same parameter, but belong to two units "
                f"({other or 'the model'} and {unit or 'the model'}). Leave {' and '.join(filter(None, (other, unit)))} out, "
                "so that one unit has both."
            )
        if parameter.requires_grad:
            before, dtype = dtypes.setdefault(unit, (name, parameter.dtype))
            if dtype != parameter.dtype:
                raise ConfigError(
                    f"parallel.shard_modules: {before} ({dtype}) and {name} ({parameter.dtype}) are in one unit, which can "
                    f"hold one dtype. Make the module of one of them a separate unit."
                )

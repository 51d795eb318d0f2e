"""Builds a model without allocating its memory, and then the parts of its parameters that this rank holds. For sharded runs.

* *Recording*: the model is built with fake tensors, which have shapes but no memory. Every operation of torch is recorded.
* *Replay*: the operations run again, in the same order, with real tensors and torch's generator in the state it had before. So
  the numbers are those of an ordinary construction, whatever code initialises the model, bit for bit.
* A tensor of the model is *final* after the last operation on its memory. The rank then copies its own part and frees it, so
  the largest tensors of the model, not their sum, decide how much memory a rank needs. If the next operation
  overwrites a tensor as a whole, its memory is freed in between as well: many models initialise each parameter twice.

What cannot be recorded raises ``NotDeferrable``: values that Python code reads, random numbers on a GPU, a generator whose
state is saved and restored, and tensors that are exchanged without an operation (``parameter.data = tensor``). The idea is that
of torchdistX's deferred initialisation.
"""

from __future__ import annotations

import ctypes
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

from dtrain.distributed.sharding import local_part, own_range

# Operations that overwrite their first argument.
_OVERWRITING = {
    f"aten::{name}"
    for name in (
        *("normal_", "uniform_", "fill_", "zero_", "copy_", "random_", "bernoulli_"),
        *("exponential_", "log_normal_", "cauchy_", "geometric_"),
    )
}
_SALT = 0x5A17_0000_0000_0000
_TRIM_EVERY = 2**25  # bytes
_TRUNCATED = "_no_grad_trunc_normal_"
_truncated_normal = getattr(nn.init, _TRUNCATED)


class NotDeferrable(Exception):
    """The construction of a model cannot be recorded; the message says why, as the end of a sentence."""


class DeferredModel:
    """A model on the meta device, and how its tensors are made.

    Args:
        build: Builds the model on the CPU; it may draw random numbers from torch's generator.

    Attributes:
        model: The model; it may be changed in place and sharded before ``fill``, if its tensors keep their names.
        checksums: After ``fill``: those of the whole parameters, by name.

    Raises:
        NotDeferrable: If the construction cannot be recorded.
        Exception: Any exception of ``build``.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self._start = torch.default_generator.get_state()
        recorder = _Recorder()
        try:
            self.model, self._operations = recorder.record(build), recorder.operations
        finally:
            torch.default_generator.set_state(self._start)
        self.checksums: dict[str, int] = {}
        self._sources: dict[str, Tensor] = {}  # by name: the recorded tensor, or a real one
        on_meta: dict[int, Tensor] = {}
        for name, place, key in _places(self.model):
            source = self._sources[name] = place[key]
            if id(source) not in on_meta:  # tied parameters stay tied
                # Not empty_like(), which would make another fake tensor.
                empty = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
                is_parameter = isinstance(source, nn.Parameter)
                on_meta[id(source)] = nn.Parameter(empty, source.requires_grad) if is_parameter else empty
            place[key] = on_meta[id(source)]

    @torch.no_grad()
    def fill(self, model: nn.Module, parameter_device: torch.device, device: torch.device) -> None:
        """Gives the model its memory on this rank, with the values of an ordinary construction. Call it once.

        Args:
            model: ``model``, as it is now.
            parameter_device: For parameters, or this rank's parts of them.
            device: For buffers.
        """
        parameters = dict(model.named_parameters(remove_duplicate=False))
        first = {id(parameter): name for name, parameter in reversed(parameters.items())}
        model.to_empty(device=parameter_device)
        for name, parameter in parameters.items():
            if first[id(parameter)] != name:  # to_empty() makes a parameter for each name
                owner, _, key = name.rpartition(".")
                model.get_submodule(owner)._parameters[key] = model.get_parameter(first[id(parameter)])
        places = {name: (place, key) for name, place, key in _places(model)}
        buffers: dict[int, Tensor] = {}

        def finish(name: str, value: Tensor) -> None:
            place, key = places[name]
            if isinstance(place[key], nn.Parameter):
                local_part(place[key]).copy_(value[own_range(place[key])])
                self.checksums[name] = checksum(value)
                return
            source = id(self._sources[name])
            if source not in buffers:
                buffers[source] = value.to(device, copy=True)
            place[key] = buffers[source]

        self._replay(finish)

    def _replay(self, finish: Callable[[str, Tensor], None]) -> None:
        """Runs the operations again; calls ``finish`` with the name and the value of each tensor of the model."""
        names: defaultdict[int, list[str]] = defaultdict(list)
        for name, source in self._sources.items():
            if isinstance(source, FakeTensor):
                names[id(source)].append(name)
            else:
                finish(name, source)
        uses: defaultdict[int, list[int]] = defaultdict(list)  # memory -> the operations that use it
        owned: defaultdict[int, dict[int, None]] = defaultdict(dict)  # memory -> its tensors
        sizes: dict[int, int] = {}  # memory -> bytes
        for number, operation in enumerate(self._operations):
            for tensor in (*operation.inputs, *operation.outputs):
                owned[_memory(tensor)][id(tensor)] = None
                sizes[_memory(tensor)] = tensor.untyped_storage().nbytes()
                if uses[_memory(tensor)][-1:] != [number]:
                    uses[_memory(tensor)].append(number)
        real: dict[int, Tensor] = {}
        freed = 0
        torch.default_generator.set_state(self._start)
        for operation in self._operations:
            if operation.overwrites is not None:
                _allocate(real[operation.overwrites])
            results = operation.run(real)
            for tensor, result in zip(operation.outputs, results, strict=True):
                real[id(tensor)] = result
            for memory in {_memory(tensor) for tensor in (*operation.inputs, *operation.outputs)}:
                later = uses[memory]
                later.pop(0)
                if not later:
                    for key in owned[memory]:
                        value = real.pop(key, None)
                        for name in names[key]:
                            assert value is not None
                            finish(name, value)
                    freed += sizes[memory]
                elif (overwritten := self._operations[later[0]].overwrites) in real and overwritten in owned[memory]:
                    storage = real[overwritten].untyped_storage()
                    if storage.resizable():  # not the memory of a NumPy array
                        storage.resize_(0)
                        freed += sizes[memory]
            if freed > _TRIM_EVERY:
                freed = 0
                _return_freed_memory()


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the bytes of a tensor."""
    return zlib.crc32(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)


@dataclass
class _Operation:
    """One recorded operation.

    Attributes:
        function: The operation; None sets a generator only.
        args, kwargs: Its arguments, with recorded tensors.
        inputs, outputs: The recorded tensors among the arguments and results.
        overwrites: The id of its first argument, if it overwrites all of the memory of that; else None.
        seeds: A generator, and the state that it gets before the operation; None leaves it alone.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Tensor]
    outputs: list[Tensor]
    overwrites: int | None
    seeds: list[tuple[torch.Generator, Tensor]]

    def run(self, real: dict[int, Tensor]) -> list[Tensor]:
        """Runs the operation with the ``real`` tensors, by the ids of the recorded ones; returns its tensors."""
        for generator, state in self.seeds:
            generator.set_state(state)
        if self.function is None:
            return []

        def of(value: Any) -> Any:
            return real[id(value)] if isinstance(value, FakeTensor) else value

        args, kwargs = tree_map(of, (self.args, self.kwargs))
        return [value for value in tree_iter(self.function(*args, **kwargs)) if isinstance(value, Tensor)]


class _Recorder(TorchDispatchMode):
    """Records every operation on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        # By the ids of the tensors, which the operations keep alive: their layouts after the last operation.
        self._made: dict[int, tuple[Any, ...]] = {}
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}  # with the state that the recorder gave it
        self._given: set[bytes] = set()
        self._reason: NotDeferrable | None = None

    def record(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Calls ``build`` and returns its model, whose tensors are fake."""
        self._salt(torch.default_generator)
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), self, patch.object(nn.init, _TRUNCATED, self._truncated):
                model = build()
        except Exception as error:
            # An ordinary construction decides whether this is an error of the model.
            raise self._reason or NotDeferrable(_first_line(error)) from error
        if seeds := self._seeds(torch.default_generator):
            self.operations.append(_Operation(None, (), {}, [], [], None, seeds))
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise NotDeferrable(f"{name or 'the model'} is a ScriptModule")
            for key, value in vars(module).items():
                if key not in ("_parameters", "_buffers", "_modules") and any(
                    isinstance(leaf, FakeTensor) for leaf in tree_iter(value)
                ):
                    raise NotDeferrable(f"{name or 'the model'} keeps a tensor in its attribute {key}, not in a buffer")
        for name, place, key in _places(model):
            if isinstance(place[key], FakeTensor):
                if id(place[key]) not in self._made:
                    raise NotDeferrable(f"{name} comes from a file, or from code outside of torch")
                self._require_unchanged([place[key]], name)
        return model

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator") or torch.default_generator
        seeds = self._seeds(generator)
        inputs: list[Tensor] = [value for value in tree_iter((args, kwargs)) if isinstance(value, FakeTensor)]
        if any(id(tensor) not in self._made for tensor in inputs) or any(
            isinstance(value, torch.UntypedStorage) for value in tree_iter((args, kwargs))
        ):
            raise self._because("it reads a file, or makes tensors outside of torch")
        self._require_unchanged(inputs)
        result = func(*args, **kwargs)
        outputs = [value for value in tree_iter(result) if isinstance(value, Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags:
            if any(tensor.device.type != "cpu" for tensor in outputs):
                raise self._because("it draws random numbers on a GPU")
            self._salt(generator)  # so that a state that is saved before this operation differs from later ones
        overwrites = None
        if func._schema.name in _OVERWRITING and inputs and inputs[0] is args[0]:
            apart = all(_memory(other) != _memory(inputs[0]) for other in inputs[1:])
            overwrites = _id_if_whole(inputs[0]) if apart else None
        self._made |= {id(tensor): _layout(tensor) for tensor in outputs}
        self.operations.append(_Operation(func, args, kwargs, inputs, outputs, overwrites, seeds))
        return result

    def _truncated(
        self, tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> Tensor:
        """Records ``nn.init.trunc_normal_`` as one operation: it reads which numbers are out of range and draws them again."""
        self._require_unchanged([tensor])
        seeds = self._seeds(generator or torch.default_generator)
        self._salt(generator or torch.default_generator)
        overwrites, args = _id_if_whole(tensor), (tensor, mean, std, a, b, generator)
        self.operations.append(_Operation(_truncated_normal, args, {}, [tensor], [tensor], overwrites, seeds))
        return tensor

    def _require_unchanged(self, tensors: list[Tensor], name: str = "a tensor") -> None:
        """Refuses tensors that are something else than after their last operation: the replay would not notice."""
        if any(self._made.get(id(tensor)) != _layout(tensor) for tensor in tensors):
            raise self._because(f"{name} was exchanged by an assignment to its .data, or by swap_tensors")

    def _because(self, reason: str) -> NotDeferrable:
        """The exception to raise. It is kept, because code under construction may replace it by an exception of its own."""
        self._reason = NotDeferrable(reason)
        return self._reason

    def _seeds(self, generator: torch.Generator) -> list[tuple[torch.Generator, Tensor]]:
        """The generator's state, if the code under construction has set it since the last operation."""
        with _disable_current_modes():
            state = generator.get_state()
            if (known := self._generators.get(id(generator))) is not None and torch.equal(state, known[1]):
                return []
            if state.numpy().tobytes() in self._given:
                raise self._because("it saves and restores the state of a random generator")
            self._salt(generator)
        return [(generator, state)]

    def _salt(self, generator: torch.Generator) -> None:
        """Gives the generator a state that occurs nowhere else, so that any other state was set by the code."""
        with _disable_current_modes():
            generator.manual_seed(_SALT + len(self._given))
            state = generator.get_state()
            self._given.add(state.numpy().tobytes())
        self._generators[id(generator)] = (generator, state)


def _places(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Name, dictionary and key of each parameter and buffer."""
    for prefix, module in model.named_modules():
        for place in (module._parameters, module._buffers):
            for key, tensor in place.items():
                if tensor is not None:
                    yield f"{prefix}.{key}" if prefix else key, place, key


def _id_if_whole(tensor: Tensor) -> int | None:
    """The id of a tensor that has all of its memory; else None."""
    return id(tensor) if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes() else None


def _return_freed_memory() -> None:
    """Returns freed memory to the operating system, where the C library has glibc's function for it."""
    # glibc keeps freed pieces of up to 32 MiB for itself. Small objects cut them, and the next tensor does not fit.
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _memory(tensor: Tensor) -> int:
    """A number for the memory of a recorded tensor."""
    return int(tensor.untyped_storage()._cdata)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """What an assignment to ``tensor.data`` changes."""
    return _memory(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _allocate(tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        storage.resize_(tensor.numel() * tensor.element_size())

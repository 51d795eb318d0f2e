"""Attributes each operator to the module that runs it and to the line of the user's code that calls it.

* The *owner* of an operation is the innermost module in whose forward it runs. ``(model)`` is the outermost module, ``(task)``
  the code around it, such as the loss. Forward hooks on the bare model maintain the stack of running modules.
* Only operations inside ``forward()`` have an owner. Operations of the backward, of recomputations for activation
  checkpointing, and of other hooks have none.
* *Operators* are observed below autograd and autocast, in the dtypes in which they really run. *Work* is an operator that
  computes floating-point values; the others only move data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from dtrain.precision.flops import operator_name
from dtrain.precision.modules import tensors

MODEL = "(model)"
TASK = "(task)"

# Operators that only move, cast or create values: they compute in no dtype.
_MOVES = {
    *("_reshape_copy", "_to_copy", "_unsafe_view", "clone", "copy", "copy_", "resize_", "set_", "lift", "lift_fresh"),
    *("empty_like", "full_like", "ones_like", "zeros_like", "fill", "fill_", "zero", "zero_"),
    *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
}

_TORCH = f"{Path(torch.__file__).parent}/"
# Stack frames between an operation and the code that called it: torch's modes and the audit itself.
_MODES = (f"{_TORCH}utils/", f"{_TORCH}_", f"{_TORCH}overrides.py", f"{Path(__file__).parent}/")
_WRAPPERS = (_TORCH, *_MODES, str(Path(__file__).parents[1] / "policy.py"))  # the last: forward of kept modules


@dataclass(frozen=True)
class PrecisionFinding:
    """A place in the model's code where the precision differs from the configured one.

    Attributes:
        kind: ``created``, ``promoted``, ``product``, ``constant``, ``fixed``, ``raised``, ``in place`` or ``naive``; see
            ``lint`` and ``recorders``.
        owner: Name of the module.
        operation: Name of the operation, such as ``zeros``.
        where: ``file:line`` in the user's code; "" if unknown.
        shape: Shape of the result.
        note: A detail, such as the constant or the dtype; or "".
    """

    kind: str
    owner: str
    operation: str
    where: str
    shape: tuple[int, ...]
    note: str = ""


@dataclass
class Frame:
    """One call of a module.

    Attributes:
        owner: Name of the module.
        products: Results of its matrix products and convolutions, with their versions at that time. The references keep
            their memory from being reused until the module returns, so that it can be compared with the memory of an output.
        casts_up: Whether the module's own code has cast a tensor to fp32.
        raised: The places where it cast 16-bit values to fp32.
    """

    owner: str
    products: list[tuple[Tensor, int]] = field(default_factory=list)
    casts_up: bool = False
    raised: list[PrecisionFinding] = field(default_factory=list)

    def is_product(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is one of ``products``, unchanged since then."""
        return any(
            tensor.untyped_storage().data_ptr() == product.untyped_storage().data_ptr()
            and tensor.numel() == product.numel()
            and tensor._version == version
            for product, version in self.products
        )


class ModuleStack:
    """The stack of the running modules of a model.

    Args:
        model: The bare model.

    Attributes:
        names: Name of each module, without those inside a ScriptModule, whose code does not run in Python.
        scripted: Names of the ScriptModules.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: dict[nn.Module, str] = {}
        self.scripted: list[str] = []
        inside: tuple[str, ...] = ()
        for name, module in model.named_modules():
            if name.startswith(inside):
                continue
            self.names[module] = name or MODEL
            if isinstance(module, torch.jit.ScriptModule):
                self.scripted.append(name or MODEL)
                if not name:
                    break
                inside += (f"{name}.",)
        self._stack: list[Frame] = []
        self._in_forward = False
        self._in_hooks = False

    @property
    def frame(self) -> Frame | None:
        """The innermost call; None where an operation has no owner."""
        return self._stack[-1] if self._in_forward and not self._in_hooks else None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context manager around the call of the task."""
        self._in_forward, self._in_hooks = True, False
        # Activation checkpointing ends a recomputation with an exception once it has all tensors: frames may be left over.
        self._stack = [Frame(TASK)]
        try:
            yield
        finally:
            self._in_forward = False
            self._stack.clear()

    @contextmanager
    def watched(self, on_output: Callable[[Frame, list[Tensor], bool], None]) -> Iterator[None]:
        """Context manager that keeps hooks on all modules.

        Args:
            on_output: Called when a module returns, with its frame, the floating-point tensors among its outputs, and
                whether this was inside ``forward()``.
        """

        def begin_hooks(*_: Any) -> None:
            self._in_hooks = True

        def enter(module: nn.Module, _arguments: Any) -> None:
            self._in_hooks = False
            self._stack.append(Frame(self.names[module]))

        def leave(_module: nn.Module, _arguments: Any, output: Any) -> None:
            # Still marked as inside hooks: what `on_output` computes has no owner.
            on_output(self._stack.pop(), floating(output), self._in_forward)
            self._in_hooks = False

        with ExitStack() as hooks:
            if self.scripted:
                # A ScriptModule refuses hooks on itself; hooks on all modules are called for it.
                hooks.callback(register_module_forward_pre_hook(self._of_scripted(begin_hooks, enter)).remove)
                hooks.callback(register_module_forward_hook(self._of_scripted(begin_hooks, leave)).remove)
            for module in self.names:
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                for handle in (
                    module.register_forward_pre_hook(begin_hooks, prepend=True),
                    module.register_forward_pre_hook(enter),
                    module.register_forward_hook(begin_hooks, prepend=True),
                    module.register_forward_hook(leave),
                ):
                    hooks.callback(handle.remove)
            yield

    def parameters(self, module: nn.Module) -> Iterator[nn.Parameter]:
        """The parameters of a module of ``names``, without the parameters of its submodules in ``names``."""
        return module.parameters(recurse=isinstance(module, torch.jit.ScriptModule))

    def _of_scripted(self, *hooks: Callable[..., None]) -> Callable[..., None]:
        def call(module: nn.Module, *values: Any) -> None:
            if isinstance(module, torch.jit.ScriptModule) and module in self.names:
                for hook in hooks:
                    hook(module, *values)

        return call


class Operators(TorchDispatchMode):
    """Observes each operator below autograd and autocast.

    Args:
        on_operator: Called after each operator as ``on_operator(func, args, kwargs, inputs, result)``, with the floating-point
            inputs as they were before the call.
    """

    # Such as flex_attention, which compiles itself even with the stance "force_eager".
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Called by torch: the compiler's own operators are not observed."""
        return True

    def __init__(self, on_operator: Callable[[Any, Any, dict[str, Any], list[Tensor], Any], None]) -> None:
        self._on_operator = on_operator
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = floating((args, kwargs))
        if func._schema.is_mutable:
            inputs = [tensor.clone() for tensor in inputs]
        out = func(*args, **kwargs)
        self._on_operator(func, args, kwargs, inputs, out)
        return out


def floating(values: Any) -> list[Tensor]:
    """The floating-point tensors in arguments or results, nested ones included, in order."""
    return [tensor for tensor in tensors(values) if tensor.is_floating_point()]


def is_work(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Whether an operator computes floating-point ``outputs`` from floating-point ``inputs``."""
    return bool(inputs and outputs) and not getattr(func, "is_view", False) and operator_name(func) not in _MOVES


def on_gradient(tensor: Tensor, call: Callable[[Tensor], None]) -> RemovableHandle:
    """Calls ``call`` with the gradient of the current value of ``tensor``, even if it is changed in place later."""
    base = tensor._base
    if base is None or base.grad_fn is None or base.numel() != tensor.numel():
        handle: RemovableHandle = tensor.register_hook(call)
        return handle
    # A view that is changed in place, such as the 3D output of a Linear, gets a new graph node and loses its hooks. The node
    # that computed its base stays.
    number = base.output_nr

    def before(gradients: tuple[Any, ...]) -> None:
        if gradients[number] is not None:
            call(gradients[number])

    handle = base.grad_fn.register_prehook(before)
    return handle


def called_by_torch() -> bool:
    """Whether the operation was called by torch's own Python code, such as ``torch.nn.LSTM.forward``."""
    frame = _innermost_outside(_MODES)
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)


def users_line() -> str:
    """``file:line`` of the innermost stack frame outside of torch; relative to the working directory if inside it."""
    frame = _innermost_outside(_WRAPPERS)
    if frame is None:
        return ""
    path = Path(frame.f_code.co_filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{frame.f_lineno}"


def _innermost_outside(places: tuple[str, ...]) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(places):
        frame = frame.f_back
    return frame

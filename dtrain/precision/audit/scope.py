"""Which module is running, kept by forward hooks on the bare model.

* The *owner* of an operation is the innermost module in whose forward it runs. ``(model)`` is the outermost one, and
  ``(task)`` the code around it, such as the loss.
* Only what runs inside ``forward()`` has an owner: backward has none, nor has what activation checkpointing computes a
  second time, nor what the hooks of others compute, such as those that look for infinities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from dtrain.precision.audit.aten import floating
from dtrain.precision.audit.finding import Finding

MODEL = "(model)"
TASK = "(task)"


@dataclass
class Frame:
    """One call of a module.

    Attributes:
        owner: The module's name.
        products: Results of its matrix products and convolutions, and their versions then. Holding them until the
            module returns keeps their memory from being used for another tensor, so that an output can be compared.
        casts_up: Whether its own code has cast something to fp32.
        raised: Where it did so with 16-bit values.
    """

    owner: str
    products: list[tuple[Tensor, int]] = field(default_factory=list)
    casts_up: bool = False
    raised: list[Finding] = field(default_factory=list)

    def is_product(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` has the values of one of ``products``: its memory, not changed since."""
        return any(
            tensor.untyped_storage().data_ptr() == product.untyped_storage().data_ptr()
            and tensor.numel() == product.numel()
            and tensor._version == version
            for product, version in self.products
        )


class ModuleScope:
    """Follows the modules of a model.

    Args:
        model: The bare model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = {module: name or MODEL for name, module in model.named_modules()}
        self._stack: list[Frame] = []
        self._in_forward = False
        self._in_hooks = False

    @property
    def frame(self) -> Frame | None:
        """The innermost call; None where nothing has an owner."""
        return self._stack[-1] if self._in_forward and not self._in_hooks else None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the task's call."""
        self._in_forward, self._in_hooks = True, False
        # Checkpointing ends a recomputation by an exception as soon as it has what it wants, so frames may be left over.
        self._stack = [Frame(TASK)]
        try:
            yield
        finally:
            self._in_forward = False
            self._stack.clear()

    @contextmanager
    def watched(self, on_output: Callable[[Frame, list[Tensor], bool], None]) -> Iterator[None]:
        """Keeps hooks on all modules.

        Args:
            on_output: Called when a module returns, with its call, the floating tensors among its outputs, and whether
                that was inside ``forward()``.
        """

        def begin_hooks(*_: Any) -> None:
            self._in_hooks = True

        def enter(module: nn.Module, _arguments: Any) -> None:
            self._in_hooks = False
            self._stack.append(Frame(self.names[module]))

        def leave(_module: nn.Module, _arguments: Any, output: Any) -> None:
            # What `on_output` computes has no owner either.
            on_output(self._stack.pop(), floating(output), self._in_forward)
            self._in_hooks = False

        with ExitStack() as hooks:
            for module in self.names:
                for handle in (
                    module.register_forward_pre_hook(begin_hooks, prepend=True),
                    module.register_forward_pre_hook(enter),
                    module.register_forward_hook(begin_hooks, prepend=True),
                    module.register_forward_hook(leave),
                ):
                    hooks.callback(handle.remove)
            yield

"""Execution options of a model: memory layout, SyncBatchNorm, activation checkpointing, ``torch.compile`` and its log.

None of them changes the results of the model, its identity, or a name in its checkpoints, so each may change between two starts
of a run.

* A graph *break* is a place where a compiled graph ends and Python runs: slower, and visible in torch's log only.
* A recompilation *limit* is the number of times that torch compiles a function for new shapes or values before it gives up.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dtrain.distributed.sharding import matching_modules
from dtrain.distributed.world import World
from dtrain.errors import ConfigError
from dtrain.precision.modules import refuse_scripted

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# torch's own loggers (2.9 to 2.13) have file, line and reason. Its counters lack them, and `torch._dynamo.explain` would
# compile everything again. The first two loggers are silent by default; the last one reports limits.
_BREAKS = ("torch._dynamo.symbolic_convert.__graph_breaks", "torch._dynamo.convert_frame.__graph_breaks")
_LIMITS = "torch._dynamo.convert_frame"

_BREAK = re.compile(r"in user code at (?P<where>.+:\d+)\nGraph Break Reason: (?P<reason>.*)", re.DOTALL)
_SKIPPED = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_LIMIT = re.compile(r"hit config\.(?P<limit>\w+) \((?P<times>\d+)\)\s+function: (?P<function>[^\n]+)")
_WHY = re.compile(r"last reason: (?:\d+/\d+: )?(?P<why>[^\n]+?)\s*(?:\(HINT|\n|$)")
_MAX_BREAKS = 10  # listed in one note
logger = logging.getLogger("dtrain")


def use_channels_last(model: nn.Module) -> None:
    """Stores weights and buffers of four and five dimensions with channels innermost, in place; fast convolutions need it.

    ``model.to(memory_format=torch.channels_last)`` does so for four dimensions and refuses five.
    """
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.dim() in _CHANNELS_LAST:
            tensor.data = tensor.data.contiguous(memory_format=_CHANNELS_LAST[tensor.dim()])


def synchronise_batchnorm(model: nn.Module, world: World) -> nn.Module:
    """Replaces every BatchNorm by ``torch.nn.SyncBatchNorm``, which uses the statistics of all ranks' micro-batches.

    Call it before anything refers to the model's modules; parameters stay the same objects. In a world of one nothing changes.

    Raises:
        ConfigError: On a CPU with several ranks, which torch does not support.
    """
    if world.size == 1:
        return model
    if world.device.type == "cpu":
        raise ConfigError(
            "parallel.sync_batchnorm=true, but torch's SyncBatchNorm computes on GPUs only. Set it to false, or use a norm "
            "that is independent of other samples, such as GroupNorm."
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted


def checkpoint_activations(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Recomputes activations of the matching modules in the backward pass instead of storing them (Chen et al. 2016).

    It costs one more forward of these modules and saves the memory of everything but their inputs. Dropout draws the same
    numbers both times. A matching module inside a matching one is not wrapped again.

    Args:
        model: The model.
        patterns: Patterns of module names (fnmatch), such as ``blocks.*``; a ``*`` does not match a dot.

    Returns:
        The modules' names.

    Raises:
        ConfigError: If a pattern matches no module, or a ScriptModule.
    """
    modules = dict(model.named_modules())
    outermost: list[str] = []
    for name in matching_modules(model, "train.checkpoint_activations", patterns):
        if not any(name.startswith(f"{outer}.") for outer in outermost):
            outermost.append(name)
            module = modules[name]
            refuse_scripted(module, name, "train.checkpoint_activations")
            module.__class__ = _recomputing(type(module))  # type: ignore[arg-type]
    return outermost


def compile_in_place(model: nn.Module, option: bool | Sequence[str], *, sharded: bool = False) -> list[str]:
    """Compiles the whole model or some of its modules with ``torch.compile``; no name in a checkpoint changes.

    Compilation happens in the first forward. Modules with the same code, such as blocks, are compiled once.

    Args:
        model: The bare model. In DDP, torch splits a graph of the whole model at DDP's buckets, so that gradients are reduced
            as they are ready.
        option: True for the whole model, or patterns of module names (fnmatch), such as ``[blocks.*]``.
        sharded: Whether the model will be sharded. The hooks that gather and free its parameters then stay outside of
            compiled code.

    Returns:
        The modules' names; ``""`` is the whole model.

    Raises:
        ConfigError: If ``option`` is neither, or a pattern matches no module, or a module is a ScriptModule; or the whole model
            would be sharded and compiled.
    """
    if sharded and option is True:
        raise ConfigError(
            "train.compile: got true, but a sharded model gathers its parameters block by block, in hooks that cannot be "
            "compiled. Compile the blocks: train.compile=[blocks.*], or as parallel.shard_modules names them."
        )
    if isinstance(option, bool):
        names = [""] if option else []
    elif isinstance(option, Sequence) and not isinstance(option, str):
        names = matching_modules(model, "train.compile", option)
    else:
        raise ConfigError(f"train.compile: got {option!r}, want true, false, or a list of patterns such as [blocks.*].")
    modules = dict(model.named_modules())
    for name in names:
        module = modules[name]
        refuse_scripted(module, name, "train.compile")
        if sharded:
            module.forward = torch.compile(module.forward)
        else:
            module.compile()
    return names


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or one of its modules is compiled."""
    # A ScriptModule has no _compiled_call_impl.
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or "forward" in vars(module)
        for module in model.modules()
    )


class CompilerLog(logging.Handler):
    """Reports graph breaks and recompilation limits to the user, until ``close``; does nothing if no module is compiled.

    Args:
        model: The bare model.
        note: Receives a text of a few lines.
    """

    def __init__(self, model: nn.Module, note: Callable[[str], None]) -> None:
        super().__init__(logging.DEBUG)
        self._note = note
        self._breaks: dict[str, str] = {}  # place -> reason
        self._limits: dict[str, str] = {}  # function -> how often, and the last reason
        self._reported: set[str] = set()
        self._restore = ExitStack()
        self._graphs_before = 0
        if is_compiled(model):
            self._graphs_before = _graphs()
            self._attach()

    def emit(self, record: logging.LogRecord) -> None:
        """Handles a log record of torch."""
        text = record.getMessage()
        if record.name == _LIMITS:
            if found := _LIMIT.search(text):
                why = _WHY.search(text)
                last = f", the last time because of {' '.join(why['why'].split())}" if why else ""
                self._limits.setdefault(found["function"], f"{found['times']} times ({found['limit']}){last}")
        elif found := _BREAK.search(text):
            self._breaks.setdefault(found["where"], _one_line(found["reason"]))
        else:  # torch skipped a whole function
            places = _SKIPPED.findall(text)
            raised = record.exc_info[1] if record.exc_info else None
            self._breaks.setdefault(":".join(places[-1]) if places else "?", _one_line(str(raised or text)))

    def report(self) -> None:
        """Notes the breaks and limits since the last call."""
        for text in self._new_texts():
            logger.info(text)
            self._note(text)

    def close(self) -> None:
        """Reports the rest and detaches from torch's loggers."""
        self.report()
        self._restore.close()
        super().close()

    def _attach(self) -> None:
        for name in (*_BREAKS, _LIMITS):
            source = logging.getLogger(name)
            if name != _LIMITS and not source.isEnabledFor(logging.DEBUG):
                self._restore.callback(_set, source, source.level, source.propagate)
                # Without propagation, or torch would print the records as well.
                _set(source, logging.DEBUG, False)
            source.addHandler(self)
            self._restore.callback(source.removeHandler, self)

    def _new_texts(self) -> list[str]:
        breaks = {place: reason for place, reason in self._breaks.items() if place not in self._reported}
        limits = {function: reason for function, reason in self._limits.items() if function not in self._reported}
        self._reported |= {*breaks, *limits}
        texts = []
        if breaks:
            lines = [f"    {place}: {reason}" for place, reason in list(breaks.items())[:_MAX_BREAKS]]
            more = len(breaks) - len(lines)
            lines += [f"    and {more} more: TORCH_LOGS=graph_breaks shows all"] if more > 0 else []
            count = f"{len(breaks)} graph break{'s' if len(breaks) > 1 else ''}"
            graphs = _graphs() - self._graphs_before
            head = f"train.compile: {count}, {graphs} graphs compiled; the code between them runs uncompiled:"
            texts.append("\n".join([head, *lines]))
        texts += [
            f"train.compile: torch compiled {function} {often}. It will not compile it again, so new shapes and values run "
            "uncompiled. TORCH_LOGS=recompiles shows every reason."
            for function, often in limits.items()
        ]
        return texts


@cache
def _recomputing(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of ``cls`` that recomputes its activations; names, hooks and deep copies stay as they are."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return cls.forward(self, *args, **kwargs)
        return checkpoint(cls.forward, self, *args, use_reentrant=False, **kwargs)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def _set(source: logging.Logger, level: int, propagate: bool) -> None:
    source.setLevel(level)
    source.propagate = propagate


def _graphs() -> int:
    from torch._dynamo.utils import counters  # imported here: it takes seconds, and only compiled models need it

    return int(counters["stats"]["unique_graphs"])


def _one_line(reason: str) -> str:
    """Title and explanation of a break, without the hints, links and traceback that torch adds on further lines."""
    head, _, rest = reason.partition("Explanation:")
    titles = [line.strip() for line in head.splitlines() if line.strip() and not line.rstrip().endswith(":")]
    title = titles[-1] if titles else head.strip().splitlines()[0] if head.strip() else "no reason given"
    explanation = rest.strip().splitlines()[0].strip() if rest.strip() else ""
    return f"{title}: {explanation}" if explanation else title

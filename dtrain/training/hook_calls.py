"""User code that is called at fixed points of a run: ``train.hooks: [{_target_: package.MyHook, option: value}]``.

A *hook* is any object with a subset of these methods. All ranks call them at the same step, so a hook may call collectives.

* ``on_start(run)``: before the first step of a start. ``run`` is the restored ``TrainState``.
* ``on_step(run, outcome)``: the outcome (``StepOutcome``) of step ``run.step.step`` is known. The gradients of the next step
  may have been computed already.
* ``on_evaluation(run, result)``: the evaluation after the current step has ended. ``result`` is an ``Evaluation``.
* ``on_save(run, path)``: a checkpoint of the current step was copied to host memory. A thread writes it to ``path``.
* ``on_end(run, state)``: the loop has ended; ``state`` is ``finished`` or ``stopped``. Not called after an exception.

A hook that reads metrics of evaluations may list their names in an attribute ``reads_metrics``, such as ``["eval/loss"]``. A
name that no evaluation will have is then refused before the first step.

A hook may also have ``state_dict()`` and ``load_state_dict(state)``, with JSON values. A checkpoint holds rank 0's state after
``on_step`` and ``on_evaluation`` of its step; every rank loads it before ``on_start``, also in replays and forks. If a
checkpoint is saved because of an error, ``on_step`` of its step may not have been called yet. A state belongs to the hook of
the same class and the same position among the hooks of this class.

An exception in a hook ends the run on all ranks. A hook that has to act at other points can arrange this in ``on_start``:
register module or optimizer hooks, or wrap public callables such as ``run.step.accumulate``, ``run.train_loader.epoch`` and
``run.checkpoints.save``, as ``benchmarks/fault_hook.py`` does.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from dtrain.config.instantiate import by_target
from dtrain.config.schema import Config
from dtrain.errors import ConfigError, as_config_error
from dtrain.training.checkpoint.state import TrainState

METHODS = ("on_start", "on_step", "on_evaluation", "on_save", "on_end")
_STATE_METHODS = ("state_dict", "load_state_dict")


class HookFailed(RuntimeError):
    """A hook raised an exception, which is this error's ``__cause__``."""


class Hooks:
    """The hooks of a run, called in the order of the config.

    Args:
        hooks: Name for error messages to an object with a subset of ``METHODS``.

    Attributes:
        banner_rows: Their row in the start banner.
        metrics: Pairs (name of a hook, name of a metric of evaluations that it reads).
        notes: One line for each hook whose state was not in the restored checkpoint, and for each unused state.
    """

    def __init__(self, hooks: Mapping[str, Any] | None = None) -> None:
        hooks = hooks or {}
        # Looked up once: in most runs the list of every method is empty, and a step pays for one empty loop.
        self._methods = {
            method: [(name, getattr(hook, method)) for name, hook in hooks.items() if hasattr(hook, method)]
            for method in METHODS
        }
        self.banner_rows = {"hooks": ", ".join(type(hook).__name__ for hook in hooks.values())} if hooks else {}
        self.metrics = [(name, metric) for name, hook in hooks.items() for metric in getattr(hook, "reads_metrics", ())]
        self.notes: list[str] = []
        self._with_state: dict[str, tuple[str, Any]] = {}
        positions = Counter[str]()
        for name, hook in hooks.items():
            kind = f"{type(hook).__module__}.{type(hook).__qualname__}"
            if hasattr(hook, "state_dict"):
                self._with_state[f"{kind}[{positions[kind]}]"] = name, hook
            positions[kind] += 1

    @property
    def read_evaluations(self) -> bool:
        """Whether a hook has ``on_evaluation``."""
        return bool(self._methods["on_evaluation"])

    def call(self, method: str, run: TrainState, *result: Any) -> None:
        """Calls ``method`` of every hook that has it; see the module's docstring for the arguments.

        Raises:
            HookFailed: If one raised an exception; names the hook.
        """
        for name, call in self._methods[method]:
            with _failure_named(name, method):
                call(run, *result)
        if method == "on_start":
            self.state_dict()  # one that JSON cannot hold fails before the first step, and not in the first save

    def state_dict(self) -> dict[str, Any]:
        """A copy of the states of the hooks that have one, by class and position among the hooks of this class.

        Raises:
            HookFailed: If a ``state_dict`` raises an exception or returns anything but JSON values.
        """
        states = {}
        for key, (name, hook) in self._with_state.items():
            with _failure_named(name, "state_dict"):
                states[key] = json.loads(json.dumps(hook.state_dict()))
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Gives each hook its state; hooks without one, and states without a hook, are noted.

        Raises:
            HookFailed: If a hook does not accept its state.
        """
        for key, (name, hook) in self._with_state.items():
            if key in state:
                with _failure_named(name, "load_state_dict"):
                    hook.load_state_dict(state[key])
        added = [name for key, (name, _) in self._with_state.items() if key not in state]
        self.notes = [f"{name}: the checkpoint has no state of it, so it begins anew" for name in added]
        removed = [key for key in state if key not in self._with_state]
        self.notes += [f"train.hooks: {key} is not among them any more, and its state is dropped" for key in removed]


@contextmanager
def _failure_named(name: str, method: str) -> Iterator[None]:
    try:
        yield
    except dist.DistError:  # another rank failed in the same hook
        raise
    except (Exception, SystemExit) as error:  # sys.exit(0) would end one rank as if it had succeeded
        raise HookFailed(f"{name}.{method} raised {type(error).__name__}: {error}") from error


def build_hooks(cfg: Config) -> Hooks:
    """Builds the hooks of ``train.hooks``.

    Raises:
        ConfigError: If a hook cannot be built or has none of ``METHODS``.
    """
    hooks: dict[str, Any] = {}
    for number, node in enumerate(cfg.train.hooks):
        hooks[f"train.hooks[{number}] ({node['_target_']})"] = _build(f"train.hooks[{number}]", node)
    return Hooks(hooks)


def _build(key: str, node: Any) -> Any:
    with as_config_error(key):
        hook = by_target(key, node)
    own = [name for name in dir(hook) if name.startswith("on_") and callable(getattr(hook, name))]
    for name in own:
        if name not in METHODS:
            near = difflib.get_close_matches(name, METHODS, n=1)
            remedy = f"Did you mean {near[0]}?" if near else "Rename it, so that its name does not begin with on_."
            raise ConfigError(
                f"{key}: {node['_target_']} has a method {name}, which nothing calls. Hooks have {', '.join(METHODS)}. {remedy}"
            )
    if len(state := [name for name in _STATE_METHODS if hasattr(hook, name)]) == 1:
        raise ConfigError(
            f"{key}: {node['_target_']} has {state[0]}, but not both of {' and '.join(_STATE_METHODS)}. Add the other one, so "
            "that its state can be saved and restored, or rename it."
        )
    if not own:
        raise ConfigError(
            f"{key}: {node['_target_']} returns a {type(hook).__name__} with none of the methods {', '.join(METHODS)}. Add at "
            "least one of them, or remove it from train.hooks."
        )
    return hook

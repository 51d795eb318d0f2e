"""User code that is called at fixed points of a run: ``train.hooks: [{_target_: package.MyHook, option: value}]``.

A *hook* is any object with a subset of these methods. All ranks call them at the same step, so a hook may call collectives.

* ``on_start(run)``: before the first step of a start. ``run`` is the ``TrainState``, restored.
* ``on_step(run, outcome)``: the outcome (``StepOutcome``) of step ``run.step.step`` is known. The gradients of the next step
  may have been computed already.
* ``on_evaluation(run, result)``: an evaluation after the current step has ended; its result is an ``Evaluation``.
* ``on_save(run, path)``: a checkpoint of the current step was copied to host memory. A thread writes it to ``path``.
* ``on_end(run, state)``: the loop has ended; ``state`` is ``finished`` or ``stopped``. Not called after an exception.

A hook that reads metrics of evaluations may name them in an attribute ``reads_metrics``, such as ``["eval/loss"]``; a name that
no evaluation will have is then refused before the first step.

An exception in a hook ends the run on all ranks. A hook that needs other points can set them up in ``on_start``:
register module or optimizer hooks, or wrap public callables such as ``run.step.accumulate``, ``run.train_loader.epoch`` and
``run.checkpoints.save``, as ``benchmarks/fault_hook.py`` does.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from dtrain.config.instantiate import by_target
from dtrain.config.schema import Config
from dtrain.errors import ConfigError, as_config_error
from dtrain.training.checkpoint.state import TrainState

METHODS = ("on_start", "on_step", "on_evaluation", "on_save", "on_end")


class HookFailed(RuntimeError):
    """A hook raised an exception, which is the cause."""


class Hooks:
    """The hooks of a run, called in the order of the config.

    Args:
        hooks: Objects with a subset of ``METHODS``, by their names in errors.

    Attributes:
        banner_rows: Their row in the start banner.
        metrics: Hooks that read metrics of evaluations, and the names of the metrics.
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
            try:
                call(run, *result)
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
    if not own:
        raise ConfigError(
            f"{key}: {node['_target_']} returns a {type(hook).__name__} with none of the methods {', '.join(METHODS)}. Add at "
            "least one of them, or remove it from train.hooks."
        )
    return hook

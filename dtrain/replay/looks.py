"""What can look into a recomputed step: an examination of its rows, and a Python prompt."""

from __future__ import annotations

import code
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dtrain.console import until_reader_leaves
from dtrain.data import Batch
from dtrain.replay.samples import examine_rows
from dtrain.training.checkpoint.state import TrainState
from dtrain.training.task import Output, Task

_BANNER = """
Within step {step}, after the backward and before the update:
  run          the run (TrainState): run.model, run.task, run.optimizer, run.step, ...
  batch        the last micro-batch; batch.sample_keys, batch.valid; batches has all of them
  output       what the task returned for it (Output); outputs has all of them
  gradients    name to gradient of the mean loss over all rows, before clipping
Ctrl-D ends the prompt, and the step is completed.
"""


class RowExaminer:
    """Shows the rows of a step; see ``samples``.

    Args:
        most: Rows for which parts of the gradient are computed; None: all.
        page: File for the pictures of the rows.
        name: Name of the run.

    Attributes:
        found: The content of the JSON file; None before.
    """

    def __init__(self, most: int | None, page: Path, name: str) -> None:
        self._most, self._page, self._name = most, page, name
        self.found: dict[str, Any] | None = None

    def before(self, run: TrainState, batches: list[Batch]) -> None:
        """Examines the rows."""
        shares = examine_rows(run, batches, self._most)
        self.found = shares.to_json()
        if run.world.rank != 0:
            return
        with until_reader_leaves():
            print(shares.table(), flush=True)
            try:
                if shares.write_page(self._page, self._name):
                    print(f"pictures: {self._page}", flush=True)
            except OSError as error:
                print(f"note: the pictures could not be written ({error})", flush=True)

    def after(self, run: TrainState, batches: list[Batch]) -> None:
        """Does nothing."""


class Shell:
    """A Python prompt, of IPython if it is installed."""

    def __init__(self) -> None:
        self._task: Task | None = None
        self._outputs: list[Output] = []

    def before(self, run: TrainState, batches: list[Batch]) -> None:
        """Keeps the outputs of the task from now on."""
        task = self._task = run.task

        def kept(model: nn.Module, batch: Batch) -> Output:
            self._outputs.append(task(model, batch))
            return self._outputs[-1]

        run.step.task = kept

    def after(self, run: TrainState, batches: list[Batch]) -> None:
        """Opens the prompt."""
        assert self._task is not None
        run.step.task = self._task
        names = {
            "run": run,
            "batch": batches[-1],
            "batches": batches,
            "output": self._outputs[-1],
            "outputs": self._outputs,
            "gradients": self._gradients(run),
        }
        banner = _BANNER.format(step=run.step.step + 1)
        try:
            from IPython import start_ipython  # an extra package of the user
        except ImportError:
            code.interact(banner, local=names, exitmsg="")
            return
        print(banner)
        start_ipython(argv=["--no-banner", "--no-confirm-exit"], user_ns=names)

    def _gradients(self, run: TrainState) -> dict[str, Tensor]:
        count = sum(float(output.count) for output in self._outputs)
        scale = float(run.step.loss_scale.scale) if run.step.loss_scale is not None else 1.0
        factor = run.cfg.train.global_batch_size / count / scale if count else 0.0
        parameters = run.model.named_parameters()
        return {name: it.grad * factor for name, it in parameters if it.grad is not None}

"""Initial weights of a new run, taken from another run.

* ``run.weights_from`` is for the same model: all names and shapes must be equal.
* ``run.warm_start`` is for another model: ``rename`` rewrites names, ``skip`` leaves out names, and the rest must fit. Only a
  parameter that ``skip`` names keeps its initialisation.

Only weights are loaded, the moving average if there is one; optimizer, schedule, loss scale and data start from the beginning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn

from dtrain.config.errors import ConfigError
from dtrain.config.schema import RunConfig
from dtrain.distributed.collectives import from_rank0, on_all_ranks
from dtrain.training.checkpoints import Checkpoints, verify_folder
from dtrain.training.state import weight_problems


@dataclass(frozen=True)
class StartingWeights:
    """Weights that fit a model.

    Attributes:
        tensors: Weights by the model's names; the other parameters keep their initialisation.
        description: For the banner: the source, and the number of the other parameters.
    """

    tensors: dict[str, Tensor]
    description: str

    def load(self, *modules: nn.Module) -> None:
        """Copies them into each of ``modules``: the model, and the EMA's copy of it."""
        for module in modules:
            module.load_state_dict(self.tensors, strict=False)  # missing names are those of run.warm_start.skip


def starting_weights(run: RunConfig, model: nn.Module) -> StartingWeights | None:
    """Collective. Reads the weights of ``run.weights_from`` or ``run.warm_start`` for the bare model; None if neither is set.

    Raises:
        ConfigError: On every rank, if there are no weights at the path, or they are damaged or do not fit.
    """
    warm = run.warm_start
    if run.weights_from is not None and warm.path is not None:
        raise ConfigError("run.weights_from and run.warm_start.path are both set. Keep one of them.")
    if warm.path is None and (warm.rename or warm.skip):
        raise ConfigError("run.warm_start has a rename or a skip, but no path. Set run.warm_start.path.")
    key, path = ("run.weights_from", run.weights_from) if warm.path is None else ("run.warm_start.path", warm.path)
    if path is None:
        return None
    file = Path(from_rank0(lambda: str(_find(key, Path(path).expanduser()))))
    return on_all_ranks(lambda: _fitted(key, file, model, dict(warm.rename), list(warm.skip)))


def _find(key: str, path: Path) -> Path:
    """The weights file of a run directory, of a checkpoint's folder, or the file itself; verified."""
    if path.is_file():
        return path
    folder = path
    if (path / "checkpoints").is_dir():
        checkpoints = Checkpoints(path / "checkpoints")
        folder = checkpoints.path(checkpoints.choose("latest"))
    elif (path / "manifest.json").is_file():
        verify_folder(path)
    else:
        raise ConfigError(
            f"{key}: {path} is no run directory, no checkpoint (checkpoints/step-000000050) and no .safetensors file."
        )
    average = folder / "ema.safetensors"
    return average if average.exists() else folder / "model.safetensors"


def _fitted(key: str, file: Path, model: nn.Module, rename: Mapping[str, str], skip: Sequence[str]) -> StartingWeights:
    try:
        loaded = safetensors.torch.load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{key}: {file} cannot be read ({error}).") from error
    renamed: dict[str, str] = {}
    for name in loaded:
        new = _renamed(name, rename)
        if new in renamed:
            raise ConfigError(f"run.warm_start.rename: {renamed[new]} and {name} both become {new}.")
        renamed[new] = name

    def skipped(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in skip)

    tensors = {new: loaded[name] for new, name in renamed.items() if not skipped(new)}
    if problems := weight_problems(model, tensors, may_lack=skipped):
        raise ConfigError(
            f"{key}: the weights in {file} do not fit: {problems}. run.warm_start.rename rewrites their names, "
            "run.warm_start.skip leaves out names of the file and of the model."
        )
    total = len(model.state_dict())
    left_out = f", {total - len(tensors)} of {total} left out" if len(tensors) < total else ""
    return StartingWeights(tensors, f"with the weights of {file}{left_out}")


def _renamed(name: str, rename: Mapping[str, str]) -> str:
    for old, new in rename.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name

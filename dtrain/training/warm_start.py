"""The weights that a new run begins with, when they are those of another: all of them, or what a name map says.

* ``run.weights_from`` is for the same model: every name and shape must fit.
* ``run.warm_start`` is for another one: names are rewritten, some are left out, and the rest must fit. What keeps its
  initialisation is asked for by name, never guessed.

Only weights are taken, the moving average where there is one: optimizer, schedule, loss scale and data begin anew.
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
from dtrain.distributed.collectives import decided_by_rank_zero, together
from dtrain.training.checkpoint import verify_folder
from dtrain.training.checkpoints import Checkpoints

_SHOWN = 5


@dataclass(frozen=True)
class StartingWeights:
    """Weights that fit a model.

    Attributes:
        tensors: By the model's names; a name that is not there keeps its initialisation.
        said: Where they are from, and how many kept their initialisation.
    """

    tensors: dict[str, Tensor]
    said: str

    def load(self, *modules: nn.Module) -> None:
        """Copies them into the model, and into its moving average."""
        for module in modules:
            module.load_state_dict(self.tensors, strict=False)  # what it leaves out was asked for


def starting_weights(run: RunConfig, model: nn.Module) -> StartingWeights | None:
    """Collective. What ``run.weights_from`` or ``run.warm_start`` asks for; None if neither does.

    Args:
        run: The config.
        model: The bare module, whose names and shapes decide what fits.

    Raises:
        ConfigError: On every rank, if there are no weights at that path, they are broken, or they do not fit.
    """
    warm = run.warm_start
    if run.weights_from is not None and warm.path is not None:
        raise ConfigError("run.weights_from and run.warm_start.path are both set. Keep one of them.")
    if warm.path is None and (warm.rename or warm.skip):
        raise ConfigError("run.warm_start has a rename or a skip, but no path. Set run.warm_start.path.")
    key, path = ("run.weights_from", run.weights_from) if warm.path is None else ("run.warm_start.path", warm.path)
    if path is None:
        return None
    file = Path(decided_by_rank_zero(lambda: str(_find(key, Path(path).expanduser()))))
    return together(lambda: _fitted(key, file, model, dict(warm.rename), list(warm.skip)))


def _find(key: str, path: Path) -> Path:
    """The file of weights that a run directory, a checkpoint's folder or the file itself stands for; checked."""
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

    def left_out(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in skip)

    own = model.state_dict()
    tensors = {new: loaded[name] for new, name in renamed.items() if not left_out(new)}
    problems = [f"{name} is missing there" for name in own if name not in tensors and not left_out(name)]
    problems += [f"{name} is unknown to this model" for name in tensors if name not in own]
    problems += [
        f"{name} has shape {list(tensor.shape)}, the model has {list(own[name].shape)}"
        for name, tensor in tensors.items()
        if name in own and tensor.shape != own[name].shape
    ]
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ConfigError(
            f"{key}: the weights in {file} do not fit: {'; '.join(problems[:_SHOWN])}{more}. run.warm_start.rename rewrites "
            "their names, run.warm_start.skip leaves out names of either side."
        )
    kept = len(own) - len(tensors)
    return StartingWeights(
        tensors, f"with the weights of {file}" + (f", {kept} of {len(own)} left out" if kept else "")
    )


def _renamed(name: str, rename: Mapping[str, str]) -> str:
    for old, new in rename.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name

"""What a checkpoint with ``checkpoint.only_trained`` leaves out: the *rest*, the parameters that are never trained.

* A parameter is in the rest if it requires no gradient when the run starts, as the base of an adapter does. One that
  ``train.freeze`` freezes until a step is trained. Buffers are always stored.
* A start builds the rest again: from the model's config, ``run.seed`` and the initial weights. A checkpoint has the SHA-256 of
  each of its tensors, and where they came from. A rest that differs is refused before anything is loaded.
* The hashes are of whole tensors, so they are the same for any number of ranks and any strategy.
* A rest that a hook or the task changes could not be built again. So it is compared, by sums of its bits, at each save.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.config.schema import RunConfig
from dtrain.distributed.replicas import sum_of_bits
from dtrain.distributed.sharding import is_dtensor, local_part, own_range, reshard
from dtrain.errors import ConfigError
from dtrain.precision.modules import dtype_name
from dtrain.runs.hub import is_hub_url
from dtrain.training.checkpoint.tensors import StoredTensor


def never_trained(model: nn.Module) -> list[str]:
    """Names of the parameters that require no gradient, as the model's ``state_dict`` has them; a tied one has several."""
    saved = model.state_dict()
    named = model.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if not parameter.requires_grad and name in saved]


@dataclass(frozen=True)
class Rest:
    """The contents of parameters.

    Attributes:
        digests: Name to the SHA-256 of a tensor's dtype, shape and bits, in hexadecimal digits.
        source: Where their values come from, for messages.
    """

    digests: Mapping[str, str]
    source: str

    @classmethod
    @torch.no_grad()
    def measure(cls, model: nn.Module, names: Collection[str], source: str) -> Rest:
        """Collective, if there is a process group. Hashes tensors of a bare model; each rank hashes some of them.

        Args:
            model: The model, sharded or not. Of a sharded one, each rank holds one whole tensor at a time.
            names: Names of its ``state_dict``; others are left out. Equal on all ranks.
            source: As the attribute.
        """
        reshard(model)
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        own, found = model.state_dict(), {}
        for number, name in enumerate(sorted(own.keys() & {*names})):
            tensor = own[name]
            whole = tensor.full_tensor() if is_dtensor(tensor) else tensor  # a collective
            if number % ranks == rank:
                found[name] = _digest(whole)
        parts = [found] * ranks
        if ranks > 1:
            dist.all_gather_object(parts, found)
        return cls({name: digest for part in parts for name, digest in part.items()}, source)

    @classmethod
    def from_state(cls, state: Any) -> Rest:
        """The inverse of ``to_state``.

        Raises:
            ConfigError: If it has a different form.
        """
        try:
            return cls({str(name): str(digest) for name, digest in state["tensors"].items()}, str(state["from"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"the checkpoint's state.json is damaged: rest lacks tensors or a source ({error!r})"
            ) from error

    def to_state(self) -> dict[str, Any]:
        """JSON values, for ``state.json``; ``sha256`` is of all names and digests, to compare two checkpoints."""
        tensors = dict(sorted(self.digests.items()))
        return {
            "from": self.source,
            "sha256": hashlib.sha256(json.dumps(tensors).encode()).hexdigest(),
            "tensors": tensors,
        }

    def matches(self, built: Rest) -> bool:
        """Whether ``built`` has all of these tensors, with equal contents."""
        return all(built.digests.get(name) == digest for name, digest in self.digests.items())

    def require(self, built: Rest) -> None:
        """Refuses a model whose tensors are not the ones that this checkpoint was saved without.

        Raises:
            ConfigError: Names the first tensor that differs, and where the checkpoint's came from.
        """
        for name, digest in self.digests.items():
            if (found := built.digests.get(name)) != digest:
                has = f"has SHA-256 {found[:12]}, want {digest[:12]}" if found else "is missing"
                origin = self.source if self.source == built.source else f"{self.source}, but here from {built.source}"
                raise ConfigError(
                    "checkpoint.only_trained: the checkpoint lacks the parameters that were not trained, and in this model "
                    f"{name} {has}. They came from {origin}. Build the model with the same config, run.seed, initial weights "
                    "and versions of packages."
                )


class BuiltRest:
    """The rest of a run as its start has built it, before a checkpoint is loaded. Making one is collective.

    Args:
        model: The bare model, sharded or not.
        source: As of ``Rest``.
        saved: The rest of the checkpoint that will be loaded, which the run may train; None without one.

    Attributes:
        names: Names of what the run never trains.
    """

    def __init__(self, model: nn.Module, source: str, saved: Rest | None = None) -> None:
        self._model = model
        self.names = never_trained(model)
        self._measured = Rest.measure(model, {*self.names, *(saved.digests if saved is not None else ())}, source)
        self._sums = self._sums_of_bits()

    def matches(self, saved: Rest) -> bool:
        """Whether the checkpoint with this rest can be loaded."""
        return saved.matches(self._measured)

    def require(self, saved: Rest | None, stored: Mapping[str, Tensor | StoredTensor], *, leaves_out: bool) -> None:
        """Refuses a checkpoint with which the run could not continue.

        Args:
            saved: Its rest; None if it has all parameters.
            stored: Its model.
            leaves_out: Whether the run's own checkpoints leave the rest out.

        Raises:
            ConfigError: If its rest differs from this one, or it has other values of what this run's checkpoints leave out.
        """
        if saved is not None:
            saved.require(self._measured)
        own = self._model.state_dict()
        for name in self.names if leaves_out else ():
            if name in stored and stored[name].shape == own[name].shape and not _has(own[name], stored[name]):
                raise ConfigError(
                    f"checkpoint.only_trained: got true, but {name}, which requires no gradient now, differs in the checkpoint "
                    f"from {self._measured.source}: it was trained before. Checkpoints without it could not be resumed. Set "
                    "checkpoint.only_trained=false, or train it (train.freeze)."
                )

    def to_state(self) -> dict[str, Any]:
        """As ``Rest.to_state``, of what the run never trains.

        Raises:
            ConfigError: If some of it has changed since the start; names it.
        """
        for name, before, now in zip(self.names, self._sums, self._sums_of_bits(), strict=True):
            if before != now:
                raise ConfigError(
                    f"checkpoint.only_trained: got true, but {name} has changed since the start, although it requires no "
                    "gradient. A hook or the task changes it, and a checkpoint without it could not be resumed. Set "
                    "checkpoint.only_trained=false."
                )
        digests = self._measured.digests
        return Rest({name: digests[name] for name in self.names}, self._measured.source).to_state()

    @torch.no_grad()
    def _sums_of_bits(self) -> list[int]:
        """Of this rank's parts."""
        own = self._model.state_dict()
        sums = [sum_of_bits(local_part(own[name])) for name in self.names]
        return torch.stack(sums).tolist() if sums else []


def source_of_rest(model: Any, run: RunConfig) -> str:
    """Where a run's parameters have their initial values from, such as ``model._target_=timm.create_model, run.seed=0``.

    Args:
        model: The config node ``model``.
        run: The config section ``run``.
    """
    parts = [f"model._target_={model.get('_target_')}" if model else "the model", f"run.seed={run.seed}"]
    for key, path in (("warm_start.path", run.warm_start.path), ("weights_from", run.weights_from)):
        if path is not None:
            parts.append(f"run.{key}={path if is_hub_url(path) else Path(path).expanduser().absolute()}")
    return ", ".join(parts)


def _digest(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{dtype_name(tensor.dtype)} {list(tensor.shape)} ".encode())
    digest.update(_bits(tensor).numpy().data)
    return digest.hexdigest()


def _has(own: Tensor, stored: Tensor | StoredTensor) -> bool:
    """Whether a stored tensor has the bits of this rank's part."""
    part, there = local_part(own), stored[own_range(own)]
    if part.dtype != there.dtype:
        return False
    return torch.equal(_bits(part), _bits(there))


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor on the CPU, in the order of its elements."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)

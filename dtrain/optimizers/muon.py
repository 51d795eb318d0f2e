"""Muon for the matrices inside a network and AdamW for all other parameters, as one optimizer.

Muon (Jordan et al. 2024) orthogonalises the momentum of each matrix. ``torch.optim.Muon`` accepts matrices only; embeddings,
output layers, convolutions, normalisation layers and biases are trained with AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dtrain.optimizers.groups import matching, trainable


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon and AdamW with the same learning rate and weight decay.

    Muon's updates are scaled to the size of AdamW's updates (Liu et al. 2025, "Muon is scalable for LLM training").

    Args:
        model: The model. Muon trains all of its trainable matrices except the weights of ``nn.Embedding``.
        lr: Learning rate.
        weight_decay: Weight decay of parameters with at least two dimensions; the others have none.
        momentum: Momentum of Muon.
        betas: Betas of AdamW.
        adamw: Patterns (fnmatch) of the names of matrices trained with AdamW instead, such as ``head.*``.

    Raises:
        ValueError: If no matrix is left for Muon, a pattern matches nothing, or the model is sharded.

    Example:
        >>> import torch
        >>> from dtrain.optimizers import MuonWithAdamW
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> optimizer = MuonWithAdamW(model, lr=0.01, adamw=["2.*"])  # the output layer
        >>> model(torch.rand(3, 4)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        adamw: Sequence[str] = (),
    ) -> None:
        parameters = trainable(model)
        with_adamw = matching(parameters, adamw)
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        inner: list[nn.Parameter] = []
        decayed: list[nn.Parameter] = []
        vectors: list[nn.Parameter] = []
        for name, parameter in parameters.items():
            outside = name in with_adamw or id(parameter) in embeddings or parameter.dim() != 2
            (vectors if parameter.dim() < 2 else decayed if outside else inner).append(parameter)
        if any(hasattr(parameter, "device_mesh") for parameter in inner):
            raise ValueError(
                "Muon: it orthogonalises whole matrices, but with parallel.shard each rank has only a part of them. Use "
                "optimizer=adamw, or set parallel=ddp."
            )
        if not inner:
            raise ValueError("Muon: the model has no matrix for Muon to train. Use optimizer=adamw.")
        self._muon = torch.optim.Muon(
            inner, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
        )
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": vectors, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            groups,
            lr=lr,
            weight_decay=weight_decay,
            betas=tuple(betas),  # type: ignore[arg-type]
        )
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})
        self._share_state()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Runs one step of Muon and AdamW.

        Raises:
            ValueError: If a closure is passed.
        """
        if closure is not None:
            raise ValueError("Muon: a closure is not supported. Call step() after backward().")
        self._muon.step()
        self._adamw.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.load_state_dict``."""
        super().load_state_dict(state_dict)
        self._share_state()

    def _share_state(self) -> None:
        """Makes both use this optimizer's groups and state, which learning-rate schedules and checkpoints access."""
        self._muon.param_groups, self._adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        self._muon.state = self._adamw.state = self.state

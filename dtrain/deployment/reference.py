"""What an export knows of its model beside the weights: what goes in, and what an artefact is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dtrain.config.errors import ConfigError, users_to_fix
from dtrain.config.schema import Config
from dtrain.deployment.image_input import ImageInput
from dtrain.deployment.samples import NotComparable, Samples, sample
from dtrain.distributed.world import World
from dtrain.precision import Precision
from dtrain.training import build
from dtrain.training.loaders import declared_fields, eval_loader


@dataclass(frozen=True)
class Reference:
    """The fp32 model on rows of the evaluation set, as far as there are any.

    Attributes:
        samples: The rows with their fp32 outputs; None if there is nothing to compare with.
        why_not: Why there is not; None if there is.
        image: The image that the task was seen to hand to the model, or, where nobody looked, the only one that the config
            declares; None if it is something else, or nobody knows.
    """

    samples: Samples | None
    why_not: str | None
    image: ImageInput | None

    @classmethod
    def of(cls, cfg: Config, model: nn.Module, world: World, limit: int) -> Reference:
        """Runs the task on ``limit`` rows of ``data.eval``; 0 for none.

        Args:
            cfg: The config; ``data.num_workers`` becomes 0.
            model: In eval mode and fp32.
            world: Of one process.
            limit: How many rows at most.

        Raises:
            ConfigError: If the evaluation set cannot be read.
        """
        images = {field.name: field for field in declared_fields(cfg.data) if field.role == "image"}
        if not cfg.data.eval or not limit:
            only = ImageInput.of(next(iter(images.values()))) if len(images) == 1 else None
            return cls(None, "samples=0" if cfg.data.eval else "data.eval is not set", only)
        cfg.data.num_workers = 0  # some hundred rows are read before a worker has started
        try:
            if cfg.data.prepare is not None:
                with users_to_fix("data.prepare"):
                    build.by_target("data.prepare", cfg.data.prepare)
            loader = eval_loader(cfg, world, Precision("fp32"))
            assert loader is not None
        except ConfigError as error:
            raise ConfigError(f"{error} (samples=0 exports without the comparison.)") from error
        try:
            found = sample(model, build.by_target("task", cfg.task), loader, images, world.device, limit)
        except NotComparable as error:
            return cls(None, f"the model is no function of one tensor: {error}", None)
        finally:
            loader.close()
        return cls(found, None, found.image)

    def example(self, device: torch.device) -> Tensor | None:
        """Rows such as go into the model, to trace it with; None where nobody saw any."""
        if self.samples is not None:
            return self.samples.rows[:2].clone().to(device)
        if self.image is not None and self.image.size is not None:
            return torch.zeros(2, *self.image.size, 3, dtype=torch.uint8, device=device)
        return None

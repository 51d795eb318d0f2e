"""Configs of earlier versions: moved classes are found."""

from __future__ import annotations

from omegaconf import OmegaConf

from dtrain.config.instantiate import by_target
from dtrain.data.augment import ColorJitter, Compose, TorchvisionTransform


def test_classes_are_found_under_the_paths_of_earlier_versions() -> None:
    node = OmegaConf.create(
        {
            "field": "image",
            "augment": {
                "_target_": "dtrain.data.augment.Compose",
                "steps": [
                    {"_target_": "dtrain.data.color_jitter.ColorJitter", "hue": 0.1, "field": "${field}"},
                    {
                        "_target_": "dtrain.data.torchvision_transform.TorchvisionTransform",
                        "transform": {"_target_": "torch.nn.Identity"},
                    },
                ],
            },
        }
    )
    before = OmegaConf.to_yaml(node)
    augment = by_target("data.augment", node.augment)
    assert isinstance(augment, Compose)
    assert [type(step) for step in augment.steps] == [ColorJitter, TorchvisionTransform]
    assert augment.steps[0].field == "image"
    assert OmegaConf.to_yaml(node) == before  # a run is identified by what its config says

"""Configs for tests, without Hydra."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from omegaconf import OmegaConf

from dtrain.config.schema import Config, from_plain

Section = TypeVar("Section")


def config_of(values: Mapping[str, Any], **more: Any) -> Config:
    """The config with these values in place of the defaults, checked against the types of the schema."""
    return section_of(Config, values, **more)


def section_of(section: type[Section], values: Mapping[str, Any] | None = None, **more: Any) -> Section:
    """As ``config_of``, of one section."""
    node = OmegaConf.merge(OmegaConf.structured(section), {**(values or {}), **more})
    plain: Any = OmegaConf.to_container(node, resolve=True)
    return from_plain(section, plain)

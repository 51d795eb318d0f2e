"""Composing a config takes a third of Hydra's time, which a thousand tests need: nothing is read or merged twice.

* A preset is read once, and so is a merge of the same presets. The folders that a test gives with ``--config-dir`` are read
  each time.
* An override or an interpolation is parsed once: the grammar takes a millisecond or more for each.
* Copies are made by pickling, which takes a sixth of the time of ``deepcopy``.

What Hydra computes stays the same, and every step of it runs for configs that are new to the process.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from hydra._internal import config_repository, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, _utils, base, grammar_parser

from dtrain.config import schema
from dtrain.config.compose import conf_dir


@contextmanager
def quick_hydra() -> Iterator[None]:
    """Inside, Hydra composes quickly."""
    schema.register()
    read: dict[tuple[str, str], bytes] = {}
    merged: dict[bytes, bytes] = {}
    load = config_repository.ConfigRepository.load_config
    choices = defaults_list._create_interpolation_map
    merge = ConfigLoaderImpl._compose_config_from_defaults_list
    copied = DictConfig.__deepcopy__
    parsed: dict[tuple[str, str], bytes] = {}
    parse = OverridesParser.parse_rule
    # The tree of an interpolation is only read.
    parse_interpolation = functools.lru_cache(maxsize=None)(grammar_parser.parse)

    def load_config(self: config_repository.ConfigRepository, config_path: str) -> Any:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None or (source.scheme() == "file" and source.path != str(conf_dir())):
            return load(self, config_path)
        if (key := (source.full_path(), config_path)) not in read:
            read[key] = pickle.dumps(load(self, config_path))
        return pickle.loads(read[key])

    def merge_configs(self: Any, defaults: list[Any], repo: Any) -> Any:
        # The configs from which dtrain has removed what others replace, the last one first.
        configs = [result.config for result in self._loaded[::-1]]
        key = pickle.dumps([*zip(configs, (default.package for default in defaults), strict=True)])
        if key not in merged:
            merged[key] = pickle.dumps(merge(self, defaults, repo))
        self._loaded.clear()
        return pickle.loads(merged[key])

    def interpolation_map(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
        used = any(default.is_interpolation() for default in defaults if not default.is_self())
        return choices(overrides, defaults, self_added) if used else None

    def parse_rule(self: OverridesParser, text: str, rule: str) -> Any:
        if (text, rule) not in parsed:
            parsed[text, rule] = pickle.dumps(parse(self, text, rule))
        return pickle.loads(parsed[text, rule])

    def deep_copy(self: DictConfig, memo: dict[int, Any]) -> DictConfig:
        # A part of a config refers to the rest of it, which is not copied.
        return copied(self, memo) if self._get_parent() is not None else pickle.loads(pickle.dumps(self))

    with (
        mock.patch.object(schema, "register"),
        mock.patch.object(config_repository.ConfigRepository, "load_config", load_config),
        mock.patch.object(ConfigLoaderImpl, "_compose_config_from_defaults_list", merge_configs),
        # Hydra makes it for each preset, which takes a seventh of the time, though only ``- group: ${other}`` needs it.
        mock.patch.object(defaults_list, "_create_interpolation_map", interpolation_map),
        # Hydra copies its sources, and with them the schema that they refer to.
        mock.patch.object(ConfigStore, "__deepcopy__", lambda store, memo: store, create=True),
        mock.patch.object(DictConfig, "__deepcopy__", deep_copy),
        mock.patch.object(OverridesParser, "parse_rule", parse_rule),
        mock.patch.object(base, "parse", parse_interpolation),
        mock.patch.object(_utils, "parse", parse_interpolation),
    ):
        yield

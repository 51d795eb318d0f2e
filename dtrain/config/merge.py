"""How presets and the command line are merged: a node of a different class replaces the earlier node.

Hydra merges mappings key by key, so the arguments of a preset's class would reach the class that a user names instead. Here

* a mapping with a different ``_target_`` replaces the earlier mapping of the same key, also inside a node;
* ``data.fields`` replaces the earlier fields if each of its fields has a name; otherwise it changes single options of them;
  likewise ``data.mixture`` if each of its sources has shards, and ``train.metrics`` if each metric has a ``_target_``;
* ``model=NAME`` on the command line replaces what presets say about ``model``; the same for ``task``, ``optimizer`` and
  ``schedule``;
* a different task removes the metric of ``checkpoint.best`` that a preset has set before for its own task, unless it is a loss
  or one of ``train.metrics``.

An argument that the class of a node takes by name can be set without ``+``, also if the presets leave it out; likewise a key
that dtrain itself reads (``OWN_KEYS``).

Everything else is merged as Hydra does it. A replaced node takes any key: its class decides which ones are valid. Hydra has no
extension point between loading configs and merging them, so ``_Loader`` overrides private methods of its config loader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeGuard

import hydra._internal.hydra as hydra_main
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, Node, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from dtrain.config.instantiate import OWN_KEYS, argument_names
from dtrain.errors import ConfigError

#: Groups whose presets are the arguments of a class.
CLASS_GROUPS = ("model", "task", "optimizer", "schedule")
#: Mappings that replace earlier ones if each of their entries has this key.
_WHOLE = {"data.fields": "name", "data.mixture": "shards", "train.metrics": "_target_"}
#: Keys of this mapping are names that the user chooses.
_NAMES = "run.warm_start.rename"
_SETS = "data.eval"  # a mapping without a class is several sets, which replace a dataset by its class
_OF_HYDRA = {"_partial_", "_recursive_", "_convert_"}  # say how a node is built, not what its class takes


@contextmanager
def replacing_nodes() -> Iterator[None]:
    """Inside, Hydra composes configs as this module describes it."""
    before = hydra_main.ConfigLoaderImpl, hydra_main.Hydra.get_mode
    hydra_main.ConfigLoaderImpl = _Loader  # type: ignore[misc]
    # It composes the whole config once more, only to find ``hydra.mode``. None: --multirun alone starts a sweep.
    hydra_main.Hydra.get_mode = lambda *args, **kwargs: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        hydra_main.ConfigLoaderImpl, hydra_main.Hydra.get_mode = before  # type: ignore[misc, method-assign]


class _Loader(ConfigLoaderImpl):
    """Removes from each config what a later one replaces, and leaves merging to Hydra."""

    def _parse_overrides_and_create_caching_repo(self, config_name: Any, overrides: list[str]) -> Any:
        self._config_name = config_name
        self._overrides, repo = super()._parse_overrides_and_create_caching_repo(config_name, overrides)
        return self._overrides, repo

    def _compose_config_from_defaults_list(self, defaults: Any, repo: Any) -> DictConfig:
        self._loaded: list[Any] = []
        loaded = [self._load_single_config(default=default, repo=repo) for default in defaults]
        configs: list[DictConfig] = [result.config for result in loaded]
        chooses_other_task = self._remove_replaced_groups(defaults, configs, repo)
        for number, config in enumerate(configs):
            _remove_best_of_other_task(configs[:number], _target_at(config, "task"))
            for path in _replacing(config):
                _remove_other(configs[:number], path, OmegaConf.select(config, path))
        self._loaded = loaded[::-1]  # super() loads them again, in the same order
        composed = super()._compose_config_from_defaults_list(defaults, repo)
        for path in _WHOLE:
            # Any option can be set, also one that presets leave out; an unknown one is refused later.
            if _is_mapping(entries := _select(composed, path)):
                for key in entries:
                    if _is_mapping(entry := _child(entries, key)):
                        OmegaConf.set_struct(entry, False)
        if _is_mapping(own := _select(composed, "vars")):
            OmegaConf.set_struct(own, False)
        if chooses_other_task or _names_other_task(self._overrides, _target_at(composed, "task")):
            _remove_best(composed)
        for override in self._overrides:
            _make_room(composed, override)
            _add_argument(composed, override)
        for override in self._overrides:
            _require_class(composed, override.key_or_group)
        for override in self._overrides:
            _allow_removal(composed, override)
        return composed

    def _load_single_config(self, default: Any, repo: Any) -> Any:
        return self._loaded.pop() if self._loaded else super()._load_single_config(default, repo)

    def _remove_replaced_groups(self, defaults: Any, configs: Sequence[DictConfig], repo: Any) -> bool:
        """Removes what presets say about a class group for which the command line chooses a different option or class.

        Returns:
            Whether the command line chooses a different task than the presets.
        """
        chosen = {
            override.key_or_group: override.value()
            for override in self._overrides
            if override.key_or_group in CLASS_GROUPS and not override.is_delete() and isinstance(override.value(), str)
        }
        if not chosen:
            return False
        others = [override for override in self._overrides if override.key_or_group not in chosen]
        presets = create_defaults_list(
            repo=repo, config_name=self._config_name, overrides_list=others, prepend_hydra=True, skip_missing=True
        ).overrides.known_choices
        has_other_task = "task" in chosen and presets.get("task") not in (None, chosen["task"])
        for default, config in zip(defaults, configs, strict=True):
            for group, option in chosen.items():
                node = None if default.config_path.startswith(f"{group}/") else _child(config, group)
                if _is_mapping(node) and ("_target_" in node or presets.get(group) not in (None, option)):
                    has_other_task |= group == "task" and "_target_" in node
                    del config[group]
        return has_other_task


def _replacing(node: DictConfig, path: str = "") -> Iterator[str]:
    """Paths of the mappings that may replace earlier ones, the outer ones first."""
    if _child(node, "_target_") is not None or (path in _WHOLE and _are_complete(path, node)):
        yield path
    for key in map(str, node):
        if _is_mapping(child := _child(node, key)) and key != "hydra":
            yield from _replacing(child, f"{path}.{key}" if path else key)


def _remove_other(configs: Sequence[DictConfig], path: str, new: DictConfig) -> None:
    """Removes the mapping at a path from earlier configs, if the mapping that they compose has a different class."""
    found = [(config, node) for config in configs if _is_mapping(node := _select(config, path))]
    targets = [target for _, node in found if (target := _target(node)) is not None]
    if path in _WHOLE or (targets and targets[-1] != _target(new)):
        for _, node in found:
            with open_dict(node):
                for key in set(node) - _OF_HYDRA:
                    del node[key]


def _remove_best_of_other_task(configs: Sequence[DictConfig], target: Any) -> None:
    """Removes the metric of the best checkpoint from configs before one with the class ``target`` as its task."""
    targets = [it for config in configs if (it := _target_at(config, "task")) is not None]
    if target is not None and targets and targets[-1] != target:
        for config in configs:
            _remove_best(config)


def _names_other_task(overrides: Sequence[Override], target: Any) -> bool:
    """Whether the command line names a different class than ``target`` as the task."""
    for override in overrides:
        if not override.is_delete() and not override.is_sweep_override():
            value = override.value()
            if override.key_or_group == "task" and isinstance(value, dict):
                value = value.get("_target_")
            elif override.key_or_group != "task._target_":
                continue
            if value is not None and value != target:
                return True
    return False


def _remove_best(config: DictConfig) -> None:
    """Removes ``checkpoint.best`` and its mode, unless the metric is a loss, which every task has, or of ``train.metrics``."""
    best, others = _select(config, "checkpoint.best"), _select(config, "train.metrics")
    if not (isinstance(best, Node) and isinstance(best._value(), str)):
        return
    name = best._value().rpartition("/")[2]
    if name != "loss" and not (isinstance(others, DictConfig) and name in others):
        for key in ("best", "best_mode"):
            if _select(config, f"checkpoint.{key}") is not None:
                OmegaConf.update(config, f"checkpoint.{key}", None)


def _make_room(composed: DictConfig, override: Override) -> None:
    """Empties the node that an override of the command line replaces, so that it takes any key."""
    if override.is_delete() or override.is_sweep_override():
        return
    path, value = override.key_or_group, override.value()
    if path.endswith("._target_"):
        path, value = path.removesuffix("._target_"), {"_target_": value}
    if not isinstance(value, dict):
        return
    if path in (_NAMES, _NAMES.rpartition(".")[0]):
        OmegaConf.set_struct(OmegaConf.select(composed, _NAMES), False)
    node = _select(composed, path)
    if path in _WHOLE:
        replaces = not node or all(_WHOLE[path] in it for it in value.values() if isinstance(it, dict))
    elif path == _SETS and "_target_" not in value:
        replaces = _is_mapping(node) and _target(node) is not None
    else:
        replaces = "_target_" in value and (not _is_mapping(node) or _target(node) not in (None, value["_target_"]))
    if replaces and not override.is_add():
        with suppress(OmegaConfBaseException):  # Hydra reports that there is no such key
            keeps = _is_mapping(node) and "_target_" in value
            kept = {key: node[key] for key in _OF_HYDRA & set(node)} if keeps else {}
            OmegaConf.update(composed, path, kept, merge=False)
            OmegaConf.set_struct(OmegaConf.select(composed, path), False)


def _require_class(composed: DictConfig, key: str) -> None:
    """Refuses a key of a class that is not chosen.

    Raises:
        ConfigError: Names the key, and how to choose the class.
    """
    group, dot, _ = key.partition(".")
    if dot and group in CLASS_GROUPS and not _is_mapping(_child(composed, group)):
        raise ConfigError(
            f"{key}: no {group} is chosen. Choose {group}=NAME, or set {group}._target_=package.Class, as well."
        )


def _add_argument(composed: DictConfig, override: Override) -> None:
    """Adds the key of an override to a node that lacks it but whose class takes it by name."""
    parent, _, key = override.key_or_group.rpartition(".")
    node = _select(composed, parent) if parent else None
    if override.is_add() or override.is_delete() or override.is_sweep_override() or not _is_mapping(node):
        return
    target = None if key in node else _target(node)
    if target is not None and (key in OWN_KEYS.get(parent, ()) or key in argument_names(target)):
        with open_dict(node):
            node[key] = None  # until Hydra sets it


def _allow_removal(composed: DictConfig, override: Override) -> None:
    """A key of a replaced node can be removed although it is no longer there."""
    parent, _, key = override.key_or_group.rpartition(".")
    node = _select(composed, parent) if override.is_delete() and parent else None
    if _is_mapping(node) and node._get_flag("struct") is False and key not in node:
        node[key] = "removed by the command line"


def _are_complete(path: str, entries: DictConfig) -> bool:
    return bool(entries) and all(not _is_mapping(it := _child(entries, key)) or _WHOLE[path] in it for key in entries)


def _target(node: DictConfig) -> Any:
    found = _child(node, "_target_")
    return None if found is None or found._is_missing() else found._value()  # not resolved


def _target_at(config: DictConfig, path: str) -> Any:
    return _target(node) if _is_mapping(node := _select(config, path)) else None


def _child(node: DictConfig, key: Any) -> Any:
    return node._get_node(key, validate_access=False)


def _select(config: DictConfig, path: str) -> Any:
    """The node at a dotted path, not resolved; None if there is none."""
    node: Any = config
    for key in path.split("."):
        if not _is_mapping(node):
            return None
        node = _child(node, key)
    return node


def _is_mapping(node: Any) -> TypeGuard[DictConfig]:
    return isinstance(node, DictConfig) and not (node._is_none() or node._is_missing() or node._is_interpolation())

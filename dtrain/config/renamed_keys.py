"""Config keys of earlier versions. Without imports of Hydra, so that ``dtrain.report`` can read old runs without it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

#: Old name to new name in the same section. A command or preset with the old name is refused with the new one; the config of
#: a run that was started with the old name is read as if it had the new one.
RENAMED_KEYS: dict[str, str] = {
    "data.wire": "data.transfer",
    "parallel.comm_dtype": "parallel.reduce_dtype",
    "task.sample_bytes": "task.sample_tokens",
}


def rename_keys(config: Mapping[str, Any], names: Mapping[str, str] = RENAMED_KEYS) -> dict[str, Any]:
    """A copy in which the keys of ``names`` (dotted, old to new) have their new names, in the same section."""
    renamed: dict[str, Any] = copy.deepcopy(dict(config))
    for old, new in names.items():
        *sections, name = old.split(".")
        section: Any = renamed
        for part in sections:
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict) and name in section:
            section[new.rpartition(".")[2]] = section.pop(name)
    return renamed


def rename_override(override: str) -> str:
    """An override ``key=value`` with the new name of its key."""
    key, equals, value = override.partition("=")
    name = key.lstrip("+~")
    return f"{key[: len(key) - len(name)]}{RENAMED_KEYS.get(name, name)}{equals}{value}"

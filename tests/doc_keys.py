"""Whether the keys and values that stand between the words of a page are those of a config."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import shlex
from collections.abc import Iterator
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from dtrain.config import instantiate
from dtrain.config.compose import conf_dir
from dtrain.config.schema import Config, key_types
from dtrain.replay.plan import OPTIONS as REPLAY_OPTIONS
from tests.doc_pages import is_placeholder

PARSER = OverridesParser.create()
#: Of commands, and no keys of the config.
OPTIONS = {"checkpoint", "weights", "out", "samples", "steps", "ranks", *REPLAY_OPTIONS}
#: Groups whose keys are the arguments of what `_target_` names.
FREE = ("model", "task", "optimizer", "schedule")
GROUPS = {folder.name for folder in conf_dir().iterdir() if folder.is_dir()}


def check_code(code: str) -> None:
    """Refuses ``key=value`` and ``section.key`` that no config takes; what is neither passes."""
    words = shlex.split(code) if re.match(r"'?[a-z_+]", code) and code.count("'") % 2 == 0 else []
    if len(words) != 1 or is_placeholder(words[0].rstrip(",")):
        return
    (word,) = words
    if re.fullmatch(r"\+{0,2}[a-z_]+(\.[a-z_0-9]+)*=.+", word):
        override = PARSER.parse_override(word)
        key = str(override.key_or_group)
        if key in OPTIONS:
            return
        if "." not in key and key not in GROUPS:  # perhaps an argument of something else
            meant = difflib.get_close_matches(key, [*GROUPS, *OPTIONS], cutoff=0.9)
            assert meant == [] or key in argument_names(), f"there is no {key}; {meant}?"
        elif key in GROUPS:
            names = str(override.value()).split(",") if not override.is_sweep_override() else []
            missing = [name for name in names if not (conf_dir() / key / f"{name}.yaml").exists()]
            assert missing == [] or names == ["packed"], f"there is no {key}={missing}"
        else:
            assert is_key(key), f"there is no {key}"
            if not override.is_sweep_override() and key.partition(".")[0] not in FREE:
                OmegaConf.update(OmegaConf.structured(Config), key, override.value(), force_add=True)
    elif re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", word) and is_section(word) and not is_file_name(word):
        assert is_key(word), f"there is no key {word}"


def is_key(key: str) -> bool:
    """Whether the schema has a key, or leaves it to a ``_target_`` whose arguments a preset shows."""
    kind: Any = Config
    names = key.split(".")
    for number, name in enumerate(names):
        if not dataclasses.is_dataclass(kind):
            return names[0] not in FREE or names[number] in argument_names() | {
                "_target_",
                *instantiate.OWN_KEYS.get(names[0], ()),
            }
        hints = key_types(kind)
        if name not in hints:
            return False
        kind = hints[name]
    return True


def is_section(key: str) -> bool:
    return key.partition(".")[0] in {field.name for field in dataclasses.fields(Config)}


def is_file_name(word: str) -> bool:
    return word.rpartition(".")[2] in ("md", "json", "yaml", "html", "py", "pt2", "onnx", "safetensors")


@functools.cache
def argument_names() -> set[str]:
    """Keys of the presets of all groups, at any depth, and the arguments of dtrain's classes that they name."""

    def inside(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            for key, value in node.items():
                yield str(key)
                yield from inside(value)
                if key == "_target_" and str(value).startswith("dtrain."):
                    yield from instantiate.argument_names(value)

    return {name for preset in conf_dir().glob("*/*.yaml") for name in inside(yaml.safe_load(preset.read_text()))}

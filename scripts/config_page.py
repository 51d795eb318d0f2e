"""Writes docs/config.md: every key with its type, default and meaning, and every preset, from the schema and ``conf/``.

    python scripts/config_page.py

A meaning is the comment behind a field of ``dtrain/config/schema.py``, or the one above it; a section's is the docstring of
its class; a preset's is the first sentence of its file. Defaults are those of a composed config, with the presets that
``conf/train.yaml`` chooses.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf

from dtrain import command_line
from dtrain.config import schema
from dtrain.config.compose import Composed, conf_dir
from dtrain.config.meanings import meanings, section_meaning

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"
_HEAD = """# Every key

Written by `python scripts/config_page.py` from [the schema](../dtrain/config/schema.py) and [the presets](../conf): edit those.

A run is described by keys, `KEY=VALUE` on the command line, and by presets, which set several keys, `GROUP=PRESET`.
`dtrain train --help` explains both, with the values that a command line gives them; `--cfg job` prints only the config, and
`--info defaults` prints the files that the values come from. Options of a single command (`checkpoint=best`, `weights=ema`) are
in its own `--help`. Your own presets are in a folder named by `--config-dir`: [tour](tour.md#your-own-model-and-task).

## Completion

`dtrain completion bash`, `zsh` or `fish` prints a script that completes commands, options, keys and dtrain's presets (not
those of `--config-dir`). Print it again after an update. Without the package bash-completion, `source` the file in `~/.bashrc`.

<!-- not run: writes to the folders of your shell -->
```bash
folder=~/.local/share/bash-completion/completions; mkdir -p $folder && dtrain completion bash > $folder/dtrain
mkdir -p ~/.zfunc && dtrain completion zsh > ~/.zfunc/_dtrain          # with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc
mkdir -p ~/.config/fish/completions && dtrain completion fish > ~/.config/fish/completions/dtrain.fish
```
"""
#: Groups whose keys are the arguments of the class or function that `_target_` names.
_FREE_FORM = ("model", "task", "optimizer", "schedule")


def page() -> str:
    """The page's text.

    Raises:
        ValueError: If a key or a preset has no comment; names all of them.
    """
    composed: list[Composed] = []
    command_line.run(composed.append, [])
    undocumented: list[str] = []
    parts = [
        _HEAD,
        "## Keys\n",
        *_sections(schema.Config, composed[0].node, "", undocumented),
        "## Presets\n",
        *_groups(undocumented),
    ]
    if undocumented:
        raise ValueError(
            f"{', '.join(undocumented)}: no comment. Write one behind the field in dtrain/config/schema.py, or at the "
            "start of the preset's file."
        )
    return "\n".join(parts)


def _sections(kind: type, cfg: DictConfig, prefix: str, undocumented: list[str]) -> Iterator[str]:
    """A section for the class's own keys, then one for each class inside it."""
    hints, comments = schema.key_types(kind), meanings(kind)
    inner = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    rows: list[tuple[str, ...]] = []
    for name in hints.keys() - inner.keys():
        if not comments[name]:
            undocumented.append(prefix + name)
    for name, hint in hints.items():
        if name not in inner:
            rows.append((f"`{prefix}{name}`", _type(hint), _default(cfg, name), _escaped(comments[name])))
    if prefix:
        yield f"### `{prefix[:-1]}`\n"
        yield section_meaning(kind) + "\n"
    yield _table(("key", "type", "default", "meaning"), rows)
    for name, hint in inner.items():
        assert isinstance(hint, type)
        yield from _sections(hint, cfg[name], f"{prefix}{name}.", undocumented)


def _groups(undocumented: list[str]) -> Iterator[str]:
    defaults = yaml.safe_load((conf_dir() / "train.yaml").read_text())["defaults"]
    chosen = {group: name for entry in defaults if isinstance(entry, dict) for group, name in entry.items()}
    groups = sorted(path for path in conf_dir().iterdir() if path.is_dir())
    for group in groups:
        usual = chosen.get(group.name)
        yield f"### `{group.name}=`\n"
        yield f"Without a choice: {f'`{usual}`' if usual else 'none'}.\n"
        free = group.name in _FREE_FORM
        rows: list[tuple[str, ...]] = []
        for file in sorted(group.glob("*.yaml")):
            text = file.read_text()
            meaning = _first_sentence(text)
            if not meaning:
                undocumented.append(f"conf/{group.name}/{file.name}")
            link = f"[`{file.stem}`](../conf/{group.name}/{file.name})"
            rows.append((link, _escaped(meaning), *([_keys(text)] if free else [])))
        yield _table(("preset", "meaning", *(["keys"] if free else [])), rows)


def _first_sentence(text: str) -> str:
    """The first sentence of a preset's header; it ends at a full stop, or at the command below."""
    lines = []
    for line in text.splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("# ") or line.startswith("#   "):
            break
        lines.append(line[2:])
    prose = re.sub(r"^\w+: (?=\S)", "", " ".join(lines)) if "@package" in text else " ".join(lines)
    return re.split(r"(?<=\.) (?=[A-Z])|:$", prose)[0].rstrip(".")


def _keys(text: str) -> str:
    return ", ".join(f"`{key}={_yaml(value)}`" for key, value in yaml.safe_load(text).items() if key != "_target_")


def _escaped(text: str) -> str:
    """Escapes characters of Markdown's emphasis and of HTML, except in backticks."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


def _type(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(_type(each) for each in get_args(hint))
    names = {NoneType: "null", Any: "any"}
    if hint in names:
        return names[hint]
    inside = [_type(each) for each in get_args(hint)]
    if get_origin(hint) is list:
        return f"list of {inside[0]}"
    if get_origin(hint) is dict:
        return f"{inside[0]} -> {inside[1]}"
    return str(hint.__name__)


def _default(cfg: DictConfig, name: str) -> str:
    content = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(content, dict)
    value = content[name]
    if isinstance(value, dict) and "_target_" in value:
        return "a preset's"
    return f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)
    return text.removesuffix("\n...\n").strip()


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)

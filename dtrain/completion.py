"""Completion scripts for ``dtrain`` in bash, zsh and fish.

A script contains all words, so that completing starts no Python: importing Hydra and composing a config, as Hydra's own
completion does for each key press, takes a second. Options are taken from the ``--help`` of each command, groups and presets
from ``conf/``, keys from the schema and the presets. Print the script again after an update. Presets of ``--config-dir`` are
not in it.

A key is completed part by part, at dots and ``=``, so that the list of candidates stays short.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from types import ModuleType
from typing import Any

import yaml
from omegaconf import OmegaConf

from dtrain.config import schema
from dtrain.config.compose import conf_dir

#: Subcommands of commands, and the commands whose arguments are keys of the config.
SUBCOMMANDS = {
    "pack": ("imagefolder", "arrays", "text", "index", "repair", "digits"),
    "launch": ("status", "tail", "stop", "resume"),
    "export": ("measure",),
    "doctor": ("memory", "lr", "numerics"),
}
WITH_KEYS = (
    *("train", "evaluate", "export", "launch", "replay", "trace", "show"),
    *("doctor", "doctor memory", "doctor lr", "doctor numerics"),
)
_OF_HYDRA = ("--help", "--multirun", "--config-dir", "--cfg", "--info")
_NPROC = ("train", "evaluate", "doctor", "replay")


def completion_script(
    shell: str, commands: Sequence[str] | Mapping[str, str], entry_point: Callable[[str], ModuleType]
) -> str:
    """The completion script of one of ``SHELLS``.

    Args:
        shell: Its name.
        commands: The commands of ``dtrain``.
        entry_point: Returns the module of a command, whose ``main`` prints its help.
    """
    table: dict[str, list[str]] = {"": [*commands, "--help", "--version"], "completion": list(SHELLS)}
    for command in commands:
        if command == "completion":
            continue
        subcommands = SUBCOMMANDS.get(command, ())
        table |= {f"{command} {name}": _listed(f"{command} {name}", entry_point) for name in subcommands}
        table[command] = [*subcommands, *_listed(command, entry_point)]
    # The subcommands first, because the pattern of a command matches them, too.
    cases = [_case(shell, called, table[called]) for called in sorted(table, key=lambda called: " " not in called)]
    return _SCRIPTS[shell].replace("@KEYS@", " ".join(_keys())).replace("@CASES@", "\n".join(cases))


def _listed(called: str, entry_point: Callable[[str], ModuleType]) -> list[str]:
    """The options and the words with ``=`` that the help of a command lists, such as ``--out`` and ``checkpoint=``."""
    command, *rest = called.split()
    if command == "launch" and rest:
        return ["--help"]  # directories follow
    if command == "train":
        return ["--nproc", *_OF_HYDRA]
    shown = io.StringIO()
    argv, sys.argv = sys.argv, [f"dtrain {command}", *rest, "--help"]
    try:
        with redirect_stdout(shown), suppress(SystemExit):
            entry_point(command).main()
    finally:
        sys.argv = argv
    # Skips options of other programs: torchrun's, and options in quotes and lists.
    text = "\n".join(line for line in shown.getvalue().splitlines() if "torchrun" not in line)
    options = {"--help", *re.findall(r"""(?<![\w"',-])--[a-z][\w-]*""", text)}
    own_keys = re.findall(r"^ {2}([a-z]+=)", text, re.MULTILINE)  # those with a dot are keys of the config
    return sorted({*options, *own_keys, *(["--nproc"] if called in _NPROC else [])})


def _keys() -> list[str]:
    """``experiment=digits`` and so on for the presets of all groups, and ``optimizer.lr=`` and so on for all keys."""
    config = OmegaConf.to_container(OmegaConf.structured(schema.Config), resolve=False)
    words = {f"{key}=" for key in _leaves(config)}
    for preset in sorted(conf_dir().glob("*/*.yaml")):
        group = preset.parent.name
        words.add(f"{group}={preset.stem}")
        content = yaml.safe_load(preset.read_text(encoding="utf-8")) or {}
        content.pop("defaults", None)
        prefix = "" if group == "experiment" else f"{group}."
        words |= {f"{prefix}{key}=" for key in _leaves(content)}
    return sorted(words)


def _leaves(node: Any, prefix: str = "") -> Iterator[str]:
    """The dotted keys of plain data whose values are not sections."""
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        elif re.fullmatch(r"[\w.]+", f"{prefix}{key}"):
            yield f"{prefix}{key}"


def _case(shell: str, called: str, words: Sequence[str]) -> str:
    """One branch of the script: the words after a command, or after a command and its subcommand."""
    keys = ["$keys"] if called in WITH_KEYS else []
    text = " ".join([*keys, *words])
    with_more = bool(called) and " " not in called  # whatever the word after the command is
    if shell == "fish":
        return f"        case '{called}'" + f" '{called} *'" * with_more + f"\n            set words {text}"
    return f"    '{called}'" + f"|'{called} '*" * with_more + f') words="{text}" ;;'


_BASH = """# bash completion for dtrain
_dtrain() {
  local line=${COMP_LINE:0:COMP_POINT} keys='@KEYS@' current='' words='' word rest part typed strip='' last=''
  read -ra typed <<<"$line"
  if [[ $line != *[[:space:]] ]]; then
    current=${typed[${#typed[@]} - 1]}
    unset "typed[${#typed[@]} - 1]"
  fi
  COMPREPLY=()
  case "${typed[1]}${typed[2]:+ ${typed[2]}}" in
@CASES@
  esac
  # bash replaces only what follows the last "=".
  if [[ $current == *=* && $COMP_WORDBREAKS == *=* ]]; then strip=${current%"${current##*=}"}; fi
  for word in $words; do
    if [[ $word != "$current"* || ($word == -* && $current != -*) || ($word == "$current" && $word == *=) ]]; then continue; fi
    rest=${word:${#current}}
    part=${rest%%[.=]*}
    if [[ $part == "$rest" ]]; then part+=' '; else part=${rest:0:${#part}+1}; fi
    if [[ $current$part != "$last" ]]; then
      last=$current$part
      COMPREPLY+=("${last#"$strip"}")
    fi
  done
}
complete -o nospace -o default -F _dtrain dtrain
"""

_ZSH = """#compdef dtrain
# zsh completion for dtrain
_dtrain_candidates() {  # CURRENT COMMAND SUBCOMMAND: sets the array `reply`
  local current=$1 keys='@KEYS@' words='' word rest part
  reply=()
  case "$2${3:+ $3}" in
@CASES@
  esac
  for word in ${=words}; do
    [[ $word == "$current"* && ($word != -* || $current == -*) && ($word != "$current" || $word != *=) ]] || continue
    rest=${word#"$current"}
    part=${rest%%[.=]*}
    [[ $part == "$rest" ]] || part=${rest[1,$#part + 1]}
    reply+=("$current$part")
  done
  reply=(${(u)reply})
}
_dtrain() {
  local -a reply unfinished
  _dtrain_candidates "$PREFIX" "${words[2,CURRENT-1][1]}" "${words[2,CURRENT-1][2]}"
  unfinished=(${(M)reply:#*[.=]})
  reply=(${reply:#*[.=]})
  if (( $#reply + $#unfinished )); then
    (( $#unfinished )) && compadd -S '' -- $unfinished
    (( $#reply )) && compadd -- $reply
  else
    compset -P '*='
    _files
  fi
}
if [[ $funcstack[1] == _dtrain ]]; then _dtrain "$@"; else compdef _dtrain dtrain; fi
"""

_FISH = """# fish completion for dtrain
function __dtrain_candidates
    set -l typed (commandline -opc)[2..3]
    set -l current (commandline -ct)
    set -l keys @KEYS@
    set -l words
    switch "$typed"
@CASES@
    end
    string match -q -- '-*' "$current"; or set words (string match -v -- '-*' $words)
    set -l start (string escape --style=regex -- "$current")
    set -l found (string replace -rf -- "^($start"'(?!(?<==)$)[^.=]*[.=]?).*' '$1' $words)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        set -l key (string match -r -- '^.*=' "$current")
        printf '%s\\n' "$key"(__fish_complete_path (string replace -r -- '^.*=' '' "$current"))
    end
end
complete -c dtrain -f -a '(__dtrain_candidates)'
"""

_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
SHELLS = tuple(_SCRIPTS)

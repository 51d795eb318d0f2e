"""Whether a command of the documentation names a program that exists and options and keys that it takes; nothing is run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from dtrain import __main__ as dtrain
from dtrain import command_line, evaluate
from dtrain.__main__ import _take_nproc, entry_point
from dtrain.completion import SHELLS
from dtrain.doctor import __main__ as doctor
from dtrain.launch.commands import COMMANDS
from dtrain.replay import plan
from dtrain.runs.recompose import take
from tests.doc_keys import GROUPS, is_key
from tests.doc_pages import ROOT

ENTRY_POINTS = sorted(name for name in dtrain.COMMANDS if name != "completion")


def compose_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry points read their command lines and compose their configs, and do nothing with them."""
    run = command_line.run
    monkeypatch.setattr(
        command_line, "run", lambda main, argv=None, rewrite=None: run(lambda composed: None, argv, rewrite)
    )
    monkeypatch.setattr(doctor, "check_machine", lambda options: 0)
    monkeypatch.setattr(evaluate, "pull", lambda url, config: Path("no-such-artefact"))  # the hub is not asked
    for name in ENTRY_POINTS:
        module = entry_point(name)
        for effect in ("join_srun", "settle_network"):
            if hasattr(module, effect):
                monkeypatch.setattr(module, effect, lambda: None)


def user_presets(folder: Path) -> None:
    """What the pages take from a ``--config-dir``: presets of the names that they use."""
    for name in ("presets", "my_conf", "shards/conf", "my_project/presets"):
        for group, preset, content in (
            ("data", "packed", "train: shards/train-*.tar\n"),
            *(("experiment", experiment, "# @package _global_\n") for experiment in ("mine", "scenes")),
            ("experiment", "sure", "# @package _global_\ntask: {_target_: my_task.Classify, smoothing: 0.1}\n"),
        ):
            path = folder / name / group / f"{preset}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    (folder / "examples").symlink_to(ROOT / "examples")


def accepted(words: list[str], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a command names a program that exists, with options and keys that it takes."""
    while re.match(r"[A-Z_]+=", words[0]):  # variables of the command's environment
        words = words[1:]
    script = next((ROOT / word for word in words if re.match(r"(scripts|slurm)/", word)), None)
    if script is not None:
        return script.exists() and (script.suffix != ".py" or _has_options(words, script))
    benchmark = next((word.replace(".", "/") for word in words if word.startswith("benchmarks.")), None)
    if benchmark is not None:
        package = ROOT / benchmark / "__main__.py"
        module = package if package.exists() else ROOT / f"{benchmark}.py"
        return module.exists() and _has_options(words, module, ROOT / "benchmarks" / "harness.py")
    if words[0] == "dtrain":
        if words[1] == "completion":
            return len(words) == 3 and words[2] in SHELLS
        several = words[1] in ("train", "evaluate", "doctor")
        words = [f"dtrain.{words[1]}", *(_take_nproc(words[1], words[2:])[1] if several else words[2:])]
    at = next(number for number, word in enumerate(words) if word.startswith("dtrain."))
    name, arguments = words[at].removeprefix("dtrain."), [word.replace("$PWD/", "") for word in words[at + 1 :]]
    if name not in ENTRY_POINTS:
        return False
    # The name of a command in a sentence.
    if not arguments or (name == "pack" and arguments in (["imagefolder"], ["text"], ["index"], ["repair"])):
        return True
    if name in ("replay", "trace"):  # which need the records of a run
        return _names_steps_or_samples(name, arguments)
    if any(word.startswith("run.fork=") for word in arguments):  # which needs the command line of a run
        arguments = ["experiment=digits", *arguments]
    # An artefact is needed to compose its config, and one of the hub a network.
    arguments = ["run.dir=runs/mine" if word.startswith("artefact=") else word for word in arguments]
    arguments = [word.removeprefix("hf://") if name == "predict" else word for word in arguments]
    if name == "launch" and arguments[:1] and arguments[0] in COMMANDS:
        return all("=" not in argument and not argument.startswith("-") for argument in arguments)
    code = call(entry_point(name), arguments, monkeypatch)
    # The others find nothing here that they could work on, and say so; 2 is a wrong usage.
    an_artefact = any(argument.startswith("artefact=") for argument in arguments)
    return code == 0 or (code == 1 and (an_artefact or name in ("pack", "predict", "report", "export")))


def _names_steps_or_samples(name: str, arguments: list[str]) -> bool:
    options, rest = take([word for word in arguments if not word.startswith("-")], **plan.OPTIONS)
    if name == "replay":
        plan.Request.parse(options)
    keys = [word.partition("=")[0] for word in rest if "=" in word]
    return "run.dir" in keys and all(key in GROUPS or is_key(key) for key in keys)


def _has_options(words: list[str], *sources: Path) -> bool:
    text = "".join(source.read_text() for source in sources)
    program = next(number for number, word in enumerate(words) if word.startswith(("scripts/", "benchmarks.")))
    options = {word.partition("=")[0] for word in words[program:] if word.startswith("--")}
    return all(f'"{option}"' in text for option in options)


def call(module: Any, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of an entry point in this process."""
    monkeypatch.setattr(sys, "argv", [f"dtrain.{module.__name__}", *arguments])
    try:
        return module.main() or 0
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)

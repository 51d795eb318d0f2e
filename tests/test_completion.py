"""Completion in real shells. A shell that is not installed is skipped."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from dtrain.__main__ import COMMANDS, entry_point
from dtrain.completion import SHELLS, SUBCOMMANDS, completion_script
from dtrain.launch.commands import COMMANDS as OF_LAUNCH
from dtrain.pack import __main__ as pack

#: By shell: prints the candidates for a command line, one on each line. bash takes only what follows the last "=".
_ASK = {
    "bash": "COMP_LINE={line}; COMP_POINT=${{#COMP_LINE}}; _dtrain; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
    "zsh": "_dtrain_candidates {words}; print -l -- $reply",
    "fish": "complete -C {line}",
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        (folder / shell).write_text(completion_script(shell, COMMANDS, entry_point))
    return {shell: folder / shell for shell in SHELLS}


def candidates(shell: str, script: Path, line: str) -> list[str]:
    """What the shell offers for a line that has been typed."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    _, *typed, current = line.split(" ")
    words = shlex.join([current, *typed[:2]])
    before = "compdef() { :; };" if shell == "zsh" else ""
    text = f"{before} source {script}; {_ASK[shell].format(line=shlex.quote(line), words=words)}"
    options = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    done = subprocess.run(
        [shell, *options, "-c", text], capture_output=True, text=True, timeout=250, check=True, cwd=script.parent
    )
    assert not done.stderr, done.stderr
    prefix = current[: current.rfind("=") + 1] if shell == "bash" else ""
    return sorted(prefix + found.strip() for found in done.stdout.splitlines() if found)


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dtrain ", sorted(COMMANDS)),
        ("dtrain ev", ["evaluate"]),
        ("dtrain train exper", ["experiment="]),
        ("dtrain train experiment=imagenet_v", ["experiment=imagenet_vit_s"]),
        ("dtrain train experiment=digits optimizer.l", ["optimizer.lr="]),
        ("dtrain train experiment=digits model.depth", ["model.depth="]),
        ("dtrain train --np", ["--nproc"]),
        ("dtrain evaluate checkpoint", ["checkpoint.", "checkpoint="]),
        ("dtrain export export.for", ["export.format="]),
        ("dtrain pack te", ["text"]),
        ("dtrain pack text --toke", ["--tokenizer"]),
        ("dtrain predict --tr", ["--trust"]),
        ("dtrain report --p", ["--png"]),
        ("dtrain launch sto", ["stop"]),
        ("dtrain doctor numerics --al", ["--all"]),
        ("dtrain doctor lr --p", ["--png"]),
        ("dtrain completion ", sorted(SHELLS)),
    ],
)
def test_words_are_completed(scripts: dict[str, Path], shell: str, line: str, expected: list[str]) -> None:
    assert candidates(shell, scripts[shell], line) == expected


@pytest.mark.parametrize("shell", SHELLS)
def test_a_complete_key_without_known_values_is_not_offered_again(scripts: dict[str, Path], shell: str) -> None:
    assert "run.dir=" not in candidates(shell, scripts[shell], "dtrain train run.dir=")  # but files are


@pytest.mark.parametrize("shell", SHELLS)
def test_a_key_is_completed_part_by_part(scripts: dict[str, Path], shell: str) -> None:
    offered = candidates(shell, scripts[shell], "dtrain train opti")
    assert offered == ["optimizer.", "optimizer="]


def test_fish_offers_files_where_no_word_fits(scripts: dict[str, Path]) -> None:
    assert candidates("fish", scripts["fish"], "dtrain train run.dir=fi") == ["run.dir=fish"]
    assert candidates("fish", scripts["fish"], "dtrain report fi") == ["fish"]


def test_all_subcommands_are_completed(capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        pack.main(["--help"])
    assert set(re.findall(r"^ {4}(\w+)(?: |$)", capsys.readouterr().out, re.MULTILINE)) == set(SUBCOMMANDS["pack"])
    assert set(OF_LAUNCH) == set(SUBCOMMANDS["launch"])

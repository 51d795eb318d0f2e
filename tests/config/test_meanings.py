"""``dtrain train --help``: each key with its value and its meaning, the most used ones first."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from dtrain.__main__ import main
from dtrain.config.compose import conf_dir
from dtrain.config.meanings import all_meanings, with_meanings


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help", *arguments])
    return capsys.readouterr().out


def test_every_key_of_the_help_has_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    shown = " ".join(re.sub(r"\n *#", "", help_of(capsys)).split())
    found = all_meanings()
    assert len(found) > 100
    missing = [key for key, meaning in found.items() if f"# {' '.join(meaning.split())}" not in shown]
    assert missing == []


def test_the_most_used_keys_come_first_with_the_values_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    shown = help_of(capsys, "experiment=digits", "train.max_epochs=7", "precision=bf16")
    named = re.findall(r"^        ([a-z_]+\.[a-z_.]+)$", (conf_dir() / "train.yaml").read_text(), re.MULTILINE)
    assert len(named) > 10
    head = shown.partition("\nAll keys")[0]
    for key in named:
        assert re.search(rf"^  {re.escape(key)}=\S+.*$", head, re.MULTILINE), key
    assert re.search(r"^  train.max_epochs=7 +# length of the run in epochs", head, re.MULTILINE)


def test_help_shows_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    shown = help_of(capsys, "experiment=digits", "+vars.api_key=hunter2")
    assert "api_key" in shown
    assert "hunter2" not in shown


def test_the_config_alone_has_no_comments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--cfg", "job", "experiment=digits"]) == 0
    assert "#" not in capsys.readouterr().out


def test_keys_of_the_users_own_classes_get_no_meaning_of_ours() -> None:
    lines = ["model:", "  _target_: mine.Model", "  seed: 3", "run:", "  seed: 0"]
    shown = list(with_meanings(lines))
    assert shown[1:2] + [line for line in shown if line.startswith("  seed: 3")] == lines[1:3]
    assert any(line.startswith("  seed: 0  ") for line in shown)


def test_without_the_source_of_the_schema_the_help_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_source(kind: type) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr("inspect.getsource", no_source)
    assert list(with_meanings(["run:", "  seed: 0"])) == ["run:", "  seed: 0"]


@pytest.mark.slow
def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from dtrain.__main__ import main; code = main(sys.argv[1:]); "
        "sys.exit('loaded torch' if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code, "train", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

"""Small data sets with known faults, configs of them, and the command in this process."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from dtrain.show.__main__ import main
from tests.shards import jpeg, write_tar

#: Keys of the config that make the shards of ``write_classes`` the data of a run.
FIELDS = "data.fields={jpg: {name: image, size: 8}, cls: {name: label}}"
FLIP = "data.augment={_target_: dtrain.data.augment.RandomCropFlip}"


def write_classes(folder: Path) -> list[str]:
    """36 pictures of three classes for training, 10 of two for evaluation; returns keys of a config.

    In training, ``train-0.tar/000`` and ``train-1.tar/dog`` are the same picture with different labels, ``train-1.tar/bad`` is
    cut off, ``train-1.tar/text`` is no picture, ``train-1.tar/none`` has no label. ``eval-0.tar/000`` is ``train-0.tar/001``.
    """
    for shard in range(3):
        samples = [(f"{12 * shard + n:03d}", {"jpg": jpeg(12 * shard + n), "cls": b"%d" % (n % 3)}) for n in range(11)]
        if shard == 1:
            samples += [
                ("dog", {"jpg": jpeg(0), "cls": b"2"}),
                ("bad", {"jpg": jpeg(500)[:-40], "cls": b"1"}),
                ("text", {"jpg": b"<b>no</b> picture", "cls": b"1"}),
                ("none", {"jpg": jpeg(501), "txt": b"more"}),
            ]
        write_tar(folder / f"train-{shard}.tar", samples)
    write_tar(
        folder / "eval-0.tar",
        [(f"{n:03d}", {"jpg": jpeg(1 if n == 0 else 700 + n), "cls": b"%d" % (n % 2)}) for n in range(10)],
    )
    (folder / "classes.json").write_text(json.dumps(["<i>ant", "bee", "cat"]))
    return [f"data.train={folder}/train-*.tar", f"data.eval={folder}/eval-*.tar", FIELDS]


def show(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The JSON file and the page of ``dtrain show data=shards ...``."""
    page, facts = tmp_path / "page.html", tmp_path / "facts.json"
    assert main([*arguments, "--out", str(page), "--json", str(facts)]) == 0
    return json.loads(facts.read_text()), page.read_text()


def message_of(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The only message of a command that is refused."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code in (1, 2)
    shown = capfd.readouterr().err
    assert shown.count("error: ") == 1
    assert "Traceback" not in shown
    return shown


def cards(page: str) -> dict[str, str]:
    """The HTML of each sample by its title, as it is in the file."""
    found = re.findall(r'<section class="card[^"]*">\s*<h3>(.*?)</h3>(.*?)</section>', page, re.DOTALL)
    return dict(found)


def pictures(card: str) -> dict[str, bytes]:
    """The files of a card's pictures by the first word of their caption."""
    found = re.findall(r'<img alt="(\w*)[^"]*"[^>]*src="data:image/\w+;base64,([^"]+)"', card)
    return {name: b64decode(content) for name, content in found}

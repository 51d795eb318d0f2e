"""``dtrain doctor memory``."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from dtrain.doctor import memory
from dtrain.doctor.memory import parse_size
from dtrain.errors import ConfigError
from tests.ranks import run_ranks
from tests.refusals import refused


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 2**30), ("80 GiB", 80 * 2**30), ("512MB", 2**29), ("1.5TB", 1.5 * 2**40), ("", None)],
)
def test_sizes_are_those_that_makers_of_gpus_write(text: str, size: int | None) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["80", "GB", "0GB", "-1GB", "80 gigabytes"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with refused(ConfigError, "device_memory", text, "80GB"):
        parse_size(text)


SMALL = ("experiment=digits", "tracker=none", "model.width=8", "ranks=4", "ranks_per_node=2")


def command(folder: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, output and JSON."""

    def one(rank: int) -> tuple[int, str]:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            return memory.main([*SMALL, *arguments, f"--json={folder / 'memory.json'}"]), text.getvalue()

    [(code, text)] = run_ranks(1, one, init=False)
    return code, text, json.loads((folder / "memory.json").read_text())


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
def test_the_command_shows_a_line_for_each_strategy_and_what_to_change(tmp_path: Path) -> None:
    code, text, found = command(tmp_path, "device_memory=0.1MB", "train.global_batch_size=64")
    assert code == 1
    assert list(found["strategies"]) == ["ddp", "hsdp 2x2", "fsdp"]
    assert not any(need["fits"] for need in found["strategies"].values())
    for name, need in found["strategies"].items():
        [line] = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        assert line.endswith("does not fit")
        assert f" {need['total'] / 2**20:.2f} " in line
    assert "4 ranks x 1 micro-batch x 16 rows" in text
    [advice] = found["advice"]
    assert advice.startswith("Nothing fits: ")
    assert f"-> {advice}" in text


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
def test_smaller_micro_batches_come_first_and_what_fits_is_no_failure(tmp_path: Path) -> None:
    code, _, found = command(tmp_path, "device_memory=100GB", "train.global_batch_size=64")
    assert (code, found["advice"]) == (0, [])
    need = found["strategies"]["ddp"]
    almost = (need["total"] - need["activations"] // 2) / 0.9 / 2**20
    code, _, found = command(tmp_path, f"device_memory={almost:.4f}MB", "train.global_batch_size=64")
    assert code == 1
    assert found["advice"][0].startswith("train.micro_batch_size=")


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.5"])
def test_what_is_no_number_of_ranks_is_refused(text: str) -> None:
    with refused(ConfigError, "ranks", text, "at least 1"):
        memory._count("ranks", text)

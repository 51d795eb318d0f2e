"""``dtrain.predict --prompt``: texts from an artefact alone, equal to those of the model, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from dtrain.data.fields.tokenizers import Tokenizer
from dtrain.export import __main__ as export
from dtrain.export import artefact
from dtrain.export.program import Program, RowSpec
from dtrain.models import GPT
from dtrain.pack import __main__ as pack
from dtrain.predict import main
from tests.export.helpers import described
from tests.refusals import assert_refused
from tests.whole_runs import train_on

NODE = {"_target_": "dtrain.models.GPT", "vocabulary": 257, "width": 16, "depth": 2, "heads": 2, "context": 16}
PROMPT = "def "


def random_gpt() -> GPT:
    torch.manual_seed(0)
    model = GPT(**{name: value for name, value in NODE.items() if name != "_target_"}).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        model.embedding.weight.mul_(20)
    return model.requires_grad_(False)


def write(out: Path, stored_as: str = "safetensors", **attributes: Any) -> Path:
    """An artefact of ``random_gpt`` with the tokenizer of bytes."""
    tokenizer = Tokenizer("bytes")
    given: dict[str, Any] = {"model": NODE, "rows": RowSpec("int64", (12,)), "tokenizer": tokenizer.identity}
    with artefact.replacing(out) as folder:
        example = torch.zeros(2, 12, dtype=torch.int64)
        program = Program(random_gpt(), None, torch.float32).eval()
        artefact.write(folder, program, described(stored_as, **(given | attributes)), example)
        tokenizer.save(folder)
    artefact.mark_trusted(out)
    return out


def expected(count: int, **options: Any) -> str:
    tokens = random_gpt().generate(torch.tensor([list(PROMPT.encode())]), count, end=256, **options)[0].tolist()
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out.removesuffix("\n")


def test_a_text_is_that_of_the_model_with_the_same_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write(tmp_path / "artefact"))
    common = (folder, "--prompt", PROMPT, "--tokens", "20")
    # Beyond the context of 16 tokens, too.
    text = printed(capsys, *common, "--seed", "3", "--temperature", "0.7", "--top-k", "5")
    assert text == expected(20, seed=3, temperature=0.7, top_k=5)
    assert text.startswith(PROMPT)
    assert printed(capsys, *common, "--top-k", "0") == expected(20, top_k=None)
    greedy = json.loads(printed(capsys, *common, "--temperature", "0", "--json"))
    assert greedy == {"prompt": PROMPT, "text": expected(20, temperature=0.0)}
    assert main([folder, "--prompt", "", "--tokens", "3"]) == 0  # begins with an end-of-text token


@pytest.mark.slow  # traces
def test_a_program_for_rows_of_one_length_gives_the_same_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write(tmp_path / "artefact", "pt2"))
    assert printed(capsys, folder, "--prompt", PROMPT, "--tokens", "8", "--seed", "3") == expected(8, seed=3)
    assert main([folder, "--prompt", PROMPT, "--tokens", "12"]) == 0  # beyond the row of 12 tokens
    assert main([folder, "--prompt", "x" * 13]) == 1
    assert_refused(capsys.readouterr().err, "--prompt", "13 tokens", "Shorten", "12")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--prompt", "x" * 17], ["--prompt", "17 tokens", "context is 16", "Shorten"]),
        (["--prompt", "x", "--temperature=-1"], ["temperature", "-1.0", "0.8"]),
        (["--prompt", "x", "--top-k=-3"], ["top_k", "-3"]),
        (["photo.jpg"], ["does not take images", "--prompt TEXT"]),
    ],
)
def test_a_wrong_request_is_refused(
    arguments: list[str], names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(write(tmp_path / "artefact")), *arguments]) == 1
    assert_refused(capsys.readouterr().err, *names)


def test_an_artefact_without_its_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for attributes, names in (
        ({"tokenizer": None}, ["no tokenizer", "vocabulary.json", "data.train="]),
        ({"tokenizer": "tiktoken:other"}, ["bytes", "tiktoken:other", "Export the run again"]),
    ):
        folder = write(tmp_path / "artefact", **attributes)
        assert main([str(folder), "--prompt", "x"]) == 1
        assert_refused(capsys.readouterr().err, *names)
    # A tokenizer whose package is not installed is refused with the command that installs it.
    folder = write(tmp_path / "artefact", tokenizer="tiktoken:gpt2")
    vocabulary = {"tokenizer": "tiktoken:gpt2", "vocab_size": 50257, "end_of_text": 50256}
    (folder / "vocabulary.json").write_text(json.dumps(vocabulary))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tiktoken", None)
        assert main([str(folder), "--prompt", "x"]) == 1
    assert_refused(capsys.readouterr().err, "tiktoken", "pip install", "dtrain[text]")


def test_either_images_or_a_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["photo.jpg", "--prompt", "x"]):
        with pytest.raises(SystemExit) as ended:
            main([str(tmp_path), *arguments])
        assert ended.value.code == 2
        assert "--prompt TEXT" in capsys.readouterr().err


@pytest.mark.slow
def test_a_trained_model_is_exported_and_continues_texts_without_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    shards, run_dir = tmp_path / "shards", tmp_path / "run"

    packing = ("--tokenizer", "characters", "--end-of-text", "END", "--length", "16", "--val", "0.1")
    pack.main(["text", str(tmp_path / "text.txt"), str(shards), *packing])
    small = ("model.width=16", "model.depth=2", "model.heads=2", "model.context=16", "model.vocabulary=29")
    data = ("--config-dir", str(shards / "conf"), "data=packed", "data.num_workers=0", "train.max_steps=5")
    options = ("task.documents=mask", "task.sample=the", "tracker.media=true")
    train_on(1, run_dir, *data, *small, *options, experiment="bytes_gpt")
    assert list((run_dir / "media").glob("**/*.txt"))
    out = tmp_path / "artefact"
    arguments = [f"run.dir={run_dir}", f"export.out={out}", "export.dtype=fp32", "export.measure=false", "samples=8"]
    with mock.patch.object(sys, "argv", ["export", *arguments]):
        export.main()
    capsys.readouterr()
    for name in ("run", "shards"):
        (tmp_path / name).rename(tmp_path / f"moved-{name}")
    weights = load_file(tmp_path / "moved-run" / "checkpoints" / "step-000000005" / "model.safetensors")
    model = GPT(29, 16, 2, 2, 16).eval()
    model.load_state_dict(weights)
    tokenizer = Tokenizer.load(tmp_path / "moved-shards")
    prompt = torch.tensor([tokenizer.encode("the ").astype("int64").tolist()])
    text = tokenizer.decode(model.generate(prompt, 10, seed=5, end=tokenizer.end_of_text)[0].tolist())
    assert printed(capsys, str(out), "--prompt", "the ", "--tokens", "10", "--seed", "5") == text
    report = json.loads((out / "report.json").read_text())
    assert report["comparison"]["max_abs_error"] < 1e-4
    assert "bits_per_byte" in report["comparison"]["metrics"]

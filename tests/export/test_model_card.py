"""The model card of a push: true numbers, valid metadata of the hub, and nothing of the machine that wrote it."""

from __future__ import annotations

import getpass
import json
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from dtrain import command_line, train
from dtrain.export import __main__ as export
from dtrain.export import artefact, pipeline
from dtrain.export.compare import Comparison
from dtrain.export.model_card import ModelCard
from dtrain.export.reference import ReferenceRows
from dtrain.runs.hub import HubModel
from dtrain.runs.run_spec import without_folders
from tests.hub_server import HubServer, point_at, serving_hub
from tests.whole_runs import train_on, weights

hub = pytest.importorskip("huggingface_hub", reason="hf needs huggingface_hub: pip install 'dtrain[hf]'")
TOKEN, PASSWORD = "hf_token_of_the_test", "a-long-password"


@pytest.fixture(scope="module")
def pushed(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, HubServer]]:
    """An artefact and the hub that it was pushed to by the command, twice."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch, serving_hub(home) as server:
        point_at(server, home, patch)
        patch.setenv("HF_TOKEN", server.add_user(TOKEN))
        patch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        patch.setenv("STORAGE_PASSWORD", PASSWORD)
        out = home / "artefact"
        arguments = [
            *(
                f"run.dir={finished_run}",
                "checkpoint=latest",
                "samples=64",
                "export.measure=false",
                f"export.out={out}",
            ),
            *("export.push=hf://org/digits", "export.license=apache-2.0"),
            "export.intended_use='Reads *single* digits.'",
            f"data.augment={{_target_: some.Augmentation, file: {home}/noise.bin, password: {PASSWORD}}}",
        ]

        def in_this_process(folder: Path, rows: ReferenceRows, device: torch.device) -> Comparison:
            return Comparison.measure(artefact.load(folder, device, trust=True).outputs(rows.inputs), rows, device)

        patch.setattr(
            pipeline, "compare", in_this_process
        )  # another process would take most of the time of these tests
        for _ in range(2):
            with mock.patch.object(sys, "argv", ["export", *arguments]):
                export.main()
        yield out, server


@pytest.fixture(scope="module")
def card(pushed: tuple[Path, HubServer]) -> Any:
    return hub.ModelCard(pushed[1].models["org/digits"].files()["README.md"].decode())


@pytest.mark.slow
def test_the_same_export_makes_the_same_files_and_no_second_commit(pushed: tuple[Path, HubServer]) -> None:
    out, server = pushed
    model = server.models["org/digits"]
    created, commit = model.branches["main"]
    assert {*model.trees[commit]} - {*model.trees[created]} == {path.name for path in out.iterdir()}
    assert "fp32" not in model.messages[commit]
    assert "step 15" in model.messages[commit]


@pytest.mark.slow
def test_the_metadata_are_those_of_the_hub(card: Any) -> None:
    data = card.data
    assert (data.library_name, data.pipeline_tag, data.license) == ("dtrain", "image-classification", "apache-2.0")
    results = {result.metric_name: result.metric_value for result in data.eval_results}
    assert {*results} == {"loss", "accuracy"}
    assert {result.dataset_name for result in data.eval_results} == {"digits"}


def test_the_card_has_the_numbers_of_the_run_and_of_the_report(pushed: tuple[Path, HubServer], card: Any) -> None:
    out, _ = pushed
    description, report = (json.loads((out / name).read_text()) for name in ("model.json", "report.json"))
    trained = description["source"]["metrics"]["eval/accuracy"]
    both = report["comparison"]["metrics"]["accuracy"]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in card.text.splitlines() if line.startswith("|")
    ]
    assert ["`accuracy`", f"{trained:.4g}"] in rows
    assert ["`accuracy`", f"{both['fp32']:.4g}", f"{both['exported']:.4g}", f"{both['difference']:+.2g}"] in rows
    facts = {row[0]: row[1] for row in rows if len(row) == 2}
    assert facts["size"].startswith("1,437 samples, 8 shards")
    assert facts["hardware"].startswith("1 x CPU")
    assert facts["steps"] == "15, 15 of them applied"
    assert facts["weights of"] == "the moving average"
    assert facts["BatchNorm"].startswith("2 merged")
    assert "dtrain predict hf://org/digits photo.jpg" in card.text
    assert 'from_hub("org/digits")' in card.text
    assert "dtrain train experiment=digits" in card.text
    assert "train.max_steps=15" in card.text


def test_what_the_user_says_about_the_model_is_in_the_card_and_what_nobody_says_is_named(card: Any) -> None:
    sections = {text.partition("\n")[0]: text.partition("\n")[2].strip() for text in card.text.split("\n## ")[1:]}
    assert sections["Intended use"] == "Reads *single* digits."
    assert sections["Limitations"] == "Not stated."
    assert sections["Licence"] == "`apache-2.0`"
    assert card.data.get("base_model") is None


def command_of(card: Any) -> list[str]:
    """The arguments of the ``dtrain train`` of a card."""
    [line] = [line for line in card.text.splitlines() if line.startswith("dtrain train ")]
    return shlex.split(line)[2:]


@pytest.mark.slow
def test_the_command_of_the_card_trains_the_same_weights(card: Any, finished_run: Path, tmp_path: Path) -> None:
    command_line.run(train.train, [*command_of(card), f"run.dir={tmp_path}", "tracker=none"])
    theirs, ours = weights(finished_run, 15), weights(tmp_path, 15)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


@pytest.mark.slow
def test_a_model_that_began_with_one_of_the_hub_names_it_and_its_commit(
    digits: Path, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    presets = tmp_path / "home of ann" / "presets"
    (presets / "experiment").mkdir(parents=True)
    (presets / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [digits]\nmodel: {_target_: tests.toys.NormNet, width: 8}\n"
    )
    with serving_hub(tmp_path) as server:
        point_at(server, tmp_path, monkeypatch)
        monkeypatch.setenv("HF_TOKEN", server.add_user(TOKEN))
        save_file(weights(finished_run, 15), tmp_path / "model.safetensors")
        server.add_model("org/base", {"model.safetensors": (tmp_path / "model.safetensors").read_bytes()})
        own = ("--config-dir", str(presets), "run.weights_from=hf://org/base", "train.max_steps=1")
        train_on(1, tmp_path / "run", *own, experiment="mine")
        commit = server.models["org/base"].branches["main"][-1]
        server.models["org/base"].add_commit("main", {"model.safetensors": b"other"}, "second")
        arguments = [f"run.dir={tmp_path / 'run'}", "samples=0", "export.measure=false", "export.push=hf://org/tuned"]
        with mock.patch.object(sys, "argv", ["export", *arguments]):
            export.main()
        card = hub.ModelCard(server.models["org/tuned"].files()["README.md"].decode())
    assert (card.data.base_model, card.data.base_model_relation) == (["org/base"], "finetune")
    assert "Not stated. Ask the authors" in card.text
    assert str(tmp_path) not in card.text
    command = command_of(card)
    assert command[:2] == ["--config-dir", "presets"]
    assert command.count(f"run.weights_from=hf://org/base@{commit}") == 1
    assert not {"run.weights_from=hf://org/base"} & {*command}


def test_the_weights_say_what_they_are(pushed: tuple[Path, HubServer]) -> None:
    content = (pushed[0] / "model.safetensors").read_bytes()
    metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    assert metadata["format"] == "pt"
    assert (metadata["model"], metadata["dtype"], metadata["step"]) == ("tests.toys.NormNet", "bf16", "15")
    assert metadata["batchnorm"] == "folded"
    assert list(metadata) == sorted(metadata)  # the library writes them in any order


def test_nothing_that_is_published_names_a_secret_a_folder_or_the_machine(
    pushed: tuple[Path, HubServer], finished_run: Path
) -> None:
    private = [
        TOKEN,
        PASSWORD,
        str(finished_run),
        str(pushed[0].parent),
        tempfile.gettempdir() + "/",
        socket.gethostname(),
    ]
    private += [str(Path.home()), str(Path.cwd()), f"pytest-of-{getpass.getuser()}"]
    files = pushed[1].models["org/digits"].files()
    assert b"noise.bin" in files["config.yaml"]
    for name, content in files.items():
        for text in private:
            assert text.encode() not in content, f"{text} is in {name}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/ann/my data/a.tar", "a.tar"),
        ("/data/train-{000..009}.tar", "train-{000..009}.tar"),
        ("/home/ann/my, data/train-{000..009}.tar", "train-{000..009}.tar"),
        ("{/data/a,/home/b}.tar", "{a,b}.tar"),
        ("~/a.tar", "a.tar"),
        ("~ann/a.tar", "a.tar"),
        ("../../x/a.tar", "a.tar"),
        ("file:///home/ann/a.tar", "a.tar"),
        ("tokenizers:/home/ann/t.json", "tokenizers:t.json"),
        ("--file=/home/ann/t.json -v", "--file=t.json -v"),
        ("shards/a.tar", "shards/a.tar"),
        ("hf://datasets/org/name/a.tar", "hf://datasets/org/name/a.tar"),
        ("https://host/x/a.tar", "https://host/x/a.tar"),
        ("s3://bucket/x/a.tar", "s3://bucket/x/a.tar"),
        ("1/2", "1/2"),
        ("dtrain.models.SmallCNN", "dtrain.models.SmallCNN"),
    ],
)
def test_paths_of_this_machine_become_names(text: str, expected: str) -> None:
    assert without_folders(text) == expected
    assert without_folders({"a": [text]}) == {"a": [expected]}


def test_metadata_of_others_stay_and_own_ones_are_replaced(pushed: tuple[Path, HubServer]) -> None:
    description, _ = artefact.read_description(pushed[0])
    report = json.loads((pushed[0] / "report.json").read_text())
    run = mock.Mock(command=lambda: [])
    start = {"weights_from": None, "warm_start": {"path": None}}
    config = {"run": start, "data": {"train": ["hf://datasets/org/shards@v1/a-*.tar"], "eval": "x.tar"}}
    theirs = {"license": "mit", "language": ["de"], "tags": ["old"], "model-index": []}
    made = ModelCard(HubModel("org/digits"), run, config, description, report, {}, 1, None, None, None, theirs)
    made = made.metadata().to_dict()
    assert (made["license"], made["language"], made["datasets"]) == ("mit", ["de"], ["org/shards"])
    assert "old" not in made["tags"]
    assert made["model-index"][0]["results"][0]["dataset"]["name"] == "org/shards"

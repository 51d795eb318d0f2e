"""``dtrain show``: the samples on the page are those that a training gets, and the facts are those of the data."""

from __future__ import annotations

import io
import json
from collections import Counter
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from dtrain.data import ShardLoader
from dtrain.data.augment import RandomCropFlip
from dtrain.data.mixing import Mix
from dtrain.pack.__main__ import main as pack
from dtrain.show import counts
from tests.refusals import assert_refused
from tests.shards import npy, stored_members, valid_keys, write_tar
from tests.show.data_for_tests import FLIP, cards, message_of, pictures, show, write_classes

FIELDS = {"jpg": {"name": "image", "size": 8}, "cls": {"name": "label"}}
MIXED = "data.mix={_target_: dtrain.data.mixing.Mix, classes: 3, cutmix_alpha: 1.0}"


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    return ["data=shards", *write_classes(tmp_path / "data")]


def test_stored_and_seen_pictures_are_those_of_a_training(tmp_path: Path, data: list[str]) -> None:
    facts, page = show(tmp_path, *data, FLIP, MIXED, "--epoch", "3", "--n", "10", "run.seed=7")
    trained = ShardLoader(
        f"{tmp_path}/data/train-*.tar",
        FIELDS,
        global_batch_size=64,
        num_workers=2,
        seed=7,
        augment=RandomCropFlip(),
        mix=Mix(3, cutmix_alpha=1.0),
    )
    batch = next(trained.epoch(3))
    trained.close()
    assert [key for key in batch.sample_keys if key][:7] == [key for key in facts["shown"] if key in batch.sample_keys][
        :7
    ]
    members = stored_members(sorted(map(str, (tmp_path / "data").glob("train-*.tar"))))
    found = cards(page)
    compared = 0
    for key in facts["shown"]:
        if key not in batch.sample_keys:  # a bad sample
            assert key.rpartition("/")[2] in ("bad", "text", "none")
            continue
        files = pictures(found[key])
        seen = np.asarray(Image.open(io.BytesIO(files["seen"])))
        assert np.array_equal(seen, batch["image"][batch.sample_keys.index(key)].numpy())
        assert np.array_equal(
            np.asarray(Image.open(io.BytesIO(files["stored"]))), simplejpeg.decode_jpeg(members[key]["jpg"][0])
        )
        compared += 1
    assert compared >= 7


def test_labels_sizes_and_extensions_are_those_of_the_tars(tmp_path: Path, data: list[str]) -> None:
    facts, page = show(tmp_path, *data, "--n", "8", "--nproc", "2", "train.global_batch_size=8")
    members = stored_members(sorted(map(str, (tmp_path / "data").glob("train-*.tar"))))
    labels = Counter(int(one["cls"][0]) for one in members.values() if "cls" in one)
    names = ["<i>ant", "bee", "cat"]
    assert (facts["split"], facts["samples"], facts["ranks"]) == ("train", len(members), 2)
    assert facts["labels"]["label"]["counts"] == {names[label]: count for label, count in labels.items()}
    assert facts["extensions"] == {
        "shards": 3,
        "of": 3,
        "counts": {"jpg": len(members), "cls": len(members) - 1, "txt": 1},
    }
    sizes = sorted(len(one["jpg"][0]) for one in members.values())
    assert facts["sizes"]["members"]["jpg"]["smallest"] == sizes[0]
    assert facts["sizes"]["members"]["jpg"]["largest"] == sizes[-1]
    assert facts["sizes"]["members"]["jpg"]["all"] == sum(sizes)
    assert facts["sizes"]["members"]["cls"]["samples_without"] == 1
    assert facts["sizes"]["smallest"][0]["key"] == "train-1.tar/text"
    rank0 = ShardLoader(
        f"{tmp_path}/data/train-*.tar", FIELDS, global_batch_size=8, num_workers=0, rank=0, world_size=2
    )
    keys = [key for batch in rank0.epoch(0) for key in (*valid_keys([batch]), *(one["key"] for one in batch.bad))]
    own = Counter(names[int(members[key]["cls"][0])] for key in keys if "cls" in members[key])
    assert facts["labels"]["label"]["rank0"] == own
    assert "&lt;i&gt;ant" in page
    assert "<i>ant" not in page


def test_bad_samples_duplicates_and_lacking_classes_are_found(tmp_path: Path, data: list[str]) -> None:
    facts, page = show(tmp_path, *data, "--n", "4")
    reasons = {each["key"]: each["reason"] for each in facts["bad"]["samples"]}
    assert reasons.keys() == {f"train-1.tar/{key}" for key in ("bad", "text", "none")}
    assert "no .cls" in reasons["train-1.tar/none"]
    assert "<b>no" in reasons["train-1.tar/text"]
    assert "<b>no" not in page
    assert facts["duplicates"]["within"]["train"] == [["train-0.tar/000 (label <i>ant)", "train-1.tar/dog (label cat)"]]
    assert facts["duplicates"]["between"] == [
        ["train: train-0.tar/001 (label bee)", "eval: eval-0.tar/000 (label <i>ant)"]
    ]
    assert facts["duplicates"]["conflicts"] == 2
    assert facts["lacking"] == {"eval": {"label": ["cat"]}}


def test_dtypes_costs_and_ranges_are_those_of_the_transfer(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    write_tar(tmp_path / "x.tar", [(f"{n}", {"npy": npy(row), "cls": b"%d" % n}) for n, row in enumerate(rows)])
    fields = "data.fields={npy: {name: x, role: feature}, cls: {name: label}}"
    facts, _ = show(tmp_path, "data=shards", f"data.train={tmp_path}/x.tar", fields, "precision=bf16")
    x = facts["fields"]["x"]
    assert (x["dtype"], x["transfer_dtype"], x["bytes_per_sample"]) == ("float32", "bfloat16", 10)
    assert x["range"] == pytest.approx([rows.min(), rows.max()], rel=0.01)
    assert (x["mean"], x["std"]) == pytest.approx((rows.mean(), rows.std()), rel=0.01, abs=0.01)
    assert facts["fields"]["label"]["transfer_dtype"] == "int64"
    assert facts["fields"]["label"]["bytes_per_sample"] == 8


def test_without_all_a_limited_number_of_samples_is_examined_and_said(
    tmp_path: Path, data: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts, "MOST_EXAMINED", 9)
    monkeypatch.setattr(counts, "MOST_LABELS", 12)
    few, page = show(tmp_path, *data, "--n", "4")
    assert few["bad"]["examined"] == 9
    assert few["labels"]["label"]["counted"] <= 12
    assert f"9 of {few['samples']} samples of train" in page
    whole, _ = show(tmp_path, *data, "--n", "4", "--all")
    assert whole["bad"]["examined"] == whole["samples"]
    assert whole["labels"]["label"]["counted"] == whole["samples"] - 1


def test_token_rows_are_text_with_the_borders_of_documents(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(6):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"<u>Story</u> {number}.")
    shards = tmp_path / "shards"
    packed = ["text", str(tmp_path / "texts"), str(shards), "--length", "40", "--fit", "best", "--shards", "1"]
    assert pack(packed) == 0
    _, page = show(tmp_path, "--config-dir", str(shards / "conf"), "data=packed")
    assert "<u>" not in page
    shown = unescape(page)
    for number in range(6):
        assert f"<u>Story</u> {number}." in shown
    assert page.count("[end of document]") >= 6
    assert "tokens of padding" in page


def test_a_mixture_shows_samples_of_all_its_sources(tmp_path: Path, data: list[str]) -> None:
    for name in "ab":
        write_classes(tmp_path / name)
    sources = ", ".join(f"{name}: {{shards: '{tmp_path}/{name}/train-*.tar', weight: 1}}" for name in "ab")
    sets = ", ".join(f"{name}: '{tmp_path}/{name}/eval-*.tar'" for name in "ab")
    mixture = ["data=shards", "data.train=null", f"data.mixture={{{sources}}}", f"data.eval={{{sets}}}", data[-1]]
    facts, page = show(tmp_path, *mixture, "--n", "12")
    loader_keys = {key.split("/")[0] for key in facts["shown"]}
    assert loader_keys == {"a", "b"}
    assert len(facts["duplicates"]["between"]) >= 10
    assert sum(facts["labels"]["label"]["counts"].values()) == facts["samples"] - 2
    for key in facts["shown"]:
        card = cards(page)[key]
        assert "class" in card
    one, _ = show(tmp_path, *mixture, "--split", "b")
    assert (one["split"], one["samples"]) == ("b", 10)
    assert all(key.startswith("b/eval-0.tar/") for key in one["shown"])


def examples(sample: int, rng: np.random.Generator) -> dict[str, object]:
    """Generated samples: a drawn vector, and a label."""
    return {"x": rng.normal(size=12).astype(np.float32), "label": sample % 2}


def test_generated_samples_are_those_of_the_epoch(tmp_path: Path) -> None:
    dataset = (
        "{_target_: dtrain.data.Generated, length: 10, function: "
        "{_target_: hydra.utils.get_method, path: tests.show.test_show.examples}}"
    )
    fields = "data.fields={x: {name: x, role: feature}, label: {name: label, role: label}}"
    seen = {}
    for epoch in (0, 1):
        facts, page = show(tmp_path, f"data.train={dataset}", fields, "--epoch", str(epoch))
        seen[epoch] = cards(page)["Generated/3"]
        assert facts["labels"]["label"]["counts"] == {"0": 5, "1": 5}
    assert "<path" in seen[0]
    assert seen[0] != seen[1]


def stream() -> list[dict[str, object]]:
    """A data set that is only iterated."""
    return [{"n": n, "words": f"sample {n} & more"} for n in range(9)]


def test_a_stream_is_shown_with_its_limits(tmp_path: Path) -> None:
    dataset = "{_target_: dtrain.data.Stream, length: 9, dataset: {_target_: tests.show.test_show.stream}}"
    fields = "data.fields={n: {name: n, role: label}, words: {name: words, role: text}}"
    options = ["data.shuffle=none", "data.num_workers=0", "train.global_batch_size=4"]
    facts, page = show(tmp_path, f"data.train={dataset}", fields, *options, "--n", "6")
    assert facts["shown"] == [f"list/{n}" for n in range(6)]
    assert facts["duplicates"] is None
    assert any("stream" in note for note in facts["notes"])
    assert "sample 5 &amp; more" in page


def test_an_excluded_sample_is_not_shown(tmp_path: Path, data: list[str]) -> None:
    facts, _ = show(tmp_path, *data, "--n", "99")
    (tmp_path / "excluded.txt").write_text(f"{facts['shown'][0]}\n")
    rest, _ = show(tmp_path, *data, "--n", "99", f"data.exclude={tmp_path}/excluded.txt")
    assert rest["shown"] == facts["shown"][1:]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--split", "evil"], ["--split evil", "'eval'", "train"]),
        (["--epoch", "-1"], ["--epoch", "-1", "from 0 on"]),
        (["--n", "none"], ["--n", "none", "from 1 on"]),
        (["data.fields.jpg.sise=3"], ["data.fields.jpg", "sise", "size"]),
        (["data.train=nowhere/*.tar"], ["data.train", "nowhere/*.tar", "no file"]),
        (["--frobnicate"], ["--frobnicate", "no such option"]),
        (["--json", "nowhere/facts.json"], ["--json", "nowhere", "not a folder"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_wrong_command_is_one_message(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, data: list[str], arguments: list[str], parts: list[str]
) -> None:
    keep = [word for word in data if not any(word.split("=")[0] == other.split("=")[0] for other in arguments)]
    out = ["--out", str(tmp_path / "page.html")]
    assert_refused(message_of(capfd, *keep, *arguments, *out), *parts)
    assert not (tmp_path / "page.html").exists()


def test_without_data_the_message_says_what_to_set(capfd: pytest.CaptureFixture[str]) -> None:
    assert_refused(message_of(capfd), "data.train", "not set", "experiment=digits")


def test_a_page_that_cannot_be_written_is_one_message(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, data: list[str]
) -> None:
    out = tmp_path / "nowhere" / "page.html"
    assert_refused(message_of(capfd, *data, "--n", "2", "--out", str(out)), "--out", out, "different file")


@pytest.mark.slow
def test_an_evaluation_split_that_cannot_be_read_is_a_note(tmp_path: Path, data: list[str]) -> None:
    keep = [word for word in data if not word.startswith("data.eval=")]
    facts, _ = show(tmp_path, *keep, "data.eval=nowhere/*.tar", "--n", "2")
    assert any("eval is not compared" in note and "nowhere/*.tar" in note for note in facts["notes"])
    assert json.dumps(facts)

"""What the loader makes of samples: bad ones, what travels, augmentation, and what webdataset finds in the same shards."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset

from dtrain.data import Limits, ShardLoader, TransferOptions
from dtrain.data.fields.field import DataError
from dtrain.data.loading.sample_log import TooManyBadSamples
from dtrain.data.shards.shard_file import ShardChanged
from dtrain.data.writer import write_shards
from tests.refusals import refused
from tests.shards import (
    IMAGE,
    LABEL,
    close,
    global_batches,
    jpeg,
    make_loader,
    make_ranks,
    npy,
    read_epoch,
    valid_keys,
    write_numbered,
    write_tar,
)

# -- bad samples


def torn_shards(folder: Path, bad: Sequence[int], count: int = 40) -> list[str]:
    samples = []
    for number in range(count):
        members = {"jpg": jpeg(number), "cls": str(number).encode()}
        if number in bad:
            members |= [{"jpg": jpeg(number)[:-50]}, {"jpg": b"garbage"}, {"cls": b"cat"}][number % 3]
        if number in bad and number % 4 == 3:
            del members["jpg"]
        samples.append((f"sample{number:05d}", members))
    return [
        write_tar(folder / f"shard-{shard}.tar", samples[shard * 20 : shard * 20 + 20]) for shard in range(count // 20)
    ]


def test_bad_samples_keep_their_position_on_every_topology(tmp_path: Path) -> None:
    bad = [0, 1, 2, 7, 19, 20, 39]
    torn, whole = torn_shards(tmp_path / "torn", bad), torn_shards(tmp_path / "whole", [])
    options = {"fields": IMAGE | LABEL, "global_batch_size": 8, "limits": Limits(max_bad=None)}
    bad_keys = {f"shard-{number // 20}.tar/sample{number:05d}" for number in bad}
    expected = [
        [key for key in step if key not in bad_keys] for step in global_batches([make_loader(whole, **options)])
    ]
    for world, num_workers in ((1, 0), (3, 0), (2, 2)):
        ranks = make_ranks(torn, world, num_workers=num_workers, **options)
        assert global_batches(ranks) == expected
        assert sum(loader.bad_samples for loader in ranks) == len(bad)
        named = [
            line["key"] for loader in ranks for step in read_epoch(loader, 0) for batch in step for line in batch.bad
        ]
        assert sorted(named) == sorted(bad_keys)
        close(ranks)


def test_a_run_of_bad_samples_longer_than_a_batch_is_survived(tmp_path: Path) -> None:
    shards = torn_shards(tmp_path, range(5, 30))
    loader = make_loader(shards, IMAGE | LABEL, global_batch_size=4, shuffle="none", limits=Limits(max_bad=None))
    steps = read_epoch(loader)
    assert len(valid_keys(itertools.chain(*steps))) == 15
    assert all(batch["image"].shape == (4, 8, 8, 3) for step in steps for batch in step)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_more_bad_samples_than_the_budget_allows_end_the_run(tmp_path: Path, num_workers: int) -> None:
    shards = torn_shards(tmp_path, range(0, 40, 2))
    loader = make_loader(shards, IMAGE | LABEL, global_batch_size=1, limits=Limits(max_bad=5), num_workers=num_workers)
    with refused(TooManyBadSamples, "data.max_bad=5", "6 of ", "", "sample000"):
        list(loader)
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_that_was_only_looked_at_is_given_again_and_its_bad_samples_count_once(
    tmp_path: Path, num_workers: int
) -> None:
    shards = torn_shards(tmp_path, [0])
    options = {"global_batch_size": 8, "shuffle": "none", "limits": Limits(max_bad=1), "num_workers": num_workers}
    loader = make_loader(shards, IMAGE | LABEL, **options)
    assert len(loader.peek().bad) == 1
    loader.divide(4)
    batches = list(loader)
    loader.close()
    assert sum(len(batch.bad) for batch in batches) == 1
    assert len(valid_keys(batches)) == 39


def test_masked_rows_are_no_samples_to_the_budget(tmp_path: Path) -> None:
    loader = make_loader(
        torn_shards(tmp_path, range(20)), IMAGE | LABEL, global_batch_size=100, limits=Limits(max_bad=0.3)
    )
    with pytest.raises(TooManyBadSamples, match="20 of 40 samples"):
        list(loader)


def test_a_row_of_bad_samples_ends_the_run_where_the_share_would_forgive_it(tmp_path: Path) -> None:
    shards = torn_shards(tmp_path, [3, 11, *range(24, 33)])
    options = {"global_batch_size": 1, "shuffle": "none"}
    with refused(TooManyBadSamples, "max_bad_consecutive=6", "7 samples in a row", "", "shard-1.tar/sample00030"):
        list(make_loader(shards, IMAGE | LABEL, limits=Limits(0.5, 6), **options))
    for limit in (9, None):
        loader = make_loader(shards, IMAGE | LABEL, limits=Limits(0.5, limit), **options)
        assert len(valid_keys(loader)) == 29


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("change", [os.unlink, lambda path: os.truncate(path, 700)], ids=["vanishes", "shrinks"])
def test_a_shard_that_changes_during_the_run_is_named(tmp_path: Path, num_workers: int, change: Any) -> None:
    shards = write_numbered(tmp_path, [30] * 4)
    loader = make_loader(shards, shuffle="none", num_workers=num_workers)
    batches = iter(loader)
    next(batches)
    change(shards[3])
    with refused(ShardChanged, "shard-003.tar"):
        list(batches)
    # What other workers hold is not handed over as if nothing were missing.
    with refused(RuntimeError, "a worker failed", "epoch()"):
        next(batches)
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_images_of_different_sizes_are_refused_naming_both(tmp_path: Path, num_workers: int) -> None:
    samples = [("small", {"jpg": jpeg(0, 8, 8)}), ("large", {"jpg": jpeg(0, 16, 8)})]
    loader = make_loader([write_tar(tmp_path / "a.tar", samples)], IMAGE, num_workers=num_workers, shuffle="none")
    with refused(ValueError, "a.tar/large", "a.tar/small", "size: 224"):
        list(loader)
    loader.close()


# -- what travels


@pytest.mark.parametrize("num_workers", [0, 1])
def test_transfer_carries_bytes_for_pixels_and_half_for_features(tmp_path: Path, num_workers: int) -> None:
    sound = np.random.default_rng(0).normal(size=(8, 4000)).astype(np.float32)
    boxes = np.array([[1333.3, 0.1, 7.0, 1e4]], np.float32)
    samples = [
        (str(i), {"jpg": jpeg(i, 64, 64), "npy": npy(sound[i]), "box.npy": npy(boxes + i), "cls": b"50257"})
        for i in range(8)
    ]
    shards = [write_tar(tmp_path / "a.tar", samples)]
    fields = {
        **IMAGE,
        "npy": {"name": "sound", "role": "feature"},
        "box.npy": {"name": "box", "role": "coord"},
        "cls": {"name": "token", "role": "id"},
    }
    sent = {}
    for precision in ("fp32", "bf16", "fp16"):
        loader = make_loader(
            shards, fields, global_batch_size=8, shuffle="none", precision=precision, num_workers=num_workers
        )
        (batch,) = loader
        loader.close()
        compute = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        assert (batch["image"].dtype, batch["image"].shape) == (torch.uint8, (8, 64, 64, 3))
        assert torch.equal(batch["sound"], torch.from_numpy(sound).to(compute))
        assert torch.equal(batch["box"], torch.from_numpy(np.stack([boxes + i for i in range(8)])))
        assert batch["token"].tolist() == [50257] * 8
        sent[precision] = batch.transfer_bytes
        arrived = batch.to("cpu")
        assert (arrived["image"].dtype, arrived["image"].shape) == (compute, (8, 3, 64, 64))
        assert arrived["image"].is_contiguous(memory_format=torch.channels_last)
    others = 8 * (64 * 64 * 3 + 4 * 4 + 8)
    assert sent["fp32"] - others == 8 * 4000 * 4
    assert sent["bf16"] - others == sent["fp16"] - others == 8 * 4000 * 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_feature_that_fp16_cannot_hold_is_named_clamped_or_sent_in_fp32(tmp_path: Path, num_workers: int) -> None:
    samples = [(f"{i}", {"npy": npy(np.array([1.0, 1e5 * i], np.float32))}) for i in range(2)]
    shards = [write_tar(tmp_path / "a.tar", samples)]
    fields = {"npy": {"name": "depth", "role": "feature"}}
    options = {"precision": "fp16", "global_batch_size": 2, "shuffle": "none", "num_workers": num_workers}
    with refused(ValueError, "field 'depth'", "100000", "data.on_overflow=fp32", "'a.tar/1'"):
        list(make_loader(shards, fields, **options))
    (batch,) = make_loader(shards, fields, transfer=TransferOptions(on_overflow="clamp"), **options)
    assert (batch["depth"].dtype, batch["depth"].tolist()) == (torch.float16, [[1, 0], [1, 65504]])
    (batch,) = make_loader(shards, fields, transfer=TransferOptions(on_overflow="fp32"), **options)
    assert (batch["depth"].dtype, batch["depth"].tolist()) == (torch.float32, [[1, 0], [1, 1e5]])


def shift(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"image": np.roll(sample["image"], int(rng.integers(64)), axis=1), "label": int(rng.integers(2**62))}


def test_a_sample_is_augmented_alike_everywhere_and_anew_in_every_epoch(tmp_path: Path) -> None:
    shards = write_numbered(tmp_path, [10, 17], image=True)

    def augmented(world: int, num_workers: int, **options: Any) -> dict[str, tuple[int, bytes]]:
        found = {}
        ranks = make_ranks(shards, world, fields=IMAGE | LABEL, augment=shift, num_workers=num_workers, **options)
        for loader in ranks:
            for batch in loader.epoch(options.get("epoch", 0)):
                for row, key in enumerate(batch.sample_keys):
                    if key:
                        found[key] = int(batch["label"][row]), batch["image"][row].numpy().tobytes()
        close(ranks)
        return found

    alone = augmented(1, 0)
    assert len(alone) == 27
    assert augmented(3, 0, global_batch_size=5, micro_batch_size=1) == alone
    assert augmented(1, 2, global_batch_size=9, shuffle="none") == alone
    loader = make_loader(shards, IMAGE | LABEL, augment=shift)
    second = {
        key: int(label)
        for batch in loader.epoch(1)
        for key, label in zip(batch.sample_keys, batch["label"], strict=True)
        if key
    }
    assert not {label for label, _ in alone.values()} & set(second.values())


# -- webdataset


@pytest.mark.parametrize("writer", ["webdataset", "dtrain"])
def test_webdataset_and_the_loader_find_the_same_keys_and_bytes(tmp_path: Path, writer: str) -> None:
    rng = np.random.default_rng(0)
    samples = [
        {
            "__key__": f"folder/{'n' * (i % 4 * 40)}ü{i}",
            "jpg": jpeg(i),
            "txt": f"caption {i}",
            "cls": i,
            "bin": rng.bytes(i * 37),
        }
        for i in range(25)
    ]
    if writer == "webdataset":
        with webdataset.ShardWriter(str(tmp_path / "shard-%06d.tar"), maxcount=9, verbose=0) as out:
            for sample in samples:
                out.write(sample)
    else:
        write_shards(samples, tmp_path, prefix="shard", shards=3)
    shards = sorted(str(path) for path in tmp_path.glob("*.tar"))
    assert len(shards) == 3
    extensions = ("jpg", "txt", "cls", "bin")
    theirs = [
        (f"{Path(sample['__url__']).name}/{sample['__key__']}", *(sample[ext] for ext in extensions))
        for sample in webdataset.WebDataset(shards, shardshuffle=False)
    ]
    loader = make_loader(shards, {ext: {"name": ext, "role": "bytes"} for ext in extensions}, shuffle="none")
    ours = [
        (key, *(batch[ext][row] for ext in extensions))
        for batch in loader
        for row, key in enumerate(batch.sample_keys)
        if key
    ]
    assert ours == theirs
    assert len(ours) == 25


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("role", ["feature", None])
def test_halves_that_were_packed_travel_bit_for_bit(tmp_path: Path, kept: torch.dtype, role: str | None) -> None:
    values = torch.from_numpy(np.random.default_rng(0).normal(0, 1e4, (6, 50))).to(kept)
    values[0, :3] = torch.tensor([float("inf"), float("nan"), 1e-7])
    bits = [row.view(torch.int16).numpy().view("V2" if kept == torch.bfloat16 else "f2") for row in values]
    shards = [write_tar(tmp_path / "a.tar", [(f"{row}", {"npy": npy(one)}) for row, one in enumerate(bits)])]
    fields = {"npy": {"name": "x", "role": role}}
    precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}[kept]
    (batch,) = make_loader(shards, fields, precision=precision, shuffle="none")
    assert batch["x"].dtype == kept
    assert torch.equal(batch["x"].view(torch.int16), values.view(torch.int16))


# -- values inside json

PAIRS = {
    "json": [
        {"name": "caption", "role": "text", "key": "caption", "tokenizer": "bytes", "length": 12},
        {"name": "label", "role": "label", "key": "meta.label"},
    ]
}


def annotated(folder: Path, annotations: Sequence[Any]) -> list[str]:
    """Three shards of json members."""
    paths = []
    for shard in range(3):
        samples = [
            (f"{number:03d}", {"json": json.dumps(annotation).encode()})
            for number, annotation in enumerate(annotations)
            if number % 3 == shard
        ]
        paths.append(write_tar(folder / f"{shard}.tar", samples))
    return paths


@pytest.mark.parametrize("num_workers", [0, 2])
def test_one_json_gives_tokens_their_mask_and_labels(tmp_path: Path, num_workers: int) -> None:
    shards = annotated(tmp_path, [{"caption": f"{n} é", "meta": {"label": n}} for n in range(14)])
    loader = make_loader(shards, PAIRS, num_workers=num_workers)
    seen = []
    for batch in loader:
        for row in batch.valid.nonzero().flatten().tolist():
            label = int(batch["label"][row])
            tokens = [*f"{label} é".encode(), 256]
            assert batch["caption"][row].tolist() == tokens + [0] * (12 - len(tokens))
            assert batch["caption_mask"][row].tolist() == [True] * len(tokens) + [False] * (12 - len(tokens))
            seen.append(label)
        assert batch["caption"].dtype == torch.int64
        assert list(batch.to("cpu")) == ["caption", "label", "caption_mask"]
    assert sorted(seen) == list(range(14))
    loader.close()


def test_a_sample_without_the_key_or_with_another_type_is_masked_and_counted(tmp_path: Path) -> None:
    annotations: list[Any] = [{"caption": "a", "meta": {"label": n}} for n in range(18)]
    annotations[4] = {"caption": "a"}
    annotations[7] = {"caption": "a", "meta": {"label": "seven"}}
    annotations[8] = {"caption": 8, "meta": {"label": 8}}
    loader = make_loader(annotated(tmp_path, annotations), PAIRS, limits=Limits(max_bad=3))
    labels, reasons = [], {}
    for batch in loader:
        labels += batch["label"][batch.valid].tolist()
        reasons |= {record["key"][-3:]: record["reason"] for record in batch.bad}
    assert sorted(labels) == [n for n in range(18) if n not in (4, 7, 8)]
    assert loader.bad_samples == 3
    assert "meta.label" in reasons["004"]
    assert "seven" in reasons["007"]
    assert "caption" in reasons["008"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"role": "label"}, "'meta'"),
        ({"role": "label", "key": "meta.lable"}, "'meta.lable'"),
        ({"role": "target", "key": "meta"}, "an object with 'label'"),
        ({"role": "label", "key": "name"}, "cat"),
    ],
)
def test_a_key_that_no_first_sample_has_is_refused_before_training(
    tmp_path: Path, options: dict[str, str], told: str
) -> None:
    shards = annotated(tmp_path, [{"meta": {"label": 1}, "name": "cat"}] * 6)
    with refused(DataError, "data.fields.json", told, "data.fields.json.key"):
        make_loader(shards, {"json": {"name": "label", **options}})


def test_a_map_style_dataset_has_captions_too() -> None:
    fields = {"text": {"name": "caption", "role": "text", "tokenizer": "bytes", "length": 4}}
    loader = ShardLoader.over({"text": ["a", "bcdef"]}, fields, global_batch_size=2, num_workers=0, shuffle="none")
    (batch,) = loader
    assert batch["caption"].tolist() == [[97, 256, 0, 0], [98, 99, 100, 256]]
    assert batch["caption_mask"].sum(1).tolist() == [2, 4]

"""Loaders over several sources: rows, fields, augmentation and masks of each. Orders are in test_mixture_order.py."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from dtrain.data import Batch, Generated, Limits, Mixture, ShardDataset, ShardLoader
from dtrain.data.augment import RandomResizedCrop
from dtrain.data.fields.field import DataError
from dtrain.data.mixing import Mix
from dtrain.data.sources.mixture import EvaluationSets
from tests.refusals import Refusal, refused
from tests.shards import (
    IMAGE,
    LABEL,
    close,
    global_batches,
    jpeg,
    make_loader,
    make_ranks,
    read_epoch,
    stored_keys,
    valid_keys,
    write_numbered,
    write_tar,
)

NUMBER = {"x": {"name": "x", "role": "id"}}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Shards of 40, 13 and 3 samples."""
    folder = tmp_path_factory.mktemp("sources")
    return {
        "web": write_numbered(folder / "web", [17, 11, 12]),
        "books": write_numbered(folder / "books", [9, 4]),
        "tiny": write_numbered(folder / "tiny", [3]),
    }


def numbers(first: int, count: int) -> dict[str, np.ndarray]:
    return {"x": np.arange(first, first + count)}


def mixed(loader: ShardLoader, steps: int) -> list[Batch]:
    """The first micro-batches, over several epochs, each a step."""
    batches: list[Batch] = []
    while len(batches) < steps:
        for batch in loader:
            batches.append(batch)
            loader.commit()
            if len(batches) == steps:
                break
    return batches


def check_epochs(used: list[str], sources: dict[str, list[str]]) -> None:
    """Each sample of a source once in each of its epochs, the last one included as far as it goes."""
    for name, shards in sources.items():
        stored = [f"{name}/{key}" for key in stored_keys(shards)]
        times = Counter(key for key in used if key.startswith(f"{name}/"))
        assert set(times) <= set(stored)
        assert {times[key] - times.total() // len(stored) for key in stored} <= {0, 1}


# -- the same global batches for any topology, each sample once


def test_global_batches_do_not_depend_on_ranks_micro_batches_or_workers(sources: dict[str, list[str]]) -> None:
    mixture = Mixture(sources, {"web": 7, "books": 2, "tiny": 1})
    options: dict[str, Any] = {"global_batch_size": 12, "seed": 3}
    one = make_loader(mixture, **options)  # type: ignore[arg-type]
    alone = [step for epoch in (0, 1) for step in global_batches([one], epoch)]
    assert {len(step) for step in alone} == {12}
    counts = Counter(key.partition("/")[0] for step in alone for key in step)
    assert counts == one.samples_by_source()
    for name, share in (("web", 0.7), ("books", 0.2), ("tiny", 0.1)):
        assert abs(counts[name] - 12 * len(alone) * share) < 2
    check_epochs([key for step in alone for key in step], sources)
    for world, micro, workers in ((2, 2, 0), (3, None, 1), (5, 2, 0), (14, None, 0)):
        ranks = make_ranks(mixture, world, micro_batch_size=micro, num_workers=workers, **options)  # type: ignore[arg-type]
        assert [step for epoch in (0, 1) for step in global_batches(ranks, epoch)] == alone
        close(ranks)


def test_a_state_resumes_on_other_ranks_with_another_batch_and_other_weights(sources: dict[str, list[str]]) -> None:
    used: list[str] = []
    state: dict[str, Any] | None = None
    for world, batch, web in ((3, 12, 7), (2, 10, 7), (1, 8, 1)):
        ranks = make_ranks(Mixture(sources, {"web": web, "books": 2, "tiny": 1}), world, global_batch_size=batch)  # type: ignore[arg-type]
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        iterators = [iter(loader) for loader in ranks]
        for _ in range(2):
            for loader, iterator in zip(ranks, iterators, strict=True):
                used += valid_keys(itertools.islice(iterator, loader.micro_batches_per_step))
                loader.commit()
        assert all(loader.state_dict() == ranks[0].state_dict() for loader in ranks)
        state = ranks[0].state_dict()
        assert Counter(key.partition("/")[0] for key in used) == ranks[0].samples_by_source()
    check_epochs(used, sources)


@pytest.mark.parametrize("order", list(itertools.permutations(["web", "books", "tiny"])))
def test_a_state_resumes_with_the_sources_in_another_order(
    sources: dict[str, list[str]], order: tuple[str, ...]
) -> None:
    used: list[str] = []
    state: dict[str, Any] | None = None
    for names in (("web", "books", "tiny"), order, ("web", "books", "tiny")):
        mixture = Mixture({name: sources[name] for name in names}, epoch_of="web")
        loader = make_loader(mixture, global_batch_size=5)  # type: ignore[arg-type]
        if state is not None:
            loader.load_state_dict(state)
        for batch in itertools.islice(loader, 4):
            used += valid_keys([batch])
            loader.commit()
        state = loader.state_dict()
        assert Counter(key.partition("/")[0] for key in used) == loader.samples_by_source()
    check_epochs(used, sources)


def test_two_sources_of_one_size_have_orders_of_their_own() -> None:
    loader = ShardLoader(
        Mixture({"a": numbers(0, 50), "b": numbers(0, 50)}), NUMBER, global_batch_size=10, num_workers=0
    )
    batches = mixed(loader, 5)
    of_a, of_b = ([int(x) for b in batches for x in b["x"][b["source"] == number]] for number in (0, 1))
    assert of_a != of_b


def test_a_weight_may_follow_a_schedule_over_the_steps() -> None:
    mixture = Mixture({"a": numbers(0, 900), "b": numbers(1000, 900)}, {"a": 1, "b": [[0, 0], [10, 1], [10, 3]]})
    batches = mixed(ShardLoader(mixture, NUMBER, global_batch_size=12, num_workers=0), 20)
    of_b = [int((batch["source"] == 1).sum()) for batch in batches]
    assert sum(of_b[:3]) < sum(of_b[3:6]) < sum(of_b[7:10]) <= 18
    assert abs(sum(of_b[:10]) - 30) < 3
    assert of_b[11:] == [9] * 9


def test_weights_may_count_tokens() -> None:
    tokens = {"a": 300.0, "b": 100.0}
    mixture = Mixture({"a": numbers(0, 900), "b": numbers(1000, 900)}, {"a": 1, "b": 1}, tokens_per_sample=tokens)
    batches = mixed(ShardLoader(mixture, NUMBER, global_batch_size=16, num_workers=0), 10)
    assert (
        sum(int((batch["source"] == 0).sum()) for batch in batches) == 40
    )  # a quarter of the samples, half of the tokens


def test_generated_samples_and_augmentations_depend_on_the_epoch_of_their_source() -> None:
    def draw(sample: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"x": rng.random()}

    def add(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"x": sample["x"] + rng.random()}

    fields = {"x": {"name": "x", "role": "target"}}
    sources = {"a": Generated(draw, 30), "b": Generated(draw, 4)}
    mixture = Mixture(sources, augment={"b": None})
    first, again = (
        [
            b["x"].tolist()
            for b in mixed(
                ShardLoader(mixture, fields, global_batch_size=8, num_workers=0, augment=add, micro_batch_size=micro), 8
            )
        ]
        for micro in (8, 8)
    )
    assert first == again
    values = [x for batch in first for x in batch]
    assert len(set(values)) == len(values)  # also those of b, which goes through an epoch in every step


# -- fields, augmentation and mixup of a source


def test_each_source_has_its_fields_and_its_augmentation(tmp_path: Path) -> None:
    photos = write_tar(tmp_path / "photos.tar", [(f"p{n}", {"jpg": jpeg(n, 20, 30), "cls": b"1"}) for n in range(6)])
    drawings = write_tar(tmp_path / "drawings.tar", [(f"d{n}", {"png": jpeg(n), "id": b"2"}) for n in range(6)])
    own = {"png": {"name": "image", "role": "image"}, "id": {"name": "label", "role": "label"}}
    mixture = Mixture(
        {"photos": photos, "drawings": drawings},
        fields={"drawings": own},
        augment={"photos": RandomResizedCrop(size=8)},
    )
    batch = mixed(make_loader(mixture, {**IMAGE, **LABEL}, global_batch_size=8), 1)[0]  # type: ignore[arg-type]
    assert batch["image"].shape == (8, 8, 8, 3)
    assert batch["label"].tolist() == (batch["source"] + 1).tolist()
    with refused(DataError, "image", "in photos", "crop", "in drawings"):
        mixed(
            make_loader(
                Mixture({"photos": photos, "drawings": drawings}, fields={"drawings": own}),
                {**IMAGE, **LABEL},
                global_batch_size=8,
            ),
            1,
        )  # type: ignore[arg-type]


def test_missing_fields_are_zeros_and_masked(tmp_path: Path) -> None:
    labelled = {"x": np.ones((20, 3), np.float32), "y": np.arange(1, 21), "text": np.array(["a"] * 20, object)}
    plain = {"x": np.full((20, 3), 2, np.float32)}
    fields = {"x": {"name": "x", "role": "feature"}, "y": {"name": "y", "role": "label"}, "text": {"name": "text"}}
    sources = {"labelled": labelled, "plain": plain}
    own = {"plain": {"x": fields["x"]}}
    with refused(ValueError, "data.missing", "plain lacks y, text", "mask"):
        ShardLoader(Mixture(sources, fields=own), fields, global_batch_size=4, num_workers=0)
    mixture = Mixture(sources, {"labelled": 1, "plain": 15}, fields=own, missing="mask")
    batches = mixed(ShardLoader(mixture, fields, global_batch_size=4, num_workers=0), 8)
    assert sorted({int(batch["has_y"].sum()) for batch in batches}) == [0, 1]  # some have no label at all
    for batch in batches:
        is_labelled = batch["source"] == 0
        assert torch.equal(batch["has_y"], is_labelled)
        assert torch.equal(batch["has_text"], is_labelled)
        assert torch.equal(batch["y"] > 0, is_labelled)
        assert batch["text"] == ["a" if has else "" for has in is_labelled.tolist()]
        assert batch["x"][:, 0].tolist() == [1.0 if has else 2.0 for has in is_labelled.tolist()]
        assert torch.equal(batch.valid_for("x"), batch.valid)
        assert torch.equal(batch.valid_for("x", "y"), is_labelled)


def test_mixup_partners_are_of_the_same_source(tmp_path: Path) -> None:
    grey = {name: np.full((12, 4, 4, 3), value, np.uint8) for name, value in (("dark", 0), ("light", 200))}
    sources = {
        name: {"image": pixels, "label": np.full(12, pixels[0, 0, 0, 0] // 200)} for name, pixels in grey.items()
    }
    fields = {"image": {"name": "image", "role": "image"}, "label": {"name": "label", "role": "label"}}
    loader = ShardLoader(Mixture(sources), fields, global_batch_size=8, num_workers=0, mix=Mix(2, mixup_alpha=1.0))
    for batch in mixed(loader, 6):
        assert torch.equal(batch["label"].argmax(dim=1), batch["source"])
        assert set(batch["label"].flatten().tolist()) == {0.0, 1.0}
    with refused(ValueError, "data.mixture.plain", "data.mix.label"):
        plain = Mixture(
            {**sources, "plain": {"image": grey["dark"]}}, fields={"plain": {"image": fields["image"]}}, missing="mask"
        )
        ShardLoader(plain, fields, global_batch_size=8, num_workers=0, mix=Mix(2, mixup_alpha=1.0))


def test_a_micro_batch_without_a_slot_is_like_the_others(tmp_path: Path) -> None:
    pixels = {"image": np.zeros((12, 4, 4, 3), np.uint8), "label": np.arange(12) % 2}
    fields = {"image": {"name": "image", "role": "image"}, "label": {"name": "label", "role": "label"}}
    options: dict[str, Any] = {"global_batch_size": 10, "micro_batch_size": 2, "num_workers": 0, "world_size": 4}
    mixture = Mixture({"a": pixels, "b": pixels})
    loader = ShardLoader(mixture, fields, rank=0, mix=Mix(2, mixup_alpha=1.0), **options)
    batches = next_step(loader)
    assert [batch.num_valid for batch in batches] == [2, 0]
    assert {tuple(batch["label"].shape) for batch in batches} == {(2, 2)}
    bad = write_tar(tmp_path / "bad.tar", [(f"b{n}", {"cls": b"oops" if n == 0 else b"7"}) for n in range(12)])
    loaders = [
        ShardLoader(Mixture({"bad": [bad]}), LABEL, rank=rank, shuffle="none", limits=Limits(max_bad=None), **options)
        for rank in range(4)
    ]
    records = [record for loader in loaders for batch in next_step(loader) for record in batch.bad]
    assert [record["key"] for record in records] == ["bad/bad.tar/b0"]


def next_step(loader: ShardLoader) -> list[Batch]:
    return list(itertools.islice(loader, loader.micro_batches_per_step))


def test_masked_rows_of_unsigned_numbers_and_of_any_objects_are_filled() -> None:
    class Pair(NamedTuple):
        first: int
        second: int

    tokens = Mixture({name: {"x": np.full((6, 3), n, np.uint16)} for n, name in enumerate("ab")})
    loader = ShardLoader(tokens, NUMBER, global_batch_size=5, world_size=2, rank=0, num_workers=0)
    assert {batch["x"].dtype for batch in mixed(loader, 3)} == {torch.uint16}
    pairs = Mixture({name: [{"x": Pair(n, n)} for n in range(6)] for name in "ab"})
    loader = ShardLoader(pairs, NUMBER, global_batch_size=5, world_size=2, rank=0, num_workers=0)
    assert all(isinstance(value, Pair) for batch in mixed(loader, 3) for value in batch["x"])


def test_bad_samples_of_a_source_are_masked_and_named(tmp_path: Path) -> None:
    good = write_numbered(tmp_path / "good", [12])
    bad = write_tar(tmp_path / "bad" / "0.tar", [(f"b{n}", {"cls": b"7" if n % 2 else b"oops"}) for n in range(12)])
    mixture = Mixture({"good": good, "bad": bad})
    batches = mixed(make_loader(mixture, global_batch_size=8, limits=Limits(max_bad=None)), 3)  # type: ignore[arg-type]
    records = [record for batch in batches for record in batch.bad]
    assert sorted(record["key"] for record in records) == sorted(f"bad/0.tar/b{n}" for n in range(0, 12, 2))
    assert {record["source"] for record in records} == {"bad"}
    for batch in batches:
        assert [key != "" for key in batch.sample_keys] == batch.valid.tolist()
        assert (batch["label"][batch["source"] == 1] == 7).all()


def test_the_loss_of_each_source_is_a_metric() -> None:
    loader = ShardLoader(
        Mixture({"a": numbers(0, 9), "b": numbers(100, 9)}), NUMBER, global_batch_size=6, num_workers=0
    )
    batch = mixed(loader, 1)[0]
    batch.valid[batch["source"].tolist().index(1)] = False
    losses = torch.arange(6.0)
    metrics = batch.to("cpu").by_source(losses)
    for number, name in enumerate("ab"):
        rows = (batch["source"] == number) & batch.valid
        assert [float(it) for it in metrics[f"loss/{name}"]] == [losses[rows].sum(), rows.sum()]
    tokens = batch.by_source(losses, torch.full((6,), 5))
    assert [int(count) for _, count in tokens.values()] == [15, 10]
    single = mixed(ShardLoader.over(numbers(0, 9), NUMBER, global_batch_size=6, num_workers=0), 1)[0]
    assert single.by_source(losses) == {}
    assert single.valid_for("x") is single.valid


# -- evaluation sets


@pytest.mark.parametrize("world", [1, 3])
def test_evaluation_sets_come_one_after_the_other_each_sample_once(sources: dict[str, list[str]], world: int) -> None:
    sets = EvaluationSets({"web": sources["web"], "tiny": sources["tiny"]})
    ranks = make_ranks(sets, world, global_batch_size=8, shuffle="none", micro_batch_size=2)  # type: ignore[arg-type]
    assert ranks[0].steps_per_epoch == 5 + 1
    keys = [key for epoch in (0, 1) for step in global_batches(ranks, epoch) for key in step]
    stored = [f"{name}/{key}" for name in ("web", "tiny") for key in stored_keys(sources[name])]
    assert keys == stored * 2
    for step in read_epoch(ranks[0], 2, commit=False):
        assert all(len(set(batch["source"].tolist())) == 1 for batch in step)


# -- refusals


def make(*arguments: Any, loader: dict[str, Any] | None = None, **options: Any) -> ShardLoader:
    return ShardLoader(
        Mixture(*arguments, **options), NUMBER, **{"global_batch_size": 4, "num_workers": 0, **(loader or {})}
    )


TWO = {"a": numbers(0, 4), "b": numbers(4, 4)}


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal(lambda: Mixture({}), "data.mixture", "{}", "at least one source"),
        Refusal(lambda: Mixture({"a/b": []}), "data.mixture", "'a/b'", "letters"),
        Refusal(lambda: Mixture(TWO, {"a": 1, "c": 1}), "weights", "'c'", "Valid: a, b"),
        Refusal(lambda: Mixture(TWO, {"a": 1}), "weights", "lacks b", "all sources"),
        Refusal(lambda: Mixture(TWO, {"a": -1, "b": 1}), "data.mixture.a.weight", "-1", "at least 0"),
        Refusal(lambda: Mixture(TWO, {"a": float("nan"), "b": 1}), "data.mixture.a.weight", "nan", "at least 0"),
        Refusal(
            lambda: Mixture(TWO, {"a": [[5, 1], [0, 1]], "b": 1}),
            "data.mixture.a.weight",
            "[[5, 1], [0, 1]]",
            "ascending",
        ),
        Refusal(lambda: Mixture(TWO, {"a": "much", "b": 1}), "data.mixture.a.weight", "'much'", "a number"),
        Refusal(lambda: Mixture(TWO, {"a": 0, "b": 0}), "data.mixture", "all weights are 0", "above 0"),
        Refusal(
            lambda: Mixture(TWO, {"a": [[0, 1], [9, 0]], "b": [[9, 0]]}, epoch_of="a"),
            "data.mixture",
            "step 9",
            "above 0",
        ),
        Refusal(lambda: Mixture(TWO, epoch_of="c"), "data.epoch_of", "'c'", "Valid: a, b"),
        Refusal(lambda: Mixture(TWO, {"a": 0, "b": 1}), "data.epoch_of", "'a'", "Name a different source"),
        Refusal(lambda: Mixture(TWO, missing="zeros"), "data.missing", "'zeros'", "mask"),
        Refusal(lambda: Mixture(TWO, augment={"c": None}), "augment", "'c'", "Valid: a, b"),
        Refusal(lambda: Mixture(TWO, tokens_per_sample={"a": 5}), "tokens_per_sample", "lacks b", "none"),
        Refusal(
            lambda: Mixture(TWO, tokens_per_sample={"a": 5, "b": 0}), "data.mixture.b.tokens_per_sample", "0", "above 0"
        ),
        Refusal(lambda: make({**TWO, "c": numbers(0, 0)}), "data.mixture.c", "0 samples", "at least one"),
        Refusal(lambda: make({**TWO, "c": iter([])}), "data.mixture.c", "iterator", "__getitem__"),
        Refusal(lambda: make(TWO, loader={"lanes": 0}), "data.lanes", "0", "64"),
        Refusal(
            lambda: make(TWO, fields={"b": {"x": {"name": "x", "role": "feature"}}}),
            "field 'x'",
            "id in a and feature in b",
            "names",
        ),
        Refusal(
            lambda: make(TWO, fields={name: {"x": {"name": "source", "role": "id"}} for name in TWO}),
            "data.fields",
            "'source'",
            "a different name",
        ),
        Refusal(
            lambda: make({**TWO, "c": "nowhere/*.tar"}, fields={"c": LABEL}), "data.mixture.c", "nowhere", "no file"
        ),
        Refusal(lambda: ShardDataset(Mixture(TWO), NUMBER), "ShardDataset", "Mixture", "ShardLoader"),  # type: ignore[arg-type]
    ],
)
def test_impossible_mixtures_are_refused_with_names(refusal: Refusal) -> None:
    refusal.check()


def test_a_source_without_samples_is_refused(tmp_path: Path) -> None:
    empty: Sequence[str] = write_numbered(tmp_path, [0, 0])
    with refused(ValueError, "data.mixture.c", "no sample", "pack"):
        make_loader(Mixture({"c": empty}))  # type: ignore[arg-type]

"""Mixup and cutmix. The oracle reads the tar, augments and mixes one pixel after the other in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtrain.config.schema import Config
from dtrain.data import Batch, ShardLoader
from dtrain.data.augment import Augment, RandomCropFlip
from dtrain.data.mixing import Blend, Mix, Patch
from dtrain.data.order.epoch_order import EpochOrder, Layout
from dtrain.data.order.lines import Recipe
from dtrain.data.order.randomness import hash64
from dtrain.data.sources.shard_source import ShardSampleReader
from dtrain.errors import ConfigError
from dtrain.precision import Precision
from dtrain.tasks import Classification
from dtrain.training.setup.loaders import eval_loader, train_loader
from tests.configs import config_of
from tests.property_tests import examples
from tests.refusals import refused
from tests.shards import (
    IMAGE,
    LABEL,
    UNEVEN,
    jpeg,
    make_loader,
    make_ranks,
    read_epoch,
    stored_members,
    write_numbered,
    write_tar,
)
from tests.toys import world

FIELDS = IMAGE | LABEL
BOTH = Mix(47, mixup_alpha=0.5, cutmix_alpha=1.0)
CROP = RandomCropFlip(padding=2)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """47 images, each of a class of its own."""
    return write_numbered(tmp_path_factory.mktemp("uneven"), UNEVEN, image=True)


def rows_by_key(batches: Iterable[Batch]) -> dict[str, tuple[bytes, bytes]]:
    """Pixels and probabilities of each sample, by its key."""
    return {
        key: (image.numpy().tobytes(), label.numpy().tobytes())
        for batch in batches
        for key, image, label in zip(batch.sample_keys, batch["image"], batch["label"], strict=True)
        if key
    }


def by_hand(
    members: Sequence[tuple[bytes, int]], number: int, partner: int, mix: Mix, augment: Augment | None, epoch: int
) -> tuple[np.ndarray, np.ndarray]:
    """A sample of loaders with seed 0: its pixels, and the probabilities of its classes in float64."""
    images = []
    for one in (number, partner):
        sample = {"image": simplejpeg.decode_jpeg(members[one][0])}
        images.append((augment(sample, generator(epoch, 4, one)) if augment else sample)["image"])
    (mine, other), rng = images, generator(epoch, 6, number)
    height, width, _ = mine.shape
    mixed, switch, down, right = rng.random(4)
    pixels, taken = mine.astype(np.float64), 0.0
    if mixed < mix.probability and number != partner:
        if mix.cutmix_alpha and (not mix.mixup_alpha or switch < mix.switch_probability):
            side = math.sqrt(rng.beta(mix.cutmix_alpha, mix.cutmix_alpha))
            rows, columns = round(side * height), round(side * width)
            top, left = int(down * height) - rows // 2, int(right * width) - columns // 2
            for y, x in itertools.product(range(height), range(width)):
                if top <= y < top + rows and left <= x < left + columns:
                    pixels[y, x] = other[y, x]
                    taken += 1 / (height * width)
        else:
            taken = round(256 * rng.beta(mix.mixup_alpha, mix.mixup_alpha)) / 256
            pixels = (1 - taken) * mine + taken * other.astype(np.float64)
    probabilities = np.zeros(mix.classes)
    probabilities[members[number][1]] += 1 - taken
    probabilities[members[partner][1]] += taken
    return pixels, probabilities


def generator(epoch: int, use: int, sample: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=int(hash64(0, epoch, use, sample))))


@pytest.mark.parametrize(
    "mix",
    [BOTH, Mix(50, mixup_alpha=0.2), Mix(47, cutmix_alpha=1.0), Mix(47, 1.0, 1.0, probability=0.4)],
    ids=["both", "mixup", "cutmix", "some"],
)
@pytest.mark.parametrize("augment", [None, CROP], ids=["plain", "augmented"])
def test_pixels_and_labels_are_what_the_tar_gives_when_mixed_by_hand(
    uneven: list[str], mix: Mix, augment: Augment | None
) -> None:
    stored = stored_members(uneven)
    members = [(one["jpg"][0], int(one["cls"][0])) for one in stored.values()]
    loader = make_loader(uneven, FIELDS, mix=mix, augment=augment, shuffle="none")
    seen = 0
    for batch in loader.epoch(2):
        assert batch["image"].dtype == torch.uint8
        assert batch["label"].dtype == torch.float32
        for key, image, label in zip(batch.sample_keys, batch["image"], batch["label"], strict=True):
            if not key:
                continue
            number = list(stored).index(key)
            partner = 45 if number == 46 else number ^ 1  # of the last of an odd number: the one before it
            pixels, probabilities = by_hand(members, number, partner, mix, augment, epoch=2)
            assert np.abs(image.numpy() - pixels).max() <= 0.5
            assert np.abs(label.numpy() - probabilities).max() < 1e-7
            seen += 1
    assert seen == 47


# -- partners


counts_of_shards = st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any)


@examples(40)
@given(counts=counts_of_shards, lanes=st.integers(1, 5), per_lane=st.integers(1, 4), data=st.data())
def test_partners_pair_up_along_each_lane_whatever_the_batch_size_and_later_cuts(
    counts: list[int], lanes: int, per_lane: int, data: st.DataObject
) -> None:
    shuffle = data.draw(st.sampled_from(["window", "full", "none"]))
    lanes = lanes if shuffle == "window" else 1
    recipe = Recipe(data.draw(st.integers(0, 3)), shuffle, data.draw(st.integers(1, 3)))
    one_by_one = EpochOrder(np.array(counts), recipe, 1, [Layout(lanes, lanes)])
    expected = {}
    for lane in range(lanes):
        line = [int(one_by_one.locate(step, np.array([lane]))[0]) for step in range(one_by_one.num_steps)]
        line = [sample for sample in line if sample >= 0]
        for place, sample in enumerate(line):
            pair = line[place // 2 * 2 :][:2]
            others = [other for other in pair if other != sample] or line[max(place - 1, 0) :][:1]
            expected[sample] = others[0]
    batch = lanes * per_lane
    first = Layout(batch, lanes, data.draw(st.integers(0, sum(counts) // batch)))
    then = Layout(data.draw(st.integers(1, 7)), 1)
    for order in (EpochOrder(np.array(counts), recipe, 1, cuts) for cuts in ([first], [first, then])):
        slots = np.arange(order.layouts[-1].global_batch_size)
        for step in range(order.first_step, order.num_steps):
            samples, partners = order.locate(step, slots).tolist(), order.partners(step, slots).tolist()
            assert partners == [expected.get(sample, -1) for sample in samples]


@examples(15)
@given(world=st.integers(1, 4), per_lane=st.integers(1, 4), data=st.data())
def test_any_ranks_micro_batches_and_batch_sizes_give_the_same_mixtures(
    uneven: list[str], world: int, per_lane: int, data: st.DataObject
) -> None:
    batch = 3 * per_lane
    rows = -(-batch // world)
    micro = data.draw(st.sampled_from([m for m in range(1, rows + 1) if batch % world or rows % m == 0]))
    options: dict[str, Any] = {"lanes": 3, "window": 2, "mix": BOTH, "augment": CROP}
    ranks = make_ranks(uneven, world, global_batch_size=batch, micro_batch_size=micro, fields=FIELDS, **options)
    expected = rows_by_key(make_loader(uneven, FIELDS, **options).epoch(1))
    assert len(expected) == 47
    assert rows_by_key(batch for rank in ranks for batch in rank.epoch(1)) == expected


def test_resumed_in_mid_epoch_with_workers_and_another_batch_size_mixtures_stay_the_same(uneven: list[str]) -> None:
    options: dict[str, Any] = {"fields": FIELDS, "lanes": 3, "window": 2, "mix": BOTH, "augment": CROP}
    expected = rows_by_key(make_loader(uneven, **options))
    first = make_loader(uneven, **options)
    batches = iter(first)
    seen = rows_by_key(itertools.islice(batches, 3))
    for _ in range(3):
        first.commit()
    second = make_loader(uneven, **{**options, "lanes": None}, global_batch_size=5, num_workers=2)
    second.load_state_dict(first.state_dict())
    seen |= rows_by_key(itertools.chain(*read_epoch(second)))
    second.close()
    assert seen == expected


@pytest.mark.parametrize("label", [np.int64, torch.int32], ids=["array", "tensor"])
def test_a_data_set_in_memory_is_mixed_like_shards(label: Any) -> None:
    images = np.random.default_rng(0).integers(0, 256, (9, 4, 5, 3), dtype=np.uint8)
    labels = torch.arange(9, dtype=label) if isinstance(label, torch.dtype) else np.arange(9, dtype=label)
    fields = {"image": {"name": "image", "role": "image"}, "label": {"name": "label", "role": "label"}}
    options: dict[str, Any] = {"global_batch_size": 9, "num_workers": 0, "shuffle": "none", "mix": Mix(9, 1.0)}
    (batch,) = ShardLoader.over({"image": images, "label": labels}, fields, **options)
    for number, (image, row) in enumerate(zip(batch["image"].numpy(), batch["label"].double().numpy(), strict=True)):
        assert np.abs(image - np.tensordot(row, images, 1)).max() <= 0.5
        assert set(np.flatnonzero(row)) <= {number, 7 if number == 8 else number ^ 1}


def test_each_epoch_and_seed_mixes_in_its_own_way(uneven: list[str]) -> None:
    loaders = [make_loader(uneven, FIELDS, mix=BOTH, seed=seed, shuffle="none") for seed in (0, 0, 1)]
    epochs = [rows_by_key(loader.epoch(epoch)) for loader, epoch in zip(loaders, (0, 1, 0), strict=True)]
    assert all(sum(one[key] != other[key] for key in one) > 30 for one, other in itertools.combinations(epochs, 2))


@pytest.mark.parametrize(("lanes", "reads"), [(6, 48), (12, 96)], ids=["two of each lane", "one of each lane"])
def test_an_even_share_of_each_lane_has_nothing_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lanes: int, reads: int
) -> None:
    fetched: list[str] = []
    fetch_all = ShardSampleReader.fetch_all

    def counted(self: ShardSampleReader, epoch: int, samples: np.ndarray) -> Any:
        fetched.extend(self._index.keys(samples))
        return fetch_all(self, epoch, samples)

    monkeypatch.setattr(ShardSampleReader, "fetch_all", counted)
    paths = write_numbered(tmp_path, [16, 16, 16], image=True)
    mix = Mix(48, cutmix_alpha=1.0)
    of_rank = []
    for rank in make_ranks(paths, 2, fields=FIELDS, mix=mix, global_batch_size=12, lanes=lanes):
        before = len(fetched)
        keys = {key for batch in rank for key in batch.sample_keys if key}
        assert set(fetched[before:]) == keys  # none of another rank's
        of_rank.append(keys)
    assert len(fetched) == reads
    assert len(of_rank[0] | of_rank[1]) == 48


# -- what is drawn


def drawn(mix: Mix, number: int) -> list[Blend | Patch | None]:
    return [mix.draw(generator(0, 6, sample)) for sample in range(number)]


@pytest.mark.parametrize(
    ("alpha", "distribution"),
    [(1.0, lambda share: share), (0.5, lambda share: 2 / math.pi * math.asin(math.sqrt(share)))],
    ids=["uniform", "arcsine"],
)
def test_the_shares_of_mixup_and_the_areas_of_cutmix_are_beta_distributed(alpha: float, distribution: Any) -> None:
    number = 4000
    blends, patches = drawn(Mix(9, mixup_alpha=alpha), number), drawn(Mix(9, cutmix_alpha=alpha), number)
    shares = [one.parts / 256 if isinstance(one, Blend) else 0.0 for one in blends]
    areas = [one.side**2 for one in patches if isinstance(one, Patch)]
    for values in (shares, areas):
        assert len(values) == number
        # Between the steps of 1/256: where rounding does not move anything.
        for edge in (np.arange(0, 256, 5) + 0.5) / 256:
            found = np.mean(np.array(values) < edge)
            assert abs(found - distribution(edge)) < 1.95 / math.sqrt(number)  # Kolmogorov and Smirnov, 0.1 %


def test_probabilities_say_how_often_there_is_mixup_cutmix_or_nothing() -> None:
    kinds = [type(one) for one in drawn(Mix(9, 1.0, 1.0, probability=0.5, switch_probability=0.25), 4000)]
    assert kinds.count(Patch) == pytest.approx(500, abs=70)
    assert kinds.count(Blend) == pytest.approx(1500, abs=110)


sides = st.integers(1, 12)


@given(
    height=sides,
    width=sides,
    side=st.floats(0, 1),
    middle=st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2),
)
def test_the_share_of_cutmix_is_that_of_the_pixels_exactly(
    height: int, width: int, side: float, middle: tuple[float, float]
) -> None:
    image, other = np.zeros((height, width, 3), np.uint8), np.full((height, width, 3), 7, np.uint8)
    share = Patch(side, *middle).put(image, other)
    assert share == np.count_nonzero(image[:, :, 0]) / (height * width)
    assert set(np.unique(image)) <= {0, 7}


@given(parts=st.integers(0, 256), seed=st.integers(0, 9))
def test_the_pixels_of_mixup_are_at_most_half_a_level_off_their_labels(parts: int, seed: int) -> None:
    image, other = np.random.default_rng(seed).integers(0, 256, (2, 5, 6, 3), dtype=np.uint8)
    image[0], other[0] = 255, 255
    exact = image * (1 - parts / 256) + other * (parts / 256)
    assert Blend(parts).put(image, other) == parts / 256
    assert np.abs(image - exact).max() <= 0.5


# -- masked rows


def test_whose_partner_is_bad_stays_as_it_is_and_the_bad_one_is_told_of_once(tmp_path: Path) -> None:
    samples = [(f"s{n}", {"jpg": jpeg(n)[:-60] if n == 2 else jpeg(n), "cls": b"%d" % n}) for n in range(6)]
    path = write_tar(tmp_path / "a.tar", samples)
    mix = Mix(6, cutmix_alpha=1.0)
    (plain,) = make_loader([path], FIELDS, shuffle="none")
    for micro in (6, 1):  # its partner in the same micro-batch, and in another one
        loader = make_loader([path], FIELDS, mix=mix, shuffle="none", micro_batch_size=micro)
        batches = list(loader.epoch(0))
        assert [line["key"] for batch in batches for line in batch.bad] == ["a.tar/s2"]
        rows = {
            key: (image, label)
            for batch in batches
            for key, image, label in zip(batch.sample_keys, batch["image"], batch["label"], strict=True)
        }
        assert torch.equal(rows["a.tar/s3"][0], plain["image"][3])
        assert rows["a.tar/s3"][1].tolist() == [0, 0, 0, 1, 0, 0]
        assert all(batch["label"].sum(dim=1).allclose(torch.ones(1)) for batch in batches)


def test_masked_rows_repeat_mixed_ones(uneven: list[str]) -> None:
    *_, last = make_loader(uneven, FIELDS, mix=BOTH, lanes=1)
    assert last.valid.tolist() == [True] * 5 + [False]
    assert torch.equal(last["image"][5], last["image"][0])
    assert torch.equal(last["label"][5], last["label"][0])


def test_a_rank_without_any_sample_in_the_last_step_has_the_shapes_of_the_others(uneven: list[str]) -> None:
    for rank in make_ranks(uneven, 3, fields=FIELDS, mix=BOTH, global_batch_size=46, lanes=1):
        *_, last = rank
        assert last["image"].shape == (16, 8, 8, 3)
        assert last["label"].shape == (16, 47)


# -- the run


def config(paths: Sequence[str], **data: Any) -> Config:
    given = {
        "train": {"global_batch_size": 12},
        "data": {"fields": FIELDS, "num_workers": 0, "train": list(paths), "eval": list(paths), **data},
    }
    return config_of(given)


def test_training_is_mixed_as_configured_and_evaluation_never(uneven: list[str]) -> None:
    cfg = config(uneven, mix={"_target_": "dtrain.data.mixing.Mix", "mixup_alpha": 0.2, "classes": 47})
    bf16 = Precision("bf16")
    training = train_loader(cfg, world(), bf16)
    evaluation = eval_loader(cfg, world(), bf16, in_stored_order=True)
    assert evaluation is not None
    batch = next(iter(training)).to("cpu")
    assert batch["label"].shape == (12, 47)
    assert batch["label"].dtype == torch.float32  # the role says nothing of it any more
    assert training.transfer.suggestions(batch) == []
    assert next(iter(evaluation))["label"].tolist() == list(range(12))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 47, dtype=torch.bfloat16))
    with torch.no_grad():
        output = Classification()(model, batch)
        expected = -(batch["label"].double() * model(batch["image"]).double().log_softmax(dim=1)).sum()
    assert float(output.loss_sum) == pytest.approx(float(expected), rel=1e-4)


def test_a_mix_that_is_none_is_refused_with_what_it_is(uneven: list[str]) -> None:
    with refused(ConfigError, "data.mix", "builtins.dict", "dtrain.data.mixing.Mix"):
        train_loader(config(uneven, mix={"_target_": "builtins.dict"}), world(), Precision("fp32"))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["one of them above 0"]),
        ({"mixup_alpha": -1.0, "cutmix_alpha": 1.0}, ["mixup_alpha -1.0"]),
        ({"mixup_alpha": math.inf}, ["mixup_alpha inf"]),
        ({"mixup_alpha": 1.0, "probability": 1.5}, ["probability 1.5: want a number from 0 to 1"]),
        ({"mixup_alpha": 1.0, "switch_probability": -0.1}, ["switch_probability -0.1"]),
        ({"mixup_alpha": 1.0, "classes": 0}, ["classes 0"]),
        ({"mixup_alpha": 1.0, "classes": 10.0}, ["classes 10.0"]),
    ],
)
def test_impossible_numbers_are_refused(options: dict[str, Any], names: list[str]) -> None:
    with refused(ValueError, *names):
        Mix(**{"classes": 10, **options})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"image": "picture"}, "data.mix.image: 'picture' .*Images: image"),
        ({"image": "label"}, "data.mix.image: 'label' .*Images: image"),
        ({"label": "image"}, "data.mix.label: 'image' .*Labels: label"),
        ({"classes": 10}, r"sample 'shard-.*' is of class \d+, but there are 10 classes, 0 to 9"),
    ],
)
def test_a_mix_that_does_not_fit_the_data_is_refused(uneven: list[str], options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        list(make_loader(uneven, FIELDS, mix=Mix(**{"classes": 47, "mixup_alpha": 1.0, **options})))


def test_the_sample_of_an_impossible_class_is_named_where_a_masked_row_before_it_repeats_it(tmp_path: Path) -> None:
    samples = [(f"s{n}", {"jpg": jpeg(n)[:-60] if n == 0 else jpeg(n), "cls": b"9"}) for n in range(2)]
    path = write_tar(tmp_path / "a.tar", samples)
    with refused(ValueError, "'a.tar/s1'", "class 9", "5 classes"):
        list(make_loader([path], FIELDS, mix=Mix(5, 1.0), shuffle="none"))


def test_labels_that_are_no_class_numbers_are_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [(f"s{n}", {"jpg": jpeg(n), "txt": b"cat"}) for n in range(2)])
    fields = IMAGE | {"txt": {"name": "label"}}
    with refused(ValueError, "'label'", "no numbers", "number of a class"):
        list(ShardLoader([path], fields, global_batch_size=2, num_workers=0, mix=Mix(9, 1.0)))

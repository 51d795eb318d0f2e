"""What packing commands share: where shards begin, and how samples are assigned to splits."""

import io
import tarfile
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.pack.command import ShardSize, assign_to_splits, check_shares, tar_bytes
from tests.refusals import refused


@given(st.integers(0, 5000))
def test_a_member_is_as_large_as_tarfile_writes_it(size):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        info = tarfile.TarInfo("a.bin")
        info.size = size
        tar.addfile(info, io.BytesIO(bytes(size)))
        assert tar_bytes(size) == stream.tell()


@given(st.lists(st.integers(512, 200_000), min_size=1, max_size=300), st.integers(1, 20))
def test_shards_by_megabytes_hold_every_sample_and_differ_by_about_one(sizes, tenths):
    bounds = ShardSize(megabytes=tenths / 10).bounds(len(sizes), np.array(sizes))
    assert (bounds[0], bounds[-1]) == (0, len(sizes))
    assert all(np.diff(bounds) > 0)
    weights = [sum(sizes[start:stop]) for start, stop in pairwise(bounds)]
    assert max(weights) <= tenths * 100_000 + 2 * max(sizes)
    assert max(weights) - min(weights) <= 2 * max(sizes)


@pytest.mark.slow
@given(st.integers(1, 10_000), st.integers(512, 100_000), st.integers(1, 50))
def test_samples_of_one_size_are_spread_to_within_one(count, sample_bytes, tenths):
    sizes = np.diff(ShardSize(megabytes=tenths / 10).bounds(count, sample_bytes))
    assert sizes.sum() == count
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("megabytes", [0, -1.0, float("nan")])
def test_impossible_megabytes_are_refused(megabytes):
    with refused(ValueError, "--shard-mb", megabytes, "more than 0"):
        ShardSize(megabytes=megabytes).bounds(5, 100)


@given(st.integers(0, 300), st.lists(st.sampled_from([0.1, 0.2, 0.25]), max_size=3), st.integers(0, 100))
def test_every_sample_is_in_one_split(count, fractions, seed):
    shares = {f"split{number}": fraction for number, fraction in enumerate(fractions)}
    assigned = assign_to_splits(np.random.default_rng(seed).permutation(count), "train", shares)
    assert list(assigned) == ["train", *shares]
    assert sorted(number for numbers in assigned.values() for number in numbers) == list(range(count))
    assert all(len(assigned[name]) == round(share * count) for name, share in shares.items())


@pytest.mark.parametrize(
    "shares", [{"val": 0.0}, {"val": -0.1, "test": 0.2}, {"val": 0.5, "test": 0.5}, {"train": 0.1}]
)
def test_impossible_shares_are_refused(shares):
    with refused(ValueError, key="", remedy="shares above 0 that sum to less than 1") as refusal:
        check_shares("train", shares)
    assert str(shares) in str(refusal.value)

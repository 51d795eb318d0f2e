"""Cuts: every sample in one shard, and shards that are alike."""

import io
import tarfile
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.packing.sizes import ShardSize, tar_bytes


@given(st.integers(0, 5000))
def test_a_member_takes_what_tarfile_writes(size):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        info = tarfile.TarInfo("a.bin")
        info.size = size
        tar.addfile(info, io.BytesIO(bytes(size)))
        assert tar_bytes(size) == stream.tell()


@given(st.lists(st.integers(512, 200_000), min_size=1, max_size=300), st.integers(1, 20))
def test_shards_by_megabytes_hold_all_and_differ_by_a_sample_or_so(sizes, tenths):
    cut = ShardSize(megabytes=tenths / 10).cut(len(sizes), np.array(sizes))
    assert (cut[0], cut[-1]) == (0, len(sizes))
    assert all(np.diff(cut) > 0)
    weights = [sum(sizes[start:stop]) for start, stop in pairwise(cut)]
    assert max(weights) <= tenths * 100_000 + 2 * max(sizes)
    assert max(weights) - min(weights) <= 2 * max(sizes)


@given(st.integers(1, 10_000), st.integers(512, 100_000), st.integers(1, 50))
def test_samples_of_one_size_are_spread_to_within_one(count, sample_bytes, tenths):
    sizes = np.diff(ShardSize(megabytes=tenths / 10).cut(count, sample_bytes))
    assert sizes.sum() == count
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("megabytes", [0, -1.0, float("nan")])
def test_impossible_megabytes_are_refused(megabytes):
    with pytest.raises(ValueError, match="want more than 0"):
        ShardSize(megabytes=megabytes).cut(5, 100)

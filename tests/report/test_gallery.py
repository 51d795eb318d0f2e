"""Pages of samples: pictures without loss where pixels count, curves without lost peaks, and nothing that data can run."""

from __future__ import annotations

import io
import re

import numpy as np
from PIL import Image

from dtrain.report.gallery import MOST_PIXELS, Box, Card, Curve, Part, Picture, Table, Text, gallery_page


def test_small_pictures_keep_their_pixels_and_large_ones_are_reduced() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    small = Picture.from_pixels(pixels)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(small.content))), pixels)
    assert small.is_enlarged
    large = Picture.from_pixels(np.zeros((300, 3000, 3), np.uint8))
    assert Image.open(io.BytesIO(large.content)).size == (MOST_PIXELS, round(MOST_PIXELS / 10))
    assert large.size == (3000, 300)
    assert large.shown[0] < 200


def test_no_peak_of_a_long_curve_is_lost() -> None:
    values = np.zeros(100_000)
    values[54_321], values[77_777] = 5, -5
    curve = Curve.from_values(values, "")
    heights = [float(point.split()[1]) for point in re.split("[ML]", curve.path)[1:]]
    assert (min(heights), max(heights)) == (0, 100)
    assert len(heights) < 1000


def test_a_curve_has_gaps_where_values_are_not_finite() -> None:
    assert Curve.from_values(np.array([1, np.nan, 2, np.inf, 3.0]), "").path.count("M") == 3
    assert Curve.from_values(np.array([np.nan]), "").path == ""


def test_everything_is_escaped_and_the_page_runs_and_loads_nothing() -> None:
    evil = "<script>alert(1)</script>\" onload='x'"
    picture = Picture.from_pixels(np.zeros((4, 4, 3), np.uint8), evil, [Box(0.1, 0.2, 0.3, 0.4)])
    card = Card(
        evil, [picture], [Curve.from_values(np.arange(9), evil)], [Text(evil, [evil, evil], evil)], [(evil, evil)], evil
    )
    table = Table([evil, evil], [[evil, evil]], (1,), [0.5], evil)
    page = gallery_page(evil, "dtrain show of", 0.0, [Part(evil, evil, [("warning", evil)], [table], [card])])
    assert "<script" not in page
    assert "onload='x'" not in page
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    assert '<rect class="over" x="10.0" y="20.0" width="30.0" height="40.0"/>' in page

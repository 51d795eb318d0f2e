"""The pages of ``dtrain show`` in a real browser: nothing is loaded, nothing is wider than the window, in both themes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.browser import view
from tests.shards import jpeg, npy, write_tar
from tests.show.data_for_tests import FLIP, show, write_classes

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
LOADED = (
    "[...document.images].filter(image => image.naturalWidth > 0 && image.getBoundingClientRect().width > 20).length"
)
ALL = "document.images.length"
PAPER = "getComputedStyle(document.body).backgroundColor"
# How far each box lies outside of its picture, in pixels.
OUTSIDE = """Math.max(...[...document.querySelectorAll('.frame')].flatMap(frame => {
    const image = frame.querySelector('img').getBoundingClientRect();
    return [...frame.querySelectorAll('rect')].map(rect => {
        const box = rect.getBoundingClientRect();
        return Math.max(image.left - box.left, image.top - box.top, box.right - image.right, box.bottom - image.bottom); });
}))"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_with_faults_is_readable_and_loads_nothing(tmp_path: Path, width: int, dark: bool) -> None:
    show(tmp_path, "data=shards", *write_classes(tmp_path / "data"), FLIP, "--n", "30", "--nproc", "2")
    page = tmp_path / "page.html"
    seen = view(page, TOO_WIDE, LOADED, ALL, PAPER, width=width, dark=dark)
    assert seen.complaints == []
    assert seen.requests == [page.as_uri()]
    assert seen.results[TOO_WIDE] == 0
    assert seen.results[LOADED] == seen.results[ALL] > 30
    light = sum(map(int, seen.results[PAPER].strip("rgb()").split(","))) > 380
    assert light != dark


def test_boxes_lie_on_their_pictures(tmp_path: Path) -> None:
    boxes = [[2, 2, 30, 14], [40, 10, 60, 20]]
    samples = [
        (
            f"{n}",
            {
                "jpg": jpeg(n, 24, 64),
                "mask.npy": npy(np.eye(24, 64, dtype=np.uint8)),
                "json": json.dumps({"boxes": boxes}).encode(),
            },
        )
        for n in range(4)
    ]
    write_tar(tmp_path / "data.tar", samples)
    fields = (
        "data.fields={jpg: {name: image, size: [24, 64]}, mask.npy: {name: mask, role: target}, "
        "json: {name: boxes, role: coord, key: boxes}}"
    )
    show(tmp_path, "data=shards", f"data.train={tmp_path}/data.tar", fields)
    seen = view(tmp_path / "page.html", OUTSIDE, TOO_WIDE, width=390)
    assert seen.complaints == []
    assert seen.results[TOO_WIDE] == 0
    assert seen.results[OUTSIDE] <= 2  # the width of their lines

"""The picture of the front page is what its script draws from the run that is committed next to it."""

from __future__ import annotations

import importlib
import json
import re
from typing import Any

import pytest

from tests.doc_pages import ROOT


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("story_picture")


def test_the_picture_is_drawn_from_the_committed_run(script: Any) -> None:
    story = json.loads(script.STORY.read_text())
    assert script.PICTURE.read_text() == script.draw(story), "stale: run `python scripts/story_picture.py`"


def test_the_run_was_killed_after_a_checkpoint_and_its_replays_are_equal(script: Any) -> None:
    story = json.loads(script.STORY.read_text())
    assert script.RANKS[0] != script.RANKS[1]
    assert story["resumed"] < story["killed"] < len(story["losses"])
    # The steps that were done twice have the same samples, so their losses differ by rounding only.
    again = story["losses"][story["resumed"] : story["killed"]]
    assert again == pytest.approx(story["lost_losses"], rel=1e-4)
    first, second = story["replays"]
    assert max(step for step, _, _ in first) <= story["resumed"] < min(step for step, _, _ in second)
    assert all(recorded == recomputed for _, recorded, recomputed in (*first, *second))


def test_the_picture_counts_steps_that_differ(script: Any) -> None:
    story = json.loads(script.STORY.read_text())
    story["replays"][1][0][2] *= 2
    picture = script.draw(story)
    assert re.findall(r"on (\d) ranks: (\d) of 5 steps equal", picture) == [("2", "5"), ("4", "4")]
    assert picture.count(" ≠ ") == 1

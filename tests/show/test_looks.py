"""How values look: boxes, masks, curves and tokens."""

from __future__ import annotations

import numpy as np
import pytest

from dtrain.data.fields.field import Field
from dtrain.report.gallery import Box
from dtrain.show.looks import Looks, boxes_of, coloured
from dtrain.show.split import Row

PIXELS = [[40, 10, 80, 30]]


@pytest.mark.parametrize(
    ("form", "box"),
    [("xyxy", Box(0.4, 0.2, 0.4, 0.4)), ("xywh", Box(0.4, 0.2, 0.8, 0.6)), ("cxcywh", Box(0.0, -0.1, 0.8, 0.6))],
)
def test_boxes_in_pixels_become_shares_of_the_picture(form: str, box: Box) -> None:
    assert boxes_of(np.array(PIXELS), (100, 50), form) == [box]


def test_boxes_in_shares_are_kept_and_those_without_area_left_out() -> None:
    rows = [[0.1, 0.2, 0.5, 0.6], [0, 0, 0, 0], [np.nan, 0, 1, 1], [0.5, 0.5, 0.4, 0.9]]
    assert boxes_of(np.array(rows), (100, 50), "xyxy") == [Box(0.1, 0.2, 0.4, 0.4)]
    assert boxes_of(np.zeros((3, 2)), (100, 50), "xyxy") == []  # key points


def test_each_number_of_a_mask_has_a_colour_of_its_own() -> None:
    mask = np.arange(16, dtype=np.uint8).reshape(4, 4)
    colours = coloured(mask)
    assert colours[0, 0].tolist() == [0, 0, 0]
    assert len({tuple(colour) for colour in colours.reshape(-1, 3).tolist()}) == 16


def test_a_mask_of_the_size_of_the_image_is_shown_on_it() -> None:
    fields = [Field("jpg", "image"), Field("mask.npy", "mask", "target")]
    image, mask = np.full((8, 8, 3), 200, np.uint8), np.zeros((8, 8), np.int64)
    mask[:4] = 3
    row = Row("a/b", None, 0, 0, {"image": image, "mask": mask})
    card = Looks().card(row, {}, fields)
    assert [picture.caption.split()[0] for picture in card.pictures] == ["seen", "mask"]
    assert "on the image" in card.pictures[1].caption


def test_sound_is_a_curve_and_its_padding_is_not_drawn() -> None:
    field = Field("npy", "sound", "audio", length=100)
    sound, mask = np.zeros((1, 100), np.float32), np.arange(100) < 50
    sound[0, :50] = np.sin(np.arange(50))
    card = Looks().card(Row("a/b", None, 0, 0, {"sound": sound, "sound_mask": mask}), {}, [field])
    [curve] = card.curves
    ends = [float(point.split()[0]) for point in curve.path.replace("M", "L").split("L")[1:]]
    assert max(ends) == pytest.approx(100 * 49 / 99, abs=0.02)
    assert "100 values" in curve.caption


def test_labels_have_their_names_and_mixed_labels_their_shares() -> None:
    looks, field = Looks(["ant", "bee", "cat"]), Field("cls", "label")
    one = looks.card(Row("a", None, 0, 0, {"label": np.asarray(2)}), {}, [field])
    assert one.facts == [("label", "cat")]
    mixed = looks.card(Row("a", None, 0, 0, {"label": np.array([0.25, 0.75, 0], np.float32)}), {}, [field])
    assert mixed.facts == [("label", "bee 0.75, ant 0.25")]
    assert looks.class_name(7) == "7"


def test_tokens_without_a_tokenizer_are_numbers() -> None:
    field = Field("tok", "tokens", dtype="uint16", length=9)
    card = Looks().card(Row("a", None, 0, 0, {"tokens": np.arange(1000, 1009, dtype=np.uint16)}), {}, [field])
    assert card.texts[0].documents == ["1000 1001 1002 1003 1004 1005 1006 1007 1008"]

import numpy as np
import pytest

from dtrain.config.schema import TrackerConfig
from dtrain.tracking import build_sinks
from dtrain.tracking.media import cut_media_after, write_media
from tests.tracking.pictures import png


def test_pictures_and_texts_lie_under_their_name_and_step(tmp_path):
    picture = png(3, 2)
    assert write_media(tmp_path, 50, "confusion", picture) == tmp_path / "confusion" / "step-000000050.png"
    write_media(tmp_path, 7, "sample", "def é():\n")
    assert (tmp_path / "confusion" / "step-000000050.png").read_bytes() == picture
    assert (tmp_path / "sample" / "step-000000007.txt").read_text(encoding="utf-8") == "def é():\n"
    assert len(list(tmp_path.rglob("*"))) == 4


@pytest.mark.parametrize("name", ["", ".", "..", "../out", "a/b", "a b", ".hidden", "/root", "a\\b"])
def test_a_name_that_is_no_folders_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="letters, digits"):
        write_media(tmp_path, 1, name, "text")
    assert not list(tmp_path.iterdir())


def test_bytes_that_are_no_png_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"media 'plot': got bytes that begin with b'GIF89a"):
        write_media(tmp_path, 1, "plot", b"GIF89a")


@pytest.mark.parametrize("content", [np.zeros((2, 2), np.uint8), bytearray(png(3, 2)), None])
def test_what_is_neither_a_png_file_nor_a_text_is_refused_and_not_written(tmp_path, content):
    with pytest.raises(ValueError, match=f"media 'plot': got a {type(content).__name__}, want the bytes of a PNG"):
        write_media(tmp_path, 1, "plot", content)
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_drops_the_media_that_it_makes_again_and_nothing_else(tmp_path):
    for step in (0, 10, 20, 30):
        write_media(tmp_path / "media", step, "sample", str(step))
    (tmp_path / "media" / "sample" / "notes.txt").touch()
    build_sinks_of(tmp_path, 20).finish("finished")
    assert names(tmp_path) == ["notes.txt", "step-000000000.txt", "step-000000010.txt", "step-000000020.txt"]
    build_sinks_of(tmp_path, 0).finish("finished")
    assert names(tmp_path) == ["notes.txt"]
    cut_media_after(tmp_path / "nothing", 3)


def build_sinks_of(run_dir, resumed):
    return build_sinks(TrackerConfig(), run_dir, "digits-12", {}, resumed)


def names(run_dir):
    return sorted(path.name for path in (run_dir / "media" / "sample").iterdir())

"""``dtrain pack``: content of the shards, skipped files, and errors of one line."""

import io
import json
import os
import shlex
import subprocess
import sys
import tarfile
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from webdataset.tariterators import base_plus_ext

from dtrain import command_line, train
from dtrain.data import ShardLoader
from dtrain.pack.__main__ import main
from dtrain.pack.staging import StagedDataset
from tests.forked_python import forked_python
from tests.ranks import run_ranks
from tests.whole_runs import metrics, records


def image(path, seed, size=(6, 5)):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def source(tmp_path):
    """Three classes, twelve images each, in two formats."""
    for label, name in enumerate(["cat", "dog", "eel"]):
        for n in range(12):
            image(tmp_path / "src" / name / f"{n:02d}.{'png' if n % 3 == 0 else 'JPEG'}", label * 100 + n)
    return tmp_path / "src"


def rows(folder, prefix):
    """(key, extension, bytes, label) of every sample in order; read by tarfile, keys as in webdataset."""
    found = []
    for path in sorted(folder.glob(f"{prefix}-*.tar")):
        with tarfile.open(path) as archive:
            content = {member.name: archive.extractfile(member).read() for member in archive}
        for name, payload in content.items():
            key, ext = base_plus_ext(name)
            if ext != "cls":
                found.append((key, ext, payload, int(content[f"{key}.cls"])))
    return found


def files(folder):
    others = (".packed.json", "conf")
    return sorted(path.name for path in folder.glob("*") if path.suffix != ".idx" and path.name not in others)


def content(folder):
    """Name and content of every file but indexes, which hold the modification time of their shard."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if path.suffix != ".idx"}


def pack(*arguments):
    return main(["imagefolder", *map(str, arguments)])


def test_every_image_is_packed_once_unchanged_with_the_label_of_its_folder(source, tmp_path):
    assert pack(source, tmp_path / "dst", "--shards", 4) == 0
    assert files(tmp_path / "dst") == ["classes.json", *(f"train-{n:06d}.tar" for n in range(4))]
    assert json.loads((tmp_path / "dst" / "classes.json").read_text()) == ["cat", "dog", "eel"]
    packed = rows(tmp_path / "dst", "train")
    expected = sorted(
        (f"{path.parent.name}/{path.stem}", "png" if path.suffix == ".png" else "jpg", path.read_bytes(), label)
        for label, name in enumerate(["cat", "dog", "eel"])
        for path in (source / name).iterdir()
    )
    assert sorted(packed) == expected


def test_the_loader_returns_the_pixels(source, tmp_path):
    for path in source.rglob("*.JPEG"):
        path.unlink()
    assert pack(source, tmp_path / "dst", "--shards", 2) == 0
    fields = {"png": {"name": "image", "role": "image"}, "cls": {"name": "label"}}
    shards = str(tmp_path / "dst" / "train-*.tar")
    (batch,) = ShardLoader(shards, fields, global_batch_size=12, num_workers=0).epoch(0)
    for row, key in enumerate(batch.sample_keys):
        name = key.partition("/")[2]
        np.testing.assert_array_equal(batch["image"][row].numpy(), np.asarray(Image.open(source / f"{name}.png")))
        assert ["cat", "dog", "eel"][batch["label"][row]] == name.partition("/")[0]


def test_classes_mix_and_the_seed_determines_the_order(source, tmp_path):
    orders = {}
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        assert pack(source, tmp_path / name, "--samples-per-shard", 10, "--seed", seed) == 0
        orders[name] = [key for key, *_ in rows(tmp_path / name, "train")]
    assert orders["one"] == orders["again"] != orders["other"]
    for path in (tmp_path / "one").glob("*.tar"):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
        with tarfile.open(path) as archive:
            classes = Counter(member.name.split("/")[0] for member in archive)
        assert len(classes) == 3
        assert sum(classes.values()) == 18


def test_split_folders_become_prefixes(source, tmp_path):
    for split in ("train", "val", "test"):
        for name in ("cat", "dog"):
            for n in range(3 if split == "train" else 1):
                image(tmp_path / "splits" / split / name / f"{n}.png", n)
    assert pack(tmp_path / "splits", tmp_path / "dst", "--shards", 1) == 0
    counts = {split: len(rows(tmp_path / "dst", split)) for split in ("train", "val", "test")}
    assert counts == {"train": 6, "val": 2, "test": 2}


def test_splits_get_a_fraction_of_every_class(source, tmp_path):
    assert pack(source, tmp_path / "dst", "--split", "val=0.25", "--split", "test=0.5") == 0
    found = {split: rows(tmp_path / "dst", split) for split in ("train", "val", "test")}
    for split, per_class in (("train", 3), ("val", 3), ("test", 6)):
        assert Counter(label for *_, label in found[split]) == dict.fromkeys(range(3), per_class)
    assert len({key for split in found.values() for key, *_ in split}) == 36


def test_names_with_the_same_key_get_unique_keys(tmp_path):
    names = ["img_0.5.png", "img_0.7.png", "img_0_5.png", "same.jpg", "same.png", "ümlaut " + "x" * 120 + ".png"]
    for n, name in enumerate([*names, "below/same.png"]):
        image(tmp_path / "src" / "v1.0" / name, n)
    assert pack(tmp_path / "src", tmp_path / "dst") == 0
    packed = rows(tmp_path / "dst", "train")
    assert len({key for key, *_ in packed}) == 7
    assert {payload for _, _, payload, _ in packed} == {
        path.read_bytes() for path in (tmp_path / "src").rglob("*") if path.is_file()
    }


BAD = {
    "cat/notes.txt": (b"text", "its name"),
    "cat/Makefile": (b"all:", "its name"),
    "stray.png": (b"", "is next to the folders of the classes"),
    "dog/broken.png": (b"no image", "not a readable image"),
    "dog/empty.jpg": (b"", "not a readable image"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_not_an_image_is_an_error_that_names_it(source, tmp_path, capsys, name):
    (source / name).write_bytes(BAD[name][0])
    assert pack(source, tmp_path / "dst") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(source / name) in error
    assert BAD[name][1] in error
    assert "--bad skip" in error
    assert files(tmp_path / "dst") == []


def test_bad_skip_lists_the_skipped_files(source, tmp_path, capsys):
    for name, (content, _) in BAD.items():
        (source / name).write_bytes(content)
    assert pack(source, tmp_path / "dst", "--bad", "skip", "--shards", 5) == 0
    out, error = capsys.readouterr()
    for name, (_, reason) in BAD.items():
        assert f"skipped {source / name}: {reason}" in error
    assert "unreadable images: 2, other files: 3," in out
    assert len(rows(tmp_path / "dst", "train")) == 36


def test_verify_finds_truncated_images(source, tmp_path, capsys):
    whole = image(source / "cat" / "cut.png", 5, (40, 40))
    whole.write_bytes(whole.read_bytes()[:-400])
    assert pack(source, tmp_path / "one") == 0
    assert pack(source, tmp_path / "two", "--verify") == 1
    assert "cut.png: not a readable image" in capsys.readouterr().err


def test_labels_agree_between_splits_packed_by_several_commands(source, tmp_path, capsys):
    image(tmp_path / "more" / "eel" / "1.png", 1)
    assert pack(source, tmp_path / "dst") == 0
    assert pack(tmp_path / "more", tmp_path / "dst", "--prefix", "val") == 0
    assert [label for *_, label in rows(tmp_path / "dst", "val")] == [2]
    image(tmp_path / "more" / "fox" / "1.png", 1)
    assert pack(tmp_path / "more", tmp_path / "dst", "--prefix", "test") == 1
    error = capsys.readouterr().err
    assert "no class 'fox' among cat, dog, eel" in error
    assert "choose a different DST" in error


@pytest.mark.parametrize(
    ("prepare", "arguments", "names"),
    [
        (
            lambda source: None,
            ["SRC/none", "DST"],
            ("SRC/none", "is not a folder", "one folder of images for each class"),
        ),
        (lambda source: None, ["SRC/cat", "DST"], ("SRC/cat/", "next to the folders of the classes", "--bad skip")),
        (lambda source: (source / "empty").mkdir(), ["SRC/empty", "DST"], ("SRC/empty", "Expected one folder")),
        (lambda source: (source / "a" / "b").mkdir(parents=True), ["SRC/a", "DST"], ("'train'", "Add images")),
        (lambda source: None, ["SRC", "SRC/dst"], ("SRC/dst", "Choose a different")),
        (lambda source: None, ["SRC", "DST", "--shards", "37"], ("37 shards", "36 or fewer")),
        (lambda source: None, ["SRC", "DST", "--shards", "0"], ("shards=0", "at least 1")),
        (lambda source: None, ["SRC", "DST", "--samples-per-shard", "0"], ("per_shard=0", "at least 1")),
        (lambda source: None, ["SRC", "DST", "--split", "val=1.5"], ("'val': 1.5", "sum to less than 1")),
        (lambda source: None, ["SRC", "DST", "--split", "val=0.01"], ("'val'", "increase the share")),
        (lambda source: None, ["SRC", "DST", "--prefix", "a/b"], ("'a/b'", "plain name")),
        (
            lambda source: image(source / "train" / "cat" / "1.png", 0),
            ["SRC", "DST"],
            ("splits train", "'cat'", "Pack each split by itself"),
        ),
        (
            lambda source: (source / "cat" / "loop").symlink_to(source / "cat"),
            ["SRC", "DST"],
            ("SRC/cat/loop", "count twice", "Remove the link"),
        ),
    ],
)
def test_errors_are_one_line_and_leave_no_shard(source, tmp_path, capsys, prepare, arguments, names):
    def resolved(text):
        return text.replace("SRC", str(source)).replace("DST", str(tmp_path / "dst"))

    prepare(source)
    assert pack(*map(resolved, arguments)) == 1
    error = capsys.readouterr().err
    assert error.startswith("pack: error: ")
    assert error.count("\n") == 1
    for name in names:
        assert resolved(name) in error
    assert files(tmp_path / "dst") == []


def test_a_class_without_training_images_is_refused(tmp_path, capsys):
    image(tmp_path / "src" / "train" / "cat" / "1.png", 0)
    image(tmp_path / "src" / "val" / "dog" / "1.png", 0)
    assert pack(tmp_path / "src", tmp_path / "dst") == 1
    assert "'dog' has no folder in train" in capsys.readouterr().err


def test_packed_shards_are_not_overwritten(source, tmp_path, capsys):
    assert pack(source, tmp_path / "dst") == 0
    before = content(tmp_path / "dst")
    assert pack(source, tmp_path / "dst", "--seed", 1) == 1
    assert "Delete them" in capsys.readouterr().err
    assert content(tmp_path / "dst") == before


def test_a_wrong_usage_exits_with_2_and_help_with_0(capsys):
    for arguments, code in ((["imagefolder"], 2), ([], 2), (["imagefolder", "a", "b", "--split", "val"], 2)):
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == code
    for arguments in (
        ["--help"],
        ["imagefolder", "--help"],
        ["arrays", "--help"],
        ["text", "--help"],
        ["index", "--help"],
        ["digits", "--help"],
    ):
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == 0


def test_an_index_is_written_with_the_shards(source, tmp_path):
    assert pack(source, tmp_path / "dst", "--shards", 2) == 0
    assert len(list((tmp_path / "dst").glob("*.tar.idx"))) == 2


def test_index_counts_what_tarfile_counts(source, tmp_path, capsys):
    assert pack(source, tmp_path / "dst", "--shards", 3) == 0
    for path in (tmp_path / "dst").glob("*.idx"):
        path.unlink()
    capsys.readouterr()
    assert main(["index", str(tmp_path / "dst" / "train-{000000..000002}.tar")]) == 0
    out = capsys.readouterr().out
    assert "shards: 3, samples: 36" in out
    assert "cls 36, jpg 24, png 12" in out
    assert len(list((tmp_path / "dst").glob("*.idx"))) == 3


def test_index_names_every_damaged_shard_and_counts_the_others(source, tmp_path, capsys):
    assert pack(source, tmp_path / "dst", "--shards", 3) == 0
    damaged = [tmp_path / "dst" / f"train-{n:06d}.tar" for n in (0, 2)]
    for shard in damaged:
        os.truncate(shard, 2000)
    capsys.readouterr()
    assert main(["index", str(tmp_path / "dst" / "*.tar")]) == 1
    out, error = capsys.readouterr()
    assert "shards: 3, samples: 12" in out
    assert all(str(shard) in error for shard in damaged)
    assert "2 of 3 shards are damaged" in error


@pytest.mark.slow
def test_index_prints_the_same_for_any_number_of_processes(source, tmp_path, capsys):
    assert pack(source, tmp_path / "dst", "--shards", 3) == 0
    printed = []
    for processes in ("1", "2"):
        capsys.readouterr()
        assert main(["index", str(tmp_path / "dst" / "*.tar"), "--processes", processes]) == 0
        printed.append(capsys.readouterr().out.splitlines()[:2])
    assert printed[0] == printed[1]


def test_digits_can_be_packed_anywhere(tmp_path, capsys):
    pytest.importorskip("sklearn")
    assert main(["digits", str(tmp_path / "dst")]) == 0
    assert "1,437 train and 360 test images" in capsys.readouterr().out
    assert len(list((tmp_path / "dst").glob("*.tar"))) == 10


@pytest.mark.slow
def test_the_command_itself_fails_with_one_line_and_code_1(tmp_path):
    command = [sys.executable, "-m", "dtrain.pack", "imagefolder", str(tmp_path / "none"), str(tmp_path / "dst")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("pack: error: ")
    assert done.stderr.count("\n") == 1


def test_memory_holds_one_image(tmp_path):
    stream = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(stream, "PNG")
    for n in range(256):
        path = tmp_path / "src" / f"c{n % 4}" / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(stream.getvalue() + bytes(64 << 10))
    tracemalloc.start()
    try:
        assert pack(tmp_path / "src", tmp_path / "dst") == 0
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 256 * (64 << 10) / 8


def make_photos(folder):
    """Two classes, images of different sizes, two splits."""
    for label in range(2):
        for n in range(8):
            image(folder / "src" / f"c{label}" / f"{n}.png", n, size=(20 + n, 30 - label))
    return ["imagefolder", folder / "src", folder / "dst", "--val", 0.25]


def make_arrays(folder, *names):
    random = np.random.default_rng(0)
    arrays = {
        "x": random.standard_normal((16, 10)).astype(np.float32),
        "label": random.integers(0, 5, 16),
        "digit": random.integers(0, 256, (16, 12, 12), dtype=np.uint8),
        "price": random.standard_normal(16),
        "y": random.standard_normal((16, 3)).astype(np.float32),
    }
    for name in names:
        np.save(folder / f"{name}.npy", arrays[name])
    png = ["--png", "digit"] if "digit" in names else []
    return ["arrays", *(folder / f"{name}.npy" for name in names), folder / "dst", "--val", 0.25, *png]


def make_text(folder):
    (folder / "one.txt").write_text("".join(f"line {n} of a book\n" for n in range(100)))
    return ["text", folder / "one.txt", folder / "dst", "--length", 16, "--val", 0.05]


def arrays(model, *names):
    return pytest.param(lambda folder: make_arrays(folder, *names), model, id=", ".join(names))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "model"),
    [
        pytest.param(make_photos, "model.classes=2", id="photos of different sizes"),
        pytest.param(make_text, "model.vocabulary=257", id="a single text file"),
        arrays("model.classes=", "digit", "label"),
        arrays("model.widths=[10,64,1]", "x", "price"),
        arrays("model.widths=[10,64,", "x", "label"),
        arrays("model.widths=[10,64,3]", "x", "y"),
    ],
)
def test_exactly_the_printed_command_trains(tmp_path, capsys, make, model):
    assert main([str(word) for word in make(tmp_path)]) == 0
    program, *arguments = shlex.split(capsys.readouterr().out.splitlines()[-1].partition("dtrain ")[2])
    assert program == "train"
    assert any(argument.startswith(model) for argument in arguments)
    short = [f"run.dir={tmp_path / 'run'}", "tracker=none", "train.global_batch_size=4", "train.max_steps=1"]
    run_ranks(1, lambda rank: command_line.run(train.train, [*arguments, *short]), init=False, timeout=120)
    assert metrics(tmp_path / "run", "eval/loss")


@pytest.mark.slow
def test_the_printed_command_trains_in_a_shell(tmp_path, capsys):
    assert main([str(word) for word in make_photos(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()[-1]
    command = printed.replace("dtrain ", f"{forked_python()} -m dtrain ", 1)
    done = subprocess.run(
        ["bash", "-c", f"{command} tracker=none run.dir=run"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert max(line["samples"] for line in records(tmp_path / "run")) == 12


def test_where_no_model_fits_the_command_names_the_users_own(tmp_path, capsys):
    np.save(tmp_path / "ids.npy", np.arange(12).reshape(6, 2))
    assert main(["arrays", str(tmp_path / "ids.npy"), str(tmp_path / "dst")]) == 0
    out = capsys.readouterr().out
    assert "your own model and task" in out
    assert "model._target_=my_package.MyModel task._target_=my_package.MyTask" in out


# -- the preset of images


def packed_preset(folder):
    return yaml.safe_load((folder / "conf" / "data" / "packed.yaml").read_text())


def test_images_of_one_size_keep_it(source, tmp_path, capsys):
    assert pack(source, tmp_path / "dst") == 0
    preset = packed_preset(tmp_path / "dst")
    assert preset["fields"]["jpg;png"] == {"name": "image", "role": "image", "exif": True}
    assert "num_workers" not in preset
    assert "images have 6 x 5 pixels" in capsys.readouterr().out


@pytest.mark.parametrize(("sides", "size"), [((30, 50, 70), 48), ((300, 500, 250), 224), ((9, 10, 12), 10)])
def test_images_of_different_sizes_are_resized_to_their_median(tmp_path, capsys, sides, size):
    for n, side in enumerate(sides):
        image(tmp_path / "src" / "c" / f"{n}.png", n, size=(side, side + 9))
    assert pack(tmp_path / "src", tmp_path / "dst") == 0
    preset = packed_preset(tmp_path / "dst")
    assert preset["image_size"] == size
    assert preset["fields"]["png"]["size"] == "${data.image_size}"
    out = capsys.readouterr().out
    assert f"resized to {size} x {size}" in out
    assert "data.image_size" in out


def test_a_photo_that_a_camera_was_turned_for_has_its_turned_size(tmp_path):
    for n, orientation in enumerate((1, 6)):
        path = tmp_path / "src" / "c" / f"{n}.jpg"
        exif = Image.Exif()
        exif[0x0112] = orientation
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((10, 20, 3), np.uint8)).save(path, exif=exif)
    assert pack(tmp_path / "src", tmp_path / "dst") == 0
    assert packed_preset(tmp_path / "dst")["image_size"] == 10


def test_a_second_split_keeps_the_formats_and_the_size_of_the_first(tmp_path):
    image(tmp_path / "train" / "c" / "1.png", 1, size=(40, 40))
    image(tmp_path / "train" / "c" / "2.png", 2, size=(50, 40))
    image(tmp_path / "val" / "c" / "3.jpg", 3, size=(20, 20))
    assert pack(tmp_path / "train", tmp_path / "dst") == 0
    assert pack(tmp_path / "val", tmp_path / "dst", "--prefix", "val") == 0
    preset = packed_preset(tmp_path / "dst")
    assert preset["fields"]["jpg;png"]["size"] == "${data.image_size}"
    assert preset["image_size"] == 40


def test_files_of_the_system_are_ignored_and_counted(source, tmp_path, capsys):
    for name in (
        ".DS_Store",
        "cat/.DS_Store",
        "cat/Thumbs.db",
        "cat/._1.jpg",
        "dog/desktop.ini",
        ".git/x",
        "__MACOSX/1.jpg",
    ):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"x")
    assert pack(source, tmp_path / "dst") == 0
    assert "ignored (hidden or of the system): 7" in capsys.readouterr().out
    assert json.loads((tmp_path / "dst" / "classes.json").read_text()) == ["cat", "dog", "eel"]
    assert len(rows(tmp_path / "dst", "train")) == 36


def test_images_packed_without_the_bad_ones_are_not_finished_for_a_command_that_stops_at_them(source, tmp_path, capsys):
    (source / "cat" / "00.png").write_bytes(b"no image")
    assert pack(source, tmp_path / "dst", "--bad", "skip") == 0
    capsys.readouterr()
    assert pack(source, tmp_path / "dst", "--bad", "skip") == 0
    assert "already" in capsys.readouterr().out
    assert pack(source, tmp_path / "dst") == 1
    assert "Delete them" in capsys.readouterr().err


def test_an_interrupted_command_still_counts_its_skipped_files(source, tmp_path, capsys, monkeypatch):
    (source / "dog" / "broken.png").write_bytes(b"no image")
    publish = StagedDataset.publish
    monkeypatch.setattr(StagedDataset, "publish", lambda self, extra_files: (_ for _ in ()).throw(KeyboardInterrupt))
    assert pack(source, tmp_path / "dst", "--bad", "skip") == 130
    assert "Run the same command again" in capsys.readouterr().err
    monkeypatch.setattr(StagedDataset, "publish", publish)
    assert pack(source, tmp_path / "dst", "--bad", "skip") == 0
    assert "unreadable images: 1" in capsys.readouterr().out


def test_shards_by_megabytes_have_similar_sizes(tmp_path):
    for n in range(60):
        path = image(tmp_path / "src" / "c" / f"{n}.png", n)
        path.write_bytes(path.read_bytes() + bytes(n * 1000))
    assert pack(tmp_path / "src", tmp_path / "dst", "--shard-mb", 0.5) == 0
    sizes = [path.stat().st_size for path in (tmp_path / "dst").glob("*.tar")]
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) < 2 * 64_000
    assert len(rows(tmp_path / "dst", "train")) == 60


@pytest.mark.slow
def test_a_bad_image_found_by_another_process_is_named(source, tmp_path, capsys):
    (source / "dog" / "broken.png").write_bytes(b"no image")
    assert pack(source, tmp_path / "dst", "--shards", 2, "--processes", 2) == 1
    error = capsys.readouterr().err
    assert "broken.png: not a readable image" in error
    assert "Traceback" not in error
    assert "broken.png" in error.splitlines()[-1]  # there may be lines of progress before it

"""Atomic replacement: what is there after an error, after a kill at any moment, and with several writers."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from dtrain import files
from dtrain.files import (
    create_folder,
    cut_lines,
    open_regular,
    open_to_append,
    replace_file,
    replace_folder,
    restore_replaced,
)
from tests.refusals import refused


def write_file(path: Path, text: str) -> None:
    with replace_file(path) as file:
        file.write(text.encode())


def write_folder(path: Path, text: str) -> None:
    with replace_folder(path) as staged:
        (staged / "inner").mkdir()
        (staged / "inner" / "content").write_text(text)


def content(path: Path) -> str:
    return (path / "inner" / "content" if path.is_dir() else path).read_text()


WRITERS = pytest.mark.parametrize("write", [write_file, write_folder])


@WRITERS
def test_new_content_replaces_old_content_and_nothing_else_is_left(
    tmp_path: Path, write: Callable[[Path, str], None]
) -> None:
    for text in ("old", "new"):
        write(tmp_path / "name", text)
        assert content(tmp_path / "name") == text
        assert os.listdir(tmp_path) == ["name"]


@WRITERS
def test_a_write_failure_keeps_the_old_content(
    tmp_path: Path, write: Callable[[Path, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    write(tmp_path / "name", "old")
    monkeypatch.setattr(files.os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "name", "new")
    monkeypatch.undo()
    assert content(tmp_path / "name") == "old"
    assert os.listdir(tmp_path) == ["name"]


def test_a_folder_whose_replacement_never_gets_its_name_has_its_own_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def refuse_new(source: Path, target: Path) -> None:
        if source.name.endswith(".staged"):
            raise OSError(28, "No space left on device")
        rename(source, target)

    write_folder(tmp_path / "name", "old")
    monkeypatch.setattr(files.os, "rename", refuse_new)
    with pytest.raises(OSError, match="No space left"):
        write_folder(tmp_path / "name", "new")
    assert content(tmp_path / "name") == "old"
    assert os.listdir(tmp_path) == ["name"]


@pytest.mark.slow
@WRITERS
def test_a_kill_before_any_change_on_the_disk_leaves_old_or_new_content(
    tmp_path: Path, write: Callable[[Path, str], None]
) -> None:
    changes = ("open", "mkdir", "rename", "replace", "unlink", "rmdir", "chmod", "fsync")
    killed = 1
    for number in range(100):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder / "name", "old")
        if (child := os.fork()) == 0:
            left = [number]

            def counted(function: Callable[..., object], left: list[int] = left) -> Callable[..., object]:
                def call(*args: object, **kwargs: object) -> object:
                    if not left[0]:
                        os._exit(9)
                    left[0] -= 1
                    return function(*args, **kwargs)

                return call

            for name in changes:
                setattr(os, name, counted(getattr(os, name)))
            write(folder / "name", "new")
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        restore_replaced(folder)
        assert content(folder / "name") in ("old", "new")
        write(folder / "name", "newest")
        assert content(folder / "name") == "newest"
        assert os.listdir(folder) == ["name"]
        if not killed:
            break
    assert killed == 0
    assert number >= 4


@WRITERS
def test_everything_is_synced_before_it_gets_its_name_and_the_name_afterwards(
    tmp_path: Path, write: Callable[[Path, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def named(call: Callable[..., None]) -> Callable[..., None]:
        def rename(*paths: Path) -> None:
            call(*paths)
            done.append("named")

        return rename

    for name in ("replace", "rename"):
        monkeypatch.setattr(files.os, name, named(getattr(os, name)))
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        done.append(str(Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path)))
        fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", recorded)
    write(tmp_path / "name", "text")
    staged = [".name.staged"]
    if write is write_folder:
        staged += [".name.staged/inner", ".name.staged/inner/content"]
    assert sorted(done[: done.index("named")]) == staged
    assert done[done.index("named") + 1 :] == ["."]


@WRITERS
def test_permissions_follow_the_umask(tmp_path: Path, write: Callable[[Path, str], None]) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "name", "new")
    finally:
        os.umask(before)
    for path in [tmp_path / "name", *(tmp_path / "name").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640)


def test_files_that_a_library_made_for_their_owner_only_can_be_read_by_others(tmp_path: Path) -> None:
    with replace_folder(tmp_path / "name") as staged:
        staged.chmod(0o755)
        (staged / "model").write_text("weights")
        (staged / "model").chmod(0o600)
    assert stat.S_IMODE((tmp_path / "name" / "model").stat().st_mode) == 0o644


@pytest.mark.parametrize("name", ["name", ".name.staged"])
def test_nothing_is_written_through_a_symbolic_link(tmp_path: Path, name: str) -> None:
    (tmp_path / "other").write_text("untouched")
    (tmp_path / name).symlink_to(tmp_path / "other")
    write_file(tmp_path / "name", "new")
    assert content(tmp_path / "other") == "untouched"
    assert content(tmp_path / "name") == "new"


def test_concurrent_writers_of_a_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    with replace_file(tmp_path / "name", concurrent=True) as first:
        first.write(b"first")
        with replace_file(tmp_path / "name", concurrent=True) as second:
            second.write(b"second")
        assert content(tmp_path / "name") == "second"
    assert content(tmp_path / "name") == "first"
    assert os.listdir(tmp_path) == ["name"]


def test_the_first_of_several_writers_creates_a_folder(tmp_path: Path) -> None:
    with create_folder(tmp_path / "name") as first:
        (first / "content").write_text("first")
        with create_folder(tmp_path / "name") as second:
            (second / "content").write_text("second")
    assert (tmp_path / "name" / "content").read_text() == "second"
    assert os.listdir(tmp_path) == ["name"]


def test_a_file_in_the_place_of_a_new_folder_is_an_error_and_kept(tmp_path: Path) -> None:
    (tmp_path / "name").write_text("old")
    with pytest.raises(NotADirectoryError), create_folder(tmp_path / "name"):
        pass
    assert content(tmp_path / "name") == "old"
    assert os.listdir(tmp_path) == ["name"]


def test_a_folder_with_the_name_of_a_staged_file_is_no_obstacle_and_kept(tmp_path: Path) -> None:
    (tmp_path / ".name.staged").mkdir()
    write_file(tmp_path / "name", "new")
    assert content(tmp_path / "name") == "new"
    assert sorted(os.listdir(tmp_path)) == [".name.staged", "name"]


@pytest.mark.parametrize("name", ["name", ".name.staged", ".name.replaced"])
def test_links_in_the_place_of_a_folder_are_replaced_and_not_followed(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path / "name", "old")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "content").write_text("untouched")
    if name == "name":
        (tmp_path / "name").rename(tmp_path / "elsewhere")
    (tmp_path / name).symlink_to(tmp_path / "other")
    write_folder(tmp_path / "name", "new")
    assert content(tmp_path / "name") == "new"
    assert (tmp_path / "other" / "content").read_text() == "untouched"
    assert not (tmp_path / "name").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} <= {"name", "other", "elsewhere"}


# -- appending, reading, cutting


def test_what_is_appended_follows_what_was_there(tmp_path: Path) -> None:
    for text in (b"a\n", b"b\n"):
        with open_to_append(tmp_path / "name") as file:
            file.write(text)
    with open_regular(tmp_path / "name") as file:
        assert file.read() == b"a\nb\n"


@pytest.mark.parametrize("other", ["file", "nothing", "/dev/zero"])
def test_nothing_is_appended_through_a_symbolic_link(tmp_path: Path, other: str) -> None:
    (tmp_path / "file").write_text("untouched")
    (tmp_path / "name").symlink_to(tmp_path / other)
    with refused(OSError, tmp_path / "name", "a symbolic link", "Delete or replace it"):
        open_to_append(tmp_path / "name")
    assert content(tmp_path / "file") == "untouched"
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("opened", [open_to_append, open_regular])
@pytest.mark.parametrize("kind", ["pipe", "folder", "link to a device"])
def test_only_regular_files_are_opened_and_nobody_waits(
    tmp_path: Path, opened: Callable[[Path], object], kind: str
) -> None:
    path = tmp_path / "name"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="name"):
        opened(path)


def test_a_link_to_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    (tmp_path / "name").symlink_to("file")
    with open_regular(tmp_path / "name") as file:
        assert file.read() == b"content"


def test_cut_lines_are_kept_beside_the_file_over_all_cuts(tmp_path: Path) -> None:
    path = tmp_path / "name"
    assert cut_lines(path, lambda line: True) == 0
    path.write_bytes(b"1\n2\n3")
    assert cut_lines(path, lambda line: line in (b"1\n", b"2\n")) == 1
    assert cut_lines(path, lambda line: line == b"1\n") == 1
    assert (path.read_bytes(), (tmp_path / "cut-name").read_bytes()) == (b"1\n", b"3\n2\n")
    assert sorted(os.listdir(tmp_path)) == ["cut-name", "name"]


@pytest.mark.parametrize("name", ["name", "cut-name"])
def test_a_cut_writes_through_no_link(tmp_path: Path, name: str) -> None:
    (tmp_path / "other").write_text("1\n2\n")
    (tmp_path / "name").write_text("1\n2\n")
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("other")
    with suppress(OSError):
        cut_lines(tmp_path / "name", lambda line: line == b"1\n")
    assert (tmp_path / "other").read_text() == "1\n2\n"

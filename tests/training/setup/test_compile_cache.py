"""What ``train.compile`` has compiled, in dtrain's cache folder."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.config.schema import Config
from dtrain.distributed.world import World
from dtrain.tasks import Regression
from dtrain.training.setup import compile_cache as module
from dtrain.training.setup.compile_cache import CompileCache
from tests.ranks import run_ranks
from tests.toys import world
from tests.whole_runs import metrics, torchrun

CONTENT = b"what torch would unpickle"


class FakeCompiler:
    """``torch.compiler`` as far as the cache calls it: what has been compiled, and what was loaded.

    As of torch's, loading the result of a save gives what was compiled after the save before.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *names: str) -> None:
        self.names, self.loaded, self._saved = list(names), list[bytes](), 0
        patch.setattr(torch.compiler, "save_cache_artifacts", self._save)
        patch.setattr(torch.compiler, "load_cache_artifacts", self._load)

    def _save(self) -> tuple[bytes, Any] | None:
        if not self.names:
            return None
        content = b"".join(name.encode() + CONTENT for name in self.names[self._saved :])
        self._saved = len(self.names)
        return content, SimpleNamespace(artifacts={"inductor": list(self.names)})

    def _load(self, content: bytes) -> Any:
        self.loaded.append(content)
        return SimpleNamespace(artifacts={})


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    return FakeCompiler(monkeypatch, "a", "b")


def cache(folder: Path, **identity: Any) -> CompileCache:
    return CompileCache(folder, identity)


def test_a_later_start_loads_what_was_saved_and_saves_it_no_second_time(tmp_path: Path, compiler: FakeCompiler) -> None:
    folder = tmp_path / "cache" / "compiled"
    first = cache(folder)
    assert first.load() == []
    (line,) = first.save()
    assert "2 compiled artefacts" in line
    assert str(first.path) in line
    assert (folder.stat().st_mode & 0o7777, first.path.stat().st_mode & 0o7777) == (0o700, 0o600)
    assert first.save() == []

    later = cache(folder)
    (line,) = later.load()
    assert "2 compiled artefacts" in line
    assert compiler.loaded == [b"a" + CONTENT + b"b" + CONTENT]
    assert later.save() == []
    compiler.names.append("c")  # such as the graph of the evaluation
    (line,) = later.save()
    assert "3 compiled artefacts" in line
    compiler.loaded.clear()
    assert cache(folder).load()
    assert compiler.loaded == [b"a" + CONTENT + b"b" + CONTENT, b"c" + CONTENT]
    assert [path.name for path in folder.iterdir()] == [first.path.name]


def test_what_is_in_a_folder_that_may_only_be_read_is_used(
    tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache(tmp_path).save()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    (line,) = cache(tmp_path).load()
    assert "2 compiled artefacts" in line
    assert compiler.loaded


def test_a_different_key_is_a_different_file(tmp_path: Path, compiler: FakeCompiler) -> None:
    cache(tmp_path / "compiled", model="a").save()
    assert cache(tmp_path / "compiled", model="b").load() == []
    assert compiler.loaded == []


def test_nothing_is_written_if_torch_has_nothing_or_this_rank_does_not_save(
    tmp_path: Path, compiler: FakeCompiler
) -> None:
    assert CompileCache(tmp_path / "compiled", {}, writes=False).save() == []
    compiler.names.clear()
    assert cache(tmp_path / "compiled").save() == []
    assert not (tmp_path / "compiled").exists()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def _altered(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def _other_format(path: Path) -> None:
    header, _, content = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps(json.loads(header) | {"format": 99}).encode() + b"\n" + content)


def _link(path: Path) -> None:
    shutil.move(path, path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def _second_name(path: Path) -> None:
    os.link(path, path.parent / "second")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _writable(path: Path) -> None:
    path.chmod(0o666)


def _of_another_user(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file to another user")
    os.chown(path, 12345, 12345)


SPOILT = [
    *(_cut, _altered, _other_format, _link, _second_name, _pipe, _folder, _writable, _of_another_user),
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(b"\x80\x04pickle\n"),
    lambda path: path.write_bytes(b"[" * 100_000 + b"\n"),
]


@pytest.mark.parametrize("spoil", SPOILT, ids=[getattr(each, "__name__", "") for each in SPOILT])
def test_a_damaged_or_foreign_file_is_ignored_with_one_line_and_torch_never_gets_it(
    tmp_path: Path, compiler: FakeCompiler, spoil: Callable[[Path], None]
) -> None:
    folder = tmp_path / "compiled"
    cache(folder).save()
    path = cache(folder).path
    spoil(path)
    compiler._saved = 0
    later = cache(folder)
    (line,) = later.load()
    assert "\n" not in line
    assert str(path) in line
    assert "not used" in line
    assert compiler.loaded == []
    if spoil is not _folder:  # the next save replaces it
        assert "saved" in later.save()[0]
        assert "loaded" in cache(folder).load()[0]


def test_what_torch_cannot_read_is_one_line(
    tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache(tmp_path / "compiled").save()

    def fail(content: bytes) -> None:
        raise AssertionError("of another torch,\nperhaps")

    for load in (fail, lambda content: None):
        monkeypatch.setattr(torch.compiler, "load_cache_artifacts", load)
        (line,) = cache(tmp_path / "compiled").load()
        assert "not used" in line
        assert "\n" not in line


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_in_a_folder_that_others_may_write_each_user_has_a_folder(
    tmp_path: Path, compiler: FakeCompiler, mode: int
) -> None:
    folder = tmp_path / "compiled"
    folder.mkdir()
    folder.chmod(mode)
    ours = cache(folder)
    assert ours.path.parent == folder / f"dtrain-{os.geteuid()}"
    ours.save()
    (folder / ours.path.name).write_bytes(ours.path.read_bytes())  # planted
    assert "loaded" in cache(folder).load()[0]
    ours.path.parent.chmod(0o777)
    compiler.names.append("c")
    loaded = list(compiler.loaded)
    for (line,) in (cache(folder).load(), ours.save()):
        assert "others may write" in line
    assert compiler.loaded == loaded


def test_a_link_in_place_of_the_users_folder_is_not_followed(tmp_path: Path, compiler: FakeCompiler) -> None:
    own, shared = tmp_path / "own", tmp_path / "compiled"
    cache(own).save()
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / f"dtrain-{os.geteuid()}").symlink_to(own)
    assert "not used" in cache(shared).load()[0]
    compiler.names.append("c")
    assert "cannot be written" in cache(shared).save()[0]
    assert compiler.loaded == []


def test_the_least_recently_used_files_go(
    tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "compiled"
    for number in range(3):
        compiler._saved = 0
        cache(folder, number=number).save()
    for number, at in ((0, 30), (1, 10), (2, 20)):
        os.utime(cache(folder, number=number).path, (at, at))
    compiler.names, compiler._saved = ["a", "b"], 0
    size = 2 * len(b"a" + CONTENT)
    monkeypatch.setattr(module, "_MOST_BYTES", sum(path.stat().st_size for path in folder.iterdir()) + size - 1)
    assert cache(folder, number=1).load()  # now the most recently used one
    cache(folder, number=3).save()
    assert [bool(cache(folder, number=number).load()) for number in range(4)] == [True, True, False, True]


def test_of_many_processes_with_one_key_each_leaves_a_whole_file(tmp_path: Path) -> None:
    def rank(number: int) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            compiler = FakeCompiler(patch, "a")
            lines = []
            for name in range(20):
                compiler.names.append(f"{name}")
                lines += cache(tmp_path / "compiled").save() + cache(tmp_path / "compiled").load()
            return lines

    parts = module._MOST_PARTS
    lines = [line for of_rank in run_ranks(4, rank, init=False) for line in of_rank]
    assert not [line for line in lines if "not used" in line or "cannot" in line]
    assert len(list((tmp_path / "compiled").iterdir())) == 1
    with cache(tmp_path / "compiled")._own_folder() as folder:
        assert 1 <= len(module._read(folder, cache(tmp_path / "compiled").path.name)) <= parts


# -- the key


class Product(nn.Module):
    """Two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 16)
        self.second = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def path_of(cfg: Config, model: nn.Module | None = None, ranks: World | None = None) -> str:
    found = CompileCache.from_config(cfg, model or Product(), Regression(), ranks or world(0, 2))
    return found.path.name if found is not None else ""


def configured() -> Config:
    cfg = Config()
    cfg.model, cfg.precision.name, cfg.train.compile = {"_target_": "x", "width": 1}, "fp32", True
    return cfg


def test_the_key_is_that_of_what_changes_the_graph_and_of_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_code_of", lambda objects: {})
    known = path_of(configured())
    assert known == path_of(configured(), ranks=world(1, 2))  # the code of a CPU has no rank in it
    same, different = set(), set()

    def change(where: set[str], setting: Callable[[Config], None]) -> None:
        cfg = configured()
        setting(cfg)
        where.add(path_of(cfg))

    change(same, lambda cfg: setattr(cfg.run, "seed", 5))
    change(same, lambda cfg: setattr(cfg.train, "max_steps", 5))
    change(same, lambda cfg: setattr(cfg.parallel, "timeout_step", 5.0))
    assert same == {known}
    change(different, lambda cfg: setattr(cfg.precision, "name", "bf16"))
    change(different, lambda cfg: setattr(cfg, "model", {"_target_": "x", "width": 2}))
    change(different, lambda cfg: setattr(cfg.train, "compile", ["first"]))
    change(different, lambda cfg: setattr(cfg.train, "global_batch_size", 5))
    change(different, lambda cfg: setattr(cfg.parallel, "bucket_cap_mb", 5))
    change(different, lambda cfg: setattr(cfg.data, "fields", {"jpg": {"size": 5}}))
    different.add(path_of(configured(), ranks=world(0, 4)))
    monkeypatch.setattr(torch, "__version__", "2.99")
    different.add(path_of(configured()))
    assert len(different - {known}) == 8
    cfg = configured()
    for nothing in (False, []):
        cfg.train.compile = nothing
        assert path_of(cfg) == ""


def test_the_code_of_the_model_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model_of_a_user.py"
    file.write_text("from torch import nn\n\nclass Net(nn.Sequential):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import model_of_a_user  # type: ignore[import-not-found]

    code = module._code_of([*nn.Sequential(model_of_a_user.Net(nn.Linear(1, 1)), Product()).modules()])
    assert set(code) == {"model_of_a_user", __name__}
    model = model_of_a_user.Net(nn.Linear(1, 1))
    before = path_of(configured(), model)
    file.write_text(file.read_text().replace("pass", "depth = 2"))
    assert path_of(configured(), model) != before


# -- whole runs


class Counts:
    """Writes how often torch has found a graph in its caches, and how often not."""

    def on_end(self, run: Any, state: str) -> None:
        from torch._dynamo.utils import counters

        found = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss")}
        (run.run_dir / f"counts-{run.world.rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_a_second_run_compiles_nothing_again_and_its_losses_are_equal(tmp_path: Path) -> None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    counts, of_torch = [], tmp_path / "torch"
    for number in range(2):
        for kind in (
            "fxgraph",
            "aotautograd",
        ):  # without the libraries, which take long to compile and have no part in this
            shutil.rmtree(of_torch / kind, ignore_errors=True)
        run_dir = tmp_path / f"run-{number}"
        run = torchrun(
            2,
            *("experiment=line", "tracker=none", f"run.dir={run_dir}", "data.num_workers=0", "train.log_every=1"),
            *("train.compile=true", "train.max_steps=4"),
            "train.hooks=[{_target_: tests.training.setup.test_compile_cache.Counts}]",
            DTRAIN_CACHE=str(tmp_path / "cache"),
            TORCHINDUCTOR_CACHE_DIR=str(of_torch),
            timeout=900,  # on a busy machine the C++ compiler takes minutes
        )
        assert run.returncode == 0, run.stderr
        lines = [line for line in run.stdout.splitlines() if "compiled artefact" in line]
        assert [("loaded" in line, "saved" in line) for line in lines] == ([(False, True)] * 2, [(True, False)])[number]
        counts.append([json.loads((run_dir / f"counts-{rank}.json").read_text()) for rank in range(2)])
        assert not [path for path in run_dir.rglob("*") if path.suffix == ".artefacts"]
    assert all(each["miss"] for each in counts[0])
    assert all(each["hit"] and not each["miss"] for each in counts[1])  # the graphs of training and of the evaluation
    assert metrics(tmp_path / "run-0") == metrics(tmp_path / "run-1")
    (file,) = (tmp_path / "cache" / "compiled").iterdir()
    assert file.suffix == ".artefacts"

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import is_hypothesis_test, settings

from tests.forked_python import forked_python
from tests.property_tests import QUICK, THOROUGH
from tests.quick_hydra import quick_hydra

# What is imported and collected stays: the collector would search its million objects again and again, in ranks forked from
# this process too.
gc.disable()


#: Files whose tests take long together, the longest first: of the slow tests, then of the default ones. A worker that begins
#: one of them last is waited for.
LONG = (
    "test_experiments.py",
    "test_docs.py",
    "test_benchmarks.py",
    "test_interruptions.py",
    "examples/test_coming_from.py",
    "replay/test_replay.py",
    "data/loading/test_worker_deaths.py",
    "test_mirrored_runs.py",
    "training/test_memory_retry.py",
    "test_doc_outputs.py",
    "test_survival.py",
    "test_plain.py",
    "training/test_recovery.py",
    "examples/test_lessons.py",
    "test_launchers.py",
    "launch/test_local.py",
    "launch/test_search.py",
    "test_package.py",
    "examples/test_regions.py",
    "export/test_main.py",
    "training/test_step.py",
    "training/test_loop.py",
    "precision/test_grad_scaler_ranks.py",
    "runs/test_run_spec.py",
    "training/checkpoint/test_manifest.py",
    "precision/test_vote.py",
    "tracking/test_wandb_sink.py",
    "replay/test_trace.py",
    "test_train.py",
    "training/checkpoint/test_rest.py",
    "training/checkpoint/test_fork.py",
    "training/checkpoint/test_sharded_saves.py",
)


def _runs_slow_tests(config: pytest.Config) -> bool:
    return config.option.markexpr == "slow"


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile(THOROUGH if _runs_slow_tests(config) else QUICK)
    config.option.loadscopereorder = False  # pytest-xdist begins with the files that have the most tests


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _runs_slow_tests(config):
        for item in items:
            if is_hypothesis_test(getattr(item, "obj", None)):
                item.add_marker("slow")
    places = {Path(__file__).parent / name: number for number, name in enumerate(LONG)}
    assert not (gone := [path for path in places if not path.exists()]), f"LONG: {gone}"
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _own_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing of the user's is read or written: an own cache, no launcher's variables, no wandb login."""
    before = dict(os.environ)
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") or name.startswith(("WANDB_", "SLURM_")):
            del os.environ[name]
    os.environ["DTRAIN_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["WANDB_MODE"] = "offline"
    # torch 2.9 reads it once, in the first process group of this process, whose state forked ranks inherit.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # unset, tokenizers 0.22 warns in every rank that is forked
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session", autouse=True)
def _quick_hydra() -> Iterator[None]:
    with quick_hydra():
        yield


@pytest.fixture(scope="session")
def digits(_own_environment: None) -> Path:
    """The folder of the digits shards."""
    pytest.importorskip("sklearn", reason="the digits need scikit-learn: pip install 'dtrain[demo]'")
    from dtrain.data.digits import prepare, shard_dir

    prepare()
    _warm_up()
    return Path(shard_dir())


def _warm_up() -> None:
    """A run in this process: what is done once in a process, its forks need not do. That is a seventh of a short run."""
    from dtrain import command_line, train

    hook = sys.excepthook  # torch sets its own
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ), torch.random.fork_rng():
        short = ("tracker=none", "data.num_workers=0", "train.max_steps=2", "data.eval=null", "model.width=4")
        command_line.run(train.train, ["experiment=digits", f"run.dir={folder}/run", *short])
    logging.getLogger("dtrain").setLevel(logging.NOTSET)
    sys.excepthook = hook


@pytest.fixture(scope="session")
def finished_run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of 15 steps of the digits with a ``NormNet``, evaluated and saved every 5, with a moving average.

    For reading only.
    """
    from tests.whole_runs import train_on

    run_dir = tmp_path_factory.mktemp("finished") / "run"
    overrides = [
        "precision=fp32",
        "train.deterministic=false",
        "model._target_=tests.toys.NormNet",
        "model.width=8",
        "schedule=constant",
        "optimizer.lr=0.02",
        f"train.max_steps={15}",
        "train.eval_every=5",
        "train.log_every=3",
        "train.ema_decay=0.7",
        "checkpoint.every_steps=5",
    ]
    train_on(1, run_dir, *overrides)
    return run_dir


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 160 rows of 16 bytes."""
    from dtrain.pack import __main__ as pack

    folder = tmp_path_factory.mktemp("text")
    words = " ".join(str(number * number) for number in range(600))
    (folder / "a.txt").write_text(words[: 160 * 16])
    assert pack.main(["text", str(folder / "a.txt"), str(folder / "shards"), "--length=16", "--shards=4"]) in (0, None)
    return folder / "shards"


@pytest.fixture
def forked_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python processes that dtrain starts are forks of a process that has imported torch."""
    monkeypatch.setattr(sys, "executable", forked_python())


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines of torchrun, which is not started."""
    calls: list[list[str]] = []
    monkeypatch.setattr("torch.distributed.run.main", lambda: calls.append(sys.argv))
    # Its thread keeps the frames of the main thread, and so the tensors of later tests.
    monkeypatch.setattr("dtrain.distributed.torchrun.prepare_torchrun", lambda: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return calls


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that code would have slept."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    return waited


@pytest.fixture
def world_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process."""
    from dtrain.distributed.process_group import process_group

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with process_group(timeout=20):
        yield


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """Hydra's ``--info`` sends all logging to the output of the test that asked for it; runs redirect the ``dtrain`` logger."""
    loggers = [logging.root, logging.getLogger("dtrain")]
    before = [(logger, list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.fixture(autouse=True)
def _own_algorithms() -> Iterator[None]:
    """A run in this process (``train.deterministic``) changes what torch does in every later test, autocast included."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.backends.cudnn.benchmark = before[1]
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]

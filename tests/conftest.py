from __future__ import annotations

import gc
import logging
import os
import pickle
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hypothesis import settings

# How long an example takes depends on what else the machine does.
settings.register_profile("dtrain", deadline=None)
settings.load_profile("dtrain")

# What is imported and collected stays: the collector would search its million objects again and again, in ranks forked from
# this process too.
gc.disable()


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
def _presets_are_read_once() -> Iterator[None]:
    """Halves the time of composing a config, which a thousand tests do: nothing that Hydra composes from is read twice.

    The folders that a test gives with ``--config-dir`` are read each time.
    """
    from hydra._internal import config_repository, defaults_list

    from dtrain.config import schema
    from dtrain.config.compose import conf_dir

    schema.register()
    read: dict[tuple[str, str], bytes] = {}
    load = config_repository.ConfigRepository.load_config
    choices = defaults_list._create_interpolation_map

    def load_config(self: config_repository.ConfigRepository, config_path: str) -> Any:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None or (source.scheme() == "file" and source.path != str(conf_dir())):
            return load(self, config_path)
        if (key := (source.full_path(), config_path)) not in read:
            read[key] = pickle.dumps(load(self, config_path))
        return pickle.loads(read[key])  # a sixth of the time of a deepcopy

    def interpolation_map(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
        used = any(default.is_interpolation() for default in defaults if not default.is_self())
        return choices(overrides, defaults, self_added) if used else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "register", lambda: None)
        patch.setattr(config_repository.ConfigRepository, "load_config", load_config)
        # Hydra makes it for each preset, which takes a seventh of the time, though only ``- group: ${other}`` needs it.
        patch.setattr(defaults_list, "_create_interpolation_map", interpolation_map)
        # Hydra copies its sources, and with them the schema that they refer to.
        patch.setattr(ConfigStore, "__deepcopy__", lambda store, memo: store, raising=False)
        yield


@pytest.fixture(scope="session")
def digits(_own_environment: None) -> Path:
    """The folder of the digits shards."""
    pytest.importorskip("sklearn", reason="the digits need scikit-learn: pip install 'dtrain[demo]'")
    from dtrain.data.digits import prepare, shard_dir

    prepare()
    return Path(shard_dir())


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

"""Checks all values of a config before anything is written, downloaded or started.

* Each value is given to the class or function that uses it in a run, so that a rule exists once.
* A class by ``_target_`` is built only where that is cheap and has no side effects: dtrain's own classes, torch's optimizers,
  and models on the meta device. The arguments of all others are compared with their signatures.
* What depends on the data or on the devices is checked later: whether shards exist, an epoch's length, the precision of a GPU.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_object
from torch import nn

from dtrain.config.instantiate import OWN_KEYS, argument_defaults, by_target, check_call, nodes_with_target
from dtrain.config.metrics import build_metric, require_torchmetrics
from dtrain.config.schema import Config, DataConfig
from dtrain.data.fields.field import Field
from dtrain.data.loading.batch import TransferOptions
from dtrain.data.loading.sample_log import Limits
from dtrain.data.loading.workers import RankShare, WorkerOptions, number_of_workers
from dtrain.data.order.epoch_order import choose_lanes
from dtrain.data.order.growth import Growth
from dtrain.data.order.lines import Recipe
from dtrain.data.shards.bad_shards import BadShards
from dtrain.data.shards.node_cache import CachePolicy
from dtrain.data.sources.datasets import SampleIndex
from dtrain.distributed.sharding import check_options, unit_names
from dtrain.distributed.stop import TimeLimit
from dtrain.distributed.world import World
from dtrain.errors import ConfigError, as_config_error, nearest
from dtrain.precision import Precision
from dtrain.runs.mirror import check_url
from dtrain.runs.run_spec import refuse_hidden
from dtrain.tracking.sinks import check_tracker
from dtrain.training.build import (
    build_loss_scale,
    build_model,
    build_schedule,
    build_step,
    build_task,
    make_precision,
    prepare_model,
    takes_corpus,
)
from dtrain.training.checkpoint.checkpoints import Checkpoints
from dtrain.training.checkpoint.fork import Fork
from dtrain.training.loop import check_intervals
from dtrain.training.monitor.profiler import StepProfiler
from dtrain.training.schedule import Lengths, check_length
from dtrain.training.setup.ema import Ema
from dtrain.training.setup.loaders import (
    are_patterns,
    are_sets,
    build_mix,
    build_mixture,
    build_sets,
    corpus_beside,
    declared_fields,
)
from dtrain.training.setup.optimizer import build_optimizer

_CPU = torch.device("cpu")
_METRIC_NAME = re.compile(r"[\w.@-]+")
_CHEAP_METRICS = ("torchmetrics.classification.", "torchmetrics.regression.", "torchmetrics.segmentation.")
_ALONE = World(0, 1, 0, 1, _CPU, "gloo", launched=False)
#: What to do if a section is not set.
_CHOICES = {
    "model": "Choose model=NAME, or set model._target_=package.Class",
    "task": "Choose task=classification or a different preset, or set task._target_=package.Class",
    "optimizer": "Choose optimizer=adamw or a different preset, or set optimizer._target_=torch.optim.RAdam",
    "schedule": "Choose schedule=constant, cosine or a different preset, or set schedule._target_=package.Class",
}


def validate(cfg: Config) -> None:
    """Checks the values of all groups except ``launch`` and ``export``, which their commands check.

    Needs no process group; with the same config, environment and code the result is the same on all ranks.

    Args:
        cfg: The composed config.

    Raises:
        ConfigError: One message; it names all values that are wrong, each with its key and what to do.
    """
    refuse_hidden(asdict(cfg))
    found = _Problems()
    for section, remedy in _CHOICES.items():
        with found.under(section):
            if getattr(cfg, section) is None:
                raise ConfigError(f"{section} is not set. {remedy}.")
    if found.errors:
        found.raise_all()
    precision = _check_run(cfg, found)
    fields = _check_fields(cfg, found)
    _check_data(cfg, found)
    _check_nodes(cfg, fields, found)
    _check_model(cfg, precision, found)
    found.raise_all()


class _Problems:
    """Collects errors, so that one message names all of them."""

    def __init__(self) -> None:
        self.errors: list[ConfigError] = []

    @contextmanager
    def under(self, key: str) -> Iterator[None]:
        """Collects the ``ConfigError``, ``ValueError`` or ``OSError`` of its block; ``key`` is put before its message."""
        try:
            with as_config_error(key):
                yield
        except ConfigError as error:
            if str(error) not in map(str, self.errors):
                self.errors.append(error)

    def raise_all(self) -> None:
        if len(self.errors) > 1:
            raise ConfigError(
                f"{len(self.errors)} values are wrong:" + "".join(f"\n  {error}" for error in self.errors)
            )
        if self.errors:
            raise self.errors[0]


def _check_run(cfg: Config, found: _Problems) -> Precision:
    """Checks the sections without classes; returns the precision, or fp32 if it is wrong."""
    train, parallel = cfg.train, cfg.parallel
    size = int(os.environ.get("WORLD_SIZE", "1"))
    precision = Precision("fp32", loss_scaling=False)
    with found.under("precision"):
        precision = make_precision(cfg.precision)
    with found.under("run.resume"):
        Checkpoints.check_resume(cfg.run.resume)
        Fork.parse(cfg.run)
    with found.under("run.max_hours"):
        TimeLimit.from_config(cfg.run.max_hours, rank=1)  # ranks other than 0 do not look at the clock
    with found.under("train.max_steps"):
        check_length(train)
    with found.under("train.log_every"):
        check_intervals(train)
    with found.under("train.global_batch_size"):
        RankShare.from_sizes(train.global_batch_size, None, 0, 1)
        micro = train.micro_batch_size
        if isinstance(micro, str) and micro != "auto":
            raise ConfigError(f"train.micro_batch_size: got {micro!r}, want a number of rows, auto, or null.")
        # Without a launcher, the number of ranks is not known yet.
        if isinstance(micro, int) and ("WORLD_SIZE" in os.environ or not 1 <= micro <= train.global_batch_size):
            RankShare.from_sizes(train.global_batch_size, micro, 0, size)
    with found.under("train.ema_decay"):
        if train.ema_decay is not None:
            Ema(nn.Identity(), train.ema_decay)
    for name in ("timeout_start", "timeout_step", "bucket_cap_mb"):
        with found.under(f"parallel.{name}"):
            if not getattr(parallel, name) > 0:
                raise ConfigError(f"parallel.{name}: got {getattr(parallel, name)}, want a number above 0.")
    with found.under("parallel"):
        check_options(parallel, size if "WORLD_SIZE" in os.environ else None)
    with found.under("checkpoint"):
        Checkpoints.from_config(Path(), cfg.checkpoint)
    with found.under("checkpoint.mirror"):
        check_url(cfg.checkpoint.mirror, cfg.checkpoint.mirror_seconds)
    for name, least in (("every_steps", 1), ("every_minutes", 0)):
        with found.under(f"checkpoint.{name}"):
            interval = getattr(cfg.checkpoint, name)
            if interval is not None and not interval >= least:
                raise ConfigError(f"checkpoint.{name}: got {interval}, want at least {least}, or null.")
    with found.under("tracker"):
        check_tracker(cfg.tracker)
    with found.under("tracker.artifacts"):
        if cfg.tracker.artifacts == "best" and cfg.checkpoint.best is None:
            raise ConfigError("tracker.artifacts=best needs checkpoint.best, such as checkpoint.best=eval/accuracy.")
    with found.under("profile"):
        StepProfiler.from_config(
            cfg.profile, 2**62, Path(), World(0, size, 0, size, _CPU, "gloo", launched=size > 1), print
        )
    with found.under("precision.loss_scale"):
        build_loss_scale(cfg.precision.loss_scale, Precision("fp16", loss_scaling=precision.loss_scaling), _CPU)
    return precision


def _check_fields(cfg: Config, found: _Problems) -> tuple[Field, ...]:
    with found.under("data.fields"):
        return declared_fields(cfg.data)
    return ()


def _check_data(cfg: Config, found: _Problems) -> None:
    data = cfg.data
    with found.under("run.seed"):
        Recipe(cfg.run.seed)
    for name in ("shuffle", "tail", "window"):
        with found.under(f"data.{name}"):
            if (value := getattr(data, name)) is not None:
                Recipe(0, **{name: value})
    with found.under("data.lanes"):
        if not data.mixture:  # whose lanes need not divide the batch
            choose_lanes(max(cfg.train.global_batch_size, 1), data.lanes, data.shuffle)
        elif data.lanes is not None and data.lanes < 1:
            raise ConfigError(f"data.lanes: got {data.lanes}, want at least 1, or null.")
    with found.under("data.prefetch"):
        WorkerOptions(data.prefetch, data.start_method, max_restarts=data.max_worker_restarts)
    with found.under("data.num_workers"):
        if data.num_workers != "auto":  # which would measure
            number_of_workers(data.num_workers, [])
    with found.under("data.storage"):
        CachePolicy.from_config(data.storage, data.cache.dir, data.cache.max_gb)
    with found.under("data.transfer"):
        TransferOptions(data.transfer, data.on_overflow)
    with found.under("data.max_bad"):
        Limits(data.max_bad, data.max_bad_consecutive)
    with found.under("data.bad_shards"):
        BadShards.from_config(data.bad_shards, data.max_bad_shards, "train")
    with found.under("data.grow"):
        Growth(data.grow, data.grow_allow_removed)
    with found.under("data.shard_size"):
        SampleIndex("", 1, data.shard_size)
    if data.mixture:
        _check_mixture(data, found)
    for split in ("train", "eval")[bool(data.mixture) :]:
        with found.under(f"data.{split}"):
            value = getattr(data, split)
            if split == "eval" and are_sets(value):
                build_sets(data, build=False)
                for name, set_node in value.items():
                    if isinstance(set_node, Mapping):
                        check_call(f"data.eval.{name}", set_node)
            elif isinstance(value, Mapping):
                check_call(f"data.{split}", value)
            elif (value is not None or split == "train") and not are_patterns(value):
                raise ConfigError(
                    f"data.{split}: got {value!r}, want shards such as 'data.{split}=\"shards/{{000..009}}.tar\"', a list of "
                    "such patterns, or a dataset by its _target_."
                )


def _check_mixture(data: DataConfig, found: _Problems) -> None:
    with found.under("data.mixture"):
        build_mixture(data, build=False)
    for name, source in data.mixture.items():
        for key in ("shards", "augment"):
            node = source.get(key) if isinstance(source, Mapping) else None
            if isinstance(node, Mapping):
                with found.under(f"data.mixture.{name}.{key}"):
                    check_call(f"data.mixture.{name}.{key}", node)


def _check_nodes(cfg: Config, fields: tuple[Field, ...], found: _Problems) -> None:
    """Checks the nodes with a ``_target_``, except model and optimizer."""
    data = cfg.data
    nodes = {"task": cfg.task, "data.augment": data.augment, "data.mix": data.mix, "data.prepare": data.prepare}
    nodes |= {f"train.hooks[{number}]": hook for number, hook in enumerate(cfg.train.hooks)}
    for key, node in nodes.items():
        with found.under(key):
            if node is None:
                continue
            check_call(key, node)
            targets = [str(inner["_target_"]) for _, inner in nodes_with_target(key, node)]
            if key != "data.prepare" and all(target.startswith("dtrain.") for target in targets):
                if key == "data.mix":
                    build_mix(node)
                elif key == "task":
                    corpus = corpus_beside(data)
                    # data.prepare may still have to write what the task needs to know of the tokens.
                    if corpus is not None or data.prepare is None or not takes_corpus(node):
                        build_task(node, corpus, cfg.train.metrics)
                else:
                    by_target(key, node)
            if key == "task" and targets[0].startswith("dtrain.tasks."):
                _check_field_names(cfg.task, {field.name for field in fields})
    for name, node in cfg.train.metrics.items():
        with found.under(f"train.metrics.{name}"):
            if not _METRIC_NAME.fullmatch(str(name)):
                raise ConfigError(f"train.metrics: got the name {name!r}, want letters, digits, _, -, . and @.")
            require_torchmetrics(name)
            check_call(f"train.metrics.{name}", node)
            if str(node["_target_"]).startswith(_CHEAP_METRICS):  # others may load a network
                build_metric(name, node)
    with found.under("schedule"):
        _check_schedule(cfg)


def _check_field_names(task: Any, names: set[str]) -> None:
    for key in ("input", "label", "target", "tokens", "coordinates", "pixels"):
        if names and task.get(key, None) not in (None, *names):
            raise ConfigError(
                f"task.{key}: data.fields has no field named {task[key]!r}. {nearest(str(task[key]), names)}"
            )


def _check_schedule(cfg: Config) -> None:
    """Builds the schedule, if its lengths can be compared without the length of an epoch; else checks its arguments."""
    train = cfg.train
    # Lengths in one unit can be compared with any number of steps per epoch, lengths in several units cannot.
    units = sum(unit in str(cfg.schedule) for unit in ("step", "epoch", "sample", "%"))
    steps_per_epoch = 10**6 if units < 2 else 0
    horizon = train.max_steps if train.max_epochs is None else train.max_epochs * steps_per_epoch
    if horizon is not None and horizon > 0 and (steps_per_epoch or "epoch" not in str(cfg.schedule)):
        build_schedule(cfg.schedule, Lengths(horizon, steps_per_epoch, max(train.global_batch_size, 1)))
    else:
        check_call("schedule", Lengths(1, 1, 1).in_steps(cfg.schedule), horizon=1)


def _check_model(cfg: Config, precision: Precision, found: _Problems) -> None:
    """Checks the model, patterns of its modules, the optimizer, and the options of the step."""
    model: nn.Module | None = None
    with found.under("model"):
        check_call("model", cfg.model)
        model = _model_on_meta(cfg)
    if model is not None:
        with found.under("train"):
            empty = [name for name, parameter in model.named_parameters() if not parameter.numel()]
            if empty:
                raise ConfigError(
                    f"model: its parameter {empty[0]} has no elements. Is a width or a number of classes 0?"
                )
            model = prepare_model(model, cfg.train, cfg.parallel, _ALONE)
        with found.under("precision.keep_fp32"):
            precision.wrap_keep_fp32(model)
        with found.under("parallel.shard_modules"):
            if cfg.parallel.shard != "none":
                unit_names(model, cfg.parallel)
    with found.under("optimizer"):
        _check_optimizer(cfg.optimizer, model)
    with found.under("train"):
        build_step(
            cfg,
            _ALONE,
            model=nn.Identity(),
            task=lambda model, batch: None,  # type: ignore[arg-type]
            optimizer=torch.optim.SGD([torch.zeros(1)]),
            precision=precision,
            ema=None,
            schedule=lambda step: 1.0,
            max_consecutive_skips=cfg.train.max_consecutive_skips,
        )


def _model_on_meta(cfg: Config) -> nn.Module | None:
    """The model without memory; None if functions build it, which may load weights.

    Raises:
        ConfigError: If it cannot be built.
    """
    targets = [get_object(node["_target_"]) for _, node in nodes_with_target("model", cfg.model)]
    if not all(map(inspect.isclass, targets)) or not issubclass(targets[0], nn.Module):
        return None
    try:
        with torch.device("meta"):
            return build_model(cfg.model, torch.device("meta"), cfg.train.channels_last)
    except ConfigError:
        # Some models cannot be built on the meta device, because they compute with values. So a real one decides.
        with torch.random.fork_rng(devices=[]):
            return build_model(cfg.model, _CPU, cfg.train.channels_last)


def _check_optimizer(node: Any, model: nn.Module | None) -> None:
    check_call("optimizer", _without(node, *OWN_KEYS["optimizer"]), params=None, model=None)
    for name, default in argument_defaults(node["_target_"]).items():
        if type(default) in (int, float) and isinstance(node.get(name), str):
            raise ConfigError(f"optimizer.{name}: got {node[name]!r}, want a number such as {default:g}.")
    if model is None or not str(node["_target_"]).startswith(("torch.optim.", "dtrain.", "torch.distributed.optim.")):
        return
    build_optimizer(_without(node, "fused"), model)


def _without(node: Any, *keys: str) -> Any:
    return {name: value for name, value in node.items() if name not in keys} if isinstance(node, Mapping) else node

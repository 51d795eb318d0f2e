"""Builds a run from its config: ``build_run`` connects data, model, optimizer and step.

``dtrain train``, ``dtrain doctor`` and ``dtrain doctor numerics`` call ``build_run``, ``dtrain evaluate`` calls
``build_for_evaluation``, and ``dtrain export`` calls ``build_model``. Each part is built by one function, which all of them
use.

The order matters:

1. the precision policy, because the loaders ask it for transfer dtypes;
2. the loaders, because the length of an epoch decides the schedule;
3. the model, changed in place (``prepare_model``, ``keep_fp32``, then sharding), then a copy of its parameters for the EMA;
4. the optimizer over the model's parameters, and only then DDP, the last wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dtrain.config.instantiate import argument_names, by_target
from dtrain.config.metrics import build_metric
from dtrain.config.schema import Config, LossScaleConfig, ParallelConfig, PrecisionConfig, TrainConfig
from dtrain.data import ShardLoader
from dtrain.data.fields.tokenizers import Corpus
from dtrain.data.order.randomness import be_deterministic, seed_generators
from dtrain.distributed.collectives import on_all_ranks
from dtrain.distributed.sharding import already_sharded, check_accumulation, is_sharded, shard_model
from dtrain.distributed.world import World
from dtrain.errors import ConfigError, as_config_error
from dtrain.precision import Precision
from dtrain.precision.loss_scale import LossScale
from dtrain.precision.reduce_dtype import REDUCE_DTYPES, reduce_in
from dtrain.precision.spike import SpikeOptions
from dtrain.runs.run_dir import code_commits
from dtrain.training.checkpoint.checkpoints import Checkpoint, Checkpoints
from dtrain.training.checkpoint.resume import load_rest
from dtrain.training.checkpoint.state import TrainState, load_weights
from dtrain.training.checks import check_initialised
from dtrain.training.schedule import Lengths, schedule_horizon
from dtrain.training.setup.compile_cache import CompileCache
from dtrain.training.setup.ema import Ema
from dtrain.training.setup.freeze import Frozen, freeze
from dtrain.training.setup.loaders import (
    check_same_data,
    class_names,
    corpus_beside,
    eval_loader,
    on_all_ranks_alike,
    prepare_data,
    train_loader,
)
from dtrain.training.setup.model import (
    checkpoint_activations,
    compile_in_place,
    synchronise_batchnorm,
    use_channels_last,
)
from dtrain.training.setup.optimizer import build_optimizer
from dtrain.training.setup.sharded_init import build_on_meta, fill
from dtrain.training.step import TrainStep
from dtrain.training.task import MetricTask, Task

_CPU = torch.device("cpu")


def build_run(
    cfg: Config,
    run_dir: Path,
    world: World,
    *,
    prepared: bool = True,
    data_ranks: int | None = None,
    with_eval_data: bool = True,
    alone: bool = False,
    schedule: Callable[[int], float] | None = None,
    max_consecutive_skips: int | None = None,
) -> tuple[TrainState, list[str]]:
    """Collective. Builds everything that trains. The defaults are the run as ``dtrain train`` executes it.

    Args:
        cfg: The composed config.
        run_dir: The run's directory; it need not exist, and nothing is written to it.
        world: The ranks.
        prepared: False leaves out ``prepare_model``, for tools that observe single modules.
        data_ranks: In one process: load the data and scale the loss as one of this many ranks would. None: the world's size.
        with_eval_data: False builds no evaluation loader.
        alone: Build a single-process step: no DDP, no vote, no sharding.
        schedule: Replaces the config's schedule.
        max_consecutive_skips: Replaces the config's limit.

    Returns:
        The run, and warnings about the precision on this device, for this model.

    Raises:
        ConfigError: On every rank, if a part of the config is invalid.
    """
    data_world = world if data_ranks is None else replace(world, size=data_ranks)
    precision, warnings = on_all_ranks(lambda: build_precision(cfg.precision, world.device))

    # -- data
    prepare_data(cfg.data)
    train_data = on_all_ranks_alike(lambda also_bad: train_loader(cfg, data_world, precision, also_bad))
    eval_data = (
        on_all_ranks_alike(lambda also_bad: eval_loader(cfg, data_world, precision, also_bad))
        if with_eval_data
        else None
    )
    check_same_data(train_data, eval_data)
    names = on_all_ranks(lambda: class_names(cfg.data))
    check_classes(cfg.model, names)
    corpus = on_all_ranks(lambda: corpus_beside(cfg.data))
    check_vocabulary(cfg.model, corpus)

    # -- model. Seeded immediately before it, so that the initial weights do not depend on earlier random numbers.
    if cfg.train.deterministic:
        be_deterministic()
    if cfg.parallel.shard != "none" and not alone:
        on_all_ranks(lambda: check_accumulation(cfg.parallel, train_data.micro_batches_per_step))
        model = build_sharded_model(cfg, world, precision)
    else:
        seed_generators(world.device, cfg.run.seed)
        model = on_all_ranks(lambda: build_model(cfg.model, world.device, cfg.train.channels_last))
        if prepared:
            model = prepare_model(model, cfg.train, cfg.parallel, world)
        else:
            freeze(model, cfg.train.freeze)
        precision.wrap_keep_fp32(model)
    warnings = [*warnings, *precision.slow_layers(model, world.device)]
    # After all changes to the model, and before DDP, which adds a prefix to parameter names.
    with as_config_error("train.ema_decay"):
        ema = build_ema(cfg, model)
    task = on_all_ranks(lambda: build_task(cfg.task, corpus, cfg.train.metrics))
    if eval_data is not None:
        on_all_ranks(lambda: [build_metric(name, node) for name, node in cfg.train.metrics.items()])
    optimizer = on_all_ranks(lambda: build_optimizer(cfg.optimizer, model))

    # -- step
    own_schedule = schedule is None
    if schedule is None:
        schedule = schedule_of(cfg, train_data)
    step = build_step(
        cfg,
        replace(world, size=1) if alone else world,
        model=model,
        task=task,
        optimizer=optimizer,
        precision=precision,
        ema=ema,
        schedule=schedule,
        loss_ranks=data_ranks,
        max_consecutive_skips=max_consecutive_skips or cfg.train.max_consecutive_skips,
    )
    run = TrainState(
        cfg=cfg,
        run_dir=run_dir,
        train_loader=train_data,
        eval_loader=eval_data,
        step=step,
        checkpoints=Checkpoints.from_config(run_dir, cfg.checkpoint),
        class_names=names,
        code=code_commits() if world.rank == 0 else {},  # runs git: once at the start, not during each save
        build_schedule=(lambda: schedule_of(cfg, train_data)) if own_schedule else None,
        compile_cache=CompileCache.from_config(cfg, model, task, world) if prepared else None,
    )
    return run, warnings


def build_step(
    cfg: Config,
    world: World,
    *,
    model: nn.Module,
    task: Task,
    optimizer: torch.optim.Optimizer,
    precision: Precision,
    ema: Ema | None,
    schedule: Callable[[int], float],
    loss_ranks: int | None = None,
    max_consecutive_skips: int | None = None,
) -> TrainStep:
    """Wraps the model in DDP and makes the optimizer step; may be called again for the same model.

    Args:
        cfg: The composed config.
        world: The ranks that average gradients and vote. A world of one has no DDP.
        model: The bare model.
        task: As ``TrainStep`` takes it; likewise ``optimizer``, ``precision``, ``ema`` and ``schedule``.
        loss_ranks: Scale the loss as one of this many ranks would; None: the world's size.
        max_consecutive_skips: This many skipped steps in a row end the run; None: the default of ``TrainStep``.

    Raises:
        ConfigError: If the parallel or loss scale options are invalid.
    """
    return TrainStep(
        wrap(model, cfg.parallel, world, cfg.train.deterministic),
        task,
        optimizer,
        world=world,
        precision=precision,
        loss_scale=build_loss_scale(cfg.precision.loss_scale, precision, world.device),
        nominal=max(cfg.train.global_batch_size // (loss_ranks or 1), 1),
        schedule=schedule,
        clip_norm=cfg.train.clip_norm,
        ema=ema,
        seed=cfg.run.seed,
        max_consecutive_skips=max_consecutive_skips,
        reduce_each=cfg.parallel.reduce_after == "micro_batch",
        spikes=SpikeOptions.parse(cfg.train.spike),
        frozen=Frozen(model, cfg.train.freeze, optimizer) if cfg.train.freeze else None,
    )


@dataclass(frozen=True)
class EvaluationParts:
    """The parts for evaluating a checkpoint: the bare model has its weights, ``weights`` is ``ema`` or ``raw``."""

    precision: Precision
    loader: ShardLoader
    model: nn.Module
    weights: str
    task: Task


def build_for_evaluation(cfg: Config, world: World, checkpoint: Checkpoint, weights: str) -> EvaluationParts:
    """Collective. Builds the parts for evaluating a checkpoint; call ``prepare_data`` before.

    Args:
        cfg: The composed config; ``data.eval`` is set.
        world: The ranks.
        checkpoint: The checkpoint.
        weights: ``ema``, ``raw``, or ``""``: the moving average if the checkpoint has one.

    Raises:
        ConfigError: On every rank, if model, task or data cannot be built, or the checkpoint is from a different model.
    """
    precision, _ = on_all_ranks(lambda: build_precision(cfg.precision, world.device))
    loader = on_all_ranks_alike(lambda also_bad: eval_loader(cfg, world, precision, also_bad))
    assert loader is not None  # data.eval is set
    check_same_data(None, loader)
    model, loaded = build_trained(cfg, world.device, checkpoint, weights)
    precision.wrap_keep_fp32(model)
    task = on_all_ranks(lambda: build_task(cfg.task, corpus_beside(cfg.data), cfg.train.metrics))
    return EvaluationParts(precision, loader, model, loaded, task)


def build_trained(cfg: Config, device: torch.device, checkpoint: Checkpoint, weights: str) -> tuple[nn.Module, str]:
    """Collective, if there is a process group. Builds the bare model with the weights of a checkpoint.

    Args:
        cfg: The run's config.
        device: The model's device.
        checkpoint: The checkpoint.
        weights: As of ``load_weights``.

    Returns:
        The model, and the loaded weights: ``ema`` or ``raw``.

    Raises:
        ConfigError: On every rank, if the model cannot be built, or the checkpoint is from a different one.
    """
    saved, built = checkpoint.rest, None
    if saved is not None:
        seed_generators(device, cfg.run.seed)  # as in build_run
    model = on_all_ranks(lambda: build_model(cfg.model, device, cfg.train.channels_last))
    if saved is not None:
        built = load_rest(cfg, model, saved)
    return model, on_all_ranks(lambda: load_weights(model, checkpoint, weights, built))


def build_ema(cfg: Config, model: nn.Module) -> Ema | None:
    """The average of the model's weights; None without ``train.ema_decay``.

    Raises:
        ValueError: If it is out of range.
    """
    if cfg.train.ema_decay is None:
        return None
    return Ema(model, cfg.train.ema_decay, only_trained=cfg.checkpoint.only_trained)


def build_precision(cfg: PrecisionConfig, device: torch.device) -> tuple[Precision, list[str]]:
    """Makes the precision policy and applies it to this process; returns it with warnings for the user.

    Raises:
        ConfigError: If the device does not support the precision, and as ``make_precision``.
    """
    with as_config_error("precision"):
        precision = make_precision(cfg)
        return precision, precision.apply(device)


def make_precision(cfg: PrecisionConfig) -> Precision:
    """Makes the precision policy.

    Raises:
        ConfigError: If the name is unknown, or ``loss_scale`` is neither ``none`` nor a section.
    """
    scaled = isinstance(cfg.loss_scale, LossScaleConfig)
    if not scaled and cfg.loss_scale != "none":
        raise ConfigError(
            f"precision.loss_scale: got {cfg.loss_scale!r}. Set one of its keys, such as precision.loss_scale.init=1024, or "
            "none for fp16 without loss scaling."
        )
    return Precision(cfg.name, tuple(cfg.keep_fp32), scaled)


def build_model(node: Any, device: torch.device, channels_last: bool = True) -> nn.Module:
    """Builds the bare model on its device.

    With ``channels_last`` the weights of convolutions get the memory layout of images, which fast kernels need.

    Raises:
        ConfigError: If the target does not return a module, or returns one that has lazy modules or is already wrapped or
            sharded for several devices.
    """
    model = _constructed(node).to(device)
    if channels_last:
        use_channels_last(model)
    return model


def _constructed(node: Any) -> nn.Module:
    model = by_target("model", node)
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        raise ConfigError(
            f"model: {node['_target_']} returns a model wrapped in {type(model).__name__}. dtrain wraps it itself, and two "
            "wrappers would average gradients twice. Return the bare module."
        )
    if not isinstance(model, nn.Module):
        pipeline = type(model).__module__.startswith("torch.distributed.pipelining")
        remedy = (
            " Pipeline parallelism is not supported: return the whole model and set parallel=fsdp." if pipeline else ""
        )
        raise ConfigError(f"model: {node['_target_']} returns {type(model).__name__}, want a torch.nn.Module.{remedy}")
    if (sharded := already_sharded(model)) is not None:
        raise ConfigError(
            f"model: {sharded}. dtrain shards models itself, and does not support tensor parallelism. Let {node['_target_']} "
            "return the plain model, and set parallel=fsdp."
        )
    check_initialised(model)
    return model


def build_sharded_model(cfg: Config, world: World, precision: Precision) -> nn.Module:
    """Collective. Builds the model, prepares it and shards it, with the initial weights that it has with DDP.

    Raises:
        ConfigError: On every rank: as ``build_model``, ``prepare_model`` and ``shard_model``; or if the ranks build different
            models.
    """
    seed_generators(world.device, cfg.run.seed)
    bare, values = build_on_meta(lambda: _constructed(cfg.model))

    def sharded() -> nn.Module:
        model = prepare_model(bare, cfg.train, cfg.parallel, world)
        kept = precision.wrap_keep_fp32(model)
        shard_model(model, cfg.parallel, world, compute_dtype=precision.compute_dtype, kept=kept)
        return model

    model = on_all_ranks(sharded)
    fill(model, values, _CPU if cfg.parallel.offload else world.device, world.device)
    return model


def check_classes(node: Any, names: Sequence[str] | None) -> None:
    """Compares ``model.classes`` or ``model.num_classes`` with the class names of the shards.

    Args:
        node: The config node ``model``.
        names: The names of classes.json; None without this file.

    Raises:
        ConfigError: If the numbers differ.
    """
    for key in ("classes", "num_classes"):
        number = node.get(key, None)
        if names is not None and isinstance(number, int) and number != len(names):
            raise ConfigError(
                f"model.{key}: got {number}, but classes.json next to the shards names {len(names)} classes. Set "
                f"model.{key}={len(names)}, or delete classes.json if its names do not match the labels."
            )


def check_vocabulary(node: Any, corpus: Corpus | None) -> None:
    """Compares ``model.vocabulary`` with the tokens of the shards.

    Args:
        node: The config node ``model``.
        corpus: The description of the tokens; None if there is none.

    Raises:
        ConfigError: If the shards may have tokens that the model does not know.
    """
    number = node.get("vocabulary", None)
    if corpus is not None and isinstance(number, int) and number < corpus.vocab_size:
        raise ConfigError(
            f"model.vocabulary: got {number}, but the shards in {corpus.folder} have {corpus.vocab_size:,} different tokens. "
            f"Set model.vocabulary={corpus.vocab_size}, or pack the text with a different tokenizer."
        )


def build_task(node: Any, corpus: Corpus | None, metrics: Collection[str] = ()) -> Task:
    """Builds the task. A target with an argument ``corpus`` gets the description of the shards' tokens, if there is one.

    Raises:
        ConfigError: If it cannot be built, or there are ``train.metrics``, and it does not give them predictions and targets.
    """
    with as_config_error("task"):
        task: Task = by_target("task", node, **({"corpus": corpus} if takes_corpus(node) else {}))
    if metrics and not isinstance(task, MetricTask):
        raise ConfigError(
            f"train.metrics: got {', '.join(metrics)}, but the task {node['_target_']} has no metric_inputs(model, batch), "
            "which returns predictions and targets. Define it, or set train.metrics={}."
        )
    return task


def takes_corpus(node: Any) -> bool:
    """Whether the config node ``task`` names a class with an argument ``corpus``."""
    return isinstance(node, Mapping) and "corpus" in argument_names(node.get("_target_"))


def prepare_model(model: nn.Module, train: TrainConfig, parallel: ParallelConfig, world: World) -> nn.Module:
    """Applies SyncBatchNorm, freezing, activation checkpointing and ``torch.compile`` to the bare model, as the config says.

    Returns:
        The same object, unless the model itself is a BatchNorm.

    Raises:
        ConfigError: If a pattern matches nothing, or this device does not support an option.
    """
    if parallel.sync_batchnorm:
        model = synchronise_batchnorm(model, world)
    freeze(model, train.freeze)
    checkpoint_activations(model, train.checkpoint_activations)
    compile_in_place(model, train.compile, sharded=parallel.shard != "none")
    return model


def schedule_of(cfg: Config, train_data: ShardLoader) -> Callable[[int], float]:
    """The learning-rate schedule of a run on these data; of data that have grown, as at the run's first start."""
    lengths = Lengths(schedule_horizon(cfg.train, train_data), train_data.steps_in(1), cfg.train.global_batch_size)
    return build_schedule(cfg.schedule, lengths)


def build_schedule(node: Any, lengths: Lengths) -> Callable[[int], float]:
    """Builds the learning-rate schedule: a factor for a number of applied steps.

    Durations in the config node ``schedule``, such as ``5 epochs``, become steps; ``horizon=null`` becomes the run's length.

    Raises:
        ConfigError: If it cannot be built or cannot be called.
    """
    if isinstance(node, Mapping):
        with as_config_error("schedule"):
            node = lengths.in_steps(node)
        if node.get("horizon") is None:
            node["horizon"] = lengths.horizon
    with as_config_error("schedule"):
        schedule: Callable[[int], float] = by_target("schedule", node)
    if not callable(schedule):
        raise ConfigError(
            f"schedule: {node['_target_']} gives {type(schedule).__name__}, want a callable of applied steps."
        )
    return schedule


def build_loss_scale(cfg: Any, precision: Precision, device: torch.device) -> LossScale | None:
    """Makes the loss scale from a ``LossScaleConfig``; None where the precision does not scale gradients.

    Raises:
        ConfigError: If a factor, interval or bound is impossible.
    """
    if not precision.scales_gradients:
        return None
    with as_config_error("precision.loss_scale"):
        return LossScale(
            device,
            init=cfg.init,
            growth_factor=cfg.growth_factor,
            backoff_factor=cfg.backoff_factor,
            growth_interval=cfg.growth_interval,
            hysteresis=cfg.hysteresis,
            min_scale=cfg.min,
            max_scale=cfg.max,
        )


def wrap(model: nn.Module, parallel: ParallelConfig, world: World, deterministic: bool) -> nn.Module:
    """Wraps the bare model in DDP if there are several ranks and it is not sharded.

    With ``deterministic`` a resumed run equals an uninterrupted one bit for bit.

    Raises:
        ConfigError: If ``parallel.reduce_dtype`` is unknown or does not suit the parameters.
    """
    if parallel.reduce_dtype not in REDUCE_DTYPES:
        raise ConfigError(
            f"parallel.reduce_dtype: got {parallel.reduce_dtype!r}, want one of {', '.join(REDUCE_DTYPES)}."
        )
    if world.size == 1 or is_sharded(model):
        return model
    ddp = DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        bucket_cap_mb=parallel.bucket_cap_mb,
        # DDP rebuilds its buckets after the first backward of a process. From three ranks on that changes the order of
        # summation, so a resumed run would differ in the last bit. A search for unused parameters keeps the layout.
        find_unused_parameters=parallel.find_unused_parameters or deterministic,
        static_graph=parallel.static_graph and not deterministic,
        gradient_as_bucket_view=parallel.gradient_as_bucket_view,
    )
    reduce_in(ddp, REDUCE_DTYPES[parallel.reduce_dtype])
    return ddp

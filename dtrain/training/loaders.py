"""Builds this rank's loaders, and finds the class names, from the data config."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from dtrain.config.errors import ConfigError, as_config_error
from dtrain.config.instantiate import by_target
from dtrain.config.schema import Config, DataConfig
from dtrain.data import ShardLoader, shards
from dtrain.data.datasets import value_fields
from dtrain.data.fields import Field, parse_fields
from dtrain.data.mixing import Mix
from dtrain.data.node_cache import CachePolicy
from dtrain.data.order import choose_lanes
from dtrain.data.stream import Stream, StreamLoader
from dtrain.distributed.collectives import from_rank0
from dtrain.distributed.world import World
from dtrain.precision import Precision

_CLASSES = "classes.json"


def prepare_data(data: DataConfig) -> None:
    """Collective. Rank 0 calls ``data.prepare``, if it is set, while the others wait."""

    def call() -> None:
        with as_config_error("data.prepare"):
            by_target("data.prepare", data.prepare)

    if data.prepare is not None:
        from_rank0(call)


def train_loader(cfg: Config, world: World, precision: Precision) -> ShardLoader:
    """This rank's training loader.

    Raises:
        ConfigError: If shards, fields and sizes cannot work together.
    """
    data = cfg.data
    return _loader(
        cfg,
        world,
        precision,
        "train",
        shuffle=data.shuffle,
        lanes=data.lanes,
        window=data.window,
        tail=data.tail,
        augment=by_target("data.augment", data.augment) if data.augment is not None else None,
        mix=build_mix(data.mix) if data.mix is not None else None,
    )


def eval_loader(
    cfg: Config, world: World, precision: Precision, *, in_stored_order: bool = False
) -> ShardLoader | None:
    """This rank's evaluation loader, each sample once; None without ``data.eval``.

    Args:
        cfg: The config.
        world: The ranks.
        precision: Decides the transfer dtypes.
        in_stored_order: Without it, a step draws from several lanes in stored order, so that each rank opens about its
            share of the shards. With it, every rank opens all of them.

    Raises:
        ConfigError: If shards, fields and sizes cannot work together.
    """
    if not cfg.data.eval:
        return None
    lanes = None if in_stored_order else choose_lanes(max(cfg.train.global_batch_size, 1), None, "window")
    return _loader(cfg, world, precision, "eval", shuffle="none", lanes=lanes)


def check_same_data(train: ShardLoader | None, evaluation: ShardLoader | None) -> None:
    """Collective. Checks that all ranks index the same data.

    Otherwise they would use samples twice or never, and end an epoch at different steps.

    Raises:
        ConfigError: On every rank, if the data of a rank differ from those of rank 0; names the differences.
    """
    own = {
        f"data.{split}": loader.index.describe()
        for split, loader in (("train", train), ("eval", evaluation))
        if loader is not None
    }
    all_ranks: list[dict[str, dict[str, Any]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(all_ranks, own)
    for rank, other in enumerate(all_ranks):
        for split, first in all_ranks[0].items():
            differences = [f"{name} {first[name]} and {it}" for name, it in other[split].items() if it != first[name]]
            if differences:
                raise ConfigError(
                    f"{split}: ranks 0 and {rank} see other data: {', '.join(differences)}. Give every node the same shards, "
                    "under the same names."
                )


def declared_fields(data: DataConfig) -> tuple[Field, ...]:
    """The fields that the evaluation loader reads, or the training loader without ``data.eval``.

    Raises:
        ConfigError: If a field is impossible.
    """
    with as_config_error("data.fields"):
        fields = _plain(data.fields)
        named = data.eval or (None if OmegaConf.is_missing(data, "train") else data.train)
        return value_fields(fields) if isinstance(named, DictConfig) else parse_fields(fields)


def class_names(data: DataConfig) -> list[str] | None:
    """Reads ``classes.json``, which ``dtrain.pack imagefolder`` writes beside the shards.

    Args:
        data: The config. The file beside ``data.train`` has priority over that beside ``data.eval``.

    Returns:
        The name of each label; None without such a file.

    Raises:
        ConfigError: If the file is no readable list of names.
    """
    for pattern in (None if OmegaConf.is_missing(data, "train") else data.train, data.eval):
        if (file := _classes_file(pattern)) is not None:
            return _read_classes(file)
    return None


def _loader(cfg: Config, world: World, precision: Precision, split: str, **order: object) -> ShardLoader:
    data = cfg.data
    if OmegaConf.is_missing(data, split):
        raise ConfigError(
            f"data.{split} is not set. Name shards, such as 'data.{split}=\"shards/{{000..009}}.tar\"', or a dataset by its "
            "_target_ (data=map)."
        )
    named, fields = data[split], _plain(data.fields)  # type: ignore[index]
    if split == "eval":
        fields = _in_the_middle(fields)
    options: dict[str, Any] = {
        "global_batch_size": cfg.train.global_batch_size,
        "micro_batch_size": cfg.train.micro_batch_size,
        "rank": world.rank,
        "world_size": world.size,
        "num_workers": data.num_workers,
        "seed": cfg.run.seed,
        "precision": precision,
        "max_bad": None,  # the vote adds up all ranks
        "transfer": data.transfer,
        "on_overflow": data.on_overflow,
        "channels_last": cfg.train.channels_last,
        "prefetch": data.prefetch,
        "start_method": data.start_method,
        "pin_memory": world.device.type == "cuda",
        **order,
    }
    with as_config_error(f"data.{split}"):
        if isinstance(named, DictConfig):
            dataset = by_target(f"data.{split}", named)
            if isinstance(dataset, Stream):
                return StreamLoader(dataset, fields, **options)
            return ShardLoader.over(dataset, fields, shard_size=data.shard_size, **options)
        policy = CachePolicy.of(data.storage, data.cache.dir, data.cache.max_gb)
        patterns = named if isinstance(named, str) else list(named)
        return ShardLoader(patterns, fields, policy=policy, **options)


def build_mix(node: Any) -> Mix:
    """Builds ``data.mix``.

    Raises:
        ConfigError: If it cannot be built or is no ``Mix``.
    """
    with as_config_error("data.mix"):
        mix = by_target("data.mix", node)
    if not isinstance(mix, Mix):
        raise ConfigError(f"data.mix: {node._target_} gives {type(mix).__name__}, want a dtrain.data.mixing.Mix.")
    return mix


def _plain(fields: object) -> dict[str, dict[str, object]]:
    """The fields as plain data, with decoders built by their ``_target_``."""
    if not isinstance(fields, DictConfig):
        return dict(fields)  # type: ignore[call-overload]
    plain = OmegaConf.to_container(fields, resolve=True)
    assert isinstance(plain, dict)
    for ext, entry in plain.items():
        is_list = isinstance(entry, list)
        for number, options in enumerate(entry if is_list else [entry]):
            if isinstance(options, dict) and isinstance(options.get("decoder"), dict):
                node = fields[ext][number] if is_list else fields[ext]
                where = f"{ext!s}[{number}]" if is_list else str(ext)
                options["decoder"] = by_target(f"data.fields.{where}.decoder", node.decoder)
    return plain  # type: ignore[return-value]


def _in_the_middle(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields without ``clip: random``: an evaluation takes the middle of a recording."""

    def fixed(options: Any) -> Any:
        if isinstance(options, list):
            return [fixed(one) for one in options]
        return {**options, "clip": None} if isinstance(options, dict) else options

    return {ext: fixed(options) for ext, options in fields.items()}


def _classes_file(pattern: Any) -> Path | None:
    # Class names are optional, and the shards may be deleted after the training.
    with suppress(ValueError, OSError):
        paths = shards.expand(pattern if isinstance(pattern, str) else list(pattern or []))
        file = Path(paths[0]).parent / _CLASSES
        if file.is_file():
            return file
    return None


def _read_classes(path: Path) -> list[str]:
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}). Correct or delete it.") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path} is not a list of class names. Correct or delete it.")
    return names

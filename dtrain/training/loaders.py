"""From the data config to this rank's loaders."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from dtrain.config.errors import ConfigError, users_to_fix
from dtrain.config.schema import Config, DataConfig
from dtrain.data import ShardLoader
from dtrain.data.cache_policy import CachePolicy
from dtrain.data.field_options import parse_fields
from dtrain.data.fields import Field
from dtrain.data.mixing import Mix
from dtrain.data.sample_source import value_fields
from dtrain.distributed.collectives import decided_by_rank_zero
from dtrain.distributed.world import World
from dtrain.precision import Precision
from dtrain.training.build import by_target


def prepare_data(data: DataConfig) -> None:
    """Collective. Rank 0 calls ``data.prepare``, if there is one, while the others wait."""

    def call() -> None:
        with users_to_fix("data.prepare"):
            by_target("data.prepare", data.prepare)

    if data.prepare is not None:
        decided_by_rank_zero(call)


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
        mix=_mix(data.mix) if data.mix is not None else None,
    )


def eval_loader(cfg: Config, world: World, precision: Precision) -> ShardLoader | None:
    """This rank's evaluation loader, in stored order, each sample once; None without ``data.eval``.

    Raises:
        ConfigError: If shards, fields and sizes cannot work together.
    """
    return _loader(cfg, world, precision, "eval", shuffle="none") if cfg.data.eval else None


def check_same_data(train: ShardLoader | None, evaluation: ShardLoader | None) -> None:
    """Collective. Ranks that see other data would draw samples twice or never, and end an epoch at different steps.

    Args:
        train: This rank's training loader, if there is one.
        evaluation: Its evaluation loader, if there is one.

    Raises:
        ConfigError: On every rank, if one of them has other data than rank 0; says in what they differ.
    """
    mine = {
        f"data.{split}": loader.index.describe()
        for split, loader in (("train", train), ("eval", evaluation))
        if loader is not None
    }
    everybodys: list[dict[str, dict[str, Any]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everybodys, mine)
    for rank, theirs in enumerate(everybodys):
        for split, first in everybodys[0].items():
            unlike = [f"{name} {first[name]} and {its}" for name, its in theirs[split].items() if its != first[name]]
            if unlike:
                raise ConfigError(
                    f"{split}: ranks 0 and {rank} see other data: {', '.join(unlike)}. Give every node the same shards, "
                    "under the same names."
                )


def declared_fields(data: DataConfig) -> tuple[Field, ...]:
    """The fields, as the evaluation's loader reads them, or the training's where there is none.

    Raises:
        ConfigError: If a field is impossible.
    """
    with users_to_fix("data.fields"):
        fields = _plain(data.fields)
        named = data.eval or (None if OmegaConf.is_missing(data, "train") else data.train)
        return value_fields(fields) if isinstance(named, DictConfig) else parse_fields(fields)


def _loader(cfg: Config, world: World, precision: Precision, split: str, **order: object) -> ShardLoader:
    data = cfg.data
    if OmegaConf.is_missing(data, split):
        raise ConfigError(
            f"data.{split} is not set. Name shards, such as 'data.{split}=\"shards/{{000..009}}.tar\"', or a data set by its "
            "_target_ (data=map)."
        )
    named = data[split]  # type: ignore[index]
    options: dict[str, Any] = {
        "global_batch_size": cfg.train.global_batch_size,
        "micro_batch_size": cfg.train.micro_batch_size,
        "rank": world.rank,
        "world_size": world.size,
        "num_workers": data.num_workers,
        "seed": cfg.run.seed,
        "precision": precision,
        "max_bad": None,  # the vote adds up all ranks
        "wire": data.wire,
        "on_overflow": data.on_overflow,
        "channels_last": cfg.train.channels_last,
        "prefetch": data.prefetch,
        "start_method": data.start_method,
        "pin_memory": world.device.type == "cuda",
        **order,
    }
    with users_to_fix(f"data.{split}"):
        if isinstance(named, DictConfig):
            dataset = by_target(f"data.{split}", named)
            return ShardLoader.over(dataset, _plain(data.fields), shard_size=data.shard_size, **options)
        policy = CachePolicy.of(data.storage, data.cache.dir, data.cache.max_gb)
        shards = named if isinstance(named, str) else list(named)
        return ShardLoader(shards, _plain(data.fields), policy=policy, **options)


def _mix(node: Any) -> Mix:
    with users_to_fix("data.mix"):
        mix = by_target("data.mix", node)
    if not isinstance(mix, Mix):
        raise ConfigError(f"data.mix: {node._target_} gives {type(mix).__name__}, want a dtrain.data.mixing.Mix.")
    return mix


def _plain(fields: object) -> dict[str, dict[str, object]]:
    """The fields as plain data; a decoder by ``_target_`` becomes the object it names."""
    if not isinstance(fields, DictConfig):
        return dict(fields)  # type: ignore[call-overload]
    plain = OmegaConf.to_container(fields, resolve=True)
    assert isinstance(plain, dict)
    for ext, options in plain.items():
        if isinstance(options, dict) and isinstance(options.get("decoder"), dict):
            options["decoder"] = by_target(f"data.fields.{ext!s}.decoder", fields[ext].decoder)
    return plain  # type: ignore[return-value]

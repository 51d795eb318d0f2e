"""Builds this rank's loaders, and finds the class names, from the data config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from dtrain.config.instantiate import by_target
from dtrain.config.schema import Config, DataConfig
from dtrain.data import Limits, Mixture, ShardLoader, TransferOptions, WorkerOptions
from dtrain.data.fields.field import Field
from dtrain.data.fields.parse import parse_fields
from dtrain.data.fields.tokenizers import DATASET, Corpus
from dtrain.data.loading.stream import Stream, StreamLoader
from dtrain.data.mixing import Mix
from dtrain.data.order.epoch_order import choose_lanes
from dtrain.data.order.growth import Growth
from dtrain.data.shards.bad_shards import BadShards, LeftOut
from dtrain.data.shards.node_cache import CachePolicy
from dtrain.data.shards.patterns import first_shard
from dtrain.data.sources.datasets import value_fields
from dtrain.data.sources.mixture import EvaluationSets
from dtrain.data.sources.random_offset import RandomOffsetSource
from dtrain.data.sources.shard_source import ShardSource
from dtrain.distributed.collectives import from_rank0, on_all_ranks
from dtrain.distributed.world import World
from dtrain.errors import ConfigError, as_config_error, nearest
from dtrain.files import read_json
from dtrain.precision import Precision
from dtrain.runs.excluded import read_excluded

_CLASSES = "classes.json"
#: Keys of a source of ``data.mixture``.
_SOURCE_KEYS = ("shards", "weight", "fields", "augment", "tokens_per_sample")


def prepare_data(data: DataConfig) -> None:
    """Collective. Rank 0 calls ``data.prepare``, if it is set, while the others wait."""

    def call() -> None:
        with as_config_error("data.prepare"):
            by_target("data.prepare", data.prepare)

    if data.prepare is not None:
        from_rank0(call)


def train_loader(
    cfg: Config, world: World, precision: Precision, also_bad: LeftOut | None = None, *, fills_cache: bool = True
) -> ShardLoader:
    """This rank's training loader.

    Args:
        cfg: The config.
        world: The ranks.
        precision: Decides the transfer dtypes.
        also_bad: Shards that are damaged on other ranks, see ``on_all_ranks_alike``.
        fills_cache: False reads shards without a copy in the node cache in place, for a few samples.

    Raises:
        ConfigError: If shards, fields and sizes cannot work together.
    """
    data = cfg.data
    loader = _loader(
        cfg,
        world,
        precision,
        "train",
        also_bad,
        shuffle=data.shuffle,
        lanes=data.lanes,
        window=data.window,
        tail=data.tail,
        random_offset=data.random_offset,
        augment=by_target("data.augment", data.augment) if data.augment is not None else None,
        mix=build_mix(data.mix) if data.mix is not None else None,
        growth=build_growth(data),
        fills_cache=fills_cache,
    )
    if data.exclude is not None:
        with as_config_error("data.exclude"):
            loader.exclude(read_excluded(data.exclude))
    return loader


def eval_loader(
    cfg: Config,
    world: World,
    precision: Precision,
    also_bad: LeftOut | None = None,
    *,
    in_stored_order: bool = False,
    fills_cache: bool = True,
) -> ShardLoader | None:
    """This rank's evaluation loader, each sample once; None without ``data.eval``.

    Args:
        cfg: The config.
        world: The ranks.
        precision: Decides the transfer dtypes.
        also_bad: As for ``train_loader``.
        in_stored_order: Without it, a step draws from several lanes in stored order, so that each rank opens about its
            share of the shards. With it, every rank opens all of them.
        fills_cache: As for ``train_loader``.

    Raises:
        ConfigError: If shards, fields and sizes cannot work together.
    """
    if not cfg.data.eval:
        return None
    lanes = None if in_stored_order else choose_lanes(max(cfg.train.global_batch_size, 1), None, "window", world.size)
    return _loader(cfg, world, precision, "eval", also_bad, shuffle="none", lanes=lanes, fills_cache=fills_cache)


_AnyLoader = TypeVar("_AnyLoader", ShardLoader, ShardLoader | None)


def on_all_ranks_alike(build: Callable[[LeftOut], _AnyLoader]) -> _AnyLoader:
    """Collective. Builds a loader on every rank; a shard that is damaged for one of them is left out by all.

    Args:
        build: Gets the damaged shards of other ranks; returns this rank's loader.

    Raises:
        ConfigError: On every rank, if the loader cannot be built on one.
    """
    loader = on_all_ranks(lambda: build({}))
    found: list[dict[str, dict[str, str]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, loader.bad_shards if loader is not None else {})
    if all(one == found[0] for one in found):
        return loader
    union: dict[str, dict[str, str]] = {}
    for rank, of_rank in enumerate(found):
        for source, reasons in of_rank.items():
            for name, reason in reasons.items():
                union.setdefault(source, {}).setdefault(name, f"on rank {rank}: {reason}")
    return on_all_ranks(lambda: build(union))


def check_same_data(train: ShardLoader | None, evaluation: ShardLoader | None) -> None:
    """Collective. Checks that all ranks index the same data.

    Otherwise they would use samples twice or never, and end an epoch at different steps.

    Raises:
        ConfigError: On every rank, if a rank's data differ from rank 0's; names the differences.
    """
    own = {
        f"data.{split}": {**loader.index.describe(), "excluded": loader.excluded}
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
    own = {name: source.get("fields") for name, source in data.mixture.items() if isinstance(source, Mapping)}
    if data.eval:
        read = dict(data.eval) if are_sets(data.eval) else {"": data.eval}
    elif data.mixture:
        read = {name: source.get("shards") for name, source in data.mixture.items() if isinstance(source, Mapping)}
    else:
        read = {"": data.train}
    found: dict[str, Field] = {}
    for name, named in read.items():
        with as_config_error(f"data.mixture.{name}.fields" if own.get(name) else "data.fields"):
            fields = _with_decoders(own.get(name) or data.fields)
            for field in value_fields(fields) if isinstance(named, Mapping) else parse_fields(fields):
                found.setdefault(field.name, field)
    return tuple(found.values())


def class_names(data: DataConfig) -> list[str] | None:
    """Reads ``classes.json``, which ``dtrain pack imagefolder`` writes next to the shards.

    Args:
        data: The config. The file next to ``data.train``, or the sources of the mixture, has priority over the one next to
            ``data.eval``.

    Returns:
        The name of each label; None without such a file.

    Raises:
        ConfigError: If the file is no readable list of names, or the sources of a mixture have different ones.
    """
    files = [file for pattern in _train_patterns(data) if (file := _file_beside(pattern, _CLASSES)) is not None]
    names = {file: _read_classes(file) for file in files}
    for file in files:
        if names[file] != names[files[0]]:
            raise ConfigError(
                f"data.mixture: {files[0]} and {file} name different classes, so a label would mean two things. Pack both "
                "sources with the same classes, or delete the file that is wrong."
            )
    if files:
        return names[files[0]]
    for pattern in data.eval.values() if are_sets(data.eval) else [data.eval]:
        if (found := _file_beside(pattern, _CLASSES)) is not None:
            return _read_classes(found)
    return None


def corpus_beside(data: DataConfig) -> Corpus | None:
    """Reads ``dataset.json``, which ``dtrain pack text`` writes next to the shards; None without it.

    The shards are found as in ``class_names``.

    Raises:
        ConfigError: If the file is not usable, or the sources of a mixture have different tokenizers, ends of text or padding,
            or the evaluation shards a different tokenizer.
    """
    eval_nodes = list(data.eval.values() if are_sets(data.eval) else [data.eval])
    found = _corpora(_train_patterns(data)) or _corpora(eval_nodes)
    first = next(iter(found.values()), None)
    for file, corpus in found.items():
        assert first is not None
        theirs, ours = (
            f"tokens of {it.tokenizer_identity} with end of text {it.end_of_text} and padding {it.padding}"
            for it in (first, corpus)
        )
        if theirs != ours:
            raise ConfigError(
                f"data.mixture: {first.folder} has {theirs}, {file.parent} {ours}, so a token would mean two things. Pack both "
                "sources in the same way."
            )
    for file, corpus in _corpora(eval_nodes).items():
        if first is None:
            break
        if corpus.tokenizer_identity != first.tokenizer_identity:
            raise ConfigError(
                f"data.eval: {file.parent} has tokens of {corpus.tokenizer_identity}, the training shards in {first.folder} "
                f"those of {first.tokenizer_identity}. Pack the text again with --tokenizer vocabulary:{first.folder}."
            )
        if first.padding is None:
            first.padding = corpus.padding
    return first


def _corpora(patterns: Iterable[Any]) -> dict[Path, Corpus]:
    """The descriptions next to the shards of patterns, by file."""
    found: dict[Path, Corpus] = {}
    for pattern in patterns:
        file = _file_beside(pattern, DATASET)
        if file is not None and file not in found and Corpus.is_described_by(file):
            with as_config_error("data"):
                found[file] = Corpus.read(file)
    return found


def build_mixture(data: DataConfig, *, build: bool = True) -> Mixture:
    """The mixture that ``data.mixture`` describes; nothing is opened yet.

    Args:
        data: The config.
        build: False leaves nodes with a ``_target_`` unbuilt, to check everything else.

    Raises:
        ConfigError: If a source is impossible; names it.
    """
    with as_config_error("data.mixture"):
        options: dict[str, dict[str, Any]] = {key: {} for key in _SOURCE_KEYS}
        for name, source in data.mixture.items():
            key = f"data.mixture.{name}"
            if not isinstance(source, Mapping) or not source.get("shards"):
                raise ConfigError(f"{key}: got {source!r}, want {{shards: PATTERN, weight: NUMBER}}.")
            if unknown := [str(option) for option in source if option not in _SOURCE_KEYS]:
                raise ConfigError(f"{key}: there is no key {unknown[0]!r}. {nearest(unknown[0], _SOURCE_KEYS)}")
            options["shards"][name] = _source(f"{key}.shards", source["shards"], build)
            options["weight"][name] = source.get("weight", 1)
            if source.get("fields") is not None:
                options["fields"][name] = _with_decoders(source["fields"])
            if (augment := source.get("augment")) is not None:
                none = augment == "none"
                options["augment"][name] = by_target(f"{key}.augment", augment) if build and not none else None
            if "tokens_per_sample" in source:
                options["tokens_per_sample"][name] = source["tokens_per_sample"]
        return Mixture(
            options["shards"],
            options["weight"],
            epoch_of=data.epoch_of,
            fields=options["fields"],
            augment=options["augment"],
            missing=data.missing,
            tokens_per_sample=options["tokens_per_sample"] or None,
            shard_size=data.shard_size,
        )


def build_sets(data: DataConfig, *, build: bool = True) -> EvaluationSets:
    """The sets that ``data.eval`` names, with the fields of the sources of the mixture of the same names.

    Raises:
        ConfigError: If a set is impossible; names it.
    """
    with as_config_error("data.eval"):
        sets = {str(name): _source(f"data.eval.{name}", named, build) for name, named in data.eval.items()}
        sources = {name: data.mixture[name] for name in sets if isinstance(data.mixture.get(name), Mapping)}
        own = {
            name: _with_decoders(source["fields"])
            for name, source in sources.items()
            if source.get("fields") is not None
        }
        fields = {name: _in_the_middle(source_fields) for name, source_fields in own.items()}
        return EvaluationSets(sets, fields=fields, missing=data.missing, shard_size=data.shard_size)


def _source(key: str, named: Any, build: bool) -> Any:
    """Patterns as they are, or the dataset of a ``_target_``."""
    if isinstance(named, Mapping):
        dataset = by_target(key, named) if build else ()
        if isinstance(dataset, Stream):
            raise ConfigError(f"{key}: a stream cannot be mixed, its samples have no numbers. Write them to shards.")
        return dataset
    if not are_patterns(named):
        raise ConfigError(f"{key}: got {named!r}, want shards such as 'shards/{{000..009}}.tar', or a _target_.")
    return named


def are_sets(named: Any) -> bool:
    """Whether a value of ``data.eval`` is a mapping of names to sets."""
    return isinstance(named, Mapping) and "_target_" not in named


def are_patterns(value: Any) -> bool:
    """Whether a value of the config is a pattern of shards, or a list of them."""
    patterns = value if isinstance(value, list) else [value]
    return bool(patterns) and all(isinstance(pattern, str) and pattern for pattern in patterns)


def _loader(
    cfg: Config,
    world: World,
    precision: Precision,
    split: str,
    also_bad: LeftOut | None,
    *,
    random_offset: bool = False,
    fills_cache: bool = True,
    **order: object,
) -> ShardLoader:
    data = cfg.data
    mixed = split == "train" and bool(data.mixture)
    named: Any = None if mixed else getattr(data, split)
    if not mixed and named is None:
        raise ConfigError(
            f"data.{split} is not set. Name shards, such as 'data.{split}=\"shards/{{000..009}}.tar\"', or a dataset by its "
            "_target_ (data=map)."
        )
    fields = _with_decoders(data.fields)
    if split == "eval":
        fields = _in_the_middle(fields)
    options: dict[str, Any] = {
        "global_batch_size": cfg.train.global_batch_size,
        "micro_batch_size": rows
        if isinstance(rows := cfg.train.micro_batch_size, int)
        else None,  # auto: see micro_batch
        "rank": world.rank,
        "world_size": world.size,
        "num_workers": data.num_workers,
        "seed": cfg.run.seed,
        "precision": precision,
        "limits": Limits(None, None),  # the vote adds up all ranks
        "transfer": TransferOptions(data.transfer, data.on_overflow, cfg.train.channels_last),
        "workers": WorkerOptions(
            data.prefetch, data.start_method, world.device.type == "cuda", data.max_worker_restarts
        ),
        **order,
    }
    policy = CachePolicy.from_config(data.storage, data.cache.dir, data.cache.max_gb, fills=fills_cache)
    with as_config_error("data.bad_shards"):
        bad_shards = BadShards.from_config(data.bad_shards, data.max_bad_shards, split, also_bad)
    if random_offset and not are_patterns(named):
        raise ConfigError(
            "data.random_offset=true: samples begin at random tokens only in shards of one text, which data.train is not. "
            "Set data.random_offset=false."
        )
    if mixed or (split == "eval" and are_sets(named)):
        sources = build_mixture(data) if mixed else build_sets(data)
        with as_config_error("data.mixture" if mixed else "data.eval"):
            return ShardLoader(sources, fields, policy=policy, bad_shards=bad_shards, **options)
    with as_config_error(f"data.{split}"):
        if isinstance(named, Mapping):
            dataset = by_target(f"data.{split}", named)
            if isinstance(dataset, Stream):
                if options.pop("growth", Growth()) != Growth():
                    raise ConfigError("data.grow: a stream has no shards that can grow. Set data.grow=null.")
                return StreamLoader(dataset, fields, **options)
            return ShardLoader.over(dataset, fields, shard_size=data.shard_size, **options)
        if not random_offset:
            return ShardLoader(named, fields, policy=policy, bad_shards=bad_shards, **options)
        source = ShardSource.build(
            named,
            parse_fields(fields),
            rank=world.rank,
            world_size=world.size,
            policy=policy,
            bad_shards=bad_shards,
            growth=options["growth"],
        )
        return ShardLoader(RandomOffsetSource.from_shards(source), **options)


def build_growth(data: DataConfig) -> Growth:
    """What ``data.grow`` and ``data.grow_allow_removed`` allow.

    Raises:
        ConfigError: If ``data.grow`` is impossible.
    """
    with as_config_error("data"):
        return Growth(data.grow, data.grow_allow_removed)


def build_mix(node: Any) -> Mix:
    """Builds ``data.mix``.

    Raises:
        ConfigError: If it cannot be built or is no ``Mix``.
    """
    with as_config_error("data.mix"):
        mix = by_target("data.mix", node)
    if not isinstance(mix, Mix):
        raise ConfigError(f"data.mix: {node['_target_']} gives {type(mix).__name__}, want a dtrain.data.mixing.Mix.")
    return mix


def _with_decoders(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the fields, with decoders built by their ``_target_``."""

    def built(place: str, options: Any) -> Any:
        if isinstance(options, list):
            return [built(f"{place}[{number}]", one) for number, one in enumerate(options)]
        decoder = options.get("decoder") if isinstance(options, Mapping) else None
        return {**options, "decoder": by_target(f"{place}.decoder", decoder)} if isinstance(decoder, dict) else options

    return {ext: built(f"data.fields.{ext}", options) for ext, options in fields.items()}


def _in_the_middle(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields without ``clip: random``: an evaluation takes the middle of a recording."""

    def fixed(options: Any) -> Any:
        if isinstance(options, list):
            return [fixed(one) for one in options]
        return {**options, "clip": None} if isinstance(options, dict) else options

    return {ext: fixed(options) for ext, options in fields.items()}


def _train_patterns(data: DataConfig) -> list[Any]:
    """The patterns of ``data.train``, or of the sources of the mixture."""
    if data.mixture:
        return [source.get("shards") for source in data.mixture.values() if isinstance(source, Mapping)]
    return [data.train]


def _file_beside(pattern: Any, name: str) -> Path | None:
    """The file of this name in the folder of the shards; None if there is none."""
    if not are_patterns(pattern):
        return None
    # Such files are optional, and the shards may be deleted after the training.
    with suppress(ValueError, OSError):
        file = Path(first_shard(pattern)).parent / name
        if file.is_file():
            return file
    return None


def _read_classes(path: Path) -> list[str]:
    try:
        names = read_json(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}). Correct or delete it.") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path} is not a list of class names. Correct or delete it.")
    return names

"""Extras that a config needs and that are not installed.

An *extra* is a group of optional packages, as in ``pip install 'dtrain[s3]'``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from dtrain.config.instantiate import by_target
from dtrain.config.metrics import require_torchmetrics
from dtrain.config.schema import Config
from dtrain.console import Finding
from dtrain.data.fields.parse import parse_fields
from dtrain.data.shards.shard_file import fsspec_file_system, is_url, scheme
from dtrain.errors import ConfigError
from dtrain.tracking.sinks import check_tracker

_pip_command = re.compile(r"pip install (?:'[^']+'|[\w-]+)")


def missing_extras(cfg: Config) -> list[Finding]:
    """One error for each part of the config that needs a package that is not installed, with the command that installs it.

    Each part is checked by the function that the run itself uses, and other problems are left to the run.
    """
    findings: dict[str, Finding] = {}
    for key, check in _checks(cfg):
        try:
            check()
        except (ConfigError, ImportError, ValueError) as error:
            if command := _pip_command.search(str(error)):
                findings.setdefault(command[0], Finding(f"extra of {key}", str(error), "error", command[0]))
    return list(findings.values())


def _checks(cfg: Config) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Keys of the config, and what raises if a package for their value is missing."""
    data = cfg.data
    yield "tracker.name", partial(check_tracker, cfg.tracker)
    for name in list(cfg.train.metrics)[:1]:
        yield "train.metrics", partial(require_torchmetrics, name)
    if "digits" in str((data.prepare or {}).get("_target_")):
        yield "data.prepare", partial(by_target, "data.prepare", data.prepare)
    for key, value in {"data.train": data.train, "data.mixture": data.mixture, "data.eval": data.eval}.items():
        for url in {scheme(text): text for text in _texts(value) if is_url(text)}.values():
            yield key, partial(fsspec_file_system, url)
    sources = [source.get("fields") for source in data.mixture.values() if isinstance(source, Mapping)]
    for fields in filter(None, [data.fields, *sources]):
        yield "data.fields", partial(parse_fields, fields)


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value of a config."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)

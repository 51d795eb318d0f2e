"""The metrics of ``train.metrics``: how one is built, and whether a larger value of it is better."""

from __future__ import annotations

from typing import Any

from dtrain.config.directions import direction
from dtrain.config.instantiate import by_target
from dtrain.config.schema import Config
from dtrain.errors import ConfigError
from dtrain.extras import install_command


def require_torchmetrics(name: str) -> None:
    """Refuses the metric ``name`` with a ``ConfigError`` if torchmetrics is not installed."""
    try:
        import torchmetrics  # noqa: F401 - takes seconds, so only where it is used
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"train.metrics.{name} needs torchmetrics ({error}): {install_command('metrics')}."
        ) from error


def build_metric(name: str, node: Any) -> Any:
    """Builds a metric.

    Args:
        name: Its name in ``train.metrics``.
        node: Its node.

    Returns:
        A ``torchmetrics.Metric``.

    Raises:
        ConfigError: If torchmetrics is missing, or the target is no metric or cannot be built.
    """
    require_torchmetrics(name)
    from torchmetrics import Metric

    metric = by_target(f"train.metrics.{name}", node)
    if not isinstance(metric, Metric):
        raise ConfigError(
            f"train.metrics.{name}: {node['_target_']} gives {type(metric).__name__}, want a torchmetrics.Metric, such as "
            "torchmetrics.classification.MulticlassF1Score."
        )
    return metric


def best_mode(cfg: Config) -> str | None:
    """The value of ``checkpoint.best_mode``; if it is null and ``checkpoint.best`` is of ``train.metrics``, the metric's own.

    Raises:
        ConfigError: As ``build_metric``.
    """
    best, name = cfg.checkpoint.best or "", (cfg.checkpoint.best or "").rpartition("/")[2]
    if cfg.checkpoint.best_mode is not None or not best.startswith("eval/") or name not in cfg.train.metrics:
        return cfg.checkpoint.best_mode
    is_better = build_metric(name, cfg.train.metrics[name]).higher_is_better
    return direction(best) if is_better is None else "max" if is_better else "min"

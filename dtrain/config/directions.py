"""Whether a larger or a smaller value of a metric is better: for checkpoints, searches, reports and hooks."""

from __future__ import annotations

from dtrain.errors import ConfigError

_MIN = frozenset({"bits", "cer", "error", "errors", "loss", "losses", "mae", "mse", "nll", "perplexity", "rmse", "wer"})
_MAX = frozenset({
    *("acc", "accuracy", "ap", "auc", "auroc", "bleu", "correlation", "dice", "f1", "iou", "kappa", "map", "mcc", "miou"),
    *("ndcg", "precision", "psnr", "r2", "recall", "rouge", "ssim"),
    "first_to_second", "second_to_first",  # shares of right pairs in dtrain.tasks.Contrastive
})  # fmt: skip
#: Words that reverse another word's direction, or make it a different quantity, such as neg_mse, accuracy_drop and loss_std.
_TURNING = frozenset({
    *("neg", "negative", "negated", "minus", "inv", "inverse", "reciprocal", "drop", "gap", "delta", "improvement"),
    *("reduction", "saved", "free", "std", "var"),
})  # fmt: skip


def direction(name: str) -> str | None:
    """The direction in which a metric improves, by the words of its name.

    Args:
        name: As in metrics.jsonl. The metric of an evaluation is its last part (``eval/loss``, and ``eval/cats/loss`` of the
            set ``cats``); a source of a mixture comes after its loss (``train/loss/books``).

    Returns:
        ``"min"``, ``"max"``, or None if the name does not tell.

    Example:
        >>> direction("eval/cats/bits_per_byte"), direction("eval/top5_accuracy"), direction("eval/quality")
        ('min', 'max', None)
    """
    parts = name.lower().split("/")[1:]
    if not parts:
        return None
    of_source = name.startswith("train/") and parts[0] == "loss"
    metric = "loss" if of_source else parts[-1]
    words = {metric, *metric.replace("@", "_").split("_")}
    if words & _TURNING:
        return None
    falls, rises = bool(words & _MIN), bool(words & _MAX)
    return None if falls == rises else "min" if falls else "max"


def require_direction(name: str, given: str | None, key: str) -> str:
    """The direction that is given, else the one of the metric's name.

    Args:
        name: The metric.
        given: ``"min"``, ``"max"``, or None.
        key: What ``given`` is the value of, for the message.

    Raises:
        ConfigError: If ``given`` is something else, or it is None and the name does not tell.
    """
    if given not in ("min", "max", None):
        raise ConfigError(f"{key}: got {given!r}, want max or min, or null to go by the metric's name.")
    if (found := given or direction(name)) is None:
        raise ConfigError(
            f"{key}: not set, and the name {name!r} does not say whether larger values are better. Set {key}=max or "
            f"{key}=min, or correct the name."
        )
    return found

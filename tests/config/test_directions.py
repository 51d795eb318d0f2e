"""Which way a metric improves, by its name."""

from __future__ import annotations

import pytest

from dtrain.config.directions import direction, require_direction
from dtrain.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *[(f"eval/{name}", "min") for name in ("loss", "perplexity", "bits_per_byte", "mae", "val_rmse", "error_rate")],
        *[
            (f"eval/{name}", "max")
            for name in ("accuracy", "top5_accuracy", "f1", "macro_f1", "mean_iou", "psnr", "acc@5")
        ],
        *[(f"eval/{name}", "max") for name in ("first_to_second", "second_to_first", "AUC")],
        ("eval/accuracy_set/loss", "min"),  # of a set: the metric comes last
        ("eval/loss_cases/accuracy", "max"),
        ("eval/loss/accuracy", "max"),  # of a set that is called loss
        ("train/loss/books", "min"),  # of a source of a mixture: the metric comes before it
        ("train/loss", "min"),
        *[
            (f"eval/{name}", None)
            for name in ("1_minus_accuracy", "accuracy_drop", "loss_std", "loss_improvement", "inv_mse")
        ],
        *[
            (name, None)
            for name in (
                "eval/quality",
                "eval/losses_avoided/quality",
                "eval/error_accuracy",
                "eval/neg_mse",
                "loss",
                "",
            )
        ],
    ],
)
def test_the_words_of_a_name_tell_which_values_are_better(name: str, expected: str | None) -> None:
    assert direction(name) == expected


def test_what_is_given_comes_first_and_what_cannot_be_known_is_refused() -> None:
    assert require_direction("eval/loss", "max", "checkpoint.best_mode") == "max"
    assert require_direction("eval/quality", "min", "checkpoint.best_mode") == "min"
    with pytest.raises(ConfigError, match=r"checkpoint\.best_mode: not set.*'eval/quality'.*checkpoint\.best_mode=max"):
        require_direction("eval/quality", None, "checkpoint.best_mode")
    with pytest.raises(ConfigError, match=r"checkpoint\.best_mode: got 'lowest'.*max or min"):
        require_direction("eval/loss", "lowest", "checkpoint.best_mode")

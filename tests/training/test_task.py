from __future__ import annotations

from typing import Any

import pytest
import torch

from dtrain.data import Batch
from dtrain.training.task import Output, require_output, run_task
from tests.refusals import refused


def test_a_sum_of_no_rows_is_an_output() -> None:
    output = Output(torch.zeros(()), 0)
    assert require_output(output) is output
    assert output.metrics == output.tables == {}


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (1.0, "got float"),
        (torch.zeros(3), "torch.float32 of shape [3]"),
        (torch.zeros(1), "torch.float32 of shape [1]"),
        (torch.zeros((), dtype=torch.float16), "torch.float16"),
        (torch.zeros((), dtype=torch.float64), "torch.float64"),
    ],
    ids=str,
)
def test_a_loss_that_is_no_fp32_number_is_refused_with_what_to_do(loss: Any, message: str) -> None:
    with refused(TypeError, "Output.loss_sum", message, "Sum the losses"):
        Output(loss, 1)


def test_a_negative_count_is_refused() -> None:
    with refused(TypeError, "Output.count", "-3", "valid rows"):
        Output(torch.zeros(()), -3)


@pytest.mark.parametrize(
    ("table", "message"),
    [(torch.zeros(2, 2), "torch.float32"), (torch.zeros(2, dtype=torch.int32), "torch.int32"), ([1, 2], "list")],
    ids=str,
)
def test_a_table_that_holds_no_counts_is_refused_by_its_name(table: Any, message: str) -> None:
    with refused(TypeError, "Output.tables['mine']", message, "int64"):
        Output(torch.zeros(()), 0, {}, {"mine": table})


@pytest.mark.parametrize(
    "returned", [None, torch.zeros(()), (torch.zeros(()), 3), {"loss_sum": torch.zeros(())}], ids=repr
)
def test_anything_but_an_output_is_refused_by_its_type(returned: object) -> None:
    with refused(TypeError, key="", got=type(returned).__name__, remedy="dtrain.training.task.Output"):
        require_output(returned)


@pytest.mark.parametrize(
    ("pair", "got"),
    [
        (torch.tensor(0.5), "torch.float32 of shape []"),
        (0.5, "float"),
        ((torch.ones(3), torch.tensor(4)), "torch.float32 of shape [3]"),
        ((1.0, 2, 3), "tuple"),
    ],
)
def test_a_metric_that_is_no_sum_with_a_number_is_refused_by_its_name(pair: Any, got: str) -> None:
    with refused(TypeError, "Output.metrics['accuracy']", got, "sum"):
        Output(torch.tensor(1.0), 4, {"accuracy": pair})


class WrongShapes:
    def __call__(self, model: Any, batch: Batch) -> Output:
        return Output((batch["image"] @ batch["label"]).sum(), 2)


def test_an_error_in_a_task_names_the_task_and_the_shapes_of_its_batch() -> None:
    columns = {"image": torch.ones(2, 3), "label": torch.ones(2, dtype=torch.int64), "caption": ["a", "b"]}
    batch = Batch(columns, ["0", "1"], torch.ones(2, dtype=torch.bool))
    with pytest.raises(RuntimeError) as raised:
        run_task(WrongShapes(), torch.nn.Identity(), batch)
    (note,) = raised.value.__notes__
    assert note.startswith(f"task {__name__}.WrongShapes: RuntimeError: ")
    assert "\n" not in note
    assert note.endswith(". The batch has image: float32 [2, 3], label: int64 [2], caption: list.")


def test_an_error_without_a_message_is_named_by_its_type() -> None:
    def empty(model: Any, batch: Batch) -> Output:
        raise ValueError

    with pytest.raises(ValueError, match=r"\.empty: ValueError\. The batch has image"):
        run_task(empty, torch.nn.Identity(), Batch({"image": torch.ones(2, 3)}, ["0", "1"], torch.ones(2)))

"""Which samples contributed to a step: the loss of each row, and its part of the gradient (``replay.samples=true``).

* A *pass* is forward and backward of one micro-batch as in the step, with the same rows, random numbers and BatchNorm
  statistics, but ``valid`` is true for one row of one rank only. Its gradient over all ranks is the *part* of the row.
* The parts add up to the gradient of the step, unless the loss of a row depends on which other rows are valid. That is checked.
* The *share* of a row is ``<part, gradient> / |gradient|**2``. Shares add up to 1. A row with a large share has moved the
  weights most; one with a negative share has pulled against the others.

All ranks make the same passes, so it works for sharded models too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.console import align_rows
from dtrain.data import Batch
from dtrain.report.gallery import Card, Part, Picture, gallery_page
from dtrain.training.checkpoint.state import TrainState
from dtrain.training.task import Output, Task

#: Relative difference of the sum over the rows from the loss, and from the gradient, from which shares are approximate.
LOSS_DIFFERENCE, INTERACTION = 1e-3, {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_MOST_PICTURES = 48
_MOST_SHOWN = 20


@dataclass(frozen=True)
class RowShare:
    """A row of the global batch.

    Attributes:
        key: ``<shard>/<key>``.
        rank: The rank.
        row: Row among the rows of the rank in this step, from 0, masked ones included.
        loss: Its mean loss; None if it is not finite.
        grad_norm: Norm of its part of the gradient of the mean loss; None if it is not finite, or was not computed.
        share: Its share; likewise.
    """

    key: str
    rank: int
    row: int
    loss: float | None
    grad_norm: float | None
    share: float | None

    def facts(self) -> list[tuple[str, str]]:
        """Names and texts of its numbers, for a page."""
        place = ("place", f"rank {self.rank}, row {self.row}")
        return [place, ("loss", _text(self.loss)), ("share", _text(self.share))]


@dataclass(frozen=True)
class Shares:
    """The rows of a step, the largest loss first.

    Attributes:
        step: The step.
        rows: Its valid rows.
        interaction: How it shows that rows interact; "" if they do not. With ``replay.rows`` only their losses are compared.
        pictures: The first rows that are images, by rank and row.
    """

    step: int
    rows: Sequence[RowShare]
    interaction: str
    pictures: dict[tuple[int, int], Picture]

    @property
    def is_approximate(self) -> bool:
        """Whether rows interact, so that the gradient is not the sum of their parts."""
        return bool(self.interaction)

    def to_json(self) -> dict[str, Any]:
        """The content of the JSON file."""
        return {"step": self.step, "approximate": self.is_approximate, "samples": [asdict(row) for row in self.rows]}

    def table(self) -> str:
        """The first rows, and what the shares add up to."""
        head = ["sample", "rank", "row", "loss", "norm", "share"]
        cells = [
            [row.key, f"{row.rank}", f"{row.row}", *map(_text, (row.loss, row.grad_norm, row.share))]
            for row in self.rows[:_MOST_SHOWN]
        ]
        more = f"... and {len(self.rows) - _MOST_SHOWN:,} more rows\n" if len(self.rows) > _MOST_SHOWN else ""
        known = [row.share for row in self.rows if row.share is not None]
        total = (
            f"step {self.step}: the shares of {len(known)} of {len(self.rows)} rows add up to {math.fsum(known):.4f}"
        )
        if self.is_approximate:
            total += f"; rows interact ({self.interaction}), so losses and shares of single rows are approximate"
        return f"{align_rows([head, *cells], numbers=range(1, 6))}{more}{total}"

    def write_page(self, path: Path, run: str) -> bool:
        """Writes the pictures of the first rows as one HTML file; returns whether there are any.

        Args:
            path: The file.
            run: Name of the run.
        """
        if not self.pictures:
            return False
        cards = [
            Card(row.key, [picture], facts=row.facts())
            for row in self.rows
            if (picture := self.pictures.get((row.rank, row.row))) is not None
        ]
        title = f"{run}, step {self.step}: the samples with the largest losses"
        page = gallery_page(title, "dtrain replay of", time.time(), [Part("", cards=cards)])
        path.write_bytes(page.encode("utf-8", errors="replace"))  # keys may not be valid text
        return True


def examine_rows(
    run: TrainState, batches: Sequence[Batch], most: int | None = None, on_pass: Callable[[int], None] = lambda n: None
) -> Shares:
    """Collective. Computes the shares of the next step; the run is then as before.

    Args:
        run: The run, before the step.
        batches: This rank's micro-batches of the step, on the device.
        most: Compute parts for this many rows of the largest losses only; None: for all rows.
        on_pass: Called with 1 after every pass.
    """
    step, world = run.step, run.world
    chooser = _ChosenRow(step.task)
    step.task = chooser
    try:
        step.accumulate(batches, len(batches))
        sums = [sum(float(it.count) for it in chooser.outputs), sum(float(it.loss_sum) for it in chooser.outputs)]
        count, loss_sum = _sum_over_ranks(sums, world.device)
        whole = {copies: [part.clone() for part in parts] for copies, parts in step.gradients().items()}
        seen = chooser.batches.copy()
        step.drop_window()
        scale = float(step.loss_scale.scale) if step.loss_scale is not None else 1.0
        mean = run.cfg.train.global_batch_size / count / scale if count else 0.0
        square = _dot(whole, whole, world.device)

        own = [(number, row) for number, batch in enumerate(seen) for row in batch.kept_rows()]
        of_ranks: list[list[tuple[int, int]]] = [[]] * world.size
        dist.all_gather_object(of_ranks, own)

        def one_pass(number: int, row: int) -> tuple[float, float]:
            """A pass with this rank's row of a micro-batch, -1 for none; returns the row's mean loss and its sum of losses."""
            chooser.row = row
            step.accumulate([batches[number]], 1, first=number)
            on_pass(1)
            of_row, rows = float(chooser.outputs[-1].loss_sum), float(chooser.outputs[-1].count)
            return (of_row / rows, of_row) if row >= 0 and rows else (0.0, 0.0)

        losses: dict[tuple[int, int, int], float] = {}
        total_loss = 0.0
        if most is not None:  # each rank a row of its own at the same time: only the losses are needed
            for turn in range(max(map(len, of_ranks))):
                number, row = own[turn] if turn < len(own) else (0, -1)
                loss, of_row = one_pass(number, row)
                step.drop_window()
                if row >= 0:
                    losses[world.rank, number, row] = loss
                    total_loss += of_row
            all_losses: list[dict[tuple[int, int, int], float]] = [{}] * world.size
            dist.all_gather_object(all_losses, losses)
            losses = {place: loss for each in all_losses for place, loss in each.items()}
            [total_loss] = _sum_over_ranks([total_loss], world.device)
        places = [(rank, *place) for rank, rows in enumerate(of_ranks) for place in rows]
        chosen = sorted(places, key=lambda place: -_order(losses[place]))[:most] if most is not None else places
        total = {copies: [torch.zeros_like(part) for part in parts] for copies, parts in whole.items()}
        parts: dict[tuple[int, int, int], tuple[float, float]] = {}
        for rank, number, row in chosen:
            losses[rank, number, row], of_row = _sum_over_ranks(
                one_pass(number, row if rank == world.rank else -1), world.device
            )
            total_loss += of_row if most is None else 0.0
            part = step.gradients()
            parts[rank, number, row] = _dot(part, part, world.device), _dot(part, whole, world.device)
            for copies, summed in total.items():
                torch._foreach_add_(summed, part[copies])
            step.drop_window()
    finally:
        step.task = chooser.task

    interaction = ""
    if abs(total_loss - loss_sum) > LOSS_DIFFERENCE * abs(loss_sum):
        interaction = f"the sum of their losses is {total_loss:.4g}, that of the step {loss_sum:.4g}"
    elif most is None and 0 < square < math.inf:
        for copies, summed in total.items():
            torch._foreach_sub_(summed, whole[copies])
        difference = math.sqrt(_dot(total, total, world.device) / square)
        if difference > INTERACTION.get(run.precision.compute_dtype, INTERACTION[torch.float32]):
            interaction = f"their parts differ from the gradient by {difference:.1e}"
    return _collected(run, batches, seen, losses, parts, mean, square, interaction)


def _collected(
    run: TrainState,
    batches: Sequence[Batch],
    seen: Sequence[Batch],
    losses: dict[tuple[int, int, int], float],
    parts: dict[tuple[int, int, int], tuple[float, float]],
    mean: float,
    square: float,
    interaction: str,
) -> Shares:
    """Collective. The rows of all ranks with their keys and pictures."""
    rank, own, rows_of = run.world.rank, [], run.train_loader.rows_per_micro_batch
    in_batch: dict[tuple[int, int], tuple[int, int]] = {}
    for (of_rank, number, row), loss in losses.items():
        if of_rank != rank:
            continue
        # A micro-batch with masked rows may have been cut to its valid rows.
        cut = len(seen[number].valid) < len(batches[number].valid)
        original = batches[number].kept_rows()[row] if cut else row
        norm = share = None
        if (rank, number, row) in parts and 0 < square < math.inf:
            own_square, product = parts[rank, number, row]
            norm, share = _finite(math.sqrt(own_square) * mean), _finite(product / square)
        place = number * rows_of + original
        in_batch[rank, place] = number, original
        own.append(RowShare(seen[number].sample_keys[row], rank, place, _finite(loss), norm, share))
    every: list[list[RowShare]] = [[]] * run.world.size
    dist.all_gather_object(every, own)
    rows = sorted((row for each in every for row in each), key=lambda row: (-_order(row.loss), row.rank, row.row))
    shown = [(row.rank, row.row) for row in rows[:_MOST_PICTURES]]
    drawn = {place: _picture(run, batches, *in_batch[place]) for place in shown if place[0] == rank}
    pictures: list[dict[tuple[int, int], Picture]] = [{}] * run.world.size
    dist.all_gather_object(pictures, {place: picture for place, picture in drawn.items() if picture is not None})
    return Shares(run.step.step + 1, rows, interaction, {place: it for each in pictures for place, it in each.items()})


class _ChosenRow:
    """A task with ``valid`` true for one row of a micro-batch.

    Attributes:
        task: The task.
        row: The row; -1 for none, None for all valid rows.
        outputs: The outputs since ``row`` was None, and the last one.
        batches: The micro-batches that the task got then.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.row: int | None = None
        self.outputs: list[Output] = []
        self.batches: list[Batch] = []

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        if self.row is None:
            self.batches.append(batch)
        else:
            valid = torch.zeros_like(batch.valid)
            if self.row >= 0:
                valid[self.row] = True
            batch = batch.mapped(lambda tensor: tensor)
            batch.valid = valid
            self.outputs = []
        output = self.task(model, batch)
        self.outputs.append(Output(output.loss_sum.detach(), output.count))
        return output


def _dot(ours: dict[int, list[Tensor]], theirs: dict[int, list[Tensor]], device: torch.device) -> float:
    """Collective. The scalar product of two gradients, of which each rank has its parts."""
    own = 0.0
    for copies, parts in ours.items():
        pairs = zip(parts, theirs[copies], strict=True)
        own += sum(float((a.double() * b.double()).sum()) for a, b in pairs) / copies
    return _sum_over_ranks([own], device)[0]


def _sum_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    found: list[float] = total.tolist()
    return found


def _picture(run: TrainState, batches: Sequence[Batch], number: int, row: int) -> Picture | None:
    """An image as the model got it, without its normalisation; None if the row has no image."""
    field = next((field for field in run.train_loader.source.fields if field.role == "image"), None)
    if field is None or not isinstance(batches[number].get(field.name), Tensor):
        return None
    image = batches[number][field.name][row].float().cpu()
    if image.dim() != 3:
        return None
    mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in (field.mean, field.std))
    pixels = ((image * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
    return Picture.from_pixels(pixels.permute(1, 2, 0).numpy())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _order(loss: float | None) -> float:
    return loss if loss is not None and math.isfinite(loss) else math.inf


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"

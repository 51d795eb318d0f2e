"""The loader: this rank's micro-batches, and how far the trainer has come.

* Workers are stateless. Each knows (seed, epoch, first step) from the parent and builds whole micro-batches of a pure
  order; worker *w* of *n* builds every *n*-th one.
* The *position* belongs to the trainer: it moves when ``commit()`` says that the optimizer step is done. What workers
  have prefetched by then is nobody's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dtrain.data.batch import Batch
from dtrain.precision.policy import Precision


class ShardLoader:
    """Micro-batches of one rank from ``.tar`` shards, each sample of an epoch exactly once over all ranks.

    Args:
        shards: Paths; each may be a brace pattern (``train-{00000..00009}.tar``) or a glob.
        fields: Extension to ``{"name": ..., "role": ..., **options}``, for example
            ``{"jpg": {"name": "image", "role": "image", "size": 224}, "cls": {"name": "label", "role": "label"}}``.
        global_batch_size: Samples of one optimizer step over all ranks.
        micro_batch_size: Samples of one forward on this rank; None is the rank's whole share of the global batch.
        rank: This process, in ``[0, world_size)``.
        world_size: Number of processes.
        num_workers: DataLoader workers; 0 decodes in the calling process.
        seed: Key of the order and of every augmentation.
        shuffle: ``"window"`` (shards permuted, samples permuted within windows of shards), ``"full"``, ``"none"``.
        lanes: Contiguous pieces of the epoch that a step draws from; divides ``global_batch_size``. None: its largest
            divisor up to 64.
        window: Shards in a shuffle window. None: 8.
        tail: ``"pad"`` masks the missing rows of the last step; ``"drop"`` leaves out samples that do not fill a step.
        precision: Name or policy; decides the wire dtypes.
        augment: ``augment(sample, rng) -> sample`` on a dict of numpy arrays, called in the worker with a generator
            that depends on (seed, epoch, sample) only.
        max_bad: Bad samples after which the loader raises; below 1 a share of the samples handed over, else a count.

    Raises:
        ValueError: If sizes do not fit, a pattern matches nothing, a field or a role is unknown.
        FileNotFoundError: If a named shard does not exist.
    """

    steps_per_epoch: int
    micro_batches_per_step: int

    def __init__(
        self,
        shards: str | Sequence[str],
        fields: Mapping[str, Mapping[str, Any]],
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 2,
        seed: int = 0,
        shuffle: str = "window",
        lanes: int | None = None,
        window: int | None = None,
        tail: str = "pad",
        precision: str | Precision = "fp32",
        augment: Callable[..., Any] | None = None,
        max_bad: float = 0.01,
    ) -> None:
        raise NotImplementedError

    def epoch(self, n: int) -> Iterator[Batch]:
        """This rank's micro-batches of epoch ``n``: from the committed position if ``n`` is the state's epoch, else
        from its start."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Batch]:
        """``epoch()`` of the state's epoch."""
        raise NotImplementedError

    def commit(self) -> None:
        """Moves the position by one global batch; after the last one of an epoch the state is ``(n + 1, 0)``.

        Raises:
            RuntimeError: If this rank was not handed all micro-batches of that global batch.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """A few numbers, equal on all ranks, that continue at any number of ranks, workers or global batch size."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state`` was taken.

        Raises:
            RuntimeError: If an iterator of this loader is open.
            ValueError: If the data set changed since; names what differs.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Ends the workers. The loader can be used again."""
        raise NotImplementedError

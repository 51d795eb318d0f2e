"""The interfaces of a sample source.

* A *source* is a sequence of samples, numbered from 0, with the fields to read from each of them.
* Its *index* (``Index``) divides the samples into shards, the units that the order shuffles, and identifies the dataset:
  equal on all ranks.
* A *reader* belongs to one worker. It fetches the fields of samples *raw*, as the source stores them, by their numbers.
  Decoding is a separate call, so that the caller can pass the memory that a value should be written to.
* There are two ways to fetch: many samples at once, fast and without reasons for what failed (``fetch_all``), or one sample
  with the reason (``fetch``).

Order, ranks, masks, augmentation, transfer and state belong to the loader and are the same for every source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from dtrain.data.fields.crop import Crop
from dtrain.data.fields.field import Field
from dtrain.data.order.index import Index


@dataclass
class OpenReaders:
    """The readers that are open in one process and share its limits.

    Attributes:
        number: How many they are.
        prefetcher: Fetches for all of them; made by the first one that needs it.
    """

    number: int = 1
    prefetcher: Any = None


class Reader(ABC):
    """Reads samples in one worker."""

    @abstractmethod
    def fetch(self, epoch: int, sample: int) -> Sequence[Any]:
        """The raw fields of a sample, in the order of the source's fields.

        Args:
            epoch: Number of the epoch.
            sample: Number of the sample.

        Raises:
            SampleError: If a field is missing or the sample is bad.
        """

    @abstractmethod
    def fetch_all(self, epoch: int, samples: np.ndarray) -> Iterator[tuple[Sequence[int], Sequence[Sequence[Any]]]]:
        """The raw fields of many samples, in blocks. Samples that could not be fetched are left out; ``fetch`` says why.

        Args:
            epoch: Number of the epoch.
            samples: Sample numbers, int64, shape ``[n]``; in ascending order, reading takes the least time.

        Returns:
            Of each block the positions of its samples in ``samples``, and for each field the raw values of these samples.
        """

    def columns(self) -> Sequence[np.ndarray | Tensor] | None:
        """For each field an array whose row *n* is the value of sample *n*; None where samples are fetched one by one."""
        return None

    @abstractmethod
    def decode(
        self,
        field: Field,
        raw: Any,
        /,
        out: np.ndarray | None = None,
        crop: Callable[[int, int], Crop] | None = None,
        at: float = 0.5,
    ) -> Any:
        """The value of a raw field.

        Args:
            field: The field.
            raw: The result of ``fetch`` for it.
            out: uint8, ``[height, width, 3]``: where an image may be written if it has that shape.
            crop: ``crop(height, width)`` of an image, in place of the field's own.
            at: Which part of a recording is taken, from 0 to 1; 0.5: the middle.

        Raises:
            SampleError: If the bytes do not fit the field.
        """

    @abstractmethod
    def place(self, sample: int) -> dict[str, Any]:
        """Where a sample is stored, for the log of bad samples: ``shard`` and ``offset``."""

    def check(self, sample: int) -> None:
        """Checks that the sample's file is still the indexed one; called before a sample counts as bad.

        Raises:
            ShardChanged: If the file changed.
        """
        return

    def expect(self, ahead: Callable[[int], np.ndarray], at_once: int | None = None) -> None:
        """Called from time to time, so that the reader can prefetch.

        Args:
            ahead: ``ahead(n)`` returns up to ``n`` shards that are read now and next, roughly in that order, int64,
                shape ``[n]``; a shard may occur twice.
            at_once: From how many shards samples are read in turn; None if that is unknown.
        """
        return

    def share(self, readers: OpenReaders) -> None:
        """Called once if several readers are open in one process: together they stay below its limit of open files, and
        prefetch with as many threads as a single reader would."""
        return

    def tell(self, reads: Callable[[int], None]) -> None:
        """Called once before a worker reads samples. In ``fetch_all``, call ``reads(sample)`` before any code that may kill the
        process, such as user code, reads that sample; see ``loading.worker_deaths``."""
        return

    def close(self) -> None:
        """Closes files."""
        return


class Source(ABC):
    """A sequence of samples; pickled and sent to the workers, each of which opens a reader.

    Attributes:
        fields: The fields to read from each sample.
        index: How many samples there are, and the identity of the dataset.
    """

    fields: tuple[Field, ...]
    index: Index

    @abstractmethod
    def open(self, seed: int) -> Reader:
        """A reader; ``seed`` is for random numbers that the source itself draws."""

    @abstractmethod
    def summary(self) -> str:
        """How much data there is, for the banner."""

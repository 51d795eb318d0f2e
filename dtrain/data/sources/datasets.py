"""Datasets that are not shards: arrays in memory, generated samples, and any map-style dataset.

* A *map-style* dataset has ``len(dataset)`` and ``dataset[n]``. ``Arrays`` takes row *n* of each array; ``Generated``
  calls a function with a generator keyed by (seed, epoch, sample), so that no two ranks or workers draw the same
  numbers.
* ``SampleSource`` turns one into a ``Source``, so that the loader reads it as it reads shards. Random numbers that a
  dataset draws from the global generators of Python, numpy and torch are keyed by (seed, epoch, sample) too: an
  augmentation in ``__getitem__``, such as torchvision's, is the same for any number of ranks and workers.
* ``value_of`` converts the values of a dataset: images become uint8 RGB ``[height, width, 3]``, everything else keeps
  its type.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from dtrain.config.partials import plain_partial
from dtrain.data.fields.crop import Crop
from dtrain.data.fields.decode import decode_image, decode_mask, part_of, tokens_of
from dtrain.data.fields.field import MEDIA, DataError, Field, SampleError
from dtrain.data.fields.parse import parse_fields
from dtrain.data.order.index import Index
from dtrain.data.order.randomness import Randomness, generators_at, hash64
from dtrain.data.sources.source import Reader, Source

# Rows of an array in its fingerprint: enough to distinguish datasets, and cheap for large ones.
_HASHED_ROWS = 64
# The order keeps a few numbers for each shard; this many take milliseconds per epoch.
_MAX_SHARDS = 2**16
_CHANNELS = (1, 3, 4)
# Not uint64: a single number of it may not fit into the int64 of a batch.
_REGULAR = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float16", "float32", "float64")
# Uses of (seed, epoch) need different keys: the order has 1 to 3, augmentation 4, mixing 6, an offset 7.
_GENERATION, _FIXED = 5, 8


class Arrays:
    """A map-style dataset of arrays of equal length; sample *n* is row *n* of each array.

    Args:
        arrays: Arrays or tensors ``[samples, ...]``, or lists of other values: by name, or in the order of the fields.

    Attributes:
        fingerprint: Hash of shapes, types and some rows.

    Raises:
        ValueError: If there are none, or their lengths differ.

    Example:
        >>> import numpy as np
        >>> from dtrain.data import Arrays, ShardLoader
        >>> arrays = Arrays({"x": np.zeros((6, 4), np.float32), "y": np.arange(6)})
        >>> fields = {"x": {"name": "x", "role": "feature"}, "y": {"name": "y", "role": "label"}}
        >>> loader = ShardLoader.over(arrays, fields, global_batch_size=3, num_workers=0)
        >>> next(loader.epoch(0))["x"].shape
        torch.Size([3, 4])
    """

    def __init__(self, arrays: Mapping[str, Any] | Sequence[Any]) -> None:
        named = isinstance(arrays, Mapping)
        self._names = list(arrays) if named else None
        self._arrays = list(arrays.values() if isinstance(arrays, Mapping) else arrays)
        lengths = [len(array) for array in self._arrays]
        if len(set(lengths)) != 1:
            raise ValueError(f"Arrays: got lengths {lengths}, want at least one array, and all of the same length.")
        digest = hashlib.sha256()
        for name, array in zip(self._names or range(len(lengths)), self._arrays, strict=True):
            digest.update(f"{name} {getattr(array, 'dtype', '')} {list(getattr(array, 'shape', lengths))}".encode())
            for row in np.unique(np.linspace(0, lengths[0] - 1, _HASHED_ROWS).astype(np.int64)) if lengths[0] else ():
                digest.update(_content(array[int(row)]))
        self.fingerprint = digest.hexdigest()[:16]

    @classmethod
    def from_npz(cls, path: str, **names: str) -> Arrays:
        """Arrays of a .npz file, as ``numpy.savez`` writes it.

        Args:
            path: The file.
            names: Name of each array here to its name in the file: ``x="x_test"``. Without any, all arrays of the file.

        Raises:
            ValueError: If an array is missing, or can only be read by unpickling it; names those that the file has.
            FileNotFoundError: If there is no such file.
        """
        with np.load(path, allow_pickle=False) as file:
            names = names or {name: name for name in file.files}
            if missing := [there for there in names.values() if there not in file.files]:
                raise ValueError(f"{path} has no array {missing[0]!r}. It has {', '.join(file.files)}.")
            return cls({here: file[there] for here, there in names.items()})

    def __len__(self) -> int:
        return len(self._arrays[0])

    def columns(self, places: Sequence[Any]) -> list[Any]:
        """The arrays at these places: names, or all of them in their order; fewer if one is missing."""
        if self._names is None:
            return self._arrays
        named = dict(zip(self._names, self._arrays, strict=True))
        return [named[place] for place in places if place in named]

    def __getitem__(self, sample: int) -> Any:
        """A dict if the arrays have names, else a tuple."""
        values = tuple(array[sample] for array in self._arrays)
        return values if self._names is None else dict(zip(self._names, values, strict=True))


class Generated:
    """Samples that a function generates.

    Args:
        function: ``function(sample, rng)`` returns the fields of sample number ``sample``: a dict by name, or a tuple
            in the order of the fields. ``rng`` is a ``numpy.random.Generator`` keyed by (seed, epoch, sample).
        length: Samples of an epoch.
        fresh: Whether each epoch has new random numbers. False: every epoch has the same ones, as evaluation needs; they
            differ from those of every epoch with True.

    Attributes:
        fingerprint: The function's name and ``fresh``; a change inside the function is not noticed.

    Raises:
        ValueError: If ``length`` is below 1, or ``function`` is not callable.

    Example:
        >>> import numpy as np
        >>> from dtrain.data import Generated, ShardLoader
        >>> points = Generated(lambda sample, rng: {"x": rng.normal(size=2).astype(np.float32)}, length=6)
        >>> loader = ShardLoader.over(points, {"x": {"name": "x"}}, global_batch_size=3, num_workers=0)
        >>> next(loader.epoch(0))["x"].shape
        torch.Size([3, 2])
    """

    def __init__(self, function: Callable[[int, np.random.Generator], Any], length: int, fresh: bool = True) -> None:
        if length < 1 or not callable(function):
            raise ValueError(
                f"Generated: got length {length} and function {function!r}, want a length of at least 1 and a function."
            )
        self._length = length
        self.function = plain_partial(function)
        self.fresh = fresh
        called = getattr(function, "func", function)  # of a functools.partial
        self.fingerprint = f"{getattr(called, '__qualname__', type(called).__qualname__)}, fresh={fresh}"

    def __len__(self) -> int:
        return self._length


def as_dataset(value: Any) -> Any:
    """A map-style dataset or ``Generated``, unchanged; a dict or tuple of arrays as ``Arrays``.

    Raises:
        ValueError: If the value is none of them.
    """
    if isinstance(value, (Mapping, tuple)):
        return Arrays(value)
    if isinstance(value, Generated) or (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        return value
    stream = ""
    if hasattr(value, "__iter__"):
        stream = " Samples of a stream cannot be read by number: write them to shards, or use data=iterable."
    raise ValueError(
        f"got a {type(value).__name__}, want a dataset with __len__ and __getitem__, a dict or tuple of arrays, or a "
        f"dtrain.data.Generated.{stream}"
    )


@dataclass(frozen=True)
class SampleSource(Source):
    """A map-style dataset, or ``Generated``, as a source.

    Attributes:
        places: Key of each field in samples that are dicts; in tuples, values are in the order of ``fields``.
    """

    dataset: Any
    index: SampleIndex
    fields: tuple[Field, ...]
    places: tuple[Any, ...]

    @classmethod
    def build(
        cls,
        dataset: Any,
        fields: Mapping[Any, Mapping[str, Any]],
        *,
        name: str | None = None,
        shard_size: int | None = None,
    ) -> SampleSource:
        """Builds the source.

        Args:
            dataset: A map-style dataset, a dict or tuple of arrays, or ``Generated``. Its attribute ``fingerprint``,
                if it is a string, identifies its content; without it only name and length do.
            fields: Key of a sample that is a dict to ``{"name": ..., "role": ..., **options}``; the values of a tuple
                in this order. A ``decoder`` is called with the value.
            name: First part of the sample keys; None: the name of the dataset's class.
            shard_size: See ``SampleIndex``.

        Raises:
            ValueError: If ``dataset`` is not such a dataset, is empty, or a field is impossible.
        """
        dataset = as_dataset(dataset)
        name = type(dataset).__name__ if name is None else name
        content = getattr(dataset, "fingerprint", "")
        index = SampleIndex(name, len(dataset), shard_size, content if isinstance(content, str) else "")
        return cls(dataset, index, value_fields(fields), tuple(fields))

    def open(self, seed: int) -> SampleReader:
        """A reader; random numbers that the dataset draws depend on ``seed``."""
        return SampleReader(self, seed)

    def summary(self) -> str:
        """``1,000 samples of MyDataset``."""
        return f"{self.index.num_samples:,} samples of {self.index.name}"


def value_fields(mapping: Mapping[Any, Mapping[str, Any]]) -> tuple[Field, ...]:
    """The fields of a ``fields`` mapping whose keys are not file extensions and therefore imply no role or decoder.

    Raises:
        ValueError: As ``parse_fields``; also if two keys differ in upper and lower case only.
    """
    for key, options in mapping.items():
        if not isinstance(options, Mapping):
            raise ValueError(f"data.fields.{key}: got {options!r}, want options such as {{name: image, role: image}}.")
    with_decoders = {
        str(key).lower(): {**options, "decoder": options.get("decoder") or unchanged}
        for key, options in mapping.items()
    }
    fields = parse_fields(with_decoders)
    if len(fields) != len(mapping):
        raise ValueError(
            f"data.fields: some of {', '.join(map(repr, mapping))} differ in upper and lower case only. Rename one of them "
            "in the dataset."
        )
    return fields


class SampleIndex(Index):
    """The index of a dataset that is not in shards.

    Samples are grouped into shards of equal size, though there are no files, so that lanes and shuffle windows work as
    for shards. The default shards are so small that a window shuffle is as good as a full one; larger shards keep
    neighbouring samples together, which helps if reading neighbours is cheaper.

    Args:
        name: Name of the dataset; the first part of a sample's key.
        num_samples: Number of samples.
        shard_size: Samples of a shard; None: the smallest size with at most 65,536 shards.
        content: Identifies the content of the samples.

    Raises:
        ValueError: If there are no samples, or ``shard_size`` is below 1.
    """

    labels: ClassVar = {"name": "name", "num_samples": "samples", "shard_size": "samples in a shard"}
    other_difference = "the same name and number of samples, but other content."

    def __init__(self, name: str, num_samples: int, shard_size: int | None = None, content: str = "") -> None:
        if num_samples < 1:
            raise ValueError(f"the dataset {name} has {num_samples} samples, want at least one.")
        size = -(-num_samples // _MAX_SHARDS) if shard_size is None else shard_size
        if size < 1:
            raise ValueError(f"data.shard_size: got {size}, want at least one sample, or null for the default.")
        self.name = name
        self.num_samples = num_samples
        self.shard_size = size
        self.counts = np.full(-(-num_samples // size), size, np.int64)
        self.counts[-1] -= len(self.counts) * size - num_samples
        identity = json.dumps([name, num_samples, size, content])
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]

    def keys(self, samples: np.ndarray) -> list[str]:
        """``<name>/<number>`` of each of these samples."""
        return [f"{self.name}/{sample}" for sample in samples.tolist()]

    def find(self, key: str) -> np.ndarray:
        """The sample of ``<name>/<number>`` or ``<number>``."""
        number = key.removeprefix(f"{self.name}/")
        known = number.isdecimal() and int(number) < self.num_samples
        return np.array([int(number)] if known else [], np.int64)

    def find_shard(self, name: str) -> np.ndarray:
        """Empty: there are no files."""
        return np.zeros(0, np.int64)

    def describe(self) -> dict[str, Any]:
        """The identity of the dataset for a checkpoint."""
        return {
            "name": self.name,
            "num_samples": self.num_samples,
            "shard_size": self.shard_size,
            "fingerprint": self.fingerprint,
        }


def value_of(
    field: Field,
    raw: Any,
    out: np.ndarray | None = None,
    crop: Callable[[int, int], Crop] | None = None,
    at: float = 0.5,
) -> Any:
    """The value of one field.

    Args:
        field: The field. Its decoder, if it has one, is called with ``raw`` first.
        raw: The value from the dataset.
        out: uint8, ``[height, width, 3]``: where an encoded image is written if it has that shape.
        crop: ``crop(height, width)`` of an image, in place of the field's own.
        at: Which part of a recording is taken, from 0 to 1; 0.5: the middle.

    Returns:
        For the role image, uint8 ``[height, width, 3]``, cropped: from a PIL image, the bytes of an image file, or an
        array or tensor ``[height, width]``, ``[height, width, channels]`` or, if the last axis cannot be channels,
        ``[channels, height, width]``; a fourth channel is dropped. For the roles audio and video, a part of a recording:
        the bytes of a file, or an array (see ``decode_media``). For other roles the result of the decoder, with PIL images
        as arrays; with a tokenizer, tokens; of the role mask, also from the bytes of a PNG.

    Raises:
        SampleError: If an image file is damaged. ``ValueError``, ``OSError`` and ``EOFError`` of a field's own decoder
            become this.
        DataError: If the role is image and the value holds no uint8 pixels.
    """
    assert field.decoder is not None
    try:
        value = field.decoder(raw)
        if isinstance(value, Image.Image):
            value = _picture(field, value)
    except SampleError:
        raise
    except (ValueError, OSError, EOFError) as error:
        raise SampleError(f"field {field.name!r}: {type(error).__name__}: {error}") from error
    if isinstance(value, Tensor):
        value = value.detach()
    if field.role in MEDIA:
        return part_of(field, value, at, crop or field.crop)
    is_file = isinstance(value, (bytes, bytearray, memoryview))
    if field.role == "mask" and is_file:
        return decode_mask(bytes(value), field.name)
    if field.role != "image":
        return value if field.tokenizer is None else tokens_of(field, value)
    crop = crop or field.crop
    if is_file:
        return decode_image(bytes(value), crop, out, field.exif, field.decode == "reduced")
    pixels = _rgb(field, value)
    return pixels if crop is None else crop(*pixels.shape[:2]).cut(pixels)


def unchanged(value: Any) -> Any:
    """The decoder of a field that has none: returns the value unchanged."""
    return value


def _picture(field: Field, picture: Image.Image) -> np.ndarray:
    if field.exif:
        picture = ImageOps.exif_transpose(picture)
    # The indices of a palette are the classes of a mask; an image needs colours.
    return np.array(picture.convert("RGB") if field.role == "image" else picture)


def _rgb(field: Field, value: Any) -> np.ndarray:
    pixels = value.cpu().numpy() if isinstance(value, Tensor) and value.element_size() == 1 else value
    if isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8:
        if pixels.ndim == 2:
            pixels = pixels[:, :, np.newaxis]
        if pixels.ndim == 3 and pixels.shape[2] not in _CHANNELS and pixels.shape[0] in _CHANNELS:
            pixels = pixels.transpose(1, 2, 0)
        if pixels.ndim == 3 and pixels.shape[2] in _CHANNELS:
            return np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels[:, :, :3]
    got = f"{value.dtype} {list(value.shape)}" if isinstance(value, (np.ndarray, Tensor)) else type(value).__name__
    raise DataError(
        f"field {field.name!r}: the dataset returns {got}, but an image has to be uint8 pixels, which are normalised on the "
        "device. Leave out ToTensor and Normalize; or declare role: feature for values that are normalised already."
    )


class SampleReader(Reader):
    """The reader of a ``SampleSource``."""

    decode = staticmethod(value_of)

    def __init__(self, source: SampleSource, seed: int) -> None:
        self._dataset = source.dataset
        self._fields = source.fields
        self._index = source.index
        self._places = source.places
        self._seed = seed
        self._randomness = Randomness()
        self._reads: Callable[[int], None] = _told_to_nobody

    def fetch(self, epoch: int, sample: int) -> list[Any]:
        """The dataset's value for each field; its ``ValueError``, ``OSError`` and ``EOFError`` become ``SampleError``."""
        return self._fetch(sample, int(self._randoms(epoch, np.array(sample))))

    def fetch_all(self, epoch: int, samples: np.ndarray) -> Iterator[tuple[Sequence[int], list[Sequence[Any]]]]:
        """The same for many samples, without those that raise an exception."""
        randoms = self._randoms(epoch, samples).tolist()
        for position, (sample, random) in enumerate(zip(samples.tolist(), randoms, strict=True)):
            self._reads(sample)
            try:
                values = self._fetch(sample, random)
            except Exception:  # noqa: BLE001 - ``fetch`` raises it again
                continue
            yield [position], [[value] for value in values]

    def columns(self) -> list[np.ndarray | Tensor] | None:
        """The arrays of ``Arrays``, if all are numbers of which a batch is the same as the values one by one."""
        if not isinstance(self._dataset, Arrays):
            return None
        columns = self._dataset.columns(self._places)
        regular = len(columns) == len(self._fields) and all(map(_is_regular, self._fields, columns))
        return columns if regular else None

    def place(self, sample: int) -> dict[str, Any]:
        """The dataset's name, and the sample's number."""
        return {"shard": self._index.name, "offset": sample}

    def tell(self, reads: Callable[[int], None]) -> None:
        self._reads = reads

    def _randoms(self, epoch: int, samples: np.ndarray) -> np.ndarray:
        """The keys of the samples' random numbers."""
        if isinstance(self._dataset, Generated) and not self._dataset.fresh:
            # Not those of an epoch: an evaluation must have other samples than training.
            return hash64(self._seed, 0, _FIXED, samples)
        return hash64(self._seed, epoch, _GENERATION, samples)

    def _fetch(self, number: int, random: int) -> list[Any]:
        try:
            sample = self._sample(number, random)
        except SampleError:
            raise
        except (ValueError, OSError, EOFError) as error:
            raise SampleError(f"{type(error).__name__}: {error}") from error
        if isinstance(sample, Mapping):
            for place in self._places:
                if place not in sample:
                    raise SampleError(f"has no {place!r}, but {', '.join(map(repr, sample))}")
            return [sample[place] for place in self._places]
        values: Sequence[Any] = sample if isinstance(sample, (tuple, list)) else (sample,)
        if len(values) != len(self._places):
            raise DataError(
                f"sample {self._index.keys(np.array([number]))[0]!r} has {len(values)} values, data.fields declares "
                f"{len(self._places)}: {', '.join(map(str, self._places))}. Declare all values, in their order."
            )
        return list(values)

    def _sample(self, number: int, random: int) -> Any:
        if isinstance(self._dataset, Generated):
            return self._dataset.function(number, self._randomness.generator(random))
        if isinstance(self._dataset, (Arrays, dict)):  # which draw no random numbers
            return self._dataset[number]
        with generators_at(random):
            return self._dataset[number]


def _told_to_nobody(sample: int) -> None:
    pass


def _is_regular(field: Field, array: Any) -> bool:
    """Whether a batch of rows of an array takes them unchanged, all at once."""
    if type(array) is Tensor:
        usable = array.device.type == "cpu" and array.layout == torch.strided
    else:
        usable = type(array) in (np.ndarray, np.memmap) and array.dtype.isnative and array.dtype.name in _REGULAR
    if not usable or field.decoder is not unchanged or field.tokenizer is not None or field.role in MEDIA:
        return False
    is_rgb = len(array.shape) == 4 and array.shape[3] == 3 and str(array.dtype).endswith("uint8")
    return field.role != "image" or (is_rgb and field.crop is None)


def _content(value: Any) -> bytes:
    if isinstance(value, Tensor):  # as bytes, because numpy does not have every dtype
        return value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tobytes()
    return repr(value).encode() if isinstance(value, (str, bytes, int, float)) else b""

"""Audio and video files: the part of a recording that a sample gets, decoded by torchcodec (the extra ``media``).

* A *recording* is an audio or video file, or a decoded array from the user's own decoder or dataset.
* A *part* is what a batch holds of it: ``length`` audio samples, or ``num_frames`` frames. Only that part is decoded.
* ``at`` says where the part lies: 0.5 in the middle, as in evaluation; with ``clip: random`` it is drawn for each (seed,
  epoch, sample), from 0 up to 1. Rank and worker do not matter.
* Audio is fp32 in [-1, 1], ``[channels, length]``. Padding is NaN until the batch is built, which replaces it by zeros and a
  mask (``audio_and_mask``): so an augmentation can tell padding from silence.
* Video is uint8 RGB, ``[num_frames, 3, height, width]``. It is transferred in this form, and normalised on the device like
  images.

torchcodec reads the bytes in memory with FFmpeg's libraries; nothing is written to a disk, and no program is started.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtrain.data.fields.crop import Crop
from dtrain.data.fields.field import Field
from dtrain.extras import install_command

#: Parts of more decoded bytes are rejected.
MAX_BYTES = 2**30
#: Larger images and frames are rejected as decompression bombs: a quarter GiB of RGB, the size from which Pillow warns.
MAX_PIXELS = 89_478_485
# The last torchcodec on PyPI that needs no CUDA, for versions of torch before 2.11; from then on it is 0.13.
_FITTING = {"2.9": "0.9.1", "2.10": "0.10.0"}
# torchcodec's errors begin with the place in its own source code.
_source_place = re.compile(r"^.*?\.cpp:\d+, ", re.DOTALL)
# Decoded beyond the end of a part: resampling may round the time of a sample up.
_MARGIN = 2


class Unreadable(ValueError):
    """A recording is damaged, too large, or not of the declared kind. The message is the reason."""


@functools.cache
def torchcodec_decoders() -> Any:
    """The module ``torchcodec.decoders``.

    Raises:
        ModuleNotFoundError: If torchcodec is not installed; names the pip command.
        ImportError: If it cannot load FFmpeg's libraries, or does not fit the installed torch; says what to install.
    """
    try:
        import torchcodec.decoders
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"audio and video need the package torchcodec, which is not installed. Run: {install_command('media')}, and "
            "install FFmpeg's libraries: apt install ffmpeg, or conda install ffmpeg.",
            name=error.name,
        ) from error
    except (ImportError, OSError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        fitting = _FITTING.get(".".join(torch.__version__.split(".")[:2]), "0.13.0")
        raise ImportError(
            f"audio and video need torchcodec, which cannot be loaded here ({reason}). Install FFmpeg's libraries, 4 to "
            "8 (apt install ffmpeg, or conda install ffmpeg), and the torchcodec that fits this "
            f"torch {torch.__version__}: pip install torchcodec=={fitting}"
        ) from error
    return torchcodec.decoders


def decode_media(field: Field, recording: Any, at: float, crop: Callable[[int, int], Crop] | None) -> np.ndarray:
    """The part of a recording that a field declares.

    Args:
        field: Its role is ``audio`` or ``video``.
        recording: The bytes of a file; or decoded, an array or a tensor: audio, floats ``[samples]`` or ``[channels,
            samples]``; video, uint8 ``[frames, 3, height, width]``.
        at: Where the part lies, in [0, 1].
        crop: ``crop(height, width)`` of each frame; None keeps all.

    Returns:
        Audio: fp32, ``[channels, length]``, NaN where it is padded. Video: uint8, ``[num_frames, 3, height, width]``.

    Raises:
        Unreadable: If it is not such a recording.
    """
    is_file = isinstance(recording, (bytes, bytearray, memoryview))
    if not is_file and not isinstance(recording, (np.ndarray, Tensor)):
        raise Unreadable(f"got a {type(recording).__name__}, want the bytes of a file, or an array")
    try:
        if field.role == "audio":
            samples = _read_audio(field, bytes(recording), at) if is_file else _part_of_audio(field, recording, at)
            return _padded(field, samples)
        frames = _read_video(field, bytes(recording), at) if is_file else _part_of_video(field, recording, at)
    except Unreadable:
        raise
    except (RuntimeError, ValueError, IndexError) as error:  # raised by torchcodec for damaged files
        reason = _source_place.sub("", str(error)).strip().splitlines() or [type(error).__name__]
        raise Unreadable(f"not readable {field.role} ({len(recording)} bytes): {reason[0]}") from error
    return np.ascontiguousarray((frames if crop is None else _cut(frames, crop)).numpy())


def audio_and_mask(padded: Tensor) -> tuple[Tensor, Tensor]:
    """Padded rows of audio, floats ``[..., channels, length]``, with zeros as padding; and a mask, bool ``[..., length]``,
    false there. Changes ``padded`` in place."""
    missing = padded.isnan()
    return padded.masked_fill_(missing, 0), ~missing[..., 0, :]


def _read_audio(field: Field, content: bytes, at: float) -> Tensor:
    decoder = torchcodec_decoders().AudioDecoder(content, sample_rate=field.sample_rate, num_channels=field.channels)
    stored = decoder.metadata
    rate = field.sample_rate or stored.sample_rate
    total = round((stored.duration_seconds or 0) * rate)
    channels = field.channels or stored.num_channels
    wanted = total if field.length is None else min(field.length, total)
    if channels * wanted * 4 > MAX_BYTES:
        raise Unreadable(f"{total / rate:.0f} s of {channels} channels are more than the limit of {MAX_BYTES} bytes")
    if wanted == total:
        everything: Tensor = decoder.get_all_samples().data
        return everything
    start = _start(at, total - wanted)
    end = start + wanted
    samples: Tensor = decoder.get_samples_played_in_range(start / rate, (end + _MARGIN) / rate).data
    return samples[:, :wanted]


def _part_of_audio(field: Field, waveform: np.ndarray | Tensor, at: float) -> Tensor:
    samples = torch.as_tensor(waveform)
    if samples.dim() == 1:
        samples = samples[None]
    if samples.dim() != 2 or not samples.is_floating_point():
        raise Unreadable(f"{samples.dtype} {list(samples.shape)}, want floats [samples] or [channels, samples]")
    length = samples.shape[1] if field.length is None else field.length
    start = _start(at, max(samples.shape[1] - length, 0))
    return samples[:, start : start + length]


def _padded(field: Field, samples: Tensor) -> np.ndarray:
    channels, got = samples.shape
    if not got:
        raise Unreadable("audio without a sample")
    if field.channels not in (None, channels):
        raise Unreadable(f"audio of {channels} channels, want {field.channels}")
    if not bool(samples.isfinite().all()):
        raise Unreadable("audio with values that are not finite")
    padded = np.full((channels, field.length or got), np.nan, np.float32)
    padded[:, :got] = samples[:, : padded.shape[1]].numpy()
    return padded


def _read_video(field: Field, content: bytes, at: float) -> Tensor:
    decoder = torchcodec_decoders().VideoDecoder(content)
    stored = decoder.metadata
    _check_frames(field, stored.height, stored.width)
    if field.fps is None:
        frames: Tensor = decoder.get_frames_at(_numbers(field, stored.num_frames, at)).data
        return frames
    assert field.num_frames is not None
    first, end = stored.begin_stream_seconds, stored.end_stream_seconds
    span = (field.num_frames - 1) / field.fps
    frame = (end - first) / max(stored.num_frames, 1)
    # The last moment at which a frame begins, so that it is not asked for at the very end.
    last = end - frame / 2
    start = first + at * max(last - first - span, 0)
    frames = decoder.get_frames_played_at(
        [min(start + number / field.fps, last) for number in range(field.num_frames)]
    ).data
    return frames


def _part_of_video(field: Field, video: np.ndarray | Tensor, at: float) -> Tensor:
    frames = torch.as_tensor(video)
    if frames.dtype != torch.uint8 or frames.dim() != 4 or frames.shape[1] != 3 or not len(frames):
        raise Unreadable(f"{frames.dtype} {list(frames.shape)}, want uint8 [frames, 3, height, width]")
    if field.fps is not None:
        raise Unreadable("decoded frames have no times, so fps cannot be applied; set stride")
    _check_frames(field, *frames.shape[2:])
    return frames[_numbers(field, len(frames), at)]


def _check_frames(field: Field, height: int, width: int) -> None:
    if height * width > MAX_PIXELS or (field.num_frames or 0) * 3 * height * width > MAX_BYTES:
        raise Unreadable(
            f"{field.num_frames} frames of {width} x {height} pixels are more than the limit of {MAX_BYTES} bytes"
        )


def _numbers(field: Field, total: int, at: float) -> list[int]:
    """Numbers of the frames of the part; a recording that is too short repeats its last frame."""
    assert field.num_frames is not None
    span = (field.num_frames - 1) * field.stride + 1
    start = _start(at, max(total - span, 0))
    return [min(start + number * field.stride, total - 1) for number in range(field.num_frames)]


def _start(at: float, most: int) -> int:
    return min(int(at * (most + 1)), most)


def _cut(frames: Tensor, crop: Callable[[int, int], Crop]) -> Tensor:
    """The same crop of each frame."""
    chosen = crop(*frames.shape[2:])
    cut = np.stack([chosen.cut(frame) for frame in frames.permute(0, 2, 3, 1).numpy()])
    return torch.from_numpy(cut).permute(0, 3, 1, 2)

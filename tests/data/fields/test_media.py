"""Audio and video: which part of a recording a sample gets, what is refused, and the way of a batch to the device."""

from __future__ import annotations

import io
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dtrain.data import ShardDataset, ShardLoader
from dtrain.data.augment import RandomResizedCrop
from dtrain.data.fields import media
from dtrain.data.fields.crop import whole
from dtrain.data.fields.decode import decode
from dtrain.data.fields.field import DataError, Field, SampleError
from dtrain.data.fields.parse import parse_fields
from dtrain.precision import Precision
from dtrain.training.setup.loaders import eval_loader, train_loader
from tests.configs import config_of
from tests.refusals import refused
from tests.shards import make_loader, read_epoch, write_tar
from tests.toys import world

needs_torchcodec = pytest.mark.usefixtures("torchcodec")

RATE = 8000


@pytest.fixture(scope="module")
def torchcodec() -> None:
    """Skips where torchcodec cannot be loaded; loading it takes longer than these tests."""
    try:
        media.torchcodec_decoders()
    except ImportError as error:
        pytest.skip(str(error))


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    """A file of 16-bit samples ``[samples]`` or ``[samples, channels]``."""
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return stream.getvalue()


def counting(samples: int, first: int = 0) -> np.ndarray:
    """Audio whose sample *n* is *first + n*, in units of the last bit."""
    return np.arange(first, first + samples)


def numbers(audio: Any) -> list[Any]:
    """The samples in units of the last bit; NaN where it is padded."""
    return [None if value != value else round(value * 32768) for value in np.asarray(audio).tolist()]


def mp4(frames: int, height: int = 32, width: int = 48, fps: float = 10) -> bytes:
    """A video whose frame *n* is grey of level 10 * *n*."""
    encoders = pytest.importorskip("torchcodec.encoders", exc_type=ImportError)
    levels = (10 * torch.arange(frames, dtype=torch.uint8))[:, None, None, None]
    content: Tensor = encoders.VideoEncoder(levels.expand(-1, 3, height, width).contiguous(), frame_rate=fps).to_tensor(
        format="mp4", codec="mpeg4"
    )
    return content.numpy().tobytes()


def levels(video: np.ndarray) -> list[int]:
    """The number of each frame, by its grey level."""
    assert np.ptp(video.astype(int), axis=(1, 2, 3)).max() <= 4  # of one colour
    return [round(frame.mean() / 10) for frame in video]


def one(ext: str, **options: Any) -> Field:
    return parse_fields({ext: {"name": "x", **options}})[0]


# -- audio


@needs_torchcodec
def test_audio_is_the_samples_of_the_file() -> None:
    stereo = np.random.default_rng(0).integers(-(2**15), 2**15, (500, 2))
    value = decode(one("wav"), wav(stereo))
    assert (value.dtype, value.shape) == (np.float32, (2, 500))
    np.testing.assert_array_equal(value, stereo.T / np.float32(32768))


@needs_torchcodec
@pytest.mark.parametrize(("at", "first"), [(0, 0), (0.5, 450), (0.999999, 900), (1, 900)])
def test_a_long_recording_is_cut_where_at_says(at: float, first: int) -> None:
    field = one("wav", length=100)
    assert numbers(decode(field, wav(counting(1000)), at=at)[0]) == list(range(first, first + 100))
    assert numbers(decode(one("npy", role="audio", length=100), npy_audio(1000), at=at)[0]) == list(
        range(first, first + 100)
    )


def npy_audio(samples: int) -> bytes:
    stream = io.BytesIO()
    np.save(stream, counting(samples).astype(np.float32) / 32768)
    return stream.getvalue()


@needs_torchcodec
def test_a_short_recording_is_padded() -> None:
    value = decode(one("wav", length=6), wav(counting(4)))
    assert numbers(value[0]) == [0, 1, 2, 3, None, None]
    filled, mask = media.audio_and_mask(torch.from_numpy(value))
    assert (numbers(filled[0]), mask.tolist()) == ([0, 1, 2, 3, 0, 0], [True] * 4 + [False] * 2)


@needs_torchcodec
def test_audio_is_resampled_and_mixed_as_declared() -> None:
    time = np.arange(RATE) / RATE
    tone = np.round(10_000 * np.sin(2 * np.pi * 440 * time))
    content = wav(np.stack([tone, 0 * tone], axis=1))
    value = decode(one("wav", sample_rate=16_000, channels=1), content)
    assert value.shape == (1, 16_000)
    # A tone and silence: the tone at sqrt(1/2), of the same frequency: 440 periods in a second.
    assert abs(np.abs(value).max() * 32768 - 7071) < 150
    assert np.argmax(np.abs(np.fft.rfft(value[0]))) == 440
    assert decode(one("wav", channels=2), wav(tone)).shape == (2, RATE)


@needs_torchcodec
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not readable audio"),
        (b"no sound at all" * 20, "not readable audio (300 bytes)"),
        (wav(counting(0)), "not readable audio"),
        (wav(counting(100))[:44], "not readable audio"),
    ],
)
def test_a_damaged_recording_is_a_bad_sample(content: bytes, reason: str) -> None:
    with refused(SampleError, "'x'", reason):
        decode(one("wav", length=10), content)


@needs_torchcodec
def test_decoded_audio_of_another_form_is_a_bad_sample() -> None:
    field = one("npy", role="audio", length=10)
    for value, part in (
        (np.zeros((2, 3, 4), np.float32), "[2, 3, 4]"),
        (np.zeros(10, np.int16), "int16"),
        (np.full(10, np.nan, np.float32), "not finite"),
        (np.zeros((1, 0), np.float32), "without a sample"),
    ):
        with refused(SampleError, "'x'", part):
            stream = io.BytesIO()
            np.save(stream, value)
            decode(field, stream.getvalue())


# -- video


@needs_torchcodec
@pytest.mark.parametrize(
    ("options", "at", "want"),
    [
        ({"num_frames": 4}, 0.0, [0, 1, 2, 3]),
        ({"num_frames": 4}, 0.5, [8, 9, 10, 11]),
        ({"num_frames": 4}, 0.99, [16, 17, 18, 19]),
        ({"num_frames": 4, "stride": 5}, 0.5, [2, 7, 12, 17]),
        ({"num_frames": 3, "fps": 5}, 0.0, [0, 2, 4]),
        ({"num_frames": 3, "fps": 5}, 1.0, [15, 17, 19]),
        ({"num_frames": 3, "fps": 20}, 0.0, [0, 0, 1]),
        ({"num_frames": 4, "stride": 9}, 0.5, [0, 9, 18, 19]),  # too short: the last frame is repeated
    ],
)
def test_frames_are_those_that_the_options_say(options: dict[str, Any], at: float, want: list[int]) -> None:
    value = decode(one("mp4", **options), mp4(20), at=at)
    assert (value.dtype, value.shape[1:]) == (np.uint8, (3, 32, 48))
    assert levels(value) == want


@needs_torchcodec
def test_each_frame_is_cropped_and_resized_as_an_image() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (3, 3, 40, 60), dtype=np.uint8)
    field = Field("npy", "x", "video", size=(16, 20), shorter_side=24, num_frames=3)
    got = media.decode_media(field, frames, 0.5, field.crop)
    crop = whole(40, 60, (16, 20), 24)
    want = [crop.cut(np.ascontiguousarray(frame.transpose(1, 2, 0))).transpose(2, 0, 1) for frame in frames]
    np.testing.assert_array_equal(got, want)


@needs_torchcodec
@pytest.mark.parametrize("content", [b"", b"no video" * 100, wav(counting(100))])
def test_a_damaged_video_is_a_bad_sample(content: bytes) -> None:
    with refused(SampleError, "'x'", "not readable video"):
        decode(one("mp4", num_frames=2), content)


@needs_torchcodec
def test_a_truncated_video_is_a_bad_sample() -> None:
    content = mp4(20)
    with refused(SampleError, "'x'", "not readable video"):
        decode(one("mp4", num_frames=2), content[: len(content) // 2])


@needs_torchcodec
def test_a_video_of_too_many_pixels_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    content = mp4(4)
    monkeypatch.setattr(media, "MAX_BYTES", 2 * 3 * 32 * 48)
    decode(one("mp4", num_frames=2), content)
    with refused(SampleError, "3 frames", "48 x 32", "limit"):
        decode(one("mp4", num_frames=3), content)


# -- fields


@needs_torchcodec
def test_files_imply_their_role_and_their_bytes_may_be_read() -> None:
    assert [one(ext).role for ext in ("wav", "flac", "left.mp3")] == ["audio"] * 3
    assert one("mp4", num_frames=2).role == "video"
    assert (one("mp4", role="bytes").kind, one("wav", role="bytes").kind) == ("bytes", "bytes")
    assert one("wav", length=7).columns == ("x", "x_mask")
    assert one("wav").columns == one("mp4", num_frames=2).columns == ("x",)


@pytest.mark.parametrize(
    ("ext", "options", "parts"),
    [
        ("mp4", {}, ["num_frames", "None", "num_frames: 16"]),
        ("mp4", {"num_frames": 2, "stride": 2, "fps": 5}, ["stride 2", "fps 5", "at most one"]),
        ("mp4", {"num_frames": 0}, ["num_frames", "0", "above 0"]),
        ("mp4", {"num_frames": 2.5}, ["mp4.num_frames", "2.5", "an int"]),
        ("mp4", {"num_frames": 2, "fps": "5"}, ["mp4.fps", "'5'", "a number"]),
        ("mp4", {"role": "image"}, ["role", "'image'", "role: bytes"]),
        ("wav", {"role": "feature"}, ["role audio", "'feature'", "role: bytes"]),
        ("wav", {"num_frames": 2}, ["num_frames", "role video", "'audio'"]),
        ("wav", {"channels": 3}, ["channels", "3", "1 or 2"]),
        ("wav", {"sample_rate": 0}, ["sample_rate", "0", "above 0"]),
        ("wav", {"length": 0}, ["length", "0", "at least 1"]),
        ("wav", {"clip": "start"}, ["clip", "'start'", "middle, random"]),
        ("wav", {"size": 8}, ["size", "role image or video", "'audio'"]),
        ("jpg", {"clip": "random"}, ["clip", "role audio or video", "'image'"]),
        ("txt", {"role": "audio"}, ["role audio", ".txt holds text", "a different role"]),
        ("bin", {"role": "audio", "dtype": "int16"}, ["dtype int16", "role 'audio'", "Remove one"]),
        ("json", {"role": "audio", "key": "a"}, ["key 'a'", "role 'audio'"]),
    ],
)
def test_options_that_do_not_fit_are_refused(ext: str, options: dict[str, Any], parts: list[str]) -> None:
    with refused(ValueError, *parts):
        one(ext, **options)


@pytest.mark.parametrize(
    ("module", "remedy"), [(None, "pip install 'dtrain[media]'"), ("broken", "pip install torchcodec==")]
)
def test_without_torchcodec_the_field_is_refused_with_the_command(
    module: str | None, remedy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchcodec"]:
        monkeypatch.delitem(sys.modules, name)
    if module is None:
        monkeypatch.setattr(sys, "path", [])
    else:
        (tmp_path / "torchcodec.py").write_text("raise RuntimeError('Could not load libtorchcodec')")
        monkeypatch.syspath_prepend(str(tmp_path))
    media.torchcodec_decoders.cache_clear()
    try:
        with refused(ValueError, "field 'x'", "torchcodec", remedy, "apt install ffmpeg"):
            one("wav")
    finally:
        media.torchcodec_decoders.cache_clear()


# -- batches


def write_recordings(folder: Path, count: int = 8) -> list[str]:
    """Two shards of audio of 100 to 100 + count samples, the first of which is the number of the recording."""
    samples = [(f"{n:02d}", {"wav": wav(counting(100 + n, 1000 * n)), "cls": str(n).encode()}) for n in range(count)]
    return [write_tar(folder / f"{shard}.tar", samples[shard::2]) for shard in (0, 1)]


SOUND = {"wav": {"name": "sound", "length": 50, "clip": "random"}, "cls": {"name": "label", "role": "label"}}


def starts(loader: ShardLoader, epoch: int = 0) -> dict[int, int]:
    """The first sample of the part of each recording, by its label."""
    found = {}
    for step in read_epoch(loader, epoch):
        for batch in step:
            assert batch["sound_mask"].all()
            first = (batch["sound"][:, 0, 0].double() * 32768).round().long() - 1000 * batch["label"]
            found |= dict(zip(batch["label"][batch.valid].tolist(), first[batch.valid].tolist(), strict=True))
    return found


@needs_torchcodec
def test_random_parts_depend_on_seed_epoch_and_sample_only(tmp_path: Path) -> None:
    shards = write_recordings(tmp_path)
    one_rank = starts(make_loader(shards, SOUND))
    assert all(0 <= first <= 50 + label for label, first in one_rank.items())
    assert len(set(one_rank.values())) > 4
    two_ranks: dict[int, int] = {}
    for rank in range(2):
        two_ranks |= starts(make_loader(shards, SOUND, rank=rank, world_size=2, global_batch_size=4, num_workers=rank))
    assert two_ranks == one_rank
    assert starts(make_loader(shards, SOUND), epoch=1) != one_rank
    assert starts(make_loader(shards, SOUND, seed=1)) != one_rank
    middle = SOUND | {"wav": {"name": "sound", "length": 50}}
    assert starts(make_loader(shards, middle)) == {label: (50 + label + 1) // 2 for label in range(8)}


@needs_torchcodec
@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_audio_is_transferred_in_the_compute_dtype_with_its_mask(
    tmp_path: Path, precision: str, dtype: torch.dtype
) -> None:
    fields = {"wav": {"name": "sound", "length": 104}, "cls": SOUND["cls"]}
    loader = make_loader(write_recordings(tmp_path), fields, precision=precision, shuffle="none", global_batch_size=8)
    ((batch,),) = read_epoch(loader)
    arrived = batch.to("cpu")
    assert (arrived["sound"].dtype, arrived["sound"].shape) == (dtype, (8, 1, 104))
    assert arrived["sound_mask"].sum(1).tolist() == [min(100 + n, 104) for n in arrived["label"].tolist()]
    assert arrived["sound"].isfinite().all()
    assert not arrived["sound"][0, :, 100:].any()


@needs_torchcodec
def test_an_evaluation_takes_the_middle(tmp_path: Path) -> None:
    listed = {"wav": [SOUND["wav"], {"name": "again", "length": 50}], "cls": SOUND["cls"]}
    for fields in (SOUND, listed):
        data = {
            "train": write_recordings(tmp_path),
            "eval": write_recordings(tmp_path),
            "fields": fields,
            "num_workers": 0,
        }
        cfg = config_of({"train": {"global_batch_size": 4}, "data": data})
        training, evaluation = (build(cfg, world(), Precision("fp32")) for build in (train_loader, eval_loader))
        assert training is not None
        assert evaluation is not None
        assert [loader.source.fields[0].clip for loader in (training, evaluation)] == ["random", "middle"]
    assert starts(evaluation) == {label: (50 + label + 1) // 2 for label in range(8)}


@needs_torchcodec
def test_recordings_of_unequal_length_need_a_length(tmp_path: Path) -> None:
    loader = make_loader(write_recordings(tmp_path), {"wav": {"name": "sound"}})
    with refused(DataError, "'sound'", "[1, 10", "Set length"):
        next(iter(loader))


@needs_torchcodec
def test_video_arrives_normalised_and_crops_of_images_apply(tmp_path: Path) -> None:
    samples = [(str(n), {"mp4": mp4(12)}) for n in range(2)]
    fields = {"mp4": {"name": "clip", "num_frames": 3, "clip": "random", "mean": [0.5] * 3, "std": [0.25] * 3}}
    shards = [write_tar(tmp_path / "0.tar", samples)]
    crop = RandomResizedCrop(16, field="clip")
    loader = make_loader(shards, fields, global_batch_size=2, precision="bf16", augment=crop)
    ((batch,),) = read_epoch(loader)
    sent = batch["clip"]
    assert (sent.dtype, sent.shape) == (torch.uint8, (2, 3, 3, 16, 16))
    arrived = batch.to("cpu")["clip"]
    assert arrived.dtype == torch.bfloat16
    torch.testing.assert_close(arrived, ((sent / 255 - 0.5) / 0.25).bfloat16(), rtol=0, atol=0.02)


@needs_torchcodec
def test_recordings_in_an_ordinary_data_loader(tmp_path: Path) -> None:
    dataset = ShardDataset(write_recordings(tmp_path), SOUND)
    samples = list(DataLoader(dataset, batch_size=None))
    assert len(samples) == 8
    assert {(sample["sound"].shape, sample["sound_mask"].shape) for sample in samples} == {((1, 50), (50,))}
    offsets = [round(float(sample["sound"][0, 0]) * 32768) - 1000 * sample["label"] for sample in samples]
    assert len(set(offsets)) > 4


@needs_torchcodec
def test_a_map_style_dataset_may_return_files_or_arrays() -> None:
    files = [wav(counting(20, n)) for n in range(4)]
    arrays = [counting(20, n).astype(np.float32) / 32768 for n in range(4)]
    fields = {"sound": {"name": "sound", "role": "audio", "length": 8}}
    batches = []
    for values in (files, arrays, np.stack(arrays)):
        loader = ShardLoader.over({"sound": values}, fields, global_batch_size=4, num_workers=0, shuffle="none")
        batches.append(next(iter(loader))["sound"])
    assert all(torch.equal(batch, batches[0]) for batch in batches)
    assert numbers(batches[0][2, 0]) == list(range(8, 16))

"""A mirror of a run in a bucket, or at any other URL that fsspec can write: its layout, claims, uploads and downloads.

    claims/000007.json                                          a start that writes to the mirror
    000007-3f9a2c1e/checkpoints/step-000000050-001/             the files of a checkpoint; manifest.json is written last
    000007-3f9a2c1e/records/000003.json                         names, sizes and SHA-256 of the run's records at one moment
    000007-3f9a2c1e/files/<SHA-256>                             their contents

* A *claim* is the number of a start that writes to the mirror. It is taken by creating its file, which only one start can do
  where the store has conditional writes; elsewhere the last writer of the file has it. A start writes only below a folder
  with its number and a random token, and the highest number counts.
* A checkpoint is *whole* if its ``manifest.json`` exists. No object is written twice, so an upload that ends at any
  point leaves everything before it usable.
* *Records* are the other files of a run directory: config, metrics, starts, status, logs and media. They are uploaded before
  the manifest of their checkpoint, so they have all steps up to it.

Nothing that is read here is composed, imported or unpickled. Names of files are checked before they are used.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from dtrain.errors import ConfigError
from dtrain.files import read_bounded, size_and_hash
from dtrain.urls import check_known, fsspec_file_system, is_url, local_path, redacted, scheme, with_retries

T = TypeVar("T")
MANIFEST = "manifest.json"
#: In the run directory: URL of the mirror, and the newest claim that the directory has the steps of.
KNOWN = ".mirror.json"
#: Records: what a start elsewhere continues, or a report shows; of trackers, what identifies the run there.
RECORDS = (
    *("config.yaml", "overrides.yaml", "status.json", "metrics.jsonl", "starts.jsonl", "steps.bin"),
    *("exclude-*.txt", "bad-shards.json", "media/*", "logs/rank-*.log", "logs/*-rank-*"),
    *("wandb/run-id", "trackio/run-name"),
)
_MOST_JSON = 2**24  # bytes of a manifest or a list of records
_CLAIMS = 20  # newest claims that are kept
_KEPT_RECORDS = 2
_CLAIM_FILE = re.compile(r"(\d{6,12})\.json")
_CLAIM_FOLDER = re.compile(r"(\d{6,12})-([0-9a-f]{8})")
_CHECKPOINT = re.compile(r"step-(\d{9})-(\d{3,9})")
_RECORDS_FILE = re.compile(r"(\d{6,12})\.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"(?:(?:logs|media|wandb|trackio)/)?[\w@+=-][\w.@+=-]*")
# Of these, a path is only the beginning of a name: there are no folders to make, and s3fs would make a bucket.
_OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf", "oci", "oss", "r2", "memory")


def check_url(url: str | None, seconds: float) -> None:
    """Refuses values of ``checkpoint.mirror`` and ``checkpoint.mirror_seconds`` that cannot work.

    Raises:
        ConfigError, ValueError, ImportError: Names the value and what to do.
    """
    if not seconds >= 0:
        raise ConfigError(f"checkpoint.mirror_seconds: got {seconds}, want at least 0.")
    if url is None:
        return
    if not is_url(url) or not url.partition("://")[2].strip("/"):
        raise ConfigError(
            f"checkpoint.mirror: got {redacted(url)!r}, want a URL: s3://BUCKET/runs/NAME, or file:///FOLDER for a folder."
        )
    if scheme(url) in ("http", "https", "memory"):
        raise ConfigError(
            f"checkpoint.mirror: got {redacted(url)!r}: nothing can be stored at {scheme(url)}://. Use s3://, gs:// or similar."
        )
    check_known(url)
    fsspec_file_system(url)


@contextmanager
def fetched_records(paths: Iterable[str]) -> Iterator[dict[Path, str]]:
    """Run directories to read, with the records of mirrors in temporary folders, which the end of the block deletes.

    Args:
        paths: Directories, and URLs of mirrors or of folders that have mirrors.

    Yields:
        Directory to the directory or URL that it stands for, in the order of ``paths``.

    Raises:
        ValueError, OSError, ImportError: If a URL has no mirror with records, or cannot be read.
    """
    found: dict[Path, str] = {}
    with TemporaryDirectory(prefix="dtrain-mirror-") as folder:
        for path in paths:
            if not is_url(path):
                found[Path(path)] = path
                continue
            mirrors = Mirror(path).mirrors_below()
            if not mirrors:
                raise ValueError(
                    f"{redacted(path)} is not a mirror of a run (checkpoint.mirror), and has none directly below it."
                )
            for mirror in mirrors:
                if (records := mirror.records()) is not None:
                    target = Path(folder, str(len(found)), mirror.url.rpartition("/")[2])
                    target.mkdir(parents=True)
                    mirror.fetch_records(records, target)
                    found[target] = str(mirror)
                elif len(mirrors) == 1:
                    raise ValueError(f"{mirror} has no records yet: its first checkpoint is still being uploaded.")
        yield found


@dataclass(frozen=True, order=True)
class Claim:
    """A start that writes to a mirror.

    Attributes:
        number: Higher than those of all starts before.
        token: Random, eight hexadecimal digits.
    """

    number: int
    token: str

    @property
    def folder(self) -> str:
        """Name of the folder that only this start writes to."""
        return f"{self.number:06d}-{self.token}"


@dataclass(frozen=True, order=True)
class MirroredCheckpoint:
    """A checkpoint in a mirror. Of two, the one of the later start is the newer one, whatever its step is.

    Attributes:
        claim: The start that has uploaded it.
        step: Attempted steps.
        upload: Counts the uploads of that start.
    """

    claim: Claim
    step: int
    upload: int

    @property
    def place(self) -> str:
        """Its folder, relative to the mirror."""
        return f"{self.claim.folder}/checkpoints/step-{self.step:09d}-{self.upload:03d}"


@dataclass(frozen=True)
class Records:
    """The records of a run at one moment.

    Attributes:
        claim: The start that has uploaded them.
        number: Counts those of that start.
        files: Name to ``size`` and ``sha256``.
        best: Step of the best checkpoint at that moment; None without one.
    """

    claim: Claim
    number: int
    files: Mapping[str, Mapping[str, Any]]
    best: int | None


class Mirror:
    """A mirror at a URL. Every method may raise an ``OSError`` that says what to do.

    Args:
        url: The mirror; it need not exist.
        retries: Whether reading is repeated after transient errors, for about a minute.

    Raises:
        ValueError, ImportError: If there is no package for this kind of URL.
    """

    def __init__(self, url: str, *, retries: bool = True) -> None:
        self.url = url.rstrip("/")
        self._retries = retries
        self._files = fsspec_file_system(self.url)
        self._has_folders = scheme(url) not in _OBJECT_STORES

    def __str__(self) -> str:
        """The URL without secrets."""
        return redacted(self.url)

    # -- claims

    def claim(self) -> Claim:
        """Takes the next number, by which all starts with lower numbers stop to write."""
        token = secrets.token_hex(4)
        while True:
            number = max(self._claim_numbers(), default=0) + 1
            content = {"token": token, "host": socket.gethostname(), "time": time.time()}
            # Where the store cannot refuse to replace a file, the one that wrote last has the claim.
            if self._create(f"claims/{number:06d}.json", json.dumps(content).encode()):
                claim = Claim(number, token)
                if self._holder(number).get("token") == token:
                    return claim

    def newer_than(self, claim: Claim) -> str | None:
        """The start that has claimed the mirror after this one, for a message; None if there is none."""
        newest = max(self._claim_numbers(), default=0)
        if newest < claim.number:
            return None
        holder = self._holder(newest)
        if newest == claim.number and holder.get("token") in (claim.token, None):
            return None
        return f"claim {newest} of host {holder.get('host')}"

    def host_of(self, claim: Claim) -> str:
        """The machine that made a claim; ``?`` if it is not known."""
        return str(self._holder(claim.number).get("host", "?"))

    def _claim_numbers(self) -> list[int]:
        return [int(found[1]) for name in self._names("claims") if (found := _CLAIM_FILE.fullmatch(name))]

    def _holder(self, number: int) -> dict[str, Any]:
        try:
            content = json.loads(self._read(f"claims/{number:06d}.json"))
        except (FileNotFoundError, ValueError):  # deleted; or it is being written, in a folder
            return {}
        return content if isinstance(content, dict) else {}

    # -- what there is

    def exists(self) -> bool:
        """Whether a run was ever mirrored here."""
        return bool(self._claim_numbers())

    def mirrors_below(self) -> list[Mirror]:
        """This mirror, or those directly below its URL."""
        if self.exists():
            return [self]
        below = [Mirror(f"{self.url}/{name}") for name in sorted(self._names(""))]
        return [mirror for mirror in below if mirror.exists()]

    def checkpoints(self) -> list[MirroredCheckpoint]:
        """The whole checkpoints of all starts, newest first."""
        return sorted((it for it, is_whole in self._uploads().items() if is_whole), reverse=True)

    def records(self) -> Records | None:
        """The newest records; None without any."""
        for claim in self._claim_folders():
            for number in sorted(self._records_of(claim), reverse=True):
                try:
                    content = json.loads(self._read(f"{claim.folder}/records/{number:06d}.json"))
                    return _parsed(claim, number, content)
                except (ValueError, KeyError, TypeError):  # cut, in a folder; the ones before are whole
                    continue
        return None

    def _claim_folders(self) -> list[Claim]:
        """Of all starts, newest first."""
        found = (_CLAIM_FOLDER.fullmatch(name) for name in self._names(""))
        return sorted((Claim(int(match[1]), match[2]) for match in found if match), reverse=True)

    def _records_of(self, claim: Claim) -> list[int]:
        names = self._names(f"{claim.folder}/records")
        return [int(found[1]) for name in names if (found := _RECORDS_FILE.fullmatch(name))]

    def _uploads(self) -> dict[MirroredCheckpoint, bool]:
        """All uploads of checkpoints, and whether they are whole."""
        found: dict[MirroredCheckpoint, bool] = {}
        for claim in self._claim_folders():
            for path in self._call(lambda claim=claim: self._files.find(self._url(f"{claim.folder}/checkpoints"))):  # type: ignore[misc]
                folder, name = path.split("/")[-2:]
                if match := _CHECKPOINT.fullmatch(folder):
                    upload = MirroredCheckpoint(claim, int(match[1]), int(match[2]))
                    found[upload] = found.get(upload, False) or name == MANIFEST
        return found

    # -- downloads

    def manifest(self, checkpoint: MirroredCheckpoint) -> bytes:
        """The manifest of a checkpoint."""
        return self._read(f"{checkpoint.place}/{MANIFEST}")

    def fetch_checkpoint(self, checkpoint: MirroredCheckpoint, folder: Path) -> None:
        """Downloads a checkpoint into a new folder. The caller verifies it.

        Raises:
            ValueError: If its manifest names anything but files of a checkpoint, or an object has a different size.
        """
        content = self.manifest(checkpoint)
        files = json.loads(content)
        if not isinstance(files, dict):
            raise ValueError(f"{MANIFEST} does not list files")
        folder.mkdir(parents=True)
        for name, entry in files.items():
            if "/" in name or not _NAME.fullmatch(name) or not isinstance(entry, dict):
                raise ValueError(f"{MANIFEST} lists {name!r}")
            self._get(f"{checkpoint.place}/{name}", folder / name, entry.get("size"))
        (folder / MANIFEST).write_bytes(content)

    def fetch_records(self, records: Records, folder: Path) -> list[str]:
        """Downloads records into a folder and compares their hashes.

        Returns:
            A line for each file that is damaged, and is left out.

        Raises:
            FileNotFoundError: If they have been deleted, because there are newer ones.
        """
        problems = []
        for name, entry in sorted(records.files.items()):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._get(f"{records.claim.folder}/files/{entry['sha256']}", path, entry["size"])
                if size_and_hash(path) != entry:
                    raise ValueError("its SHA-256 differs")
            except (ValueError, FileNotFoundError) as error:
                if isinstance(error, FileNotFoundError) and self.records() != records:
                    raise  # newer ones have replaced them
                path.unlink(missing_ok=True)
                problems.append(f"{self}: {name} is damaged and left out: {error}")
        return problems

    # -- uploads

    def put_checkpoint(self, checkpoint: MirroredCheckpoint, folder: Path, before_last: Callable[[], None]) -> None:
        """Uploads a checkpoint.

        Args:
            checkpoint: Where to; nothing is there.
            folder: The files.
            before_last: Called before the manifest is written, which makes the checkpoint whole.
        """
        manifest = read_bounded(folder / MANIFEST, _MOST_JSON)
        for name in sorted(json.loads(manifest)):
            self._put(folder / name, f"{checkpoint.place}/{name}")
        before_last()
        self._write(f"{checkpoint.place}/{MANIFEST}", manifest)

    def put_file(self, claim: Claim, path: Path, sha256: str) -> None:
        """Uploads the content of a record."""
        self._put(path, f"{claim.folder}/files/{sha256}")

    def put_records(self, records: Records) -> None:
        """Uploads a list of records, whose contents are there."""
        content = {"files": dict(records.files), "best": records.best, "time": time.time()}
        self._write(f"{records.claim.folder}/records/{records.number:06d}.json", json.dumps(content, indent=1).encode())

    def delete_old(self, claim: Claim, keep: Callable[[list[int]], Iterable[int]]) -> None:
        """Deletes what is not needed any more, of this start and of those before it.

        Args:
            claim: This start; it has uploaded a checkpoint and records.
            keep: Returns which of the steps of all whole checkpoints to keep.
        """
        uploads = {it: is_whole for it, is_whole in self._uploads().items() if it.claim <= claim}
        newest: dict[int, MirroredCheckpoint] = {}
        for upload in sorted(it for it, is_whole in uploads.items() if is_whole):
            newest[upload.step] = upload
        kept = {newest[step] for step in keep(sorted(newest))}
        for upload in uploads.keys() - kept:
            with suppress(FileNotFoundError):  # first, so that no reader takes it for whole
                self._call(lambda upload=upload: self._files.rm_file(self._url(f"{upload.place}/{MANIFEST}")))  # type: ignore[misc]
            self._remove(upload.place)
        for other in self._claim_folders():
            if other < claim:
                has_checkpoint = any(it.claim == other for it in kept)
                for name in ("records", "files") if has_checkpoint else ("",):
                    self._remove(f"{other.folder}/{name}".rstrip("/"))
        for number in sorted(self._claim_numbers())[:-_CLAIMS]:
            self._remove(f"claims/{number:06d}.json")

    def delete_old_records(self, claim: Claim) -> set[str]:
        """Deletes all but the newest records of this start; returns the SHA-256 of the contents that are left."""
        numbers = sorted(self._records_of(claim))
        used: set[str] = set()
        for number in numbers[-_KEPT_RECORDS:]:
            files = json.loads(self._read(f"{claim.folder}/records/{number:06d}.json"))["files"]
            used |= {entry["sha256"] for entry in files.values()}
        for number in numbers[:-_KEPT_RECORDS]:
            self._remove(f"{claim.folder}/records/{number:06d}.json")
        for name in self._names(f"{claim.folder}/files"):
            if name not in used:
                self._remove(f"{claim.folder}/files/{name}")
        return used

    # -- the store

    def _url(self, place: str) -> str:
        return f"{self.url}/{place}" if place else self.url

    def _call(self, call: Callable[[], T]) -> T:
        return with_retries(self.url, call, (FileNotFoundError, FileExistsError)) if self._retries else call()

    def _names(self, place: str) -> list[str]:
        """Names of files and folders in a folder; none if it does not exist."""
        try:
            paths = self._call(lambda: self._files.ls(self._url(place), detail=False))
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error.__cause__):
                raise ConfigError(
                    f"checkpoint.mirror: the bucket of {self} does not exist. Correct its name, or create it."
                ) from None
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def _read(self, place: str) -> bytes:
        """The content of a small file."""
        url = self._url(place)
        size = self._call(lambda: self._files.info(url)).get("size")
        if size is not None and size > _MOST_JSON:
            raise ValueError(f"{place} has {size:,} bytes, more than {_MOST_JSON:,}")
        content: bytes = self._call(lambda: self._files.cat_file(url))
        return content

    def _get(self, place: str, path: Path, size: object) -> None:
        url = self._url(place)
        found = self._call(lambda: self._files.info(url)).get("size")
        if found is not None and found != size:  # before it fills the disk
            raise ValueError(f"{place} has {found} bytes, want {size}")
        self._call(lambda: self._files.get_file(url, str(path)))

    def _put(self, path: Path, place: str) -> None:
        self._make_parent(place)
        self._files.put_file(str(path), self._url(place))

    def _write(self, place: str, content: bytes) -> None:
        self._make_parent(place)
        self._files.pipe_file(self._url(place), content)

    def _create(self, place: str, content: bytes) -> bool:
        """Writes a new file; returns False if it exists, which not every store can tell."""
        self._make_parent(place)
        url = self._url(place)
        try:
            if scheme(url) in ("file", "local"):  # fsspec would look first and write then
                with Path(local_path(url)).open("xb") as file:
                    file.write(content)
            else:
                self._files.pipe_file(url, content, mode="create")
        except FileExistsError:
            return False
        except (TypeError, NotImplementedError):
            self._files.pipe_file(url, content)
        except OSError as error:
            cause = str(error.__cause__)
            if "PreconditionFailed" in cause or "(412)" in cause:
                return False
            if "NotImplemented" not in cause:
                raise
            self._files.pipe_file(url, content)
        return True

    def _make_parent(self, place: str) -> None:
        if self._has_folders:
            self._files.makedirs(self._url(place.rpartition("/")[0]), exist_ok=True)

    def _remove(self, place: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm(self._url(place), recursive=True)


def _parsed(claim: Claim, number: int, content: Any) -> Records:
    """A list of records, of which every name is one that a run writes.

    Raises:
        ValueError, KeyError, TypeError: If it is something else.
    """
    for name, entry in content["files"].items():
        if not is_record(name):
            raise ValueError(f"{name!r} is not a record of a run")
        if set(entry) != {"size", "sha256"} or not _SHA256.fullmatch(entry["sha256"]):
            raise ValueError(f"{name}: {entry!r}")
    best = content.get("best")
    return Records(claim, number, content["files"], best if isinstance(best, int) else None)


def is_record(name: str) -> bool:
    """Whether a relative path is one of ``RECORDS``, and safe to write in a run directory."""
    known = (Path(name).match(pattern) and name.count("/") == pattern.count("/") for pattern in RECORDS)
    return _NAME.fullmatch(name) is not None and any(known)

"""URLs: the file systems behind them, retries, errors, and hiding their secrets.

* URLs are read and written through fsspec. Transient network errors are retried, with growing pauses of random length, so that
  many processes do not retry at the same time; a server may ask for a longer pause (``Retry-After``).
* A URL may contain a password or a signature. Logs, hashes and names never do (``redacted``).
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import fsspec
from fsspec.registry import known_implementations

from dtrain.extras import EXTRAS, install_command

_MAX_ATTEMPTS = 8
# huggingface_hub itself repeats most requests up to five times.
_MAX_HUB_ATTEMPTS = 5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 20.0  # seconds
_LONGEST_RETRY_AFTER = 300.0
# Forked workers have equal generators; the operating system's differ.
_random = random.SystemRandom()
_CREDENTIALS = {
    "s3": "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, to credentials that may read it.",
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS to credentials that may read it.",
    "hf": "Set HF_TOKEN to a token that may read it. If the dataset is gated, accept its terms on its page first.",
    "http": "Write a URL that is still valid, or with user and password, https://USER:PASSWORD@HOST/...",
}
_ALIASES = {"https": "http", "s3a": "s3", "gcs": "gs"}
_PERMANENT_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_TRANSIENT_STATUS = frozenset((408, 425, 429))
# Never released. A forked worker that garbage-collects its copy would close the connections in it and remove them from
# the epoll instance that it shares with its parent. The parent would then never see that its answers have arrived.
_file_systems: set[Any] = set()

T = TypeVar("T")
_url = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_LOCAL_URL, _BUCKETS = "file://", "hf://buckets/"
#: Matches a file of a dataset, space or model of the Hugging Face hub: kind, repository, revision, path.
hub_url = re.compile(
    r"hf://(?:(dataset|space)s/)?((?!datasets/|spaces/|buckets/)[^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?/(.+)"
).fullmatch
_user_prefix = re.compile(r"^[^/@]*@")
_password = re.compile(r"^([^/@:]*):[^/@]*@")
_user_in_text = re.compile(r"(://)[^/\s'\"@]*@")
_query_in_text = re.compile(r"(://[^\s'\"?#]*)[?#][^\s'\")]*")


def is_url(path: str) -> bool:
    """True for ``s3://bucket/x.tar``; False for paths."""
    return _url.match(path) is not None


def scheme(url: str) -> str:
    """``s3`` of ``s3://bucket/x.tar``; empty for a path."""
    found = _url.match(url)
    return found.group(1).lower() if found else ""


def local_path(path: str) -> str:
    """The path in a ``file://`` URL; anything else unchanged."""
    return path[len(_LOCAL_URL) :] if path.startswith(_LOCAL_URL) else path


def absolute(path: str) -> str:
    """A shard's absolute path, or its URL unchanged."""
    return path if is_url(path) else os.path.abspath(path)


def redacted(path: str) -> str:
    """A path or URL without user, password and signature, for messages, names and logs."""
    if not is_url(path):
        return path
    start, _, rest = path.partition("://")
    if scheme(path) in ("http", "https"):
        rest = _user_prefix.sub("", re.split(r"[?#]", rest, maxsplit=1)[0])
    hidden = _password.sub(r"\1@", rest) if "@" in rest else rest
    return f"{start}://{hidden}"


def components(path: str) -> list[str]:
    """The folders and the name of a path or URL, from the root or host on."""
    return redacted(path).partition("://")[2].split("/") if is_url(path) else os.path.abspath(path).split(os.sep)


def without_url_secrets(text: str) -> str:
    """A message of another library, with the secrets removed from its URLs."""
    return _query_in_text.sub(r"\1", _user_in_text.sub(r"\1", text))


def check_known(url: str) -> None:
    """Raises ``ValueError`` for a URL of a kind that fsspec does not know."""
    if scheme(url) not in fsspec.available_protocols():
        raise ValueError(f"{redacted(url)!r}: unknown kind of URL {scheme(url)}://. Use https://, s3:// or a path.")
    if scheme(url) == "hf" and not url.startswith(_BUCKETS) and hub_url(url) is None:
        raise ValueError(f"{redacted(url)!r}: want hf://datasets/ORGANISATION/NAME/FILE or .../NAME@REVISION/FILE.")


def fsspec_file_system(url: str) -> Any:
    """fsspec's file system for a URL, without a cache of listings."""
    check_known(url)
    kind = scheme(url)
    try:
        files = fsspec.core.url_to_fs(url, use_listings_cache=False)[0]
    except ImportError as error:
        # fsspec's own advice for packages that dtrain has no extra for, such as "Please install gcsfs to access ...".
        extra = _ALIASES.get(kind, kind)
        remedy = install_command(extra) if extra in EXTRAS else known_implementations[kind].get("err", str(error))
        raise ModuleNotFoundError(f"{kind}:// needs a package that is not installed ({error}): {remedy}") from error
    _file_systems.add(files)
    return files


def with_retries(url: str, call: Callable[[], T], passed: tuple[type[Exception], ...] = ()) -> T:
    """Calls a function, and again after a transient error of the network.

    Args:
        url: What is read, for messages.
        call: Reads it.
        passed: Errors that are raised as they are.

    Raises:
        OSError: If it fails after several attempts; says what to do.
    """
    attempts = _MAX_HUB_ATTEMPTS if scheme(url) == "hf" else _MAX_ATTEMPTS
    for attempt in range(1, attempts + 1):
        try:
            return call()
        except passed:
            raise
        except network_errors() as error:
            if attempt == attempts or not _is_transient(error):
                # Without its cause, whose message contains the whole URL.
                raise _explained(url, error, attempt) from None
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (attempt - 1)) * _random.uniform(0.5, 1.0)
            pause = max(pause, min(_LONGEST_RETRY_AFTER, _retry_after(error)))
        time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def network_errors() -> tuple[type[Exception], ...]:
    """Exceptions that access to a URL may raise; libraries that are not imported cannot raise any."""
    found: list[type[Exception]] = [OSError, asyncio.TimeoutError]
    known = (
        ("aiohttp", "ClientError"),
        ("httpx", "HTTPError"),
        ("httpx2", "HTTPError"),
        ("botocore.exceptions", "BotoCoreError"),
    )
    for module, name in known:
        if module in sys.modules:
            found.append(getattr(sys.modules[module], name))
    return tuple(found)


def _cause(error: BaseException) -> BaseException:
    # The file systems of HTTP and of the hub report failed requests as "not found"; the real error is the cause.
    return error.__cause__ if isinstance(error.__cause__, network_errors()) else error


def _status(error: BaseException) -> int | None:
    """The HTTP status of an error of aiohttp or huggingface_hub."""
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _retry_after(error: BaseException) -> float:
    """The seconds that a server asks to wait; 0 if it asks for none."""
    error = _cause(error)
    headers = getattr(error, "headers", None) or getattr(getattr(error, "response", None), "headers", None) or {}
    seconds = headers.get("Retry-After", "")
    return float(seconds) if seconds.isdigit() else 0.0


def _is_transient(error: BaseException) -> bool:
    error = _cause(error)
    status = _status(error)
    if status is not None:
        return status >= 500 or status in _TRANSIENT_STATUS
    botocore = sys.modules.get("botocore.exceptions")
    if botocore is not None and isinstance(error, botocore.BotoCoreError):
        return isinstance(error, (botocore.ConnectionError, botocore.HTTPClientError))
    return not isinstance(error, (*_PERMANENT_ERRORS, ValueError))


def _explained(url: str, error: BaseException, attempts: int) -> OSError:
    error = _cause(error)
    status = _status(error)
    told = f" (HTTP {status})" if status else ""
    kind = scheme(url)
    credentials = _CREDENTIALS.get(_ALIASES.get(kind, kind), "Set credentials that may read it.")
    if kind == "hf" and status == 401:  # the hub does not say which of the two
        return PermissionError(f"{redacted(url)} does not exist, or is private{told}. Correct it, or: {credentials}")
    if isinstance(error, PermissionError) or status in (401, 403):
        return PermissionError(f"{redacted(url)}: access denied with the current credentials{told}. {credentials}")
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return FileNotFoundError(f"{redacted(url)} does not exist{told}. Correct its host, path or revision.")
    reason = f"HTTP {status}" if status else without_url_secrets(f"{type(error).__name__}: {error}")
    times = f" after {attempts} attempts" if attempts > 1 else ""
    remedy = "The server limits the number of requests. " if status == 429 else ""
    if attempts > 1:
        remedy += "Start again when the server answers; a run resumes from its last checkpoint."
    return OSError(f"{redacted(url)} cannot be read: {reason}{times}. {remedy}".rstrip())

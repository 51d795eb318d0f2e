"""Errors that are shown without a traceback, and the hiding of secrets in messages. Imports nothing of dtrain."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

_STARTS_WITH_KEY = re.compile(
    r"(run|train|data|model|task|optimizer|schedule|precision|parallel|checkpoint)\.[\w.;]+:? "
)
HIDDEN = "<hidden>"
#: Matches the end of keys whose values are secret if they are text. ``tokens`` are usually those of a language model.
SECRET_KEY = re.compile(r"((pass(word|wd)|secret|api_?key|credential)s?|token)$", re.IGNORECASE)
# user:password@ of a URL, and the value of a signature or token in its query
_URL_SECRET = re.compile(
    r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)|(?<=[?&])([\w-]*(?:sig|signature|token|key|secret|password)=)[^&\s'\"]+", re.I
)


class ConfigError(ValueError):
    """An error in the config, data, checkpoint or environment, which the user can correct.

    The message is complete: it names the key or file, the value and the remedy. The error is raised on every rank and
    shown on rank 0.
    """


class Explained(Exception):
    """An error that the user can correct and that only one rank may have, such as a full disk or a batch of bad samples.

    The message is complete, as that of a ``ConfigError``. The first rank with the error shows it; the others end with
    one line.
    """


class PeerFailed(RuntimeError):
    """This rank ends because another one failed first and has published its error."""


class PeerLost(Explained, RuntimeError):
    """This rank ends because another one is gone and no rank has published an error."""


def shortened(text: str, most: int) -> str:
    """The beginning of a text, at most ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def hide_secret(key: str, value: str) -> str:
    """The text of a value; without passwords, signatures and tokens."""
    return HIDDEN if SECRET_KEY.search(key) else without_url_secrets(value)


def in_brief(message: str) -> str:
    """The beginning of a message on one line, for a place where the whole message is not needed."""
    return textwrap.shorten(message.splitlines()[0] if message else "", 120, placeholder="...")


@contextmanager
def as_config_error(what: str) -> Iterator[None]:
    """Converts the errors that public classes raise for wrong arguments, files and missing packages to ``ConfigError``.

    Args:
        what: The config key or file concerned; it is put before the message.

    Raises:
        ConfigError: Instead of ``ValueError``, ``OSError`` and ``ImportError``.
    """
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError, ImportError) as error:
        message = str(error)
        known = message.startswith(what) or _STARTS_WITH_KEY.match(message)
        raise ConfigError(message if known else f"{what}: {message}") from error


def without_url_secrets(text: str) -> str:
    """A text in which the passwords, signatures and tokens of URLs are hidden."""
    return _URL_SECRET.sub(lambda match: f"{match[1] or ''}{HIDDEN}", text)

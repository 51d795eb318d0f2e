"""Errors that are shown without a traceback, and the hiding of secrets in messages. Imports nothing of dtrain."""

from __future__ import annotations

import difflib
import functools
import io
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

#: Exit codes of all commands: a wrong command line or config, as from argparse; Ctrl-C, as from a shell.
EXIT_USAGE, EXIT_INTERRUPTED = 2, 130
_STARTS_WITH_KEY = re.compile(
    r"(run|train|data|model|task|optimizer|schedule|precision|parallel|checkpoint)\.[\w.;]+:? "
)
HIDDEN = "<hidden>"
_SECRET_NAME = (
    r"(?:(?:pass(?:word|wd|phrase)|secret|credential|cookie|(?:api|access|account|private|secret|signing)[_-]?key)s?"
    r"|auth(?:orization)?|token)"
)
_SECRET_KEY = re.compile(f"{_SECRET_NAME}$", re.IGNORECASE)
_MOST_SHOWN = 20  # valid names in a message
# A shorter value of the environment may be an ordinary word of other texts.
_SHORTEST_SECRET = 8
# user:password@ of a URL, and the value of a signature or token in its query
_URL_SECRET = re.compile(
    r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)|(?<=[?&])([\w-]*(?:sig|signature|token|key|secret|password)=)[^&\s'\"]+", re.I
)
# `name=value`, `"name": "value"`, and `Authorization: Basic value`. A number, a truth value or an interpolation is not a
# secret. What stands before the end of a name is not matched: a search from each letter of a long word would be quadratic.
_NAMED_SECRET = re.compile(
    rf"""((?:{_SECRET_NAME}(?:=|["']\s?:\s?)|authorization:\s)\\?["']?(?:(?:basic|bearer|token)\s)?)"""
    r"""(?!(?:true|false|none|null|[-+\d.e]+|\$\{.*?|<hidden>.*?)(?:[\s"',;&})\]]|$))([^\s"',;&})\]\\]+)""",
    re.IGNORECASE,
)
_BEARER = re.compile(rf"(?<=bearer )[\w.~+/=-]{{{_SHORTEST_SECRET},}}", re.IGNORECASE)


class ConfigError(ValueError):
    """An error in the config, data, checkpoint or environment that the user can correct.

    The message is complete: it names the key or file, the value and the remedy. The error is raised on every rank and
    shown on rank 0, without a traceback.
    """


class Explained(Exception):
    """An error that the user can correct and that only one rank may have, such as a full disk or a batch of bad samples.

    The message is complete, as in a ``ConfigError``. The first rank that raises it shows it; the other ranks end with
    one line.
    """


class PeerFailed(RuntimeError):
    """This rank ends because a different rank failed first and published its error."""


class PeerLost(Explained, RuntimeError):
    """This rank ends because a different rank has died or does not answer, and no rank has published an error."""


class RankLost(PeerLost):
    """A different rank has died, and this rank continues without it (``parallel.recover``)."""


def shortened(text: str, most: int) -> str:
    """The beginning of a text, at most ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


@functools.lru_cache(maxsize=4096)  # each text of a config is compared with the whole environment
def names_secret(key: str) -> bool:
    """Whether the value of a key or an environment variable of this name is secret if it is text, such as ``WANDB_API_KEY``.

    ``tokens`` is no such name: it usually belongs to a language model.
    """
    return _SECRET_KEY.search(key) is not None


def hide_secret(key: str, value: str) -> str:
    """The text of a value; without passwords, signatures and tokens."""
    return HIDDEN if names_secret(key) else without_secrets_in(value)


def nearest(name: str, valid: Iterable[str]) -> str:
    """``Did you mean 'a'? Valid: a, b, c.``"""
    names = sorted(set(valid))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    guess = f"Did you mean {close[0]!r}? " if close else ""
    more = len(names) - _MOST_SHOWN
    shown = ", ".join(names[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return f"{guess}Valid: {shown or 'none'}."


def near_names(pattern: str, names: Iterable[str]) -> str:
    """``Near names: a, b``: those that are most like a pattern that matches none of them, or the first ones."""
    names = list(names)
    near = difflib.get_close_matches(pattern.replace("*", ""), names, n=5, cutoff=0.4) or names[:5]
    return f"Near names: {', '.join(near)}" if near else "There are no names"


def one_line(message: str) -> str:
    """The lines of a message on one, ended by a full stop."""
    joined = " ".join(message.split())
    return joined if joined.endswith((".", "!", "?")) else f"{joined}."


def add_note(error: BaseException, note: str) -> None:
    """Adds a line about where an error happened: commands show it first; since Python 3.11 it also ends a traceback."""
    error.__notes__ = [*getattr(error, "__notes__", ()), note]


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


def printable(text: str, keep: str = "") -> str:
    """The text with a question mark for each control or invisible character, which could control a terminal.

    Args:
        text: The text, such as a name in another user's file.
        keep: Characters that stay. Without ``"\\n"`` the result is one line.
    """
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() or character in keep else "?" for character in text)


def escape_on_stdout() -> None:
    """Makes standard output escape characters that its encoding lacks, as standard error does, instead of raising an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def without_secrets_in(text: str) -> str:
    """A text in which secrets are hidden.

    They are passwords, signatures and tokens in URLs; values after a name such as ``token=`` or ``"Authorization":``; and
    values of environment variables with such names, such as ``WANDB_API_KEY``, if they have at least eight characters.
    """
    text = _URL_SECRET.sub(lambda match: f"{match[1] or ''}{HIDDEN}", text)
    text = _BEARER.sub(HIDDEN, _NAMED_SECRET.sub(rf"\1{HIDDEN}", text))
    values = {value for name, value in os.environ.items() if len(value) >= _SHORTEST_SECRET and names_secret(name)}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return text

"""The kinds of failure that are shown without a traceback."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """A config, data set, checkpoint or environment that cannot work: something that the user can put right.

    The message is the whole story: it names the thing, the value got, and what to do. It is raised on every rank and
    shown on rank 0.
    """


class Explained(Exception):
    """Something that the user can put right, which one rank may meet alone while the others go on: a disk that is full,
    samples that no batch can be made of.

    The message is the whole story, as that of a ``ConfigError``. The first rank that has it shows it, the others end with
    one line.
    """


class PeerFailed(RuntimeError):
    """This rank ends because another one failed first and has already said why."""


class PeerLost(Explained, RuntimeError):
    """This rank ends because another one is gone, and none has said why."""


def in_brief(message: str) -> str:
    """The beginning of a message, on one line, for where another line shows all of it."""
    return textwrap.shorten(message.splitlines()[0] if message else "", 120, placeholder="...")


@contextmanager
def users_to_fix(what: str) -> Iterator[None]:
    """Makes a ``ConfigError`` of what the public classes raise for wrong arguments, files and missing packages.

    Args:
        what: The part of the config that it is about, put before the message.
    """
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError, ImportError) as error:
        said = str(error)
        raise ConfigError(said if said.startswith(what) else f"{what}: {said}") from error

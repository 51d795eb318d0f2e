"""The two kinds of failure that are shown without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """A config, data set, checkpoint or environment that cannot work: something that the user can put right.

    The message is the whole story: it names the thing, the value got, and what to do. It is raised on every rank and
    shown on rank 0.
    """


class PeerFailed(RuntimeError):
    """This rank ends because another one failed first and has already said why."""


class PeerLost(RuntimeError):
    """This rank ends because another one is gone, and none has said why."""


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
        raise ConfigError(f"{what}: {error}") from error

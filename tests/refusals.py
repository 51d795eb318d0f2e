"""Refusals are tested by what their message names (key, value and remedy), never by its wording.

    with refused(ConfigError, key="train.max_steps", got=-5, remedy="at least 1"):
        ...

Tables of parametrised tests hold rows of (bad value, key, got, remedy), or ``Refusal`` where a row needs a call of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest


@contextmanager
def refused(
    error: type[BaseException], key: object, got: object = "", remedy: object = "", *more: object
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expects an ``error`` whose message contains the key, the refused value, the remedy and ``more``, in any order."""
    with pytest.raises(error) as raised:
        yield raised
    assert_refused(str(raised.value), key, got, remedy, *more)


def refusal_of(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The message of the ``ValueError`` or ``OSError`` that a call raises."""
    with pytest.raises((ValueError, OSError)) as raised:
        call(*arguments, **options)
    return str(raised.value)


def assert_refused(message: str, key: object, got: object = "", remedy: object = "", *more: object) -> None:
    """Checks that a message contains the key, the refused value, the remedy and ``more``, in any order."""
    for part in (key, got, remedy, *more):
        assert str(part) in message, f"{str(part)!r} is not named in: {message}"


class Refusal(NamedTuple):
    """A call that raises, as a row of a table.

    Attributes:
        call: Raises the error.
        key: The config key, method or object at fault.
        got: The refused value.
        remedy: What to do, or set, instead.
        error: Type of the error.
    """

    call: Callable[[], Any]
    key: str
    got: str
    remedy: str
    error: type[BaseException] = ValueError

    def check(self) -> None:
        with refused(self.error, self.key, self.got, self.remedy):
            self.call()

"""A place in a model's code where precision goes another way than the config says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One such place.

    Attributes:
        kind: ``created``, ``promoted``, ``product``, ``constant``, ``fixed``, ``raised`` or ``in place``.
        owner: The module.
        operation: Such as ``zeros``.
        where: ``file:line`` in the user's code, or "".
        shape: Of the result.
        note: What else there is to say, or "".
    """

    kind: str
    owner: str
    operation: str
    where: str
    shape: tuple[int, ...]
    note: str = ""

"""Functions that a config gives with ``_partial_: true``.

Apart from ``instantiate``, which imports Hydra: the data layer uses this module, and works without Hydra.
"""

from __future__ import annotations

import functools
from typing import Any


def plain_partial(value: Any) -> Any:
    """Returns the value; a function that Hydra made for ``_partial_: true`` as a plain ``functools.partial``.

    Hydra checks the target of every node when it builds it. Hydra 1.3.8 also checks each call of such a function, which takes a
    tenth of a millisecond or more: too much for a function that is called for every sample.

    Example:
        >>> from functools import partial
        >>> from hydra.utils import instantiate
        >>> from dtrain.config.partials import plain_partial
        >>> function = instantiate({"_target_": "math.pow", "_partial_": True})
        >>> type(plain_partial(function)) is partial
        True
    """
    if not (isinstance(value, functools.partial) and type(value).__module__.startswith("hydra.")):
        return value
    plain = functools.partial(value.func, *value.args, **value.keywords)
    plain.__dict__.update({name: item for name, item in vars(value).items() if not name.startswith("_hydra_")})
    return plain

"""Random numbers for one sample at a time: a counter-based generator that is set to a sample's key.

Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) makes no difference between keys that are near
each other, so nothing has to be drawn and thrown away.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class Randomness:
    """One generator, which gives the numbers of any key; setting it costs a sixth of making another one."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._philox)
        self._start: Any = self._philox.state

    def of(self, key: int) -> np.random.Generator:
        """The generator at the start of ``key``'s numbers; good until the next call.

        Args:
            key: 64 bits, not negative.
        """
        self._start["state"]["key"][0] = key
        self._philox.state = self._start
        return self._generator

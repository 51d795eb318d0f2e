"""How many examples the property tests have: half of them in the default tests, all of them in ``-m slow``."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

#: Of the default tests, and of ``-m slow``. How long an example takes depends on what else the machine does.
QUICK, THOROUGH = "dtrain", "thorough"
settings.register_profile(QUICK, deadline=None, max_examples=50)
settings.register_profile(THOROUGH, deadline=None, max_examples=100)


def examples(number: int, **options: Any) -> settings:
    """Settings of a test with ``number`` examples, of which the default tests have half, and at least ten."""
    quick = settings().max_examples == settings.get_profile(QUICK).max_examples
    return settings(max_examples=min(number, max(10, number // 2)) if quick else number, **options)

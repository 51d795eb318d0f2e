"""The record: what a run has to say about one logged step."""

from __future__ import annotations

from collections.abc import Mapping

#: A flat dict of plain Python numbers, named as in metrics.jsonl. ``step`` (attempted steps, never less than in the
#: record before) and ``time`` (Unix seconds) are always there.
Record = Mapping[str, float | int]

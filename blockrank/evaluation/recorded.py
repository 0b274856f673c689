"""What is recorded of each list beside its scores (seconds, tokens, a ranker's own `extra`), as numbers of tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from blockrank.evaluation.records import QueryRecord

SECONDS = "seconds"
"""The one that is summed up by its median: the first lists of a shape wait for its compilation."""


def recorded_values(records: Mapping[str, QueryRecord], name: str) -> list[float]:
    """The values of one record (a number of `QueryRecord`, or a key of its `extra`) of the lists that have it.

    Seconds count where a ranker read something: neither for a first stage's order nor for a run of another system.
    """
    found = []
    for record in records.values():
        if record.documents == 0 or (name == SECONDS and not record.tokens):
            continue
        value = record.extra.get(name, getattr(record, name, None))
        if isinstance(value, int | float):
            found.append(float(value))
    return found


def recorded_columns(name: str) -> tuple[str, ...]:
    """Names of the columns: mean and standard deviation over lists, or the median of seconds."""
    return (f"median {SECONDS}",) if name == SECONDS else (name, f"{name} sd")


def recorded_numbers(name: str, values: Sequence[float]) -> tuple[float | None, ...]:
    """The numbers under `recorded_columns`; None where there are too few values."""
    if name == SECONDS:
        return (statistics.median(values) if values else None,)
    return (statistics.fmean(values) if values else None, statistics.stdev(values) if len(values) > 1 else None)

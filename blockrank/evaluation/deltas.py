"""How each query fares under a system and under the baseline: every difference, sorted."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blockrank.evaluation.files import write_text
from blockrank.evaluation.metrics import MetricsReport, parse_measure

COLUMNS = ("ranker", "measure", "query_id", "query", "value", "baseline", "difference")


@dataclass(frozen=True, slots=True)
class Delta:
    """One query's value of a measure; `difference` is system minus baseline."""

    query_id: str
    value: float
    baseline: float

    @property
    def difference(self) -> float:
        return self.value - self.baseline


def deltas(system: MetricsReport, baseline: MetricsReport, measure: str) -> list[Delta]:
    """The queries that both have, by falling difference, then by id."""
    ours, theirs = system.values(measure), baseline.values(measure)
    found = [Delta(query, ours[query], theirs[query]) for query in ours if query in theirs]
    return sorted(found, key=lambda delta: (-delta.difference, delta.query_id))


def all_deltas(
    reports: Mapping[str, MetricsReport], baseline: str, measures: Sequence[str]
) -> dict[str, dict[str, list[Delta]]]:
    """measure -> row -> its differences from the row `baseline`, which itself is left out."""
    return {
        str(parse_measure(measure)): {
            row: deltas(report, reports[baseline], measure) for row, report in reports.items() if row != baseline
        }
        for measure in measures
    }


def write_deltas(path: Path, found: Mapping[str, Mapping[str, Sequence[Delta]]], texts: Mapping[str, str]) -> None:
    """A CSV file, one line for each row, measure and query. `texts`: query id -> its text."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for measure, rows in found.items():
        for row, values in rows.items():
            for delta in values:
                text = texts.get(delta.query_id, "")
                numbers = (delta.value, delta.baseline, delta.difference)
                writer.writerow([row, measure, delta.query_id, text, *numbers])
    write_text(path, buffer.getvalue())

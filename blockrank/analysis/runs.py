"""A run query by query: which fail, and what the run has in front there."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from blockrank.evaluation.metrics import MetricsReport, canonical_order, parse_measure
from blockrank.evaluation.tables import Cell, Table
from blockrank.types import Qrels, Query, Run


def worst_queries(
    report: MetricsReport, measure: str, run: Run, qrels: Qrels, queries: Mapping[str, Query], count: int = 10
) -> Table:
    """The `count` queries of the lowest value: text, the first document, and the best relevant one with its rank.

    Ties go by query id. A relevant document that the run lacks has no rank.
    """
    name = str(parse_measure(measure))
    values = report.values(name)
    rows = []
    for query in sorted(values, key=lambda q: (values[q], q))[:count]:
        order = canonical_order(run.get(query, {}))
        relevant = {document for document, grade in qrels.get(query, {}).items() if grade > 0}
        rank = next((i for i, document in enumerate(order, 1) if document in relevant), None)
        best = order[rank - 1] if rank is not None else min(relevant, default=None)
        text = queries[query].text if query in queries else None
        cells = (values[query], text, order[0] if order else None, best, rank)
        rows.append((query, tuple(map(Cell, cells))))
    columns = (name, "query", "ranked first", "best relevant", "its rank")
    return Table(columns, tuple(rows), title=f"The {len(rows)} worst queries", row_header="id")


def query_values(reports: Mapping[str, MetricsReport], measure: str) -> dict[str, np.ndarray]:
    """Row -> its per-query values of a measure, float64 [queries]; for `figures.plot_queries`."""
    return {row: np.array(list(report.values(measure).values())) for row, report in reports.items()}

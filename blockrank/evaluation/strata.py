"""Easy and hard queries apart: a ranker's measures by strata of what is known of a query before it is ranked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from blockrank.data.candidates import CandidateLists
from blockrank.evaluation.metrics import MetricsReport, parse_measure
from blockrank.evaluation.significance import bootstrap_interval
from blockrank.evaluation.tables import Cell, Table
from blockrank.types import Qrels

Strata = dict[str, dict[str, list[str]]]
"""What queries are told apart by -> stratum -> ids of judged queries; each query is in one stratum at most."""

ABSENT = "not in the list"
_RANKS = (1, 3, 10, 30, 100)


def query_strata(lists: CandidateLists, qrels: Qrels, texts: Mapping[str, str]) -> Strata:
    """The judged queries by words of the query, by number of relevant documents, and by the rank and the score that
    the first stage gave the best placed relevant document of the list.

    Words, numbers and scores are cut at their terciles. A document is relevant with a grade above 0. There are no
    scores where the first stage has none. Queries without a list, or a relevant document in it, are `ABSENT`.
    `texts`: query id -> its text.
    """
    judged = {query: grades for query, grades in qrels.items() if grades}
    relevant = {query: {d for d, grade in grades.items() if grade > 0} for query, grades in judged.items()}
    ranks: dict[str, int] = {}
    scores: dict[str, float] = {}
    for index, query in enumerate(lists.queries):
        wanted = relevant.get(query.id, set())
        for rank, (document, score) in enumerate(lists.first_stage(index).items(), start=1):
            if document in wanted:
                ranks[query.id], scores[query.id] = rank, score
                break
    absent = [query for query in judged if query not in ranks]
    words = {query: len(texts.get(query, "").split()) for query in judged}
    found: Strata = {
        "words of the query": by_terciles(words),
        "relevant documents": by_terciles({query: len(documents) for query, documents in relevant.items()}),
        "first-stage rank of the first relevant": cut(ranks, _RANKS) | _absent(absent),
    }
    if not lists.uninformative:
        found["first-stage score of the first relevant"] = by_terciles(scores) | _absent(absent)
    return found


def by_terciles(values: Mapping[str, float]) -> dict[str, list[str]]:
    """Query ids in three strata of about one size; fewer where values are equal."""
    if not values:
        return {}
    return cut(values, np.quantile(list(values.values()), [1 / 3, 2 / 3], method="lower").tolist())


def cut(values: Mapping[str, float], edges: Sequence[float]) -> dict[str, list[str]]:
    """Query ids by the interval of their value: up to and with each edge, and above the last; none is empty."""
    edges = sorted(set(edges))
    names = [f"<= {edges[0]:g}", *(f"> {low:g}, <= {high:g}" for low, high in pairwise(edges))]
    names.append(f"> {edges[-1]:g}")
    strata: dict[str, list[str]] = {name: [] for name in names}
    for query, value in values.items():
        strata[names[int(np.searchsorted(edges, value))]].append(query)
    return {name: queries for name, queries in strata.items() if queries}


def strata_table(
    report: MetricsReport,
    strata: Strata,
    measures: Sequence[str],
    *,
    title: str = "",
    scale: float = 1.0,
    digits: int = 4,
    samples: int = 10_000,
    seed: int = 0,
) -> Table:
    """One ranker's means by stratum with bootstrap 95 % intervals, and numbers of queries; all queries come first."""
    names = [str(parse_measure(measure)) for measure in measures]

    def cells(queries: Sequence[str]) -> tuple[Cell, ...]:
        found = []
        for name in names:
            values = [report.per_query[query][name] for query in queries]
            low, high = bootstrap_interval(values, samples=samples, seed=seed)
            found.append(Cell(float(np.mean(values)) * scale, (low * scale, high * scale)))
        return (*found, Cell(len(queries)))

    rows = [("all queries", cells(list(report.per_query)))]
    for what, parts in strata.items():
        for name, queries in parts.items():
            averaged = [query for query in queries if query in report.per_query]
            if averaged:
                rows.append((f"{what}: {name}", cells(averaged)))
    note = f"In brackets: 95 % bootstrap interval of the mean ({samples} samples, seed {seed})."
    return Table((*names, "queries"), tuple(rows), title=title, row_header="stratum", notes=(note,), digits=digits)


def _absent(queries: list[str]) -> dict[str, list[str]]:
    return {ABSENT: queries} if queries else {}

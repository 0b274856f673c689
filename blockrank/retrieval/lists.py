"""The candidate lists of a split, as a configuration names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from blockrank.data.candidates import CandidateLists, candidate_lists
from blockrank.data.collection import Collection
from blockrank.data.files import hash64
from blockrank.errors import at_least
from blockrank.retrieval.first_stage import first_stage
from blockrank.types import Qrels


@dataclass(frozen=True)
class ListsConfig:
    """Which queries and which candidates: `candidates` and `depth` are `first_stage`'s.

    `with_positives`: every list holds its positives, in the place of its last candidates where the first stage missed
    them. `max_queries`: a fixed subset of so many queries (those whose ids hash lowest); of the judged ones, with or
    without a list, where rankers are measured against qrels. `missing_documents`: what is done about candidates that
    the collection lacks.
    """

    split: str
    candidates: str | None = None
    depth: int = 100
    with_positives: bool = False
    max_queries: int | None = None
    missing_documents: Literal["error", "drop"] = "error"

    def __post_init__(self) -> None:
        at_least(self, 1, "depth", "max_queries")


def open_lists(collection: Collection, config: ListsConfig) -> CandidateLists:
    """All lists of the split, made when asked for (`max_queries` is not applied)."""
    run = first_stage(collection, config.split, config.candidates, config.depth)
    options = {"with_positives": config.with_positives, "missing_documents": config.missing_documents}
    return candidate_lists(collection, run, config.split, config.depth, **options)


def select_queries(lists: CandidateLists, max_queries: int | None) -> CandidateLists:
    """The lists of a fixed subset of the queries, in the split's order; all of them for None."""
    return lists_of(lists, fixed_subset([query.id for query in lists.queries], max_queries))


def select_judged(lists: CandidateLists, qrels: Qrels, max_queries: int | None) -> tuple[CandidateLists, Qrels]:
    """Lists and judgements of a fixed subset of the queries that have a judgement or, for None, all of both.

    Whether a query has a list does not matter: a judged one without is as likely chosen, and stays in the qrels.
    Queries without a judgement are left out only where there are more queries than `max_queries`, and some are judged.
    """
    known = qrels.keys() | {query.id for query in lists.queries}
    if max_queries is None or max_queries >= len(known):
        return lists, qrels
    judged = [query for query, grades in qrels.items() if grades]
    chosen = fixed_subset(judged or [query.id for query in lists.queries], max_queries)
    return lists_of(lists, chosen), {query: qrels[query] for query in chosen if query in qrels}


def lists_of(lists: CandidateLists, queries: Sequence[str]) -> CandidateLists:
    """Those of the lists that are of `queries`, in the lists' order."""
    wanted = set(queries)
    return lists.take([index for index, query in enumerate(lists.queries) if query.id in wanted])


def fixed_subset(queries: Sequence[str], size: int | None) -> list[str]:
    """The `size` ids that hash lowest, in the given order; all of them for None."""
    if size is None or size >= len(queries):
        return list(queries)
    chosen = sorted(range(len(queries)), key=lambda i: (hash64(queries[i]), i))[:size]
    return [queries[index] for index in sorted(chosen)]

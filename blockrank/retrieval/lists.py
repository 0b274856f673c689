"""The candidate lists of a split, as a configuration names them."""

from __future__ import annotations

from dataclasses import dataclass

from blockrank.data.candidates import CandidateLists, candidate_lists
from blockrank.data.collection import Collection
from blockrank.data.files import hash64
from blockrank.errors import at_least
from blockrank.retrieval.first_stage import first_stage


@dataclass(frozen=True)
class ListsConfig:
    """Which queries and which candidates: `candidates` and `depth` are `first_stage`'s.

    `with_positives`: every list holds its positives, in the place of its last candidates where the first stage missed
    them. `max_queries`: a fixed subset of so many queries (those whose ids hash lowest).
    """

    split: str
    candidates: str | None = None
    depth: int = 100
    with_positives: bool = False
    max_queries: int | None = None

    def __post_init__(self) -> None:
        at_least(self, 1, "depth", "max_queries")


def open_lists(collection: Collection, config: ListsConfig) -> CandidateLists:
    """All lists of the split, made when asked for (`max_queries` is not applied)."""
    run = first_stage(collection, config.split, config.candidates, config.depth)
    return candidate_lists(collection, run, config.split, config.depth, with_positives=config.with_positives)


def select_queries(lists: CandidateLists, max_queries: int | None) -> CandidateLists:
    """The lists of a fixed subset of the queries, in the split's order; all of them for None."""
    if max_queries is None or max_queries >= len(lists):
        return lists
    chosen = sorted(range(len(lists)), key=lambda i: (hash64(lists.queries[i].id), i))[:max_queries]
    return lists.take(sorted(chosen))

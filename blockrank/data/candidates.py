"""Candidate lists: a run's documents with their text, in first-stage order, judged by the collection's qrels."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, overload

from blockrank.data.collection import Collection
from blockrank.data.documents import Documents
from blockrank.data.trec import check_overlap, ranked, sample_ids
from blockrank.errors import UserError
from blockrank.types import CandidateList, Qrels, Query, Rankings, has_text

log = logging.getLogger(__name__)


class CandidateLists(Sequence[CandidateList]):
    """Lists of one split, made when asked for; memory holds the run's ids and scores at most.

    `ranking(i)` gives the document ids of list i without reading text. `uninformative` says that the first stage's
    scores are equal within every list, so that no baseline should be reported from them.
    `dropped` counts run documents that are not in the collection.
    """

    def __init__(
        self,
        documents: Documents,
        queries: Sequence[Query],
        run: Rankings,
        qrels: Qrels,
        *,
        uninformative: bool = False,
        dropped: int = 0,
        ignore_self: bool = False,
    ) -> None:
        self.documents = documents
        self.queries = tuple(queries)
        self.qrels = qrels
        self.uninformative = uninformative
        self.dropped = dropped
        self.ignore_self = ignore_self
        self._run = run

    def ranking(self, index: int) -> tuple[str, ...]:
        """Document ids of list `index`, best first."""
        return tuple(self._run[self.queries[index].id])

    def first_stage(self, index: int) -> Mapping[str, float]:
        """Document ids of list `index` with the first stage's scores, best first."""
        return self._run[self.queries[index].id]

    def take(self, indices: Sequence[int]) -> CandidateLists:
        """The lists at `indices`, in that order."""
        chosen = [self.queries[index] for index in indices]
        flags = {"uninformative": self.uninformative, "dropped": self.dropped, "ignore_self": self.ignore_self}
        return CandidateLists(self.documents, chosen, self._run, self.qrels, **flags)

    def __len__(self) -> int:
        return len(self.queries)

    @overload
    def __getitem__(self, index: int) -> CandidateList: ...
    @overload
    def __getitem__(self, index: slice) -> CandidateLists: ...
    def __getitem__(self, index: int | slice) -> CandidateList | CandidateLists:
        if isinstance(index, slice):
            return self.take(range(len(self))[index])
        query = self.queries[index]
        ranking = self._run[query.id]
        judged = self.qrels.get(query.id)
        return CandidateList(
            query=query,
            documents=tuple(self.documents[i] for i in ranking),
            scores=tuple(ranking.values()),
            relevance=None if judged is None else tuple(judged.get(i, 0) for i in ranking),
        )


def candidate_lists(
    collection: Collection,
    run: Rankings,
    split: str,
    depth: int | None = None,
    *,
    missing_documents: Literal["error", "drop"] = "error",
    with_positives: bool = False,
) -> CandidateLists:
    """Lists of those of the split's queries that are in `run`, in the split's order, at most `depth` documents each.

    Queries without text get no list. What run, split and collection do not share is told in warnings, with samples.

    Documents go by score, highest first; ties by document id descending, as trec_eval has it, unless the scores say
    nothing: then the run's order stands. Where the collection ignores self (ArguAna, Quora)
    a query's own id is left out before the cut. `with_positives` lets positives that the cut or the first stage left
    out take the places of the last candidates, with scores below all others: for lists that always hold an answer.

    Raises `UserError` when `run` and the split share no query, and for run documents that are not in the collection
    (they are dropped and counted with `missing_documents="drop"`).
    """
    if depth is not None and depth < 1:
        raise UserError(f"depth must be at least 1, got {depth}")
    queries = collection.queries(split)
    check_overlap(queries, run, f"{collection.name} ({split})", "the run", "query")
    found = _with_text([query for query in queries.values() if query.id in run], f"{collection.name} ({split})")
    qrels = collection.qrels(split)
    _report_judged_without_document(qrels, found, collection, split)
    ids = [query.id for query in found]
    if collection.ignore_self:
        own = sum(query in run[query] for query in ids)
        log.info("%s: the query itself was left out of %d candidate lists", collection.name, own)
    cut = _Cut(run, ids, depth, collection)
    cut.uninformative = _equal_scores(map(cut.whole, ids))
    if cut.uninformative:
        log.warning(
            "%s (%s): the first-stage scores of each list are equal: they keep the run's order, which is no baseline",
            collection.name,
            split,
        )
    dropped = _drop_missing(cut, collection, missing_documents)
    if with_positives:
        cut.judged = qrels
    return CandidateLists(
        collection.documents,
        found,
        cut,
        qrels,
        uninformative=cut.uninformative,
        dropped=dropped,
        ignore_self=collection.ignore_self,
    )


class _Cut(Mapping[str, dict[str, float]]):
    """The rankings of a run as lists have them, each made when asked for, so that the run may stay on disk."""

    def __init__(self, run: Rankings, queries: Sequence[str], depth: int | None, collection: Collection) -> None:
        self._run, self._queries, self._depth = run, queries, depth
        self._documents, self._ignore_self = collection.documents, collection.ignore_self
        self.uninformative = False
        self.absent: frozenset[str] = frozenset()
        self.judged: Qrels | None = None
        """Where lists hold their positives, what they are."""

    def whole(self, query: str) -> Mapping[str, float]:
        """All that the run has, the query itself aside where it does not count."""
        ranking = self._run[query]
        if self._ignore_self and query in ranking:
            return {d: score for d, score in ranking.items() if d != query}
        return ranking

    def __getitem__(self, query: str) -> dict[str, float]:
        ordered = ranked(self.whole(query), "input" if self.uninformative else "document")
        found = {d: score for d, score in ordered[: self._depth] if d not in self.absent}
        if self.judged is None:
            return found
        step = 0.0 if self.uninformative else 1.0
        return _with_positives(found, self.judged.get(query, {}), self._documents, self._depth, step)

    def __iter__(self) -> Iterator[str]:
        return iter(self._queries)

    def __len__(self) -> int:
        return len(self._queries)


def _with_text(queries: list[Query], where: str) -> list[Query]:
    """The queries a ranker can read. The others get no list, so that a judged one counts as missing, and are told."""
    silent = [query.id for query in queries if not has_text(query.text)]
    if not silent:
        return queries
    log.warning("%d queries of %s have no text and get no list: %s", len(silent), where, sample_ids(silent))
    readable = [query for query in queries if has_text(query.text)]
    if not readable:
        raise UserError(f"no query of {where} has any text: is this the right file of queries?")
    return readable


def _report_judged_without_document(qrels: Qrels, queries: list[Query], collection: Collection, split: str) -> None:
    """Warns of positives that are not in the collection: they stay in the ideal ranking, and no list can hold them."""
    positives = [d for query in queries for d, grade in qrels.get(query.id, {}).items() if grade > 0]
    missing = collection.documents.missing(positives)
    if missing:
        log.warning(
            "%d of %d documents judged relevant in %s (%s) are not in its collection: %s",
            *(len(missing), len(dict.fromkeys(positives)), collection.name, split, sample_ids(missing)),
        )


def _equal_scores(rankings: Iterable[Mapping[str, float]]) -> bool:
    """Whether every list of two or more has one score throughout, and there are such lists."""
    several = False
    for ranking in rankings:
        if len(set(ranking.values())) > 1:
            return False
        several = several or len(ranking) > 1
    return several


def _with_positives(
    ranking: dict[str, float], judged: dict[str, int], documents: Documents, depth: int | None, step: float
) -> dict[str, float]:
    """`ranking` with all positives that have text, cut to `depth` again from its end, positives spared.

    Those added get a score `step` below all others.
    """

    def listable(document: str) -> bool:
        return document in ranking or (document in documents and not documents[document].is_empty)

    positives = [d for d, grade in judged.items() if grade > 0 and listable(d)]
    left_out = [d for d in positives if d not in ranking]
    if not left_out:
        return ranking
    others = [d for d in ranking if d not in positives]
    if depth is not None:
        others = others[: max(depth - len(positives), 0)]
    kept = {d: score for d, score in ranking.items() if d in positives or d in others}
    below = min(ranking.values(), default=0.0) - step
    return kept | dict.fromkeys(left_out, below)


def _drop_missing(cut: _Cut, collection: Collection, policy: Literal["error", "drop"]) -> int:
    """Lets `cut` leave out what the collection lacks, and returns how many entries that are."""
    missing = collection.documents.missing(document for ranking in cut.values() for document in ranking)
    if not missing:
        return 0
    sample = sample_ids(missing, 5)
    if policy == "error":
        raise UserError(
            f"{len(missing)} documents of the run are not in {collection.name}: {sample}; use the run's own corpus "
            "(an evaluation leaves them out and counts them with missing_documents=drop)"
        )
    absent = frozenset(missing)
    dropped = sum(document in absent for ranking in cut.values() for document in ranking)
    cut.absent = absent
    log.warning("dropped %d run entries of documents that are not in %s: %s", dropped, collection.name, sample)
    return dropped

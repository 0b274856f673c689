"""From a ranker's scores of one candidate list to its place in a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from blockrank.data.trec import strictly_decreasing
from blockrank.errors import UserError
from blockrank.evaluation.metrics import count_ties
from blockrank.types import CandidateList, ListScores

RANKING_RULE = "score descending, ties by first-stage order, documents without text last in first-stage order"
Tail = Literal["drop", "keep"]


@dataclass(frozen=True, slots=True)
class Reranking:
    """A candidate list in its new order: `scores` (document id -> score) strictly decrease, also as float32."""

    scores: dict[str, float]
    tied_documents: int


def select(candidates: CandidateList, indices: list[int]) -> CandidateList:
    """The candidate list reduced to some of its documents, in the given order."""
    return CandidateList(
        candidates.query,
        tuple(candidates.documents[i] for i in indices),
        None if candidates.scores is None else tuple(candidates.scores[i] for i in indices),
        None if candidates.relevance is None else tuple(candidates.relevance[i] for i in indices),
    )


def without_self(candidates: CandidateList) -> CandidateList:
    """The candidate list without the documents that bear the query's id."""
    kept = [i for i, document in enumerate(candidates.documents) if document.id != candidates.query.id]
    return candidates if len(kept) == len(candidates) else select(candidates, kept)


def check_documents(candidates: CandidateList) -> None:
    """Raises when a document id occurs twice: a run can hold each once."""
    seen: set[str] = set()
    for document in candidates.documents:
        if document.id in seen:
            raise UserError(
                f"query {candidates.query.id!r}: document {document.id!r} is a candidate twice; list it once"
            )
        seen.add(document.id)


def check_scores(ranker: str, candidates: CandidateList, result: ListScores) -> np.ndarray:
    """The scores as float32 [N], after making sure there is one finite score and one flag per document."""
    scores, truncated = np.asarray(result.scores), np.asarray(result.truncated)
    for name, values in (("scores", scores), ("truncation flags", truncated)):
        if values.shape != (len(candidates),):
            raise UserError(
                f"ranker {ranker!r}, query {candidates.query.id!r}: {name} of shape {values.shape} "
                f"for {len(candidates)} documents; a ranker returns one per document, in the list's order"
            )
    with np.errstate(over="ignore"):
        scores = scores.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(scores))
    if bad.size:
        index = int(bad[0])
        raise UserError(
            f"ranker {ranker!r}, query {candidates.query.id!r}, document {index} ({candidates.documents[index].id!r}): "
            f"score {np.asarray(result.scores)[index]} is not finite in float32 ({bad.size} such in this list); "
            "check the weights and the compute dtype"
        )
    return scores


def rerank_order(candidates: CandidateList, scores: np.ndarray, *, empty_last: bool = True) -> np.ndarray:
    """Indices of the first len(scores) candidates by `RANKING_RULE`, best first."""
    empty = np.array([empty_last and document.is_empty for document in candidates.documents[: len(scores)]], bool)
    return np.lexsort((np.arange(len(scores)), np.where(empty, 0.0, -scores.astype(np.float64)), empty))


def rerank(candidates: CandidateList, scores: np.ndarray, *, tail: Tail = "drop", empty_last: bool = True) -> Reranking:
    """Orders the first len(scores) candidates by `RANKING_RULE`; the rest is dropped or kept below, in its order.

    `scores` float32 [n], n <= N. Where two scores would not strictly decrease the lower one is moved to the next
    float32 below, so that any reader of the run sees this order.
    """
    head = candidates.documents[: len(scores)]
    order = rerank_order(candidates, scores, empty_last=empty_last)
    below = candidates.documents[len(scores) :] if tail == "keep" else ()
    documents = [head[i] for i in order] + list(below)
    lowest = scores[order[-1]] if len(order) else np.float32(0)
    values = strictly_decreasing(np.concatenate([scores[order], np.full(len(below), lowest, np.float32)]))
    return Reranking(
        {document.id: float(value) for document, value in zip(documents, values, strict=True)},
        count_ties(scores.tolist()),
    )

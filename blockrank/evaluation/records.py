"""What an evaluation keeps of each candidate list, and their sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from blockrank.evaluation.files import EvaluationFiles
from blockrank.evaluation.metrics import MetricsReport
from blockrank.rankers.confidence import ScoreKind, confidence_of, with_text
from blockrank.types import CandidateList, Qrels, Run


@dataclass(frozen=True, slots=True)
class ScoredDocuments:
    """A ranker's float32 [n] scores, and those of its parts, for the scored documents of a list that have text."""

    ids: tuple[str, ...]
    scores: np.ndarray
    parts: dict[str, np.ndarray]

    @staticmethod
    def of(candidates: CandidateList, scores: np.ndarray, parts: Mapping[str, Sequence[float]]) -> ScoredDocuments:
        """Of the first len(scores) candidates."""
        head = candidates.documents[: len(scores)]
        readable = with_text(head)
        ids = tuple(document.id for document, reads in zip(head, readable, strict=True) if reads)
        return ScoredDocuments(
            ids, scores[readable], {name: np.asarray(part, np.float32)[readable] for name, part in parts.items()}
        )

    def confidence(self, kind: ScoreKind) -> dict[str, float] | None:
        """The fields of `Confidence`; None for a list without text."""
        found = confidence_of(self.scores, kind)
        return None if found is None else asdict(found)

    def ranking(self, scores: np.ndarray | None = None) -> list[str]:
        """Ids by score descending, ties in first-stage order."""
        values = self.scores if scores is None else scores
        return [self.ids[i] for i in np.argsort(-np.asarray(values, np.float64), kind="stable")]


@dataclass
class QueryRecord:
    """What happened to one candidate list."""

    documents: int
    truncated: int = 0
    query_truncated: bool = False
    tied_documents: int = 0
    empty_documents: int = 0
    self_documents: int = 0
    dropped_documents: int = 0
    tokens: int = 0
    seconds: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)
    confidence: dict[str, float] | None = None


class ScoredLists:
    """What accumulates while the lists are scored."""

    def __init__(self) -> None:
        self.run: Run = {}
        self.records: dict[str, QueryRecord] = {}
        self.qrels: Qrels = {}
        self.documents: dict[str, ScoredDocuments] = {}
        self.resumed = 0
        self.lowest, self.highest = float("inf"), float("-inf")

    def add_list(self, original: CandidateList, candidates: CandidateList, keep_relevance: bool) -> None:
        self.records[original.query.id] = QueryRecord(0, self_documents=len(original) - len(candidates))
        if keep_relevance and candidates.relevance is not None:
            grades = zip(candidates.documents, candidates.relevance, strict=True)
            self.qrels[candidates.query.id] = {document.id: int(grade) for document, grade in grades}

    def counts(self) -> dict[str, int]:
        records = list(self.records.values())
        return {
            "queries": len(records),
            "empty_lists": sum(record.documents == 0 for record in records),
            "resumed_queries": self.resumed,
            "documents": sum(record.documents for record in records),
            "truncated_documents": sum(record.truncated for record in records),
            "truncated_queries": sum(record.query_truncated for record in records),
            "tied_documents": sum(record.tied_documents for record in records),
            "queries_with_ties": sum(record.tied_documents > 0 for record in records),
            "empty_documents": sum(record.empty_documents for record in records),
            "self_documents": sum(record.self_documents for record in records),
            "documents_below_depth_dropped": sum(record.dropped_documents for record in records),
            "tokens": sum(record.tokens for record in records),
        }

    def timing(self, wall_seconds: float) -> dict[str, float]:
        seconds = sum(record.seconds for record in self.records.values())
        timing = {"wall_seconds": wall_seconds, "scoring_seconds": seconds}
        if seconds > 0:
            counts = self.counts()
            timing |= {f"{unit}_per_second": counts[unit] / seconds for unit in ("queries", "documents", "tokens")}
        return timing


def extra_totals(records: Mapping[str, QueryRecord]) -> dict[str, dict[str, float]]:
    """Each of the rankers' own values (`ListScores.extra`): its total, and its mean over the lists that have it."""
    values: dict[str, list[float]] = {}
    for record in records.values():
        for name, value in record.extra.items():
            values.setdefault(name, []).append(value)
    return {name: {"total": sum(some), "mean": sum(some) / len(some)} for name, some in values.items()}


@dataclass(frozen=True)
class EvaluationResult:
    """The run (in ranked order, scores strictly decreasing), its metrics, and what it took.

    `report` is None when nothing is judged. `counts` and `timing` are the ones of `results.json`. `qrels` are
    what was measured against; `documents` has each list's scores as they were; `score_kind` is the ranker's, if any.
    """

    name: str
    run: Run
    report: MetricsReport | None
    baseline_report: MetricsReport | None
    records: dict[str, QueryRecord]
    counts: dict[str, int]
    timing: dict[str, float]
    score_range: tuple[float, float] | None
    files: EvaluationFiles | None
    qrels: Qrels = field(default_factory=dict)
    documents: dict[str, ScoredDocuments] = field(default_factory=dict)
    score_kind: ScoreKind | None = None

    @property
    def means(self) -> dict[str, float]:
        """measure -> mean; empty when nothing is judged."""
        return {} if self.report is None else dict(self.report.means)

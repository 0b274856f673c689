"""What an evaluation keeps of each candidate list, and their sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from blockrank.evaluation.files import EvaluationFiles
from blockrank.evaluation.metrics import MetricsReport
from blockrank.types import CandidateList, Qrels, Run


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


class ScoredLists:
    """What accumulates while the lists are scored."""

    def __init__(self) -> None:
        self.run: Run = {}
        self.records: dict[str, QueryRecord] = {}
        self.qrels: Qrels = {}
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

    `report` is None when nothing is judged. `counts` and `timing` are the ones of `results.json`.
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

    @property
    def means(self) -> dict[str, float]:
        """measure -> mean; empty when nothing is judged."""
        return {} if self.report is None else dict(self.report.means)

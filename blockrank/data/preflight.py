"""What to know of a collection before hours are spent on it: counts, lengths, and ids that lead nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from blockrank.data.collection import Collection
from blockrank.data.progress import track
from blockrank.types import Qrels, Query, Rankings, has_text

_SAMPLE = 5
_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Lengths:
    """Lengths of `count` texts in `unit`; `over` is the share longer than `limit` (None without a limit)."""

    unit: str
    count: int
    mean: float
    percentiles: dict[int, int]
    longest: int
    limit: int | None = None
    over: float | None = None


@dataclass(frozen=True)
class SplitReport:
    """One split. Ids that lead nowhere come as a count and a few examples, sorted.

    `judged_without_text`: judged documents not in the corpus (they stay in the ideal ranking). `judged_empty`: judged
    documents that were read and hold no text (training leaves them out). `queries_without_text`: judged queries whose
    text is absent or empty. `dangling_candidates`: documents of the run not in the corpus.
    """

    queries: int
    judgements: int
    positives: int
    queries_without_positive: int
    queries_without_text: tuple[int, tuple[str, ...]]
    judged_without_text: tuple[int, tuple[str, ...]]
    judged_empty: tuple[int, tuple[str, ...]]
    query_lengths: Lengths
    candidates: int | None = None
    queries_without_candidates: int | None = None
    positives_among_candidates: int | None = None
    dangling_candidates: tuple[int, tuple[str, ...]] | None = None


@dataclass(frozen=True)
class Preflight:
    """A collection's report; empty and titled documents are among the `document_lengths.count` that were read."""

    name: str
    documents: int
    empty_documents: int
    titled_documents: int
    document_lengths: Lengths
    splits: dict[str, SplitReport] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """One line for each thing that would fail, or silently change results, later on."""
        lines = []
        if self.empty_documents:
            lines.append(f"{self.empty_documents} of {self.document_lengths.count} documents read are empty")
        for name, split in self.splits.items():
            for what, found in (
                ("judged documents are not in the corpus", split.judged_without_text),
                ("judged documents are empty", split.judged_empty),
                ("judged queries have no text", split.queries_without_text),
                ("documents of the run are not in the corpus", split.dangling_candidates),
            ):
                if found is not None and found[0]:
                    lines.append(f"{name}: {found[0]} {what}: {', '.join(map(repr, found[1]))}")
            if split.queries_without_positive:
                lines.append(f"{name}: {split.queries_without_positive} of {split.queries} queries have no positive")
            if split.queries_without_candidates:
                lines.append(
                    f"{name}: {split.queries_without_candidates} of {split.queries} queries have no candidates"
                )
        return lines


def preflight(
    collection: Collection,
    *,
    splits: Iterable[str] | None = None,
    runs: Mapping[str, Rankings] | None = None,
    count_tokens: Callable[[str], int] | None = None,
    chunk_length: int = 160,
    sample: int | None = None,
) -> Preflight:
    """Reads the collection once and reports. `runs` are candidates by split.

    Lengths are in tokens when `count_tokens` is given, else in white-space words, title included; documents are
    compared with `chunk_length`. `sample` reads only so many documents, evenly spread.
    """
    unit = "words" if count_tokens is None else "tokens"
    measure = count_tokens or (lambda text: len(text.split()))
    documents = collection.documents
    total = len(documents)
    count = total if sample is None else min(sample, total)
    rows = documents.scan() if count == total else (documents.pick(i * total // count) for i in range(count))
    lengths = np.zeros(count, np.int64)
    empty: set[str] = set()
    titled = 0
    with track(f"reading {collection.name}", count) as advance:
        for i, document in enumerate(rows):
            lengths[i] = measure(f"{document.title} {document.text}".strip())
            if document.is_empty:
                empty.add(document.id)
            titled += has_text(document.title)
            advance(1)
    return Preflight(
        name=collection.name,
        documents=total,
        empty_documents=len(empty),
        titled_documents=titled,
        document_lengths=_lengths(lengths, unit, chunk_length),
        splits={
            split: _split_report(collection, split, (runs or {}).get(split), measure, unit, empty)
            for split in (collection.splits if splits is None else splits)
        },
    )


def _split_report(
    collection: Collection, split: str, run: Rankings | None, measure: Callable[[str], int], unit: str, empty: set[str]
) -> SplitReport:
    queries, qrels = collection.queries(split), collection.qrels(split)
    positives = {q: {d for d, grade in judged.items() if grade > 0} for q, judged in qrels.items()}
    wordless = [q for q in qrels if q not in queries or not has_text(queries[q].text)]
    report = SplitReport(
        queries=len(queries),
        judgements=sum(map(len, qrels.values())),
        positives=sum(map(len, positives.values())),
        queries_without_positive=sum(not positives.get(q) for q in queries),
        queries_without_text=_examples(wordless),
        judged_without_text=_examples(collection.documents.missing(d for judged in qrels.values() for d in judged)),
        judged_empty=_examples(sorted({d for judged in qrels.values() for d in judged} & empty)),
        query_lengths=_lengths(np.array([measure(q.text) for q in queries.values()], np.int64), unit),
    )
    return report if run is None else _with_candidates(report, collection, queries, qrels, run)


def _with_candidates(
    report: SplitReport, collection: Collection, queries: dict[str, Query], qrels: Qrels, run: Rankings
) -> SplitReport:
    found = {q: run[q] for q in queries if run.get(q)}
    dangling = collection.documents.missing(d for ranking in found.values() for d in ranking)
    reached = sum(qrels.get(q, {}).get(d, 0) > 0 for q, ranking in found.items() for d in ranking)
    return replace(
        report,
        candidates=sum(map(len, found.values())),
        queries_without_candidates=len(queries) - len(found),
        positives_among_candidates=reached,
        dangling_candidates=_examples(dangling),
    )


def _examples(ids: list[str]) -> tuple[int, tuple[str, ...]]:
    return len(ids), tuple(sorted(ids)[:_SAMPLE])


def _lengths(values: np.ndarray, unit: str, limit: int | None = None) -> Lengths:
    if not len(values):
        return Lengths(unit, 0, 0.0, dict.fromkeys(_PERCENTILES, 0), 0, limit, None if limit is None else 0.0)
    return Lengths(
        unit=unit,
        count=len(values),
        mean=float(values.mean()),
        percentiles={p: int(np.percentile(values, p, method="inverted_cdf")) for p in _PERCENTILES},
        longest=int(values.max()),
        limit=limit,
        over=None if limit is None else float((values > limit).mean()),
    )

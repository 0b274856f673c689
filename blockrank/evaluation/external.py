"""TREC runs of other systems: read, cut and measured as a ranker's own run is."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from blockrank.data.collection import Collection
from blockrank.data.trec import check_overlap, ranked, read_run, sample_ids
from blockrank.errors import UserError
from blockrank.evaluation.files import EvaluationFiles
from blockrank.evaluation.metrics import count_ties, evaluate
from blockrank.evaluation.records import EvaluationResult, QueryRecord, ScoredLists
from blockrank.types import Qrels, Run

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExternalRun:
    """A run as it is measured: `depth` documents at most of each query, best first, and what was left out of it."""

    path: Path
    run: Run
    records: dict[str, QueryRecord]

    def identity(self) -> dict[str, Any]:
        """The file, by its content."""
        return {"run": str(self.path), "sha256": hashlib.sha256(self.path.read_bytes()).hexdigest()}


def read_external(
    path: Path,
    collection: Collection,
    split: str,
    *,
    depth: int,
    missing_documents: Literal["error", "drop"] = "error",
) -> ExternalRun:
    """The queries of `split` in a run file, cut to `depth` documents by trec_eval's rule for ties.

    A query's own id is left out before the cut where the collection ignores self. Raises `UserError` naming the file
    (and line) for what is no run, a run of other queries, and documents that the collection lacks, which
    `missing_documents="drop"` leaves out instead.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such run file")
    queries = collection.queries(split)
    found = read_run(path)
    check_overlap(queries, found, f"{collection.name} ({split})", str(path), "query")
    if not found:
        raise UserError(f"{path}: the run is empty")
    run: Run = {}
    records: dict[str, QueryRecord] = {}
    for query in queries:
        if query not in found:
            continue
        ranking = dict(found[query])
        own = int(collection.ignore_self and ranking.pop(query, None) is not None)
        kept = dict(ranked(ranking, "document")[:depth])
        ties = count_ties(list(kept.values()))
        run[query] = kept
        records[query] = QueryRecord(
            len(kept), tied_documents=ties, self_documents=own, dropped_documents=len(ranking) - len(kept)
        )
    absent = collection.documents.missing(document for ranking in run.values() for document in ranking)
    if absent and missing_documents == "error":
        raise UserError(
            f"{path}: {len(absent)} documents are not in {collection.name}: {sample_ids(absent, 5)}; is it a run of "
            "another corpus? (missing_documents=drop leaves them out)"
        )
    if absent:
        log.warning("%s: %d documents are not in %s: left out: %s", path, len(absent), collection.name, absent[:5])
        gone = frozenset(absent)
        for query, ranking in run.items():
            run[query] = {document: score for document, score in ranking.items() if document not in gone}
            records[query].dropped_documents += len(ranking) - len(run[query])
            records[query].documents = len(run[query])
    return ExternalRun(path, run, records)


def external_result(
    external: ExternalRun,
    row: str,
    qrels: Qrels,
    measures: tuple[str, ...],
    missing: Literal["zero", "skip"],
    covered: AbstractSet[str],
    files: EvaluationFiles,
) -> EvaluationResult:
    """What a ranker's row would hold. `covered`: the queries that have a candidate list.

    Raises `UserError` where nothing is judged, the run shares no id with the judgements, or `missing="skip"` would
    average other queries than for the lists.
    """
    if not any(qrels.values()):
        raise UserError(f"{external.path}: the queries have no judgements to measure a run by")
    run = {query: ranking for query, ranking in external.run.items() if query in qrels}
    judged = {query for query, grades in qrels.items() if grades}
    if missing == "skip" and (odd := sorted(judged & ({q for q in run if run[q]} ^ covered))):
        raise UserError(
            f"{external.path}: {len(odd)} judged queries have a candidate list or are in the run, but not both "
            f"({sample_ids(odd)}): a comparison needs the same queries, set missing=zero"
        )
    try:
        report = evaluate(run, qrels, measures, missing=missing)
    except UserError as error:
        raise UserError(f"{external.path}: {error}") from error
    scored = ScoredLists()
    scored.run, scored.records = run, {query: external.records[query] for query in run}
    scores = [score for ranking in run.values() for score in ranking.values()]
    span = (min(scores), max(scores)) if scores else None
    return EvaluationResult(row, run, report, None, scored.records, scored.counts(), {}, span, files)

"""A ranker over candidate lists: scores -> run -> metrics -> table, resumable after a kill."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from blockrank.data.progress import track
from blockrank.errors import UserError
from blockrank.evaluation.files import EvaluationFiles
from blockrank.evaluation.journal import ScoreJournal, list_digest
from blockrank.evaluation.metrics import (
    DEFAULT_MEASURES,
    MetricsReport,
    check_measures,
    evaluate,
    parse_measure,
    require_overlap,
)
from blockrank.evaluation.ranking import Tail, check_documents, check_scores, rerank, select, without_self
from blockrank.evaluation.records import EvaluationResult, ScoredDocuments, ScoredLists
from blockrank.evaluation.report import write_results
from blockrank.rankers.confidence import ScoreKind
from blockrank.types import CandidateList, Qrels, Ranker, Run

log = logging.getLogger(__name__)

_LOG_EVERY_SECONDS = 30.0


class Evaluator:
    """Runs a ranker over candidate lists and measures the resulting run.

    Args:
        ranker: scores the lists; its `name` is the run's tag unless `name` is given.
        lists: one candidate list per query, read lazily and in order. Each query id occurs once.
        output_dir: where `scores.jsonl` (the journal), `run.trec`, `results.json`, `per_query.jsonl` and `table.md` go;
            None writes nothing (validation inside training).
        batch_size: queries per call of the ranker. Batches are cut from the order of the lists, whatever is scored
            already, so that a resumed run equals an unbroken one to the byte. Scores depend on it by rounding at most,
            so it may change on resume.
        qrels: judgements; None takes the lists' `relevance`, whose ideal ranking knows of the candidates only.
        measures: ir-measures names, the main one first.
        depth: how many candidates of each list are re-ranked; None for all.
        tail: candidates below `depth` are dropped ("drop": the run is what the ranker saw) or kept below the re-ranked
            ones in first-stage order ("keep": recall measures stay those of the first stage).
        ignore_self: drop documents that bear their query's id, before ranking and before measuring (ArguAna, Quora).
        missing, allow_no_overlap: see `metrics.evaluate`.
        identity: what the scores depend on; a journal made with another one is refused. `config` when not given.
        config, collection, seed: recorded in `results.json`; the seed also drives the intervals and tests.
        overwrite: starts anew in a folder that holds another evaluation.
        baseline: (row name, run) to put above the ranker's row and test against.
        paper: measure -> the published number, on [0, 1], for the ranker's row.
        progress: show a bar on a terminal, a log line every 30 seconds elsewhere.

    Documents without text are ranked last in first-stage order whatever they score, unless the ranker has a true
    attribute `scores_empty_documents` (it does not read the text).
    """

    def __init__(
        self,
        ranker: Ranker,
        lists: Sequence[CandidateList],
        output_dir: str | Path | None = None,
        batch_size: int = 8,
        *,
        qrels: Qrels | None = None,
        measures: Sequence[str] = DEFAULT_MEASURES,
        depth: int | None = None,
        tail: Tail = "drop",
        ignore_self: bool = False,
        missing: Literal["zero", "skip"] = "zero",
        allow_no_overlap: bool = False,
        name: str | None = None,
        collection: str = "",
        config: Mapping[str, Any] | None = None,
        identity: Mapping[str, Any] | None = None,
        seed: int = 0,
        overwrite: bool = False,
        baseline: tuple[str, Run] | None = None,
        paper: Mapping[str, float] | None = None,
        progress: bool = True,
    ) -> None:
        if batch_size < 1:
            raise UserError(f"batch_size={batch_size}: at least one query per batch")
        if depth is not None and depth < 1:
            raise UserError(f"depth={depth}: at least one candidate, or null for all")
        if tail not in ("drop", "keep"):
            raise UserError(f"tail={tail!r}: 'drop' or 'keep' the candidates below depth")
        if not measures:
            raise UserError("measures is empty: name at least one measure, such as nDCG@10")
        self.ranker, self.lists, self.batch_size = ranker, lists, batch_size
        self.output_dir = None if output_dir is None else Path(output_dir)
        self.qrels, self.depth, self.ignore_self = qrels, depth, ignore_self
        self.tail: Tail = tail
        self.measures = tuple(str(parse_measure(measure)) for measure in measures)
        self.missing: Literal["zero", "skip"] = missing
        self.allow_no_overlap = allow_no_overlap
        self.name = name or ranker.name
        self.collection, self.config, self.seed = collection, dict(config or {}), seed
        self.overwrite, self.baseline, self.paper = overwrite, baseline, dict(paper or {})
        self.progress = progress
        self._score_kind: ScoreKind | None = getattr(ranker, "score_kind", None)
        self._last_log = time.perf_counter()
        self._identity = {
            **(self.config if identity is None else identity),
            "ranker.name": ranker.name,
            "lists": len(lists),
            "depth": depth,
            "ignore_self": ignore_self,
        }

    def run(self) -> EvaluationResult:
        """Scores what is not scored yet, then measures and (with an output folder) writes everything."""
        self._check_overlap()
        started = time.perf_counter()
        if self.output_dir is None:
            return self._finish(self._score(None), None, started)
        files = EvaluationFiles(self.output_dir)
        files.prepare(self.overwrite)
        with ScoreJournal(files.journal, self._identity, overwrite=self.overwrite) as journal:
            return self._finish(self._score(journal), files, started)

    def _prepare(self, candidates: CandidateList) -> CandidateList:
        check_documents(candidates)
        return without_self(candidates) if self.ignore_self else candidates

    def _check_overlap(self) -> None:
        """Before hours of scoring: do lists and qrels know each other's ids, and can the measures be computed on them?

        Stops at the first list that has a judged document.
        """
        if self.qrels is None or self.allow_no_overlap:
            return
        judged = {str(query): {str(d): g for d, g in grades.items()} for query, grades in self.qrels.items() if grades}
        known = {document for grades in judged.values() for document in grades}
        seen: Run = {}
        for candidates in self.lists:
            query, ids = candidates.query.id, [document.id for document in candidates.documents]
            if query in judged and not known.isdisjoint(ids):
                order = {query: {document: -float(rank) for rank, document in enumerate(ids)}}
                check_measures(self.measures, {query: judged[query]}, order)
                return
            seen[query] = dict.fromkeys(ids, 0.0)
        if seen and judged:
            require_overlap(seen, judged)

    def _score(self, journal: ScoreJournal | None) -> ScoredLists:
        scored = ScoredLists()
        pending: list[CandidateList] = []
        done = {} if journal is None else journal.entries
        with self._bar() as advance:
            for original in self.lists:
                candidates = self._prepare(original)
                query = candidates.query.id
                if query in scored.records:
                    raise UserError(f"query {query!r} has two candidate lists; give each query one")
                scored.add_list(original, candidates, self.qrels is None)
                head = self._head(candidates)
                if query in done:
                    self._check_entry(journal, head, done[query])
                    scored.resumed += 1
                if not head.documents:
                    self._accept(scored, candidates, {"scores": [], "truncated": []})
                    advance(1)
                else:
                    pending.append(candidates)
                if len(pending) == self.batch_size:
                    self._score_batch(scored, pending, journal)
                    advance(len(pending))
                    pending = []
                    self._log_progress(scored)
            if pending:
                self._score_batch(scored, pending, journal)
                advance(len(pending))
        if scored.resumed:
            log.info("%d of %d lists were already scored in %s", scored.resumed, len(self.lists), self.output_dir)
        return scored

    def _head(self, candidates: CandidateList) -> CandidateList:
        if self.depth is None or len(candidates) <= self.depth:
            return candidates
        return select(candidates, list(range(self.depth)))

    def _score_batch(self, scored: ScoredLists, batch: list[CandidateList], journal: ScoreJournal | None) -> None:
        """Accepts a batch; scores all of it if one list is missing, as batch mates may change the last bit."""
        done = {} if journal is None else journal.entries
        entries = {c.query.id: done[c.query.id] for c in batch if c.query.id in done}
        if len(entries) < len(batch):
            new = [entry for entry in self._entries(batch) if entry["query"] not in entries]
            if journal is not None:
                journal.append(new)
            entries |= {entry["query"]: entry for entry in new}
        for candidates in batch:
            self._accept(scored, candidates, entries[candidates.query.id])

    def _entries(self, batch: list[CandidateList]) -> list[dict[str, Any]]:
        """Scores a batch; one journal entry per list."""
        heads = [self._head(candidates) for candidates in batch]
        started = time.perf_counter()
        results = self.ranker.score(heads)
        seconds = time.perf_counter() - started
        if len(results) != len(heads):
            raise UserError(f"ranker {self.ranker.name!r} returned {len(results)} results for {len(heads)} lists")
        entries = []
        for head, result in zip(heads, results, strict=True):
            scores = check_scores(self.ranker.name, head, result)
            parts = {
                part: check_scores(f"{self.ranker.name}, {part}", head, dataclasses.replace(result, scores=values))
                for part, values in result.parts.items()
            }
            entries.append(
                {
                    "query": head.query.id,
                    "list": list_digest(head),
                    "scores": scores.tolist(),
                    "truncated": np.flatnonzero(result.truncated).tolist(),
                    "query_truncated": bool(result.query_truncated),
                    "tokens": int(result.tokens),
                    "seconds": seconds / len(heads),
                    "extra": {key: float(value) for key, value in result.extra.items() if np.isfinite(value)},
                    **({"parts": {part: values.tolist() for part, values in parts.items()}} if parts else {}),
                }
            )
        return entries

    def _check_entry(self, journal: ScoreJournal | None, head: CandidateList, entry: dict[str, Any]) -> None:
        if entry.get("list") != list_digest(head) or len(entry.get("scores", ())) != len(head):
            path = "the journal" if journal is None else journal.path
            raise UserError(
                f"{path}: the candidates of query {head.query.id!r} have changed since they were scored; "
                "choose another output folder, or set overwrite=true to start anew"
            )

    def _accept(self, scored: ScoredLists, candidates: CandidateList, entry: Mapping[str, Any]) -> None:
        scores = np.asarray(entry["scores"], dtype=np.float32)
        empty_last = not getattr(self.ranker, "scores_empty_documents", False)
        ranking = rerank(candidates, scores, tail=self.tail, empty_last=empty_last)
        scored.run[candidates.query.id] = ranking.scores
        record = scored.records[candidates.query.id]
        record.documents = len(scores)
        record.truncated = len(entry["truncated"])
        record.query_truncated = entry.get("query_truncated", False)
        record.tied_documents = ranking.tied_documents
        record.tokens, record.seconds = entry.get("tokens", 0), entry.get("seconds", 0.0)
        record.extra = dict(entry.get("extra", {}))
        documents = ScoredDocuments.of(candidates, scores, entry.get("parts", {}))
        scored.documents[candidates.query.id] = documents
        record.confidence = None if self._score_kind is None else documents.confidence(self._score_kind)
        record.empty_documents = sum(document.is_empty for document in candidates.documents[: len(scores)])
        record.dropped_documents = len(candidates) - len(ranking.scores)
        if len(scores):
            scored.lowest = min(scored.lowest, float(scores.min()))
            scored.highest = max(scored.highest, float(scores.max()))

    def _finish(self, scored: ScoredLists, files: EvaluationFiles | None, started: float) -> EvaluationResult:
        run = {query: scored.run[query] for query in scored.records}
        empty = [query for query, record in scored.records.items() if record.empty_documents]
        if empty:
            total = sum(record.empty_documents for record in scored.records.values())
            log.warning("%d documents without text (queries %s), ranked last", total, empty[:3])
        qrels = scored.qrels if self.qrels is None else self.qrels
        report = self._measure(run, qrels)
        baseline = None
        if report is not None and self.baseline is not None:
            baseline = self._measure(self.baseline[1], qrels)
        counts, timing = scored.counts(), scored.timing(time.perf_counter() - started)
        span = (scored.lowest, scored.highest) if scored.lowest <= scored.highest else None
        result = EvaluationResult(
            *(self.name, run, report, baseline, scored.records, counts, timing, span, files),
            qrels=qrels,
            documents=scored.documents,
            score_kind=self._score_kind,
        )
        if files is not None:
            write_results(
                result,
                measures=self.measures,
                collection=self.collection,
                config=self.config,
                identity=self._identity,
                seed=self.seed,
                tail=self.tail,
                score_scale=getattr(self.ranker, "score_scale", ""),
                baseline_name=None if self.baseline is None else self.baseline[0],
                paper=self.paper,
            )
        return result

    def _measure(self, run: Run, qrels: Qrels) -> MetricsReport | None:
        if not any(qrels.values()):
            return None
        return evaluate(
            run,
            qrels,
            self.measures,
            missing=self.missing,
            ignore_self=self.ignore_self,
            allow_no_overlap=self.allow_no_overlap or self.qrels is None,
        )

    def _bar(self) -> contextlib.AbstractContextManager[Callable[[float], None]]:
        if self.progress:
            return track(f"ranking with {self.name}", len(self.lists))
        return contextlib.nullcontext(lambda _: None)

    def _log_progress(self, scored: ScoredLists) -> None:
        now = time.perf_counter()
        if self.progress and now - self._last_log >= _LOG_EVERY_SECONDS:
            self._last_log = now
            log.info("%s: %d of %d lists", self.name, len(scored.run), len(self.lists))

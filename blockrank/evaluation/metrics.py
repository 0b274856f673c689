"""Metrics of a run against judgements, all computed by ir-measures on one canonical order.

The rule for ties, in every measure, is trec_eval's: **score descending, then document id descending by string
comparison**. Measure providers break ties each in their own way, so they never see a tie: each query's documents are
put in the ruled order here and handed over with the scores n, n-1, ..., 1. Scores are compared in float64 (trec_eval
reads float32, so scores that differ only beyond 24 bits may fall the other way there; runs we write differ in float32).
"""

from __future__ import annotations

import logging
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import ir_measures

from blockrank.data.files import check_id
from blockrank.data.trec import as_mapping, check_grade
from blockrank.errors import UserError
from blockrank.types import Qrels, Run

log = logging.getLogger(__name__)

TIE_RULE = "score descending, then document id descending (string comparison)"
DEFAULT_MEASURES = ("nDCG@10", "RR@10", "P@1")

_OFFICIAL: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("trec-dl", "trec_dl", "dl19", "dl20"), ("nDCG@10", "RR(rel=2)", "AP(rel=2)", "R(rel=2)@100")),
    (("wikiqa",), ("AP", "RR", "P@1")),
    (("beir",), ("nDCG@10", "R@100")),
    (("msmarco", "ms-marco", "ms_marco"), ("RR@10", "R@100")),
)
_BEIR_SETS = frozenset(
    {
        "arguana",
        "climate-fever",
        "cqadupstack",
        "dbpedia-entity",
        "fever",
        "fiqa",
        "hotpotqa",
        "nfcorpus",
        "quora",
        "robust04",
        "scidocs",
        "scifact",
        "signal1m",
        "trec-covid",
        "trec-news",
        "touche",
        "webis-touche2020",
        "bioasq",
    }
)


def official_measures(collection_name: str) -> tuple[str, ...]:
    """The measures a collection is reported with, its main measure first, in ir-measures syntax.

    The name is matched without case, folders included ("msmarco-passage/trec-dl-2019/judged"); `DEFAULT_MEASURES`
    for a collection without a convention of its own.
    """
    name = collection_name.lower()
    for keys, measures in _OFFICIAL:
        if any(key in name for key in keys):
            return measures
    if _BEIR_SETS.intersection(name.split("/")):
        return ("nDCG@10", "R@100")
    return DEFAULT_MEASURES


def parse_measure(name: str) -> ir_measures.Measure:
    """A measure from its ir-measures name ("nDCG@10", "AP(rel=2)"); aliases such as "MRR@10" or "MAP" are accepted.

    Raises `UserError` naming it when there is no such measure, or nothing installed computes it.
    """
    try:
        measure = ir_measures.parse_measure(name)
        measure.validate_params()
        least = [f"{key}={value}" for key, value in measure.params.items() if key in ("cutoff", "rel") and value < 1]
        if least:
            raise ValueError(f"{least[0]} is below 1")
        supported = any(p.is_available() and p.supports(measure) for p in ir_measures.DefaultPipeline.providers)
    except Exception as error:  # whatever a parser or a provider makes of a wrong name
        reason = re.sub(r"=<object object at \w+>", " is missing", " ".join(str(error).split()))
        raise UserError(
            f"unknown measure {name!r} ({reason}); write it as ir-measures does, e.g. nDCG@10, RR@10"
        ) from error
    if not supported:
        raise UserError(f"measure {name!r} needs a cutoff or a package that is not installed; e.g. P@1, R@100, nDCG@10")
    return measure


@dataclass(frozen=True, slots=True)
class Counts:
    """What the means are made of. Every number is over queries unless it says documents."""

    averaged: int
    """queries in the mean"""
    judged: int
    """queries with at least one judgement"""
    in_run: int
    """judged queries for which the run holds a document"""
    missing: int
    """judged queries for which the run holds no document"""
    no_judgement: int
    """queries of the run or the qrels without any judgement; never averaged"""
    all_zero: int
    """judged queries with no grade above zero; averaged as they come, hence 0"""
    tied_documents: int
    """documents that share their score with another document of their query, over the whole run"""
    self_documents: int
    """documents dropped because their id is the query's (`ignore_self`)"""
    judged_at_10: float
    """share of the documents at ranks 1-10 of judged queries that have a judgement, in [0, 1]"""


@dataclass(frozen=True, slots=True)
class MetricsReport:
    """Means and per-query values by canonical measure name, with the counts behind them. No value is ever NaN."""

    means: dict[str, float]
    per_query: dict[str, dict[str, float]]
    counts: Counts
    missing: Literal["zero", "skip"] = "zero"
    warnings: tuple[str, ...] = ()

    def __getitem__(self, measure: str) -> float:
        """The mean of a measure by any of its names (`report["MRR@10"]` is `report["RR@10"]`)."""
        return self.means[str(parse_measure(measure))]

    def values(self, measure: str) -> dict[str, float]:
        """query id -> value of one measure, for the averaged queries."""
        name = str(parse_measure(measure))
        return {query: values[name] for query, values in self.per_query.items()}

    def as_dict(self) -> dict[str, Any]:
        """Means, counts and warnings as JSON values (per-query values are left out)."""
        return {
            "means": dict(self.means),
            "counts": asdict(self.counts),
            "missing_queries_count_as": self.missing,
            "tie_rule": TIE_RULE,
            "warnings": list(self.warnings),
        }


def canonical_order(scores: Mapping[str, float]) -> list[str]:
    """Document ids of one query in the ruled order (`TIE_RULE`)."""
    return [document for document, _ in sorted(scores.items(), key=lambda item: (item[1], item[0]), reverse=True)]


def count_ties(scores: Sequence[float]) -> int:
    """How many of the scores occur more than once."""
    seen: dict[float, int] = {}
    for score in scores:
        seen[score] = seen.get(score, 0) + 1
    return sum(count for count in seen.values() if count > 1)


def normalise_run(run: Mapping[Any, Mapping[Any, Any]]) -> Run:
    """A copy with ids as str and scores as float: any numeric scalar (NumPy, JAX, torch) goes in, NaN does not."""
    return {query: _scores(query, documents) for query, documents in _string_keys(run, "the run").items()}


def normalise_qrels(qrels: Mapping[Any, Mapping[Any, Any]]) -> Qrels:
    """A copy with ids as str and grades as int; a query without judgements keeps its empty inner dict."""
    result: Qrels = {}
    for query, documents in _string_keys(qrels, "the qrels").items():
        grades = _string_keys(documents, f"the qrels of query {query!r}")
        result[query] = {document: _grade(query, document, grade) for document, grade in grades.items()}
    return result


def evaluate(
    run: Mapping[Any, Mapping[Any, Any]],
    qrels: Mapping[Any, Mapping[Any, Any]],
    measures: Sequence[str] = DEFAULT_MEASURES,
    *,
    missing: Literal["zero", "skip"] = "zero",
    ignore_self: bool = False,
    allow_no_overlap: bool = False,
) -> MetricsReport:
    """Metrics of a run: query id -> document id -> score, against query id -> document id -> grade.

    The mean is over the queries with at least one judgement. Those the run lacks count 0 (`missing="zero"`, as
    `trec_eval -c`) or are left out (`"skip"`); queries without a judgement are left out; queries whose grades are all
    zero are averaged in. `ignore_self` drops documents that bear their query's id before anything is measured (ArguAna,
    Quora). A run and qrels with no query id, or no document id, in common are an error that shows ids of both sides,
    unless `allow_no_overlap` (for a handful of queries whose judged documents may all be unretrieved).
    """
    if missing not in ("zero", "skip"):
        raise UserError(f"missing={missing!r}: say 'zero' (absent queries count 0) or 'skip' (they are left out)")
    parsed = list({str(measure): measure for measure in map(parse_measure, measures)}.values())
    if not parsed:
        raise UserError("no measure was asked for; name at least one, e.g. nDCG@10")
    grades, scores = normalise_qrels(qrels), normalise_run(run)
    dropped = drop_self(scores) if ignore_self else 0
    judged = {query: documents for query, documents in grades.items() if documents}
    if not judged:
        raise UserError(f"the qrels hold no judgement ({len(grades)} queries): nothing can be measured")
    if not allow_no_overlap:
        require_overlap(scores, judged)

    present = {query: canonical_order(scores[query]) for query in judged if scores.get(query)}
    averaged = list(judged) if missing == "zero" else list(present)
    if not averaged:
        raise UserError("no judged query is in the run and missing='skip' leaves them out: there is nothing to average")
    ranked = {query: {d: float(len(order) - i) for i, d in enumerate(order)} for query, order in present.items()}
    per_query, means = measure_ranked(parsed, {query: judged[query] for query in averaged}, ranked)

    top = [document in judged[query] for query, order in present.items() for document in order[:10]]
    counts = Counts(
        averaged=len(averaged),
        judged=len(judged),
        in_run=len(present),
        missing=len(judged) - len(present),
        no_judgement=len((scores.keys() | grades.keys()) - judged.keys()),
        all_zero=sum(max(documents.values()) <= 0 for documents in judged.values()),
        tied_documents=sum(count_ties(list(documents.values())) for documents in scores.values()),
        self_documents=dropped,
        judged_at_10=sum(top) / len(top) if top else 0.0,
    )
    return MetricsReport(means, per_query, counts, missing, _warn(counts, missing, scores, judged))


def drop_self(run: Run) -> int:
    """Removes from each query of a run of our own the document that bears its id; says how many were removed."""
    return sum(documents.pop(query, None) is not None for query, documents in run.items())


def require_overlap(run: Mapping[str, Mapping[str, float]], judged: Qrels) -> None:
    """Raises when run and qrels share no query id, or no document id: then one of them is of another collection."""
    if run.keys().isdisjoint(judged):
        raise UserError(_no_overlap("query", list(run), list(judged)))
    judged_documents = {document for documents in judged.values() for document in documents}
    if not any(document in judged_documents for query in judged for document in run.get(query, ())):
        retrieved = [document for query in judged for document in run.get(query, ())]
        raise UserError(_no_overlap("document", retrieved, list(judged_documents)))


def check_measures(measures: Sequence[str], qrels: Qrels, run: Run) -> None:
    """Raises `UserError` for a measure that cannot be computed on this sample of what will be measured."""
    measure_ranked([parse_measure(name) for name in measures], qrels, run)


def _no_overlap(kind: str, in_run: list[str], in_qrels: list[str]) -> str:
    return (
        f"run and qrels have no {kind} id in common: the run has {sorted(in_run)[:3] or 'none'}, "
        f"the qrels have {sorted(in_qrels)[:3]}; check that both are of the same collection and split"
    )


def measure_ranked(
    measures: list[ir_measures.Measure], qrels: Qrels, run: Run
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Per-query values (every query of the qrels, every measure) and their aggregates, of a run without ties."""
    values: dict[str, dict[str, float]] = {query: {str(m): float(m.DEFAULT) for m in measures} for query in qrels}
    for metric in _calculate(measures, qrels, run):
        if not math.isfinite(metric.value):
            raise UserError(
                f"measure {metric.measure} is not finite for query {metric.query_id!r}; choose another measure"
            )
        values[metric.query_id][str(metric.measure)] = float(metric.value)
    means: dict[str, float] = {}
    for measure in measures:
        aggregator = measure.aggregator()
        for query in values:
            aggregator.add(values[query][str(measure)])
        means[str(measure)] = float(aggregator.result())
    return values, means


def _calculate(measures: list[ir_measures.Measure], qrels: Qrels, run: Run) -> list[ir_measures.Metric]:
    """The providers' values. What they raise (for odd ids, or values that do not exist) becomes a `UserError`."""
    try:
        return list(ir_measures.iter_calc(measures, qrels, run))
    except Exception as error:
        if len(measures) > 1:
            return [metric for measure in measures for metric in _calculate([measure], qrels, run)]
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(
            f"measure {measures[0]} cannot be computed for these queries ({reason}); choose another measure"
        ) from error


def _warn(counts: Counts, missing: str, run: Run, judged: Qrels) -> tuple[str, ...]:
    warnings = []
    if counts.missing:
        absent = sorted(query for query in judged if not run.get(query))
        fate = "count 0" if missing == "zero" else "are left out of the mean"
        warnings.append(
            f"{counts.missing} of {counts.judged} judged queries are not in the run and {fate}: {absent[:3]}"
        )
    unjudged = sorted(query for query in run if query not in judged)
    if unjudged:
        warnings.append(f"{len(unjudged)} of {len(run)} queries of the run have no judgement, left out: {unjudged[:3]}")
    strange = [
        query for query, documents in judged.items() if run.get(query) and documents.keys().isdisjoint(run[query])
    ]
    if strange:
        ids = [sorted(side[strange[0]])[:3] for side in (run, judged)]
        warnings.append(
            f"{len(strange)} of {counts.in_run} judged queries in the run list no judged document: {strange[:3]} "
            f"(of {strange[0]!r} the run has {ids[0]}, the qrels have {ids[1]})"
        )
    if counts.self_documents:
        warnings.append(f"{counts.self_documents} documents that bear their query's id were dropped (ignore_self)")
    for warning in warnings:
        log.warning("%s", warning)
    return tuple(warnings)


def _string_keys(mapping: Any, where: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in as_mapping(mapping, where).items():
        if key is None or isinstance(key, bytes):
            raise UserError(f"{where}: {key!r} is no id; ids are strings or integers")
        if str(key) in result:
            raise UserError(f"{where}: id {str(key)!r} occurs twice (once as {type(key).__name__}); give each id once")
        result[check_id(str(key), where)] = value
    return result


def _scores(query: str, documents: Mapping[Any, Any]) -> dict[str, float]:
    result = _string_keys(documents, f"the run of query {query!r}")
    for document, score in result.items():
        try:
            value = math.nan if isinstance(score, str | bytes) else float(score)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if math.isnan(value):
            raise UserError(f"query {query!r}, document {document!r}: score {score!r} is not a number")
        result[document] = value
    return result


def _grade(query: str, document: str, grade: Any) -> int:
    where = f"the qrels of query {query!r}, document {document!r}"
    try:
        value = grade.item() if hasattr(grade, "item") else grade
    except (TypeError, ValueError, RuntimeError):  # NumPy's, JAX's and torch's of an array of several
        value = None
    if isinstance(value, numbers.Integral) or (isinstance(value, float) and value.is_integer()):
        return check_grade(int(value), where)
    raise UserError(f"{where}: grade {grade!r} is not an integer")

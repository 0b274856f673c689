"""What is chosen on validation lists before a test: the weight of an ensemble, the temperature of a softmax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from blockrank.errors import UserError
from blockrank.evaluation.calibration import TemperatureFit, fit_temperature
from blockrank.evaluation.metrics import measure_ranked, parse_measure
from blockrank.evaluation.records import EvaluationResult, ScoredDocuments
from blockrank.rankers.ensemble import Normalization, combine
from blockrank.types import Qrels

ALPHAS = tuple(round(0.05 * step, 2) for step in range(21))


def judged(qrels: Qrels, documents: Mapping[str, Any], missing: Literal["zero", "skip"]) -> Qrels:
    """The queries a mean is over: those with a judgement, and with `skip` of these the ones that have a list."""
    return {q: grades for q, grades in qrels.items() if grades and (missing == "zero" or q in documents)}


def ranked_values(
    rankings: Mapping[str, Sequence[str]], qrels: Qrels, measures: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Query of the qrels -> measure -> value, of document ids in ranked order; a query without a ranking has 0."""
    runs = {
        query: {document: float(len(ids) - rank) for rank, document in enumerate(ids)}
        for query, ids in rankings.items()
        if ids and query in qrels
    }
    return measure_ranked([parse_measure(measure) for measure in measures], qrels, runs)[0]


@dataclass(frozen=True, slots=True)
class AlphaChoice:
    """The best weight by a measure's mean over validation queries, and that mean for every weight tried."""

    alpha: float
    measure: str
    grid: tuple[tuple[float, float], ...]
    queries: int


def tune_alpha(
    result: EvaluationResult,
    measure: str,
    normalization: Normalization,
    *,
    missing: Literal["zero", "skip"] = "zero",
    alphas: Sequence[float] = ALPHAS,
) -> AlphaChoice:
    """The α of `alphas` with the highest mean of `measure`, on an evaluation whose ranker told both parts' scores.

    Of equal means the smallest α is taken. Documents without text are left out for every α alike. Raises `UserError`
    where no query is judged, or none has a positive document: every weight would be as good.
    """
    qrels = judged(result.qrels, result.documents, missing)
    if not any(grade > 0 for grades in qrels.values() for grade in grades.values()):
        raise UserError("alpha cannot be tuned: no validation query has a relevant document; give ranker.alpha")
    name = str(parse_measure(measure))
    grid = []
    for alpha in alphas:
        values = ranked_values(rankings_of(result.documents, alpha, normalization), qrels, [name])
        grid.append((float(alpha), float(np.mean([found[name] for found in values.values()]))))
    best = max(value for _, value in grid)
    return AlphaChoice(min(alpha for alpha, value in grid if value == best), name, tuple(grid), len(qrels))


def rankings_of(
    documents: Mapping[str, ScoredDocuments], alpha: float, normalization: Normalization
) -> dict[str, list[str]]:
    """Query -> ids as an ensemble of the parts' scores ranks them."""
    return {query: found.ranking(ensemble_scores(found, alpha, normalization)) for query, found in documents.items()}


def ensemble_scores(documents: ScoredDocuments, alpha: float, normalization: Normalization) -> np.ndarray:
    """float32 [n] scores of a list from both parts'."""
    return combine(documents.parts["attention"], documents.parts["generative"], alpha, normalization)


def temperature_of(documents: Mapping[str, ScoredDocuments], qrels: Qrels, least_grade: int = 1) -> TemperatureFit:
    """`fit_temperature` on the judged lists; a document is positive from `least_grade` on."""
    lists = [
        (found.scores, [qrels[query].get(document, 0) >= least_grade for document in found.ids])
        for query, found in documents.items()
        if qrels.get(query) and found.ids
    ]
    return fit_temperature(lists)

"""`confidence.json` and `confidence.png` of an evaluated ranker: is it right as often as it is sure?"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np

from blockrank.errors import UserError
from blockrank.evaluation.calibration import (
    Bin,
    Binning,
    TemperatureFit,
    area_under_risk_coverage,
    calibration_error,
    reliability,
    risk_coverage,
    softmax,
)
from blockrank.evaluation.confidence_figures import plot_confidence
from blockrank.evaluation.files import write_json
from blockrank.evaluation.metrics import parse_measure
from blockrank.evaluation.records import EvaluationResult, ScoredDocuments
from blockrank.rankers.confidence import Measure, confidence_of, shares
from blockrank.types import Qrels

log = logging.getLogger(__name__)

BINS = 10
CONFIDENCE_JSON, CONFIDENCE_PNG = "confidence.json", "confidence.png"


def least_grade(measures: Sequence[str]) -> int:
    """From which grade on a document is relevant: the highest `rel` that the measures ask for, 1 without any."""
    return max([int(parse_measure(measure).params.get("rel", 1)) for measure in measures], default=1)


def confidence_report(
    result: EvaluationResult, measures: Sequence[str], temperature: TemperatureFit | None = None, bins: int = BINS
) -> dict[str, Any]:
    """Calibration of the list's first document being relevant, JSON-ready.

    Over judged queries whose list has a document with text; the others are counted. `shares`: the confidence is the
    first document's share. `calibrated`: its softmax(S/τ), where `temperature` was fitted. `risk_coverage` is by each
    measure of confidence. Raises `UserError` for a ranker whose scores are no masses or logarithms, and without
    judgements.
    """
    kind = result.score_kind
    if kind is None:
        raise UserError(
            f"row {result.name!r}: its scores are neither masses nor logarithms, so they have no confidence"
        )
    grade = least_grade(measures)
    known = {q: found for q, found in result.documents.items() if result.qrels.get(q) and found.ids}
    if not known:
        raise UserError(f"row {result.name!r}: no judged query has a list, so its confidence cannot be checked")
    right = np.asarray([_is_right(result.qrels, q, found, grade) for q, found in known.items()], float)
    share = [float(shares(found.scores, kind).max()) for found in known.values()]
    curves: dict[str, Any] = {}
    for measure in get_args(Measure):
        values = [c.value(measure) for found in known.values() if (c := confidence_of(found.scores, kind)) is not None]
        curves[measure] = _curve(values, right)
    calibrated = None
    if temperature is not None:
        values = [float(softmax(found.scores, temperature.temperature).max()) for found in known.values()]
        calibrated = {**_calibration(values, right, bins), "risk_coverage": _curve(values, right)}
    positives = sum(_has_positive(result.qrels, q, found, grade) for q, found in known.items())
    return {
        "ranker": result.name,
        "score_kind": kind,
        "queries": len(known),
        "left_out": {
            "judged_without_list": sum(bool(grades) and q not in known for q, grades in result.qrels.items()),
            "without_judgement": sum(not result.qrels.get(q) for q in result.documents),
        },
        "lists_without_positive": len(known) - positives,
        "least_grade": grade,
        "error_rate": float(1 - right.mean()),
        "shares": _calibration(share, right, bins),
        "temperature": None if temperature is None else asdict(temperature),
        "calibrated": calibrated,
        "risk_coverage": curves,
        "perfect_aurc": area_under_risk_coverage(risk_coverage(right, right)[1]),
    }


def write_confidence(folder: Path, report: Mapping[str, Any]) -> None:
    """Writes the report as JSON and as a figure."""
    write_json(folder / CONFIDENCE_JSON, report)
    plot_confidence(report, folder / CONFIDENCE_PNG)


def _is_right(qrels: Qrels, query: str, found: ScoredDocuments, grade: int) -> bool:
    return qrels[query].get(found.ranking()[0], 0) >= grade


def _has_positive(qrels: Qrels, query: str, found: ScoredDocuments, grade: int) -> bool:
    return any(qrels[query].get(document, 0) >= grade for document in found.ids)


def _calibration(values: Sequence[float], right: np.ndarray, bins: int) -> dict[str, Any]:
    def binned(binning: Binning) -> list[Bin]:
        return reliability(values, right, bins, binning)

    return {
        "mean_confidence": float(np.mean(values)),
        **{
            f"equal_{binning}": {"ece": calibration_error(found), "bins": [asdict(b) for b in found]}
            for binning in get_args(Binning)
            if (found := binned(binning))
        },
    }


def _curve(values: Sequence[float], right: np.ndarray) -> dict[str, Any]:
    coverage, risk = risk_coverage(values, right)
    return {"aurc": area_under_risk_coverage(risk), "coverage": coverage.tolist(), "risk": risk.tolist()}

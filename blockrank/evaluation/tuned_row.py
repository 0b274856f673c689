"""A row with what goes beside its scores: tuned on validation lists before, confidence and fallback curve after."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from blockrank.config import to_plain
from blockrank.evaluation.confidence import confidence_report, least_grade, write_confidence
from blockrank.evaluation.fallback_curve import fallback_curves, has_both_readouts, write_fallback_curve
from blockrank.evaluation.files import write_json
from blockrank.evaluation.held_out import HeldOut, row_folder
from blockrank.evaluation.records import EvaluationResult
from blockrank.evaluation.settings import EvalConfig
from blockrank.evaluation.tuning import ensemble_scores, temperature_of, tune_alpha
from blockrank.rankers.ensemble import is_untuned
from blockrank.types import Ranker

log = logging.getLogger(__name__)

VALIDATION, TUNING_JSON = "validation", "tuning.json"


def measure_row(
    held_out: HeldOut,
    row: str,
    ranker: Ranker,
    config: EvalConfig,
    identity: Mapping[str, Any],
    recorded: Mapping[str, Any],
) -> EvaluationResult:
    """`held_out.measure`, and where asked for or possible:

    an ensemble without `alpha` is tuned on the validation lists (`tuning.json`), `confidence` is reported with a
    temperature from them (`confidence.json`, `.png`), and a row read both ways gets the curve of all thresholds
    (`fallback_curve`). The validation lists' scores lie in the row's folder, so a killed evaluation continues.
    """
    folder, settings = held_out.folder / row_folder(row), held_out.config
    validation: EvaluationResult | None = None
    if is_untuned(ranker):
        validation = _validate(held_out, row, ranker.with_alpha(0.5), config, identity, recorded)
        normalization = ranker.settings.normalization
        choice = tune_alpha(validation, settings.measures[0], normalization, missing=settings.missing)
        log.info(
            "%s: alpha %g has the best %s on %d validation queries", row, choice.alpha, choice.measure, choice.queries
        )
        ranker = ranker.with_alpha(choice.alpha)
        documents = {
            query: replace(found, scores=ensemble_scores(found, choice.alpha, normalization))
            for query, found in validation.documents.items()
        }
        validation = replace(validation, documents=documents)
        identity = {**identity, "ranker": to_plain(ranker.settings)}
        write_json(folder / TUNING_JSON, {**asdict(choice), "validation": to_plain(config.validation)})
    result = held_out.measure(row, ranker, identity, **recorded)
    if has_both_readouts(result):
        write_fallback_curve(folder, fallback_curves(result, settings.measures, settings.missing))
    if config.confidence and result.score_kind is None:
        log.warning("%s: no confidence.json: its scores are neither masses nor logarithms", row)
    elif config.confidence:
        if validation is None and config.validation is not None:
            validation = _validate(held_out, row, ranker, config, identity, recorded)
        grade = least_grade(settings.measures)
        fit = None if validation is None else temperature_of(validation.documents, validation.qrels, grade)
        if fit is None:
            log.info("%s: no temperature is fitted: there are no validation lists", row)
        write_confidence(folder, confidence_report(result, settings.measures, fit))
    return result


def _validate(
    held_out: HeldOut,
    row: str,
    ranker: Ranker,
    config: EvalConfig,
    identity: Mapping[str, Any],
    recorded: Mapping[str, Any],
) -> EvaluationResult:
    """The ranker on the validation lists of the same collection, in a folder below the row's."""
    assert config.validation is not None
    settings = replace(config.validation, measures=held_out.config.measures, missing=held_out.config.missing)
    validation = HeldOut(held_out.collection, settings, held_out.folder / row_folder(row), held_out.seed)
    return validation.measure(VALIDATION, ranker, {**identity, **settings.identity()}, **recorded)

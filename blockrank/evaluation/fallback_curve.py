"""What decoding the unsure lists would buy, for every threshold, from one evaluation that read all lists both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from blockrank.errors import UserError
from blockrank.evaluation.confidence_figures import plot_fallback
from blockrank.evaluation.files import write_json
from blockrank.evaluation.metrics import parse_measure
from blockrank.evaluation.records import EvaluationResult, ScoredDocuments
from blockrank.evaluation.tables import Cell, Table
from blockrank.evaluation.tuning import judged, ranked_values
from blockrank.rankers.confidence import Measure, confidence_of

CURVE = "fallback_curve"
_PARTS = ("attention", "generative")


def has_both_readouts(result: EvaluationResult) -> bool:
    """Whether every list with text was read both ways, and something is judged."""
    read = [found for found in result.documents.values() if found.ids]
    return result.report is not None and bool(read) and all(set(_PARTS) <= found.parts.keys() for found in read)


def fallback_curves(
    result: EvaluationResult, measures: Sequence[str], missing: Literal["zero", "skip"] = "zero"
) -> dict[str, Any]:
    """JSON-ready: the means of either readout, and by each measure of confidence the curve between them.

    A point is a threshold of `ranker=fallback`, how many lists it decodes and their share of all lists with text, and
    the means of `measures`. Lists of one confidence are decoded together, so there is a point for each value; `never`
    and `always` are the ends. Documents without text are left out of the rankings. Raises `UserError` for an evaluation
    without both readouts.
    """
    if not has_both_readouts(result):
        raise UserError(f"row {result.name!r} has no curve: not every list was read both ways, or nothing is judged")
    names = [str(parse_measure(measure)) for measure in measures]
    qrels = judged(result.qrels, result.documents, missing)
    read = {query: found for query, found in result.documents.items() if found.ids}
    values = [_values(read, part, qrels, names) for part in _PARTS]
    base = np.mean([list(per_query.values()) for per_query in values[0].values()], axis=0)
    curves = {m: _curve(read, m, values[0], values[1], base, len(values[0]), names) for m in get_args(Measure)}
    ends = [next(iter(curves.values()))[at]["means"] for at in (0, -1)]
    counts = {"lists": len(read), "queries": len(qrels)}
    return {"ranker": result.name, **counts, **dict(zip(_PARTS, ends, strict=True)), "curves": curves}


def curve_table(curves: Mapping[str, Any], steps: int = 10) -> Table:
    """The points nearest above each `1/steps` of the lists decoded."""
    names = list(curves["attention"])
    rows = []
    for measure, points in curves["curves"].items():
        shown = dict.fromkeys(
            next(i for i, p in enumerate(points) if p["share"] >= s / steps) for s in range(steps + 1)
        )
        for point in (points[i] for i in shown):
            values = [point["threshold"], point["share"], *(point["means"][name] for name in names)]
            rows.append((measure, tuple(Cell(value) for value in values)))
    title = f"{curves['ranker']}: lists decoded where the confidence is below a threshold, {curves['lists']} lists"
    return Table(("threshold", "decoded", *names), tuple(rows), title=title, row_header="confidence")


def write_fallback_curve(folder: Path, curves: Mapping[str, Any]) -> None:
    """Writes JSON, a figure, and the table in all formats."""
    write_json(folder / f"{CURVE}.json", curves)
    plot_fallback(curves, folder / f"{CURVE}.png")
    curve_table(curves).write_all(folder / CURVE)


def _values(
    read: Mapping[str, ScoredDocuments], part: str, qrels: Mapping[str, Mapping[str, int]], names: Sequence[str]
) -> dict[str, dict[str, float]]:
    rankings = {query: found.ranking(found.parts[part]) for query, found in read.items()}
    values = ranked_values(rankings, {query: dict(grades) for query, grades in qrels.items()}, names)
    return {query: {name: found[name] for name in names} for query, found in values.items()}


def _curve(
    read: Mapping[str, ScoredDocuments],
    measure: Measure,
    attention: Mapping[str, Mapping[str, float]],
    decoded: Mapping[str, Mapping[str, float]],
    base: np.ndarray,
    queries: int,
    names: Sequence[str],
) -> list[dict[str, Any]]:
    sure = {q: c.value(measure) for q, found in read.items() if (c := confidence_of(found.parts["attention"]))}
    gain = {
        q: np.asarray([decoded[q][n] - attention[q][n] for n in names]) if q in attention else np.zeros(len(names))
        for q in sure
    }
    levels = sorted(set(sure.values()))
    points = [_point("never", 0, len(sure), base, names)]
    means, count = base.copy(), 0
    for level, above in zip(levels, [*levels[1:], "always"], strict=True):
        chosen = [q for q, value in sure.items() if value == level]
        means, count = means + sum(gain[q] for q in chosen) / queries, count + len(chosen)
        points.append(_point(above, count, len(sure), means, names))
    return points


def _point(threshold: float | str, count: int, total: int, means: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    named = {name: float(value) for name, value in zip(names, means, strict=True)}
    return {"threshold": threshold, "decoded": count, "share": count / total, "means": named}

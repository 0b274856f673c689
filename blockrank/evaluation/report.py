"""The files of an evaluation: run, results, per-query values and table, each written whole or not at all."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from blockrank.data.trec import write_run
from blockrank.evaluation.files import git_commit, versions, write_json, write_json_lines
from blockrank.evaluation.metrics import MetricsReport
from blockrank.evaluation.ranking import RANKING_RULE
from blockrank.evaluation.records import EvaluationResult, extra_totals
from blockrank.evaluation.significance import bootstrap_interval, compare
from blockrank.evaluation.tables import Table, metrics_table

_DEFAULT_SCALE = "the ranker's own; comparable within one candidate list only"


def write_results(
    result: EvaluationResult,
    *,
    measures: tuple[str, ...],
    collection: str,
    config: Mapping[str, Any],
    identity: Mapping[str, Any],
    seed: int,
    tail: str,
    score_scale: str,
    baseline_name: str | None,
    paper: Mapping[str, float],
    ranking_rule: str = RANKING_RULE,
) -> None:
    """Writes run, per-query values, table and, last, `results.json`: once that exists the evaluation is complete."""
    files = result.files
    if files is None:
        raise ValueError("the evaluation has no output folder")
    write_run(files.run, result.run, "_".join(result.name.split()), ties="input")
    write_json_lines(files.per_query, _per_query(result))
    table = _table(result, measures, collection, seed, baseline_name, paper)
    if table is not None:
        table.write(files.table)
    metrics = None
    if result.report is not None:
        metrics = {**result.report.as_dict(), "intervals_95": _intervals(result.report, measures, seed)}
    baseline = None
    if result.report is not None and result.baseline_report is not None:
        comparisons = {
            m: compare(result.report.values(m), result.baseline_report.values(m), seed=seed) for m in measures
        }
        baseline = {
            "name": baseline_name,
            **result.baseline_report.as_dict(),
            "comparisons": {measure: asdict(comparison) for measure, comparison in comparisons.items()},
        }
    write_json(
        files.results,
        {
            "ranker": result.name,
            "collection": collection,
            "metrics": metrics,
            "baseline": baseline,
            "paper": dict(paper),
            "counts": result.counts,
            "extra": extra_totals(result.records),
            "timing": {**result.timing, "peak_memory_mib": _peak_memory_mib()},
            "ranking_rule": ranking_rule,
            "below_depth": tail,
            "scores": {"scale": score_scale or _DEFAULT_SCALE, "range": result.score_range},
            "seed": seed,
            "config": config,
            "identity": identity,
            "git_commit": git_commit(),
            "versions": versions(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "files": {name: path.name for name, path in files.paths().items() if name != "results" and path.exists()},
        },
    )


def _per_query(result: EvaluationResult) -> list[dict[str, Any]]:
    measured = {} if result.report is None else result.report.per_query
    rows = [
        {"query_id": query, "in_run": bool(result.run[query]), "metrics": measured.get(query), **asdict(record)}
        for query, record in result.records.items()
    ]
    absent = [query for query in measured if query not in result.records]
    return rows + [{"query_id": query, "in_run": False, "metrics": measured[query]} for query in absent]


def _table(
    result: EvaluationResult,
    measures: tuple[str, ...],
    collection: str,
    seed: int,
    baseline_name: str | None,
    paper: Mapping[str, float],
) -> Table | None:
    if result.report is None:
        return None
    reports = {result.name: result.report}
    baseline = None
    if result.baseline_report is not None and baseline_name not in (None, result.name):
        baseline = baseline_name
        reports = {baseline_name: result.baseline_report, **reports}
    return metrics_table(
        reports, measures, baseline=baseline, paper={result.name: paper} if paper else None, title=collection, seed=seed
    )


def _intervals(report: MetricsReport, measures: tuple[str, ...], seed: int) -> dict[str, tuple[float, float]]:
    return {m: bootstrap_interval(list(report.values(m).values()), seed=seed) for m in measures}


def _peak_memory_mib() -> float | None:
    """Largest resident size of this process so far, where the platform tells."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10

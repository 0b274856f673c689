"""What is read from other commands' files, and the queries of a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from blockrank.analysis import figures
from blockrank.analysis.runs import query_values, worst_queries
from blockrank.analysis.speed import SpeedResults
from blockrank.errors import UserError
from blockrank.evaluation.metrics import evaluate
from blockrank.types import Query

CELLS = [
    {"system": "dense", "candidates": 50, "p50_seconds": 8.0, "error": None},
    {"system": "dense", "candidates": 10, "p50_seconds": 2.0, "error": None},
    {"system": "packed", "candidates": 10, "p50_seconds": 1.0, "error": None},
    {"system": "dense", "candidates": 500, "error": "too long"},
]
STEPS = [{"change": "dense", "system": "a", "seconds": 8.0, "factor": 1.0}]
STEPS.append({"change": "packed", "system": "b", "seconds": 2.0, "factor": 4.0})


def test_a_benchmark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"cells": CELLS, "decomposition": {"50": STEPS}}))
    results = SpeedResults.read(path)
    assert results.latency == {"dense": ([10, 50], [2.0, 8.0]), "packed": ([10], [1.0])}
    assert results.steps == {50: [("dense", 8.0, 1.0), ("packed", 2.0, 4.0)]}
    assert "| packed | 1 | – |" in results.table().to_markdown()
    for picture in (results.draw_latency(tmp_path / "a.png"), results.draw_decomposition(tmp_path / "b.png")):
        assert imread(picture).shape[1] > 600
    with pytest.raises(UserError, match="no decomposition at N = 10; the benchmark has it at 50"):
        results.draw_decomposition(tmp_path / "c.png", 10)


def test_what_is_no_benchmark(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"results\.json: no such file; `python -m blockrank\.bench` writes"):
        SpeedResults.read(tmp_path / "results.json")
    (tmp_path / "x.json").write_text('{"cells": []}')
    with pytest.raises(UserError, match=r"x\.json: not a results\.json of"):
        SpeedResults.read(tmp_path / "x.json")


def test_the_worst_queries_of_a_run_by_hand(tmp_path: Path) -> None:
    qrels = {"a": {"d1": 1, "d2": 0}, "b": {"d3": 1}, "c": {"d9": 2, "d8": 1}}
    run = {"a": {"d1": 2.0, "d2": 1.0}, "b": {"d1": 3.0, "d3": 2.0}, "c": {"d1": 1.0}}
    report = evaluate(run, qrels, ["RR@10", "P@1"])
    queries = {query: Query(query, f"text of {query}") for query in qrels}
    table = worst_queries(report, "MRR@10", run, qrels, queries, count=2)
    rows = [(name, [cell.value for cell in cells]) for name, cells in table.rows]
    assert rows == [("c", [0.0, "text of c", "d1", "d8", None]), ("b", [0.5, "text of b", "d1", "d3", 2])]
    values = query_values({"run": report}, "RR@10")
    assert sorted(values["run"].tolist()) == [0.0, 0.5, 1.0]
    assert imread(figures.plot_queries(values, "RR@10", tmp_path / "q.png")).shape[1] > 600


def test_long_lists_name_some_of_their_parts(tmp_path: Path) -> None:
    """102 parts: the figure stays readable, and the part that is never seen is white."""
    weights = np.tril(np.full((102, 102), 0.01))
    assert imread(figures.plot_parts(weights, tmp_path / "m.png")).shape[1] > 600
    picture = figures.plot_suffix(np.full((3, 100), 0.01), ["a", "b", "c"], tmp_path / "s.png", relevant=[41])
    assert imread(picture).shape[1] > 600
    assert len(figures._some(102)) <= 28
    assert figures._some(3) == [0, 1, 2]

"""The notebooks run from top to bottom: on a tiny model, and (slow) on SmolLM2; they hold calls, not logic."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from blockrank.data.collection import PydocsConfig
from blockrank.data.trec import write_run
from blockrank.retrieval.lists import open_lists, select_judged
from blockrank.training.recipe import HeldOutConfig

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NAMES = ["attention", "run", "signals", "speed"]
TINY = ["+exp=quickstart", "model=tiny", "ranker.score_layer=2", "validation.max_queries=3", "samples=20"]


def read(name: str) -> Any:
    return pytest.importorskip("jupytext").read(FOLDER / f"{name}.py")


def execute(name: str, folder: Path, **parameters: Any) -> str:
    """Runs a notebook in `folder` with other values in its parameter cell; returns all Markdown it shows."""
    client = pytest.importorskip("nbclient")
    notebook = read(name)
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    cell.source += "".join(f"\n{key} = {value!r}" for key, value in parameters.items())
    resources = {"metadata": {"path": str(folder)}}
    client.NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources).execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    assert not [out for out in outputs if out.output_type == "error"]
    return "\n".join(out.data["text/markdown"] for out in outputs if "text/markdown" in out.get("data", {}))


def test_there_are_these() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_they_call_the_library_and_hold_no_logic(name: str) -> None:
    nodes = list(ast.walk(ast.parse((FOLDER / f"{name}.py").read_text("utf-8"))))
    logic = (ast.FunctionDef, ast.ClassDef, ast.For, ast.While, ast.If, ast.Try, ast.Lambda)
    assert not [ast.unparse(node) for node in nodes if isinstance(node, logic)]
    assert any(isinstance(node, ast.ImportFrom) and str(node.module).startswith("blockrank.") for node in nodes)


@pytest.fixture
def bench_results(tmp_path: Path) -> Path:
    """Two systems at two lengths, and a decomposition of three steps."""
    seconds = {"dense": (2.0, 8.0), "packed": (1.0, 2.0)}
    cells = [
        {"system": name, "candidates": n, "p50_seconds": time, "error": None}
        for name, times in seconds.items()
        for n, time in zip((10, 50), times, strict=True)
    ]
    cells.append({"system": "dense", "candidates": 500, "error": "too long"})
    steps = [("dense", 8.0, 1.0), ("sparse attention", 4.0, 2.0), ("packed rows", 2.0, 2.0)]
    keys = ("change", "seconds", "factor")
    found = [{**dict(zip(keys, step, strict=True)), "system": "x"} for step in steps]
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"cells": cells, "decomposition": {"50": found}}))
    return path


def test_signals_on_a_tiny_model(tmp_path: Path) -> None:
    text = execute("signals", tmp_path, OVERRIDES=TINY)
    assert "best of all" in text
    assert "Choosing anew is" in text
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"layers.png", "tokens.png"}


@pytest.mark.slow
def test_attention_on_a_tiny_model(tmp_path: Path) -> None:
    text = execute("attention", tmp_path, OVERRIDES=TINY, LAYERS=(1, 2), LISTS=2)
    assert "own document" in text
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"map.png", "sparsity.png", "suffix.png"}


@pytest.mark.slow
def test_speed(tmp_path: Path, bench_results: Path) -> None:
    text = execute("speed", tmp_path, RESULTS=str(bench_results))
    assert "| dense | 2 | 8 |" in text
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"latency.png", "decomposition.png"}


@pytest.mark.slow
def test_a_run(tmp_path: Path) -> None:
    """BM25's order of five test queries, and the same upside down."""
    config = HeldOutConfig("test", "bm25", depth=5, with_positives=True, max_queries=5)
    collection = PydocsConfig(max_words=20, titles=True).open()
    lists, _ = select_judged(open_lists(collection, config), collection.qrels("test"), 5)
    files = {}
    for row, sign in (("BM25", -1), ("reversed", 1)):
        run = {c.query.id: {d.id: float(sign * i) for i, d in enumerate(c.documents)} for c in lists}
        write_run(path := tmp_path / f"{row}.trec", run, row)
        files[row] = str(path)
    text = execute("run", tmp_path, RUNS=files, OVERRIDES=["+exp=quickstart", "max_queries=5"])
    assert "The 5 worst queries" in text
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["queries.png"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "signals"])
def test_on_smollm2(name: str, tmp_path: Path) -> None:
    execute(name, tmp_path)

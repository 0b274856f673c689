"""A tiny BEIR folder with a run, and the evaluation command on the tiny model."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from blockrank.config import build, compose
from blockrank.evaluation.held_out import HeldOut
from blockrank.evaluation.settings import EvalConfig
from blockrank.evaluation.suite import evaluate_rows

DOCUMENTS = {"d1": "cats purr", "d2": "dogs bark", "d3": "cows moo", "d4": "ducks quack"}
QUERIES = {"q1": "who purrs", "q2": "who barks", "q3": "who sings"}


def beir_folder(folder: Path) -> Path:
    """Four documents, three judged queries, and `run.trec`, which finds d1, d2, d3 (in that order) for q1 and q2."""
    (folder / "qrels").mkdir(parents=True)
    lines = [json.dumps({"_id": key, "title": "", "text": text}) for key, text in DOCUMENTS.items()]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    lines = [json.dumps({"_id": key, "text": text}) for key, text in QUERIES.items()]
    (folder / "queries.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td2\t1\nq3\td4\t1\n")
    run = [f"{q} Q0 d{d} {d} {5 - d} bm25" for q in ("q1", "q2") for d in (1, 2, 3)]
    (folder / "run.trec").write_text("\n".join(run) + "\n")
    return folder


def evaluate(output: Path, *overrides: str) -> tuple[list[HeldOut], str]:
    """What `python -m blockrank.eval output_dir=... overrides` measures and prints."""
    config = compose("eval", [f"output_dir={output}", *overrides])
    text = io.StringIO()
    held_out = evaluate_rows(build(EvalConfig, config), Console(file=text, width=200, soft_wrap=True))
    return held_out, text.getvalue()


def on(collection: Path) -> list[str]:
    """Overrides for a folder of `beir_folder`."""
    return [
        "data=beir_folder",
        f"data.path={collection}",
        f"candidates={collection / 'run.trec'}",
        "measures=[P@1,nDCG@10]",
    ]

"""`python -m blockrank.eval` on a small folder: run, metrics, table, resumption, and the errors a user can cause."""

from __future__ import annotations

import io
import json
from pathlib import Path

import eval_helpers
import pytest
from eval_helpers import beir_folder, on
from rich.console import Console

from blockrank.config import build, compose
from blockrank.data.collection import BeirConfig
from blockrank.data.files import hash64
from blockrank.errors import UserError
from blockrank.eval import EvalConfig, evaluate_ranker
from blockrank.evaluation.evaluator import Evaluator
from blockrank.evaluation.held_out import HeldOut
from blockrank.rankers.attention import AttentionRanker
from blockrank.rankers.first_stage import FirstStageRanker
from blockrank.retrieval.lists import open_lists, select_judged, select_queries
from blockrank.training.recipe import HeldOutConfig


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    return beir_folder(tmp_path / "animals")


def evaluate(collection: Path, output: Path, *overrides: str) -> tuple[HeldOut, str]:
    (held_out,), text = eval_helpers.evaluate(output, *on(collection), "model=tiny", "deltas=false", *overrides)
    return held_out, text


def test_the_first_stage_row_is_exact_and_missing_queries_count_zero(collection: Path, tmp_path: Path):
    held_out, text = evaluate(collection, tmp_path / "out")
    assert "first stage" in text
    results = json.loads((tmp_path / "out/eval/first_stage/results.json").read_text())
    assert results["metrics"]["means"]["P@1"] == pytest.approx(1 / 3)
    assert results["metrics"]["means"]["nDCG@10"] == pytest.approx((1 + 0.6309297535714575) / 3)
    assert results["metrics"]["counts"]["missing"] == 1
    run = held_out.runs["attention"].read_text().split("\n")
    assert sum(line.startswith("q1 ") for line in run) == 3


@pytest.mark.parametrize("max_queries", [2, 3, 100])
def test_judged_queries_without_a_list_count_zero_under_max_queries(collection: Path, max_queries: int):
    """The run has q1 only; its first document is relevant."""
    run = collection / "run.trec"
    run.write_text("".join(line + "\n" for line in run.read_text().splitlines() if line.startswith("q1 ")))
    settings = HeldOutConfig("test", str(run), measures=("P@1",), max_queries=max_queries)
    lists, qrels = open_lists(opened := BeirConfig(collection).open(), settings), opened.qrels("test")
    chosen = sorted(qrels, key=hash64)[:max_queries]
    assert "q1" in chosen
    taken, judged = select_judged(lists, qrels, max_queries)
    assert ([one.query.id for one in taken], sorted(judged)) == (["q1"], sorted(chosen))
    result = HeldOut(opened, settings, collection / "out", seed=0).measure_first_stage({})
    assert result is not None
    assert result.means["P@1"] == pytest.approx(1 / len(chosen))
    assert result.report is not None
    assert result.report.values("P@1").keys() == set(chosen)


def test_a_run_without_a_line_is_named(collection: Path, tmp_path: Path):
    (collection / "run.trec").write_text("\n")
    with pytest.raises(UserError, match=r"^candidates=.*run\.trec: holds no list for any query of \S+ \(test\)$"):
        evaluate(collection, tmp_path / "out")


def test_candidates_outside_the_collection_are_dropped_when_asked(collection: Path, tmp_path: Path):
    run = collection / "run.trec"
    run.write_text("q1 Q0 elsewhere 1 9.0 x\n" + run.read_text())
    with pytest.raises(UserError, match=r"'elsewhere'; .*missing_documents=drop"):
        evaluate(collection, tmp_path / "out")
    held_out, _ = evaluate(collection, tmp_path / "out", "missing_documents=drop")
    assert "elsewhere" not in held_out.runs["attention"].read_text()


def test_the_chosen_queries_are_those_chosen_among_the_lists(collection: Path):
    """Where every judged query has a list."""
    settings = HeldOutConfig("test", str(collection / "run.trec"))
    lists = open_lists(BeirConfig(collection).open(), settings)
    qrels = {"q2": {"d2": 1}, "q1": {"d1": 1}}
    for size in (None, 1, 2, 3):
        taken, judged = select_judged(lists, qrels, size)
        assert taken.queries == select_queries(lists, size).queries
        assert judged.keys() == {query.id for query in taken.queries}


@pytest.mark.parametrize(
    "name", ["first_stage", "first stage", "First_Stage", "", " ", "..", "a/b", "/tmp/x", "a\\b", "c:x", "table.md"]
)
def test_names_that_are_no_rows_are_refused(name: str):
    config = compose("eval", ["model=tiny"])
    config.name = name
    with pytest.raises(UserError, match="config key name: "):
        build(EvalConfig, config)


def test_no_measures_are_an_error_that_names_the_key(collection: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"config key measures: \[\] is empty: name at least one"):
        evaluate(collection, tmp_path / "out", "measures=[]")
    with pytest.raises(UserError, match="measures is empty"):
        Evaluator(FirstStageRanker(), [], measures=[])


def test_a_killed_evaluation_continues(collection: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole, _ = evaluate(collection, tmp_path / "whole", "batch_size=1")
    score, calls = AttentionRanker.score, []

    def killed(self, lists):
        if calls:
            raise KeyboardInterrupt
        calls.append(len(lists))
        return score(self, lists)

    monkeypatch.setattr(AttentionRanker, "score", killed)
    with pytest.raises(KeyboardInterrupt):
        evaluate(collection, tmp_path / "killed", "batch_size=1")
    seen = []
    monkeypatch.setattr(AttentionRanker, "score", lambda self, lists: seen.append(1) or score(self, lists))
    resumed, _ = evaluate(collection, tmp_path / "killed", "batch_size=1")
    assert len(seen) == 1
    assert resumed.runs["attention"].read_text() == whole.runs["attention"].read_text()


def test_other_scores_are_not_mixed_in(collection: Path, tmp_path: Path):
    evaluate(collection, tmp_path / "out")
    with pytest.raises(UserError, match="overwrite"):
        evaluate(collection, tmp_path / "out", "ranker=attention", "ranker.score_layer=1")
    evaluate(collection, tmp_path / "out", "ranker=attention", "ranker.score_layer=1", "overwrite=true")


def test_other_weights_are_not_mixed_in(collection: Path, tmp_path: Path):
    evaluate(collection, tmp_path / "out")
    with pytest.raises(UserError, match="overwrite"):
        evaluate(collection, tmp_path / "out", "seed=1")


def test_training_and_evaluation_share_an_output_folder(collection: Path, tmp_path: Path):
    folder = tmp_path / "out"
    opened = BeirConfig(collection).open()
    settings = HeldOutConfig("test", str(collection / "run.trec"), depth=2, measures=("P@1",))
    training = HeldOut(opened, settings, folder / "evaluation", seed=0)
    training.measure_first_stage({"row": "as training writes it"})
    training.write_table(folder / "table.md", "first stage")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert before
    evaluated, _ = evaluate(collection, folder)
    assert list(evaluated.runs) == ["first stage", "attention"]
    assert {path: path.read_bytes() for path in before} == before
    training.measure_first_stage({"row": "as training writes it"})
    again, _ = evaluate(collection, folder)
    assert again.runs == evaluated.runs


def test_a_first_stage_without_scores_gets_no_row(collection: Path, tmp_path: Path):
    run = collection / "run.trec"
    run.write_text("".join(line.rsplit(" ", 2)[0] + " 0 bm25\n" for line in run.read_text().splitlines()))
    held_out, text = evaluate(collection, tmp_path / "out")
    assert list(held_out.runs) == ["attention"]
    assert "first stage" not in text


def test_what_is_missing_is_told(collection: Path, tmp_path: Path):
    def run(*overrides: str) -> None:
        evaluate_ranker(build(EvalConfig, compose("eval", overrides)), Console(file=io.StringIO()))

    with pytest.raises(UserError, match="data"):
        run("model=tiny")
    with pytest.raises(UserError, match="checkpoint"):
        run("data=beir_folder", f"data.path={collection}")
    with pytest.raises(UserError, match="no such"):
        run("data=beir_folder", f"data.path={collection}", f"checkpoint={tmp_path / 'nothing'}")


def test_every_experiment_composes_with_a_checkpoint(tmp_path: Path):
    config = build(EvalConfig, compose("eval", ["+exp=quickstart", f"checkpoint={tmp_path}"]))
    assert config.test is not None
    assert config.ranker is not None
    assert config.ranker.score_layer == 14
    for name in ("msmarco", "nq"):
        build(EvalConfig, compose("eval", [f"+exp={name}", f"checkpoint={tmp_path}"]))

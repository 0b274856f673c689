"""The evaluator: run, metrics and files from any ranker; ties, empty and odd input."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from blockrank.data.trec import read_run
from blockrank.errors import UserError
from blockrank.evaluation.evaluator import Evaluator
from blockrank.evaluation.metrics import canonical_order, evaluate
from blockrank.evaluation.ranking import strictly_decreasing
from blockrank.types import CandidateList, Document, ListScores, Query

Score = Callable[[CandidateList, int], float]


class FunctionRanker:
    """Scores by a function of (list, position); remembers the query ids of each call."""

    def __init__(self, function: Score, name: str = "function") -> None:
        self.name = name
        self.function = function
        self.calls: list[list[str]] = []

    def score(self, lists: list[CandidateList]) -> list[ListScores]:
        self.calls.append([candidates.query.id for candidates in lists])
        return [
            ListScores(
                np.array([self.function(c, i) for i in range(len(c))], dtype=np.float32),
                np.array([document.text.endswith("…") for document in c.documents], dtype=bool),
                tokens=10 * len(c),
            )
            for c in lists
        ]


def candidate_list(query: str, texts: Sequence[str], relevance: Sequence[int] | None = None) -> CandidateList:
    documents = tuple(Document(f"{query}-d{i}", text) for i, text in enumerate(texts))
    return CandidateList(
        Query(query, f"about {query}"), documents, relevance=None if relevance is None else tuple(relevance)
    )


def by_length(candidates: CandidateList, index: int) -> float:
    return len(candidates.documents[index].text)


def lists_of(count: int, size: int = 4) -> list[CandidateList]:
    rng = np.random.default_rng(count)
    return [
        candidate_list(f"q{i}", ["x" * int(n) for n in rng.integers(1, 40, size)], rng.integers(0, 2, size).tolist())
        for i in range(count)
    ]


def test_by_hand() -> None:
    lists = [candidate_list("q1", ["aa", "aaaa", "a"], [1, 0, 0]), candidate_list("q2", ["a", "aaa"], [0, 1])]
    result = Evaluator(FunctionRanker(by_length), lists, measures=["RR@10", "P@1"]).run()
    assert [list(scores) for scores in result.run.values()] == [["q1-d1", "q1-d0", "q1-d2"], ["q2-d1", "q2-d0"]]
    assert result.run["q1"] == {"q1-d1": 4.0, "q1-d0": 2.0, "q1-d2": 1.0}
    assert result.means == {"RR@10": 0.75, "P@1": 0.5}
    assert result.files is None
    assert result.counts["documents"] == 5
    assert result.counts["tokens"] == 50


def test_full_qrels_keep_unretrieved_documents_in_the_ideal_ranking() -> None:
    lists = [candidate_list("q1", ["aa", "a"])]
    result = Evaluator(
        FunctionRanker(by_length), lists, qrels={"q1": {"q1-d0": 1, "other": 1}}, measures=["R@10"]
    ).run()
    assert result.means == {"R@10": 0.5}


@pytest.mark.parametrize("batch_size", [1, 3, 7, 32])
def test_batch_size_changes_nothing(batch_size: int) -> None:
    lists = lists_of(10)
    ranker = FunctionRanker(by_length)
    result = Evaluator(ranker, lists, batch_size=batch_size).run()
    reference = Evaluator(FunctionRanker(by_length), lists, batch_size=10).run()
    assert result.run == reference.run
    assert result.means == reference.means
    assert [query for call in ranker.calls for query in call] == [f"q{i}" for i in range(10)]
    assert max(map(len, ranker.calls)) == min(batch_size, 10)


def test_ragged_and_empty_lists() -> None:
    lists = [candidate_list(f"q{n}", ["x" * (i % 7 + 1) for i in range(n)], [1] * n) for n in (0, 1, 3, 30)]
    ranker = FunctionRanker(by_length)
    result = Evaluator(ranker, lists, qrels={f"q{n}": {f"q{n}-d0": 1} for n in (0, 1, 3, 30)}).run()
    assert {query: len(scores) for query, scores in result.run.items()} == {"q0": 0, "q1": 1, "q3": 3, "q30": 30}
    assert ranker.calls == [["q1", "q3", "q30"]]
    assert (result.counts["queries"], result.counts["empty_lists"]) == (4, 1)
    assert result.report is not None
    assert (result.report.counts.missing, result.report.counts.averaged) == (1, 4)
    only = Evaluator(FunctionRanker(by_length), lists[2:3]).run()
    assert only.run["q3"] == result.run["q3"]


def test_only_empty_lists_call_no_model() -> None:
    ranker = FunctionRanker(by_length)
    result = Evaluator(ranker, [candidate_list("q", [])]).run()
    assert (ranker.calls, result.run, result.report) == ([], {"q": {}}, None)


@pytest.mark.parametrize("count", [33, 101, 1001])
def test_huge_lists_keep_every_document_once(count: int) -> None:
    ids = np.random.default_rng(0).permutation(count)
    lists = [candidate_list("q", [str(i) for i in ids])]
    result = Evaluator(FunctionRanker(lambda c, i: float(c.documents[i].text)), lists).run()
    expected = [f"q-d{index}" for index in np.argsort(-ids)]
    assert list(result.run["q"]) == expected


@pytest.mark.parametrize("transform", [lambda x: x, lambda x: 1 / (1 + np.exp(-x)), lambda x: np.exp(x) / 1e4])
def test_the_scale_of_the_scores_does_not_matter(transform: Callable[[float], float]) -> None:
    lists = [candidate_list("q", ["x" * n for n in (3, 1, 7, 5)], [0, 0, 1, 0])]
    result = Evaluator(FunctionRanker(lambda c, i: transform(by_length(c, i))), lists, measures=["P@1"]).run()
    assert list(result.run["q"]) == ["q-d2", "q-d3", "q-d0", "q-d1"]
    assert result.means == {"P@1": 1.0}


@pytest.mark.parametrize("score", [0.5, 0.0, -1e9])
def test_ties_keep_first_stage_order_in_run_metrics_and_file(tmp_path: Path, score: float) -> None:
    lists = [candidate_list("q", ["a", "b", "c", "d"], [1, 0, 0, 0])]
    result = Evaluator(FunctionRanker(lambda *_: score), lists, tmp_path, measures=["P@1", "RR", "RR@10"]).run()
    order = [f"q-d{i}" for i in range(4)]
    assert list(result.run["q"]) == order
    assert result.means == {"P@1": 1.0, "RR": 1.0, "RR@10": 1.0}
    assert (result.counts["tied_documents"], result.counts["queries_with_ties"]) == (4, 1)
    written = read_run(tmp_path / "run.trec")["q"]
    assert canonical_order(written) == order
    assert written == pytest.approx(result.run["q"], rel=1e-8, abs=0)
    values = np.array(list(written.values()), dtype=np.float32)
    assert (np.diff(values) < 0).all()
    assert evaluate({"q": written}, {"q": {"q-d0": 1}}, ["RR"])["RR"] == 1.0


def test_documents_without_text_come_last_in_input_order(caplog: pytest.LogCaptureFixture) -> None:
    lists = [candidate_list("q", ["", "   ", "good text", "more"], [0, 0, 1, 0])]
    with caplog.at_level(logging.WARNING):
        result = Evaluator(FunctionRanker(lambda _, i: -float(i)), lists, measures=["P@1"]).run()
    assert list(result.run["q"]) == ["q-d2", "q-d3", "q-d0", "q-d1"]
    assert result.run["q"]["q-d2"] == -2.0
    assert np.isfinite(list(result.run["q"].values())).all()
    assert (np.diff(list(result.run["q"].values())) < 0).all()
    assert result.counts["empty_documents"] == 2
    assert "2 documents without text (queries ['q'])" in caplog.text


def test_the_lowest_finite_scores_still_decrease() -> None:
    lowest = float(np.finfo(np.float32).min)
    lists = [candidate_list("q", ["a", "", ""])]
    result = Evaluator(FunctionRanker(lambda _, i: lowest if i else 1.0), lists).run()
    values = list(result.run["q"].values())
    assert values[0] == 1.0
    assert values[1] > values[2] == lowest


@given(arrays(np.float32, st.integers(0, 12), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_strictly_decreasing(values: np.ndarray) -> None:
    ranked = np.sort(values)[::-1]
    result = strictly_decreasing(ranked)
    assert (result[:-1] > result[1:]).all()
    assert np.isfinite(result).all()
    if len(set(values.tolist())) == len(values):
        np.testing.assert_array_equal(result, ranked)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_not_finite_names_ranker_query_and_document(value: float, tmp_path: Path) -> None:
    lists = [candidate_list("q1", ["a", "b"]), candidate_list("q2", ["a", "b"])]
    ranker = FunctionRanker(lambda c, i: value if (c.query.id, i) == ("q2", 1) else 0.0, name="broken")
    with pytest.raises(UserError, match=r"ranker 'broken', query 'q2', document 1 \('q2-d1'\): score -?(nan|inf)"):
        Evaluator(ranker, lists, tmp_path).run()
    assert not (tmp_path / "results.json").exists()


class WrongRanker:
    name = "wrong"

    def __init__(self, results: list[ListScores]) -> None:
        self.results = results

    def score(self, lists: list[CandidateList]) -> list[ListScores]:  # noqa: ARG002
        return self.results


def test_wrong_numbers_of_scores_are_errors() -> None:
    lists = [candidate_list("q1", ["a", "b"])]
    two, three = np.zeros(2, np.float32), np.zeros(3, np.float32)
    with pytest.raises(UserError, match=r"'q1': scores of shape \(3,\) for 2 documents"):
        Evaluator(WrongRanker([ListScores(three, two > 0)]), lists).run()
    with pytest.raises(UserError, match=r"truncation flags of shape \(3,\)"):
        Evaluator(WrongRanker([ListScores(two, three > 0)]), lists).run()
    with pytest.raises(UserError, match="returned 0 results for 1 lists"):
        Evaluator(WrongRanker([]), lists).run()


def test_depth_drops_or_keeps_the_tail() -> None:
    lists = [candidate_list("q", ["a", "aaa", "aaaaa", "aaaaaaa"], [0, 0, 0, 1])]
    dropped = Evaluator(FunctionRanker(by_length), lists, depth=2, measures=["RR"]).run()
    assert dropped.run == {"q": {"q-d1": 3.0, "q-d0": 1.0}}
    assert dropped.means == {"RR": 0.0}
    assert dropped.counts["documents_below_depth_dropped"] == 2
    kept = Evaluator(FunctionRanker(by_length), lists, depth=2, tail="keep", measures=["RR"]).run()
    assert list(kept.run["q"]) == ["q-d1", "q-d0", "q-d2", "q-d3"]
    assert kept.means == {"RR": 0.25}
    assert (kept.counts["documents"], kept.counts["tied_documents"]) == (2, 0)
    assert list(kept.run["q"].values()) == sorted(set(kept.run["q"].values()), reverse=True)


def test_ignore_self_applies_before_ranking_and_metrics() -> None:
    documents = (Document("t1", "long text"), Document("t2", "text"))
    lists = [CandidateList(Query("t1", "long text"), documents, (2.0, 1.0), (0, 1))]
    seen: list[int] = []
    ranker = FunctionRanker(lambda c, i: (seen.append(len(c)), by_length(c, i))[1])
    result = Evaluator(ranker, lists, qrels={"t1": {"t2": 1}}, measures=["RR"], ignore_self=True, depth=1).run()
    assert result.run == {"t1": {"t2": 4.0}}
    assert set(seen) == {1}
    assert result.means == {"RR": 1.0}
    assert result.counts["self_documents"] == 1
    assert len(lists[0]) == 2


def test_duplicates_are_errors() -> None:
    lists = lists_of(1)
    with pytest.raises(UserError, match="query 'q0' has two candidate lists"):
        Evaluator(FunctionRanker(by_length), lists * 2, batch_size=1).run()
    twice = CandidateList(Query("q", "x"), (Document("d", "a"), Document("d", "b")))
    with pytest.raises(UserError, match="query 'q': document 'd' is a candidate twice"):
        Evaluator(FunctionRanker(by_length), [twice]).run()


def test_qrels_of_another_collection_are_refused_before_scoring() -> None:
    ranker = FunctionRanker(by_length)
    with pytest.raises(UserError, match=r"no query id in common: the run has \['q0', 'q1'\], the qrels have \['1'\]"):
        Evaluator(ranker, lists_of(2), qrels={"1": {"q0-d0": 1}}).run()
    with pytest.raises(UserError, match="no document id in common"):
        Evaluator(ranker, lists_of(2), qrels={"q1": {"d0": 1}}).run()
    assert ranker.calls == []
    result = Evaluator(ranker, lists_of(2), qrels={"q1": {"d0": 1}}, allow_no_overlap=True, measures=["P@1"]).run()
    assert result.means == {"P@1": 0.0}


def test_a_measure_that_cannot_be_computed_stops_before_scoring() -> None:
    ranker = FunctionRanker(by_length)
    with pytest.raises(UserError, match="measure Accuracy cannot be computed"):
        Evaluator(ranker, lists_of(2, size=1), qrels={"q0": {"q0-d0": 1}}, measures=["P@1", "Accuracy"]).run()
    assert ranker.calls == []


def test_files(tmp_path: Path) -> None:
    lists = [candidate_list("q1", ["aa…", "aaaa", "a"], [1, 0, 0]), candidate_list("q2", ["a", "aaa"], [0, 1])]
    qrels = {"q1": {"q1-d0": 1}, "q2": {"q2-d1": 1}, "q3": {"x": 1}}
    ranker = FunctionRanker(by_length, name="my ranker")
    baseline = {"q1": {"q1-d0": 3.0, "q1-d1": 2.0}, "q2": {"q2-d0": 2.0, "q2-d1": 1.0}}
    result = Evaluator(
        ranker,
        lists,
        tmp_path,
        qrels=qrels,
        measures=["MRR@10", "P@1"],
        collection="tiny",
        config={"model": "x", "depth": 3},
        seed=5,
        baseline=("BM25", baseline),
        paper={"MRR@10": 0.42},
    ).run()
    names = ["per_query.jsonl", "results.json", "run.trec", "scores.jsonl", "table.md"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert read_run(tmp_path / "run.trec") == result.run
    assert (tmp_path / "run.trec").read_text().splitlines()[0] == "q1 Q0 q1-d1 1 4 my_ranker"

    results = json.loads((tmp_path / "results.json").read_text())
    assert results["metrics"]["means"] == pytest.approx({"RR@10": 0.5, "P@1": 1 / 3})
    assert results["metrics"]["counts"]["missing"] == 1
    assert results["metrics"]["intervals_95"]["P@1"] == [0.0, 1.0]
    assert results["config"] == {"model": "x", "depth": 3}
    assert (results["seed"], results["collection"], results["ranker"]) == (5, "tiny", "my ranker")
    assert results["counts"]["truncated_documents"] == 1
    assert results["counts"]["documents"] == 5
    assert results["scores"]["range"] == [1.0, 4.0]
    assert results["baseline"]["means"] == pytest.approx({"RR@10": 0.5, "P@1": 1 / 3})
    assert results["baseline"]["comparisons"]["P@1"]["p_value"] == 1.0
    assert results["versions"]["numpy"] == np.__version__
    assert results["timing"]["scoring_seconds"] > 0

    rows = [json.loads(line) for line in (tmp_path / "per_query.jsonl").read_text().splitlines()]
    assert [(row["query_id"], row["in_run"], row["metrics"]["RR@10"]) for row in rows] == [
        ("q1", True, 0.5),
        ("q2", True, 1.0),
        ("q3", False, 0.0),
    ]
    assert (rows[0]["truncated"], rows[0]["documents"], rows[0]["tokens"]) == (1, 3, 30)
    table = (tmp_path / "table.md").read_text()
    assert table.startswith("**tiny**\n\n| ranker | RR@10 | RR@10 (paper) | P@1 | queries | missing |\n")
    assert "| BM25 | 0.5000 " in table
    assert "| 0.4200 |" in table


def test_unjudged_lists_give_a_run_and_no_metrics(tmp_path: Path) -> None:
    result = Evaluator(FunctionRanker(by_length), [candidate_list("q", ["a", "aa"])], tmp_path).run()
    assert result.report is None
    assert result.means == {}
    assert json.loads((tmp_path / "results.json").read_text())["metrics"] is None
    assert list(read_run(tmp_path / "run.trec")["q"]) == ["q-d1", "q-d0"]
    assert not (tmp_path / "table.md").exists()


def test_bad_options() -> None:
    ranker = FunctionRanker(by_length)
    for option, message in [
        ({"batch_size": 0}, "batch_size=0"),
        ({"depth": 0}, "depth=0"),
        ({"tail": "x"}, "tail='x'"),
    ]:
        with pytest.raises(UserError, match=message):
            Evaluator(ranker, [], **option)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="unknown measure"):
        Evaluator(ranker, [], measures=["nope"])

"""Metrics: one rule for ties in every measure, honest means, ids and scores of any kind."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import ir_measures
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockrank.data.trec import read_qrels, read_run
from blockrank.errors import UserError
from blockrank.evaluation.metrics import (
    canonical_order,
    count_ties,
    evaluate,
    normalise_run,
    official_measures,
    parse_measure,
)
from blockrank.types import Qrels


@pytest.mark.parametrize(("name", "expected"), [("bm25", 0.5058), ("splade_p_p_ensemble_distil", 0.7308)])
def test_published_runs_of_trec_dl_2019(shared_data: Path, name: str, expected: float) -> None:
    qrels = read_qrels(shared_data / "trec-dl19" / "qrels" / "test.tsv")
    run = read_run(shared_data / "trec-dl19" / "runs" / f"{name}.dl19.trec")
    report = evaluate(run, qrels, ["nDCG@10"])
    assert round(report["nDCG@10"], 4) == expected
    assert (report.counts.judged, report.counts.in_run, report.counts.missing) == (43, 43, 0)


@pytest.mark.parametrize(
    "text",
    [
        "q1 0 a 1\nq1 0 b 0\n",
        "q1\t0\ta\t1\nq1\t0\tb\t0\n\n",
        "query-id\tcorpus-id\tscore\nq1\ta\t1\nq1\tb\t0\n",
        "q1\ta\t1\nq1\tb\t0\n",
    ],
)
def test_the_first_judgement_counts_in_every_shape_of_qrels_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "qrels.tsv"
    path.write_text(text)
    assert evaluate({"q1": {"a": 2.0, "b": 1.0}}, read_qrels(path), ["P@1"]).means == {"P@1": 1.0}


def test_ties_go_to_the_higher_document_id_in_every_measure() -> None:
    report = evaluate({"q1": {"a": 1.0, "b": 1.0}}, {"q1": {"a": 1, "b": 0}}, ["P@1", "RR", "RR@10", "nDCG@10", "AP"])
    expected = {"P@1": 0.0, "RR": 0.5, "RR@10": 0.5, "nDCG@10": 1 / math.log2(3), "AP": 0.5}
    assert report.means == pytest.approx(expected)
    assert report.counts.tied_documents == 2


def test_a_list_of_equal_scores_is_read_by_descending_id() -> None:
    documents = [f"d{i:03}" for i in range(100)]
    run = {"q": dict.fromkeys(reversed(documents), 0.0)}
    report = evaluate(run, {"q": {"d095": 1}}, ["RR", "RR@10", "Success@4", "Success@5", "AP"])
    assert report.means == pytest.approx({"RR": 0.2, "RR@10": 0.2, "Success@4": 0.0, "Success@5": 1.0, "AP": 0.2})
    assert report.counts.tied_documents == 100


def test_ids_compare_as_strings() -> None:
    assert canonical_order({"9": 1.0, "10": 1.0, "2": 2.0, "é": 1.0}) == ["2", "é", "9", "10"]


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.text("abcé0", min_size=1, max_size=3), st.integers(0, 3), min_size=1, max_size=12),
    st.data(),
)
def test_providers_agree_and_the_order_of_insertion_is_irrelevant(scores: dict[str, int], data: st.DataObject) -> None:
    grades = {document: data.draw(st.integers(0, 2)) for document in scores}
    shuffled = {document: scores[document] for document in data.draw(st.permutations(list(scores)))}
    measures = ["RR", "RR@12", "RR(rel=2)", "P@1", "Success@1", "nDCG", "AP"]
    first, second = evaluate({"q": scores}, {"q": grades}, measures), evaluate({"q": shuffled}, {"q": grades}, measures)
    assert first.means == second.means
    assert first["RR"] == pytest.approx(first["RR@12"])
    ranked = sorted(sorted(scores, reverse=True), key=lambda document: -scores[document])
    hits = [rank for rank, document in enumerate(ranked, 1) if grades[document] > 0]
    assert first["RR"] == pytest.approx(1 / hits[0] if hits else 0.0)
    assert first["P@1"] == first["Success@1"] == float(hits[:1] == [1])


def test_ndcg_and_ap_by_hand() -> None:
    run = {"q": {"a": 3.0, "b": 2.0, "c": 1.0}}
    report = evaluate(run, {"q": {"a": 0, "b": 2, "c": 1, "unretrieved": 3}}, ["nDCG@3", "AP(rel=2)", "R@2", "AP"])
    dcg = 2 / math.log2(3) + 1 / math.log2(4)
    ideal = 3 + 2 / math.log2(3) + 1 / math.log2(4)
    expected = {"nDCG@3": dcg / ideal, "AP(rel=2)": 1 / 4, "R@2": 1 / 3, "AP": (1 / 2 + 2 / 3) / 3}
    assert report.means == pytest.approx(expected)
    assert report.counts.judged_at_10 == 1.0


def test_missing_queries_count_zero_unless_skipped() -> None:
    qrels, run = {"q1": {"a": 1}, "q2": {"b": 1}}, {"q1": {"a": 1.0}}
    report = evaluate(run, qrels, ["P@1", "RR@10", "RR"])
    assert report.means == {"P@1": 0.5, "RR@10": 0.5, "RR": 0.5}
    assert report.per_query["q2"] == {"P@1": 0.0, "RR@10": 0.0, "RR": 0.0}
    assert (report.counts.judged, report.counts.in_run, report.counts.missing) == (2, 1, 1)
    assert "1 of 2 judged queries" in report.warnings[0]
    skipped = evaluate(run, qrels, ["P@1"], missing="skip")
    assert skipped.means == {"P@1": 1.0}
    assert list(skipped.per_query) == ["q1"]
    assert (skipped.counts.averaged, skipped.counts.missing) == (1, 1)


def test_a_query_with_an_empty_list_is_missing() -> None:
    report = evaluate({"q1": {"a": 1.0}, "q2": {}}, {"q1": {"a": 1}, "q2": {"b": 1}}, ["P@1"])
    assert report["P@1"] == 0.5
    assert report.counts.missing == 1


def test_queries_without_judgement_and_all_zero_ones() -> None:
    run = {query: {"a": 1.0} for query in ("q1", "q2", "q3", "q4")}
    report = evaluate(run, {"q1": {}, "q2": {"a": 0}, "q3": {"a": 1}}, ["P@1", "nDCG@10", "RR@10", "AP"])
    assert report.per_query["q3"] == {"P@1": 1.0, "nDCG@10": 1.0, "RR@10": 1.0, "AP": 1.0}
    assert report.per_query["q2"] == {"P@1": 0.0, "nDCG@10": 0.0, "RR@10": 0.0, "AP": 0.0}
    assert "q1" not in report.per_query
    assert report.means == {"P@1": 0.5, "nDCG@10": 0.5, "RR@10": 0.5, "AP": 0.5}
    assert (report.counts.no_judgement, report.counts.all_zero, report.counts.averaged) == (2, 1, 2)
    json.dumps(report.as_dict(), allow_nan=False)


@pytest.mark.parametrize("qrels", [{}, {"q": {}}])
def test_empty_qrels_are_an_error(qrels: Qrels) -> None:
    with pytest.raises(UserError, match="no judgement"):
        evaluate({"q": {"a": 1.0}}, qrels, ["P@1"])


def test_ids_and_scores_of_any_numeric_type() -> None:
    run = {1: {10: np.float32(0.5), 11: np.int64(1), np.str_("12"): np.array(0.25)}}
    report = evaluate(run, {"1": {"10": np.int32(1)}}, ["RR@10", "P@1"])
    assert report.means == {"RR@10": 0.5, "P@1": 0.0}
    assert list(normalise_run(run)["1"].items()) == [("10", 0.5), ("11", 1.0), ("12", 0.25)]
    assert type(run[1][10]) is np.float32


@pytest.mark.parametrize("score", [float("nan"), np.float32("nan"), None, "0.5", np.zeros(2), 10**400])
def test_a_score_that_is_no_number_names_query_and_document(score: object) -> None:
    with pytest.raises(UserError, match=r"query 'q7', document 'd9'"):
        evaluate({"q7": {"d8": 1.0, "d9": score}}, {"q7": {"d8": 1}}, ["P@1"])


def test_infinite_scores_keep_their_place() -> None:
    run = {"q": {"a": float("-inf"), "b": 0.0, "c": float("inf")}}
    assert evaluate(run, {"q": {"a": 1}}, ["RR"])["RR"] == pytest.approx(1 / 3)


def test_ids_that_collide_as_strings() -> None:
    with pytest.raises(UserError, match="'1' occurs twice"):
        evaluate({1: {"a": 1.0}, "1": {"a": 1.0}}, {"1": {"a": 1}}, ["P@1"])


def test_grades_are_integers() -> None:
    assert evaluate({"q": {"a": 1.0}}, {"q": {"a": 1.0}}, ["P@1"])["P@1"] == 1.0
    with pytest.raises(UserError, match=r"query 'q', document 'a': grade 0\.5"):
        evaluate({"q": {"a": 1.0}}, {"q": {"a": 0.5}}, ["P@1"])
    with pytest.raises(UserError, match=r"query 'q', document 'a': grade array\(\[1, 2\]\)"):
        evaluate({"q": {"a": 1.0}}, {"q": {"a": np.array([1, 2])}}, ["P@1"])


@pytest.mark.parametrize("grade", [2**31, -(2**31), 1_000_001])
def test_grades_beyond_what_trec_eval_counts(grade: int) -> None:
    with pytest.raises(UserError, match="document 'd': grades go from -1000000 to 1000000"):
        evaluate({"q": {"d": 1.0}}, {"q": {"d": grade}})
    assert evaluate({"q": {"d": 1.0}}, {"q": {"d": 1_000_000}})["nDCG@10"] == 1.0


@pytest.mark.parametrize("name", ["\ud800", "a\0b"])
def test_ids_that_trec_eval_cannot_read(name: str) -> None:
    for bad in ({name: {"d": 1}}, {"q": {name: 1}}):
        for run, qrels in ((bad, {"q": {"d": 1}}), ({"q": {"d": 1}}, bad)):
            with pytest.raises(UserError, match="NUL or a lone surrogate"):
                evaluate(run, qrels)


@pytest.mark.parametrize("wrong", [None, {"q": ["a", "b"]}, {"q": None}, [("q", "a")]])
def test_runs_and_qrels_are_dicts_of_dicts(wrong: Any) -> None:
    for run, qrels in ((wrong, {"q": {"d": 1}}), ({"q": {"d": 1}}, wrong)):
        with pytest.raises(UserError, match=r"expected a dict by id, got (list|NoneType)"):
            evaluate(run, qrels)


def test_no_query_in_common_shows_ids_of_both_sides() -> None:
    with pytest.raises(UserError, match=r"no query id in common: the run has \['1\.X'\], the qrels have \['1'\]"):
        evaluate({"1.X": {"10": 1.0}}, {"1": {"10": 1}}, ["P@1"])


def test_no_document_in_common_shows_ids_of_both_sides() -> None:
    run, qrels = {"1": {"10.X": 1.0}}, {"1": {"10": 1}}
    with pytest.raises(UserError, match=r"no document id in common: the run has \['10\.X'\], the qrels have \['10'\]"):
        evaluate(run, qrels, ["P@1"])
    assert evaluate(run, qrels, ["P@1"], allow_no_overlap=True).means == {"P@1": 0.0}


def test_partial_overlap_warns_with_counts(caplog: pytest.LogCaptureFixture) -> None:
    run = {"q1": {"a": 1.0}, "q2": {"a": 1.0}, "q9": {"a": 1.0}}
    with caplog.at_level(logging.WARNING):
        report = evaluate(run, {"q1": {"a": 1}, "q3": {"a": 1}}, ["P@1"])
    assert "1 of 2 judged queries are not in the run and count 0: ['q3']" in caplog.text
    assert "2 of 3 queries of the run have no judgement, left out: ['q2', 'q9']" in caplog.text
    assert report.counts.no_judgement == 2


def test_lists_without_a_judged_document_are_told(caplog: pytest.LogCaptureFixture) -> None:
    run = {"q1": {"a": 1.0}, "q2": {"D2": 1.0, "D1": 0.5}, "q3": {"D3": 1.0}}
    report = evaluate(run, {"q1": {"a": 1}, "q2": {"2": 1}, "q3": {"3": 1}}, ["P@1"])
    told = (
        "2 of 3 judged queries in the run list no judged document: ['q2', 'q3'] "
        "(of 'q2' the run has ['D1', 'D2'], the qrels have ['2'])"
    )
    assert report.warnings == (told,)
    assert told in caplog.text
    assert evaluate({"q1": {"a": 1.0, "b": 0.5}}, {"q1": {"a": 0}}, ["P@1"]).warnings == ()


def test_ignore_self_is_applied_before_metrics() -> None:
    run, qrels = {"t1": {"t1": 2.0, "t2": 1.0}}, {"t1": {"t2": 1}}
    assert evaluate(run, qrels, ["RR"])["RR"] == 0.5
    report = evaluate(run, qrels, ["RR"], ignore_self=True)
    assert report["RR"] == 1.0
    assert report.counts.self_documents == 1
    assert run == {"t1": {"t1": 2.0, "t2": 1.0}}


def test_judged_share_of_the_top_ten() -> None:
    run = {"q": {f"d{i:02}": float(-i) for i in range(20)}}
    report = evaluate(run, {"q": {"d00": 1, "d09": 0, "d10": 1}}, ["P@1"])
    assert report.counts.judged_at_10 == 0.2


def test_aliases_and_unknown_measures() -> None:
    report = evaluate({"q": {"a": 1.0}}, {"q": {"a": 1}}, ["MRR@10", "RR@10", "MAP"])
    assert list(report.means) == ["RR@10", "AP"]
    assert report["MRR@10"] == report["RR@10"] == 1.0
    assert report.values("MAP") == {"q": 1.0}


@pytest.mark.parametrize(
    "name",
    [
        "nonsense@3",
        "nDGC@10",
        "ndcg@10",
        "nDCG@",
        "nDCG@ten",
        "P",
        "",
        "nDCG@10 P@1",
        "P@1.5",
        "R@-1",
        "RR(foo=1)",
        "ERR",
    ],
)
def test_an_unknown_or_impossible_measure_is_named(name: str) -> None:
    with pytest.raises(UserError, match="measure") as caught:
        parse_measure(name)
    assert repr(name) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "object at" not in str(caught.value)


def failing(measure: str) -> None:
    evaluate({"q": {"a": 2.0, "b": 1.0}}, {"q": {"a": 1, "b": 1}}, ["P@1", measure, "RR"])


def test_what_a_provider_raises_names_its_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"measure Accuracy cannot be computed .*ZeroDivisionError"):
        failing("Accuracy")
    calculate = ir_measures.iter_calc

    def broken(measures, qrels, run):
        if ir_measures.parse_measure("ERR@20") in measures:
            raise OSError("no perl\nhere")
        return calculate(measures, qrels, run)

    monkeypatch.setattr(ir_measures, "iter_calc", broken)
    with pytest.raises(UserError, match=r"measure ERR@20 cannot be computed .*\(OSError: no perl here\)"):
        failing("ERR@20")


def test_bad_options() -> None:
    with pytest.raises(UserError, match="missing='drop'"):
        evaluate({"q": {"a": 1.0}}, {"q": {"a": 1}}, ["P@1"], missing="drop")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no measure"):
        evaluate({"q": {"a": 1.0}}, {"q": {"a": 1}}, [])


@pytest.mark.parametrize(
    ("collection", "first"),
    [
        ("trec-dl19", "nDCG@10"),
        ("msmarco-passage/trec-dl-2020/judged", "nDCG@10"),
        ("msmarco-passage/dev/small", "RR@10"),
        ("beir/msmarco/dev", "nDCG@10"),
        ("scifact", "nDCG@10"),
        ("wikiqa", "AP"),
        ("pydocs", "nDCG@10"),
    ],
)
def test_official_measures(collection: str, first: str) -> None:
    measures = official_measures(collection)
    assert measures[0] == first
    assert [str(ir_measures.parse_measure(measure)) for measure in measures] == list(measures)
    assert all(parse_measure(measure) for measure in measures)
    assert official_measures("trec-dl19")[1:3] == ("RR(rel=2)", "AP(rel=2)")


def test_count_ties() -> None:
    assert count_ties([1.0, 2.0, 1.0, 3.0, 3.0, 3.0]) == 5
    assert count_ties([]) == 0

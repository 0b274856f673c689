"""The first stage's order as a baseline, and its refusal when the order means nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from blockrank.data.candidates import candidate_lists
from blockrank.data.collection import open_collection
from blockrank.data.trec import read_run
from blockrank.errors import UserError
from blockrank.evaluation.evaluator import Evaluator
from blockrank.rankers.first_stage import FirstStageRanker
from blockrank.types import CandidateList, Document, Query


def candidates(query: str, scores: tuple[float, ...] | None, count: int = 3) -> CandidateList:
    return CandidateList(Query(query, "text"), tuple(Document(f"d{i}", "text") for i in range(count)), scores)


def test_scores_are_the_given_order() -> None:
    first, second = FirstStageRanker().score([candidates("q", (1.0, 9.0, 5.0)), candidates("r", None, count=0)])
    np.testing.assert_array_equal(first.scores, np.array([3, 2, 1], dtype=np.float32))
    assert first.scores.dtype == np.float32
    assert not first.truncated.any()
    assert second.scores.shape == (0,)


def test_constant_scores_are_refused_unless_asked() -> None:
    zeros = [candidates("q1", (0.0, 0.0, 0.0)), candidates("q2", (0.0, 0.0, 0.0))]
    with pytest.raises(UserError, match=r"2 lists \(first: query 'q1'\).*no information.*allow_constant_scores"):
        FirstStageRanker().score(zeros)
    results = FirstStageRanker(allow_constant_scores=True).score(zeros)
    np.testing.assert_array_equal(results[1].scores, [3, 2, 1])


def test_a_constant_list_among_informative_ones_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    ranker = FirstStageRanker()
    ranker.score([candidates("q1", (2.0, 1.0, 0.0))])
    with caplog.at_level(logging.WARNING):
        ranker.score([candidates("q2", (1.0, 1.0, 1.0))])
    assert "query 'q2'" in caplog.text


def test_unknown_scores_are_refused_unless_asked() -> None:
    with pytest.raises(UserError, match=r"1 lists \(first: query 'q'\) have no first-stage scores"):
        FirstStageRanker().score([candidates("q", None)])
    (result,) = FirstStageRanker(allow_constant_scores=True).score([candidates("q", None)])
    np.testing.assert_array_equal(result.scores, [3, 2, 1])


def test_lists_of_one_are_fine() -> None:
    results = FirstStageRanker().score([candidates("q1", (0.0,), count=1), candidates("q2", None, count=1)])
    assert [len(result.scores) for result in results] == [1, 1]


def test_documents_without_text_keep_their_rank() -> None:
    empty = CandidateList(Query("q", "x"), (Document("e", ""), Document("d", "text")), (2.0, 1.0), (1, 0))
    result = Evaluator(FirstStageRanker(), [empty], measures=["P@1"]).run()
    assert list(result.run["q"]) == ["e", "d"]
    assert result.means == {"P@1": 1.0}


def test_the_baseline_of_trec_dl_2019_is_the_published_one(shared_data: Path) -> None:
    folder = shared_data / "trec-dl19"
    collection = open_collection("beir", path=str(folder))
    run = read_run(folder / "runs" / "bm25.dl19.trec")
    lists = candidate_lists(collection, run, "test", depth=100)
    result = Evaluator(FirstStageRanker(), lists, qrels=collection.qrels("test"), measures=["nDCG@10"]).run()
    assert round(result.means["nDCG@10"], 4) == 0.5058
    assert result.counts["documents"] == sum(map(len, run.values()))

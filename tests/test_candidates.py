"""Candidate lists and where they come from."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from blockrank.data.candidates import candidate_lists
from blockrank.data.collection import open_collection
from blockrank.data.documents import Documents, InMemoryDocuments
from blockrank.errors import UserError
from blockrank.retrieval.first_stage import first_stage
from blockrank.types import CandidateList, Document, Qrels, Query, Run


class Small:
    """A collection in memory, of one split."""

    name = "small"
    splits = ("test",)

    def __init__(
        self,
        documents: Mapping[str, str],
        queries: Mapping[str, str],
        qrels: Qrels | None = None,
        ignore_self: bool = False,
    ) -> None:
        self.ignore_self = ignore_self
        self.documents: Documents = InMemoryDocuments(Document(i, text) for i, text in documents.items())
        self._queries = {i: Query(i, text) for i, text in queries.items()}
        self._qrels = qrels or {}

    def queries(self, split: str) -> dict[str, Query]:
        assert split == "test"
        return self._queries

    def qrels(self, split: str) -> Qrels:
        assert split == "test"
        return self._qrels


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKRANK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def letters() -> Small:
    return Small({c: f"text {c}" for c in "abcdef"}, {"q1": "one", "q2": "two"}, {"q1": {"b": 2, "z": 1}})


def ids(lists: Sequence[CandidateList], index: int = 0) -> list[str]:
    return [d.id for d in lists[index].documents]


def test_lists_are_in_score_order_judged_and_cut(letters: Small) -> None:
    lists = candidate_lists(letters, {"q2": {"a": 1.0}, "q1": {"c": 1.0, "b": 3.0, "a": 2.0, "d": 0.5}}, "test", 3)
    assert [c.query.id for c in lists] == ["q1", "q2"]
    assert ids(lists) == ["b", "a", "c"]
    assert lists[0].scores == (3.0, 2.0, 1.0)
    assert lists[0].relevance == (2, 0, 0)
    assert lists[0].documents[0].text == "text b"
    assert lists[1].relevance is None
    assert lists.ranking(0) == ("b", "a", "c")
    assert [c.query.id for c in lists[1:]] == ["q2"]


def test_the_run_is_left_as_it_was(letters: Small) -> None:
    run: Run = {"q1": {"a": 1.0, "nowhere": 2.0, "q1": 3.0}}
    letters.ignore_self = True
    candidate_lists(letters, run, "test", 1, missing_documents="drop")
    assert run == {"q1": {"a": 1.0, "nowhere": 2.0, "q1": 3.0}}


def test_ragged_and_empty_lists(letters: Small) -> None:
    lists = candidate_lists(letters, {"q1": {}, "q2": {"a": 1.0}}, "test")
    assert [len(c) for c in lists] == [0, 1]
    assert lists[0].documents == ()


def test_a_query_absent_from_the_run_is_told(letters: Small, caplog: pytest.LogCaptureFixture) -> None:
    assert len(candidate_lists(letters, {"q1": {"a": 1.0}}, "test")) == 1
    assert "1 of 2 query ids of small (test) are not in the run: 'q2'" in caplog.text


def test_a_query_of_the_run_alone_is_told(letters: Small, caplog: pytest.LogCaptureFixture) -> None:
    run = {q: {"a": 1.0} for q in ("q1", "q2", "q7", "q8")}
    assert len(candidate_lists(letters, run, "test")) == 2
    assert "2 of 4 query ids of the run are not in small (test): 'q7', 'q8'" in caplog.text


def test_a_relevant_document_outside_the_collection_is_told(letters: Small, caplog: pytest.LogCaptureFixture) -> None:
    candidate_lists(letters, {"q1": {"a": 1.0}, "q2": {"a": 1.0}}, "test")
    assert "1 of 2 documents judged relevant in small (test) are not in its collection: 'z'" in caplog.text


@pytest.mark.parametrize("text", ["", " \n", "\u200b", "\ufeff\u00ad\u2060\0"])
def test_a_query_without_text_gets_no_list_and_is_told(text: str, caplog: pytest.LogCaptureFixture) -> None:
    small = Small({"a": "text"}, {"q1": text, "q2": "two"}, {"q1": {"a": 1}})
    run = {q: {"a": 1.0} for q in ("q1", "q2")}
    lists = candidate_lists(small, run, "test")
    assert [query.id for query in lists.queries] == ["q2"]
    assert "1 queries of small (test) have no text and get no list: 'q1'" in caplog.text
    with pytest.raises(UserError, match=r"no query of small \(test\) has any text"):
        candidate_lists(Small({"a": "text"}, {"q1": text}), {"q1": {"a": 1.0}}, "test")


def test_with_positives_adds_none_without_text() -> None:
    small = Small({"a": "one", "b": "two", "p": "\u200b"}, {"q": "query"}, {"q": {"p": 1}})
    lists = candidate_lists(small, {"q": {"a": 2.0, "b": 1.0}}, "test", 2, with_positives=True)
    assert ids(lists) == ["a", "b"]


def test_no_shared_query_shows_both_sides(letters: Small) -> None:
    with pytest.raises(UserError, match=r"small \(test\) has 'q1', 'q2', the run has '1'"):
        candidate_lists(letters, {"1": {"a": 1.0}}, "test")


def test_dangling_run_documents_are_an_error_or_dropped_and_counted(
    letters: Small, caplog: pytest.LogCaptureFixture
) -> None:
    run = {"q1": {"x": 3.0, "a": 2.0}, "q2": {"x": 2.0, "y": 1.0}}
    with pytest.raises(UserError, match=r"2 documents of the run are not in small: 'x', 'y'; .*missing_documents=drop"):
        candidate_lists(letters, run, "test")
    lists = candidate_lists(letters, run, "test", missing_documents="drop")
    assert (lists.dropped, ids(lists, 0), ids(lists, 1)) == (3, ["a"], [])
    assert "dropped 3 run entries" in caplog.text


def test_a_judged_document_without_text_stays_judged(letters: Small) -> None:
    lists = candidate_lists(letters, {"q1": {"a": 1.0}}, "test")
    assert lists.qrels["q1"] == {"b": 2, "z": 1}


def test_ignore_self_only_where_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run = {"t1": {"t1": 9.0, "t2": 8.0, "t3": 7.0}}
    texts = {"t1": "one", "t2": "two", "t3": "three"}
    argument = Small(texts, {"t1": "one"}, {"t1": {"t2": 1}}, ignore_self=True)
    assert ids(candidate_lists(argument, run, "test", 2)) == ["t2", "t3"]
    assert "the query itself was left out of 1 candidate lists" in caplog.text
    chance = Small(texts, {"t1": "one"}, {"t1": {"t2": 1}})
    assert ids(candidate_lists(chance, run, "test", 2)) == ["t1", "t2"]


def test_all_zero_scores_keep_file_order_and_are_no_baseline(letters: Small, caplog: pytest.LogCaptureFixture) -> None:
    lists = candidate_lists(letters, {"q1": {"c": 0.0, "a": 0.0, "b": 0.0}, "q2": {"b": 0.0}}, "test", 2)
    assert ids(lists) == ["c", "a"]
    assert lists.uninformative
    assert lists[0].scores == (0.0, 0.0)
    assert "which is no baseline" in caplog.text


def test_one_informative_list_makes_a_baseline(letters: Small) -> None:
    lists = candidate_lists(letters, {"q1": {"c": 0.0, "a": 0.0}, "q2": {"b": 1.0, "a": 0.5}}, "test")
    assert not lists.uninformative
    assert lists[0].scores == (0.0, 0.0)


def test_with_positives_the_answer_takes_the_last_place(letters: Small) -> None:
    run = {"q1": {"a": 3.0, "c": 2.0, "d": 1.0, "b": 0.5}}
    lists = candidate_lists(letters, run, "test", 3, with_positives=True)
    assert ids(lists) == ["a", "c", "b"]
    assert lists[0].scores == (3.0, 2.0, 0.0)
    assert lists[0].relevance == (0, 0, 2)
    short = candidate_lists(letters, {"q1": {"a": 3.0}}, "test", 3, with_positives=True)
    assert ids(short) == ["a", "b"]
    assert ids(candidate_lists(letters, {"q1": {}}, "test", 3, with_positives=True)) == ["b"]


def test_with_positives_does_not_make_equal_scores_informative(letters: Small) -> None:
    lists = candidate_lists(letters, {"q1": {"a": 0.0, "c": 0.0, "d": 0.0}}, "test", 3, with_positives=True)
    assert lists.uninformative
    assert (ids(lists), lists[0].scores) == (["a", "c", "b"], (0.0, 0.0, 0.0))


@pytest.mark.parametrize("depth", [0, -1])
def test_depth_must_be_positive(letters: Small, depth: int) -> None:
    with pytest.raises(UserError, match="depth must be at least 1"):
        candidate_lists(letters, {"q1": {"a": 1.0}}, "test", depth)


def test_first_stage_from_a_file_and_by_bm25(tmp_path: Path) -> None:
    small = Small({"a": "red apples", "b": "green apples", "c": "blue sky"}, {"q": "green apples"})
    assert list(first_stage(small, "test", "bm25", 5)["q"]) == ["b", "a"]
    assert list(first_stage(small, "test", None, 1)["q"]) == ["b"]
    path = tmp_path / "run.trec"
    path.write_text("q Q0 c 1 2.0 t\nq Q0 a 2 1.0 t\n")
    assert first_stage(small, "test", path, 1) == {"q": {"c": 2.0, "a": 1.0}}
    assert first_stage(small, "test", str(path), 2) == {"q": {"c": 2.0, "a": 1.0}}
    with pytest.raises(UserError, match="is no file, and none of bm25, dense, scoreddocs, own"):
        first_stage(small, "test", "bm52")
    with pytest.raises(UserError, match="only ir_datasets collections have scoreddocs"):
        first_stage(small, "test", "scoreddocs")
    with pytest.raises(UserError, match="no candidates of its own"):
        first_stage(small, "test", "own")


def test_first_stage_leaves_room_for_the_query_itself() -> None:
    same = Small({"t1": "red apples", "t2": "red pears", "t3": "red plums"}, {"t1": "red apples"}, ignore_self=True)
    run = first_stage(same, "test", "bm25", 2)
    assert len(run["t1"]) == 3
    assert len(candidate_lists(same, run, "test", 2)[0]) == 2


def test_scoreddocs_of_ir_datasets(tmp_path: Path) -> None:
    from test_irds import ir_dataset

    collection = open_collection("ir_datasets", id=ir_dataset(tmp_path / "data", "scored-corpus"))
    run = first_stage(collection, "dev", "scoreddocs", 10)
    assert run == {"q1": {"003": 0.0, "d1": 0.0}}
    lists = candidate_lists(collection, run, "dev")
    assert lists.uninformative
    assert ids(lists) == ["003", "d1"]


def test_own_lists_of_icr(tmp_path: Path) -> None:
    from test_collections import ROWS, write_jsonl

    collection = open_collection("icr", path=write_jsonl(tmp_path / "dev.jsonl", ROWS))
    lists = candidate_lists(collection, first_stage(collection, "dev"), "dev")
    assert ids(lists) == ["paris", "5"]
    assert lists[0].relevance == (1, 0)
    assert lists[1].relevance == (0,)


def test_real_run(shared_data: Path) -> None:
    collection = open_collection("beir", path=shared_data / "trec-dl19")
    run = first_stage(collection, "test", shared_data / "trec-dl19" / "runs" / "bm25.dl19.trec", 100)
    lists = candidate_lists(collection, run, "test", 100)
    assert [len(c) for c in lists] == [100] * 43
    assert not lists.uninformative
    assert all(all(d.text for d in c.documents) for c in lists)


def test_ties_at_the_cut_follow_the_one_rule(tmp_path: Path) -> None:
    small = Small({"d1": "one", "d2": "two", "d3": "three"}, {"q": "words"})
    path = tmp_path / "run.trec"
    path.write_text("q Q0 d1 1 5 t\nq Q0 d3 2 5 t\nq Q0 d2 3 1 t\n")
    for depth, expected in ((1, ["d3"]), (2, ["d3", "d1"]), (3, ["d3", "d1", "d2"])):
        lists = candidate_lists(small, first_stage(small, "test", path, depth), "test", depth)
        assert [document.id for document in lists[0].documents] == expected
        assert not lists.uninformative

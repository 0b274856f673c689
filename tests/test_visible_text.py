"""One definition of "has text", asked everywhere; text that has something visible is never changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_candidates import Small
from test_collections import write_jsonl
from test_encode import encoder, listed, same, texts

from blockrank.data.collection import open_collection
from blockrank.data.documents import parse_document
from blockrank.data.files import as_text
from blockrank.data.preflight import preflight
from blockrank.errors import UserError
from blockrank.evaluation.ranking import rerank_order
from blockrank.types import CandidateList, Document, Query, has_text

NOTHING = {
    "empty": "",
    "white space": " \t\r\n\x0b\x0c\u00a0\u2003\u3000\u2028",
    "zero-width space": "\u200b",
    "byte order mark": "\ufeff",
    "soft hyphen": "\u00ad",
    "word joiner": "\u2060",
    "NUL": "\0",
    "controls": "\x01\x1f\x7f\x85",
    "joiners and marks": "\u200c\u200d\u200e\u202a\u2066\U000e0001\u034f\u180e",
    "variation selectors": "\ufe0f\U000e0100",
    "fillers": "\u3164\u115f\uffa0\u2800",
    "mixed": " \u200b\n\ufeff\u00ad \0",
}
SOMETHING = ("a", " \u200bx", "\ufeffé", "\U0001f600", ".", "日", "a\u00adb", "\u0301", "\U00020000")
nothing = pytest.mark.parametrize("text", NOTHING.values(), ids=NOTHING.keys())


@nothing
def test_nothing_visible_is_no_text(text: str) -> None:
    assert not has_text(text)
    assert Document("d", text, text).is_empty
    assert as_text(text, "here") == ""


@pytest.mark.parametrize("text", SOMETHING)
def test_anything_visible_is_text_and_stays_as_it_is(text: str) -> None:
    assert has_text(text)
    assert not Document("d", text).is_empty
    assert not Document("d", "\u200b", text).is_empty
    assert as_text(text, "here") == text


@given(st.text(), st.characters(categories=("L", "N", "P", "S")), st.text())
def test_one_visible_character_anywhere_is_enough(before: str, character: str, after: str) -> None:
    if has_text(character):
        assert has_text(before + character + after)


@nothing
def test_prompts_leave_such_documents_out_and_refuse_such_queries(text: str) -> None:
    candidates = listed(text, (text, "good text"), (text, text), query="x")
    segments = encoder().encode(candidates, [0, 1])
    assert segments.document_index == (1,)
    assert same(segments, encoder().encode(listed("good text", query="x"), [0]))
    with pytest.raises(UserError, match="query 'q' is empty"):
        encoder().encode(listed("a", query=text))


def test_invisible_characters_beside_visible_ones_reach_the_model() -> None:
    text = "co\u00adop\u200b e\u2060\ufeffnd"
    segments = encoder().encode(listed(text, query="x"))
    assert text in texts(segments)[0]


@nothing
def test_such_documents_rank_last_and_keep_their_order(text: str) -> None:
    documents = tuple(Document(f"d{i}", t) for i, t in enumerate((text, "a", text, "b")))
    order = rerank_order(CandidateList(Query("q", "x"), documents), np.array([8, 1, 9, 2], np.float32))
    assert order.tolist() == [3, 1, 0, 2]


def test_files_and_reports_ask_the_same_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKRANK_CACHE", str(tmp_path / "cache"))
    assert parse_document('{"_id": "d", "title": "\\u200b", "text": "\\ufeff\\u0000"}', "f:1") == Document("d", "")
    rows = [{"query": "x", "documents": [{"doc_id": "a", "text": "\u2060"}, "\ufeffyes"], "answer_ids": ["a"]}]
    documents = open_collection("icr", path=write_jsonl(tmp_path / "dev.jsonl", rows)).documents
    assert [(d.id, d.text) for d in documents.scan()] == [("a", ""), ("1", "\ufeffyes")]
    collection = Small({"a": "\u200b", "b": "\0", "c": "text"}, {"q": "\u00ad", "r": "query"}, {"q": {"c": 1, "a": 1}})
    report = preflight(collection)
    assert report.splits["test"].judged_empty == (1, ("a",))
    assert "test: 1 judged documents are empty: 'a'" in report.problems
    assert report.empty_documents == 2
    assert report.splits["test"].queries_without_text == (1, ("q",))
